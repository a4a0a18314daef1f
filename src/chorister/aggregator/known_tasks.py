"""A task as an aggregator knows it, and which tasks of a recipe it serves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from chorister._native import HPKEKeypair, Prio3, TaskBinding
from chorister.dap.draft import REPORT_ID_BYTES, BatchMode, Problem, Role
from chorister.dap.task import (
    Interval,
    Task,
    TaskConfiguration,
    collection_id,
    task_binding,
    task_configurations,
)
from chorister.errors import InternalError, InvalidInput, ProblemError, QueryRefused
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, refusal

MAX_SKEW_SECONDS: Final = 300
"""How far the clocks of devices and aggregators may differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The distribution of one bin's noise at one aggregator: Bin(trials, threshold / 2^64)."""

    trials: int
    threshold: int

    @classmethod
    def of(cls, recipe: Recipe) -> Noise | None:
        """Return the noise a recipe asks each aggregator for; None if it relies on devices."""
        if recipe.privacy.crowd != "noised":
            return None
        threshold = recipe.randomizer.q_threshold
        # q = 1 / (e^eps0 + 1) is below one half; the native sampler's tables rely on it.
        if not 0 < threshold < 2**63:
            raise InvalidInput(f"a noise threshold of {threshold} is not below one half")
        return cls(trials=recipe.privacy.noise_trials, threshold=threshold)


@dataclass(frozen=True, kw_only=True)
class KnownTask:
    """A task of a logged recipe, with everything an aggregator needs to serve it."""

    task_id: bytes
    configuration: TaskConfiguration
    recipe_digest: bytes
    policy_digest: bytes
    analysis: str
    group: str  # canonical JSON of group values and arm
    collector: bytes  # SHA-256 of the collector's HpkeConfig
    noise: Noise | None
    opens: int
    closes: int  # uploads are refused from here on
    ends: int  # every request is refused from here on
    bucket_end: int  # not before `ends`; replay protection is deleted after this

    @property
    def interval(self) -> Interval:
        """The task's only bucket, in units of its time precision."""
        interval = self.configuration.task_interval
        if interval is None:
            raise InternalError("a task without an interval was stored")
        return interval

    @property
    def leader_url(self) -> str:
        """The task's leader, as policies spell it."""
        return self.configuration.leader_aggregator_endpoint

    @property
    def helper_url(self) -> str:
        """The task's helper, as policies spell it."""
        return self.configuration.helper_aggregator_endpoint

    @property
    def min_batch_size(self) -> int:
        """The minimum cohort, as devices state it with every report."""
        return self.configuration.min_batch_size

    @property
    def starts(self) -> int:
        """When the bucket begins, in POSIX seconds."""
        return self.interval.start * self.configuration.time_precision

    @cached_property
    def binding(self) -> TaskBinding:
        """The native functions for this task's reports."""
        return task_binding(self.configuration)

    @cached_property
    def vdaf(self) -> Prio3:
        """The task's Prio3 instance."""
        return self.configuration.vdaf.native()

    @cached_property
    def report_bytes(self) -> int:
        """The exact length of a report; any other length is malformed."""
        return _report_bytes(self.configuration.vdaf_type, self.configuration.vdaf_configuration)

    def check_live(self, now: int) -> None:
        """Raise `ProblemError` once the window and its grace period are over."""
        if now >= self.ends:
            raise self.refusal(
                Problem.UNRECOGNIZED_TASK,
                f"the task ended at {self.ends} (POSIX seconds), and its data is deleted",
            )

    def refusal(self, problem: str | None, detail: str, *, status: int = 400) -> ProblemError:
        """Return the error to raise for a refused request for this task."""
        return ProblemError(problem, detail, status=status, task_id=self.task_id)


@lru_cache(maxsize=256)
def _report_bytes(vdaf_type: int, vdaf_configuration: bytes) -> int:
    """Seal a report of zeros and measure it: sizes depend on the VDAF alone."""
    configuration = TaskConfiguration(
        task_info=b"\0",
        leader_aggregator_endpoint="l",
        helper_aggregator_endpoint="h",
        time_precision=1,
        min_batch_size=1,
        batch_mode=BatchMode.TIME_INTERVAL,
        vdaf_type=vdaf_type,
        vdaf_configuration=vdaf_configuration,
        task_interval=None,
    )
    config = HPKEKeypair.generate(0).config
    (report,) = task_binding(configuration).seal_reports(
        bytes(configuration.vdaf.length),
        report_ids=bytes(REPORT_ID_BYTES),
        time=0,
        leader_config=config,
        helper_config=config,
        threads=1,
    )
    return len(report)


def served_tasks(
    signed: SignedRecipe, *, url: str, role: Role, policies: Iterable[Policy]
) -> list[KnownTask]:
    """Return the tasks of a logged recipe that the aggregator at `url` serves.

    The recipe must name this aggregator in this role, and a device with one of the served policies
    must be able to answer it. Everything else is none of this aggregator's business.
    """
    named = signed.recipe.aggregators
    if url != (named.leader if role is Role.LEADER else named.helper):
        return []
    found: dict[bytes, KnownTask] = {}
    for policy in policies:
        for task in _permitted(signed, policy):
            found.setdefault(task.task_id, _known(task, signed.recipe, policy))
    return list(found.values())


def _permitted(signed: SignedRecipe, policy: Policy) -> Sequence[Task]:
    # Size first: the other checks do work that grows with it.
    try:
        enumerated = task_configurations(policy, signed.recipe)
    except QueryRefused:
        return ()
    if refusal(signed, policy) is not None:
        return ()
    return list(enumerated)


def _known(task: Task, recipe: Recipe, policy: Policy) -> KnownTask:
    window = recipe.window_at(task.number)
    return KnownTask(
        task_id=task.task_id,
        configuration=task.configuration,
        recipe_digest=recipe.digest,
        policy_digest=policy.digest,
        analysis=recipe.analysis,
        group=collection_id(recipe, task.group).decode(),
        collector=bytes.fromhex(recipe.collector),
        noise=Noise.of(recipe),
        opens=window.opens,
        closes=window.closes,
        ends=window.ends,
        bucket_end=window.bucket.end,
    )
