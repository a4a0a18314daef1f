"""Which tasks an aggregator takes part in: those of the recipes that it has seen in the log.

Opting in is a lookup. `TaskRegister.accept` gets every recipe before its checkpoint is cosigned,
checks it against the policies that this aggregator serves, and writes down all its tasks. A task
that is not written down does not exist: a request about it is refused, and leaves no row.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from sqlalchemy import Connection, Row, select

from chorister._native import HPKEKeypair, Prio3, TaskBinding
from chorister.aggregator.database import Database
from chorister.aggregator.noise import Noise
from chorister.aggregator.schema import BatchState, batches, swept_tasks, tasks
from chorister.clock import Clock
from chorister.dap.binding import native_vdaf, task_binding
from chorister.dap.draft import REPORT_ID_BYTES, BatchMode, Problem, Role
from chorister.dap.task import Interval, Task, TaskConfiguration, collection_id, task_configurations
from chorister.errors import InternalError, ProblemError, QueryRefused
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, check

__all__ = ["MAX_SKEW", "KnownTask", "TaskRegister"]

MAX_SKEW: Final = 300
"""Seconds by which the clocks of devices and aggregators may differ."""
_CACHED: Final = 1024


@dataclass(frozen=True, kw_only=True)
class KnownTask:
    """A task of a logged recipe: all that an aggregator needs to serve it."""

    task_id: bytes
    configuration: TaskConfiguration
    recipe_digest: bytes
    policy_digest: bytes
    analysis: str
    group: str  # canonical JSON of group values and arm
    collector: bytes  # SHA-256 of the collector's HpkeConfig
    noise: Noise | None
    opens: int
    closes: int  # no upload is taken from here on
    ends: int  # nothing is answered from here on
    bucket_end: int  # not before `ends`; what protects against replays goes after this

    @property
    def interval(self) -> Interval:
        """The task's one bucket, in units of its time precision."""
        interval = self.configuration.task_interval
        if interval is None:
            raise InternalError("a task without an interval was registered")
        return interval

    @property
    def min_batch_size(self) -> int:
        """As the devices stated it with every report."""
        return self.configuration.min_batch_size

    @property
    def starts(self) -> int:
        """POSIX seconds at which the bucket begins."""
        return self.interval.start * self.configuration.time_precision

    @cached_property
    def binding(self) -> TaskBinding:
        """What its reports are bound to."""
        return task_binding(self.configuration)

    @cached_property
    def vdaf(self) -> Prio3:
        """Its VDAF."""
        return native_vdaf(self.configuration.vdaf)

    @cached_property
    def report_bytes(self) -> int:
        """The length of every report: any other length is malformed."""
        return _report_bytes(self.configuration.vdaf_type, self.configuration.vdaf_configuration)

    def check_live(self, now: int) -> None:
        """Raise `ProblemError` from the end of the window and its grace on."""
        if now >= self.ends:
            raise ProblemError(
                Problem.UNRECOGNIZED_TASK,
                f"the task ended at {self.ends} (POSIX seconds); nothing is kept of it",
                task_id=self.task_id,
            )


@lru_cache(maxsize=256)
def _report_bytes(vdaf_type: int, vdaf_configuration: bytes) -> int:
    """Seal a report of zeros and look: sizes depend on the VDAF alone."""
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


class TaskRegister:
    """The tasks that one aggregator serves."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        url: str,
        role: Role,
        policies: Sequence[Policy],
    ) -> None:
        """`url` is this aggregator's own, as recipes and policies spell it."""
        self._database = database
        self._clock = clock
        self._url = url
        self._role = role
        self._policies = tuple(policies)
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, KnownTask] = OrderedDict()

    def accept(self, recipes: Sequence[SignedRecipe]) -> None:
        """Write down the tasks of logged recipes; those of other pairs or policies are passed over.

        Idempotent. Called before the checkpoint is cosigned: a device that sees the recipe on a
        cosigned list finds both aggregators ready for it.
        """
        found: dict[bytes, dict[str, Any]] = {}
        for signed in recipes:
            if self._names_us(signed.recipe):
                for policy in self._policies:
                    for task in self._permitted(signed, policy):
                        found.setdefault(task.task_id, _row(task, signed.recipe, policy))
        if not found:
            return
        now = self._clock.now()
        with self._database.write() as connection:
            # A clock that went back must not bring back what was swept: replays would count anew.
            gone = _swept(connection, list(found))
            rows = [
                row
                for task_id, row in found.items()
                if row["bucket_end"] > now and task_id not in gone
            ]
            rows.sort(key=lambda row: bytes(row["task_id"]))
            if not rows:
                return
            new = self._database.insert(tasks).on_conflict_do_nothing()
            connection.execute(new, rows)
            opened = self._database.insert(batches).on_conflict_do_nothing()
            states = [{"task_id": row["task_id"], "state": BatchState.OPEN} for row in rows]
            connection.execute(opened, states)

    def _names_us(self, recipe: Recipe) -> bool:
        named = recipe.aggregators
        return self._url == (named.leader if self._role is Role.LEADER else named.helper)

    def _permitted(self, signed: SignedRecipe, policy: Policy) -> Sequence[Task]:
        """Its tasks under a policy; none if no device with that policy would answer it."""
        # Size first: the other checks do work that grows with it.
        try:
            enumerated = task_configurations(policy, signed.recipe)
        except QueryRefused:
            return ()
        if not all(each.passed for each in check(signed, policy)):
            return ()
        return list(enumerated)

    def find(self, task_id: bytes) -> KnownTask | None:
        """The task of this id, if it is one of ours."""
        with self._lock:
            known = self._cache.get(task_id)
            if known is not None:
                self._cache.move_to_end(task_id)
                return known
        with self._database.read() as connection:
            row = connection.execute(select(tasks).where(tasks.c.task_id == task_id)).one_or_none()
        if row is None:
            return None
        return self._remember(_known(row))

    def of_recipe(self, recipe_digest: bytes) -> list[KnownTask]:
        """The tasks of one recipe."""
        with self._database.read() as connection:
            rows = connection.execute(
                select(tasks)
                .where(tasks.c.recipe_digest == recipe_digest)
                .order_by(tasks.c.group, tasks.c.task_id)
            ).all()
        return [_known(row) for row in rows]

    def all(self) -> list[KnownTask]:
        """Every task, the last to end first."""
        with self._database.read() as connection:
            rows = connection.execute(
                select(tasks).order_by(tasks.c.ends.desc(), tasks.c.group, tasks.c.task_id)
            ).all()
        return [_known(row) for row in rows]

    def _remember(self, task: KnownTask) -> KnownTask:
        with self._lock:
            task = self._cache.setdefault(task.task_id, task)
            self._cache.move_to_end(task.task_id)
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return task

    def forget(self) -> None:
        """Drop what was remembered: tasks were swept."""
        with self._lock:
            self._cache.clear()


def _swept(connection: Connection, task_ids: Sequence[bytes]) -> set[bytes]:
    gone: set[bytes] = set()
    for start in range(0, len(task_ids), 500):
        some = swept_tasks.c.task_id.in_(task_ids[start : start + 500])
        gone.update(
            map(bytes, connection.execute(select(swept_tasks.c.task_id).where(some)).scalars())
        )
    return gone


def _row(task: Task, recipe: Recipe, policy: Policy) -> dict[str, Any]:
    noise = Noise.of(recipe)
    return {
        "task_id": task.task_id,
        "configuration": task.configuration.encode(),
        "recipe_digest": recipe.digest,
        "policy_digest": policy.digest,
        "analysis": recipe.analysis,
        "group": collection_id(recipe, task.group).decode(),
        "collector": bytes.fromhex(recipe.collector),
        "noise_trials": noise.trials if noise else None,
        "noise_threshold": noise.threshold if noise else None,
        "opens": recipe.window.opens,
        "closes": recipe.window.closes,
        "ends": recipe.window.ends,
        "bucket_end": recipe.window.bucket.end,
    }


def _known(row: Row[Any]) -> KnownTask:
    noise = None
    if row.noise_trials is not None:
        noise = Noise(trials=row.noise_trials, threshold=row.noise_threshold)
    return KnownTask(
        task_id=bytes(row.task_id),
        configuration=TaskConfiguration.decode(bytes(row.configuration)),
        recipe_digest=bytes(row.recipe_digest),
        policy_digest=bytes(row.policy_digest),
        analysis=row.analysis,
        group=row.group,
        collector=bytes(row.collector),
        noise=noise,
        opens=row.opens,
        closes=row.closes,
        ends=row.ends,
        bucket_end=row.bucket_end,
    )
