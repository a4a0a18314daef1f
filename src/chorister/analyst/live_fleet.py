"""A live fleet: publish a recipe, wait for its cohort, collect what both aggregators release.

Everything needed to resume after a crash is written to the round's file before it is relied upon:
the recipe before it is published, the handles of the collection jobs as soon as the leader assigns
them. Asking again resumes. A batch is released once, and the leader keeps it until told that it is
saved.
"""

from __future__ import annotations

import math
import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Final, Self, TypeVar

import httpx2
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, StringConstraints, ValidationError

from chorister import key_files
from chorister._native import HPKEKeypair
from chorister.analyst.estimate import Part
from chorister.analyst.fleet import Fleet, OthersQuestions, ReleasedSums
from chorister.analyst.public_log import LoggedRecipes
from chorister.analyst.rounds import Archive, Round
from chorister.analyst.study_status import OnProgress, Progress
from chorister.canonical import Int, Model, Number, first_error, sha256
from chorister.clock import Clock, SystemClock
from chorister.dap.collector import Collected, CollectionHandle, Collector, RecipeStatus
from chorister.dap.task import Task, task_configurations
from chorister.errors import (
    CohortTooSmall,
    InvalidInput,
    ProblemError,
    ResultPending,
    ServiceError,
    SubmissionRefused,
    Unreachable,
    WindowOver,
)
from chorister.policy import Policy
from chorister.policy.values import URL, duration_text
from chorister.recipe import Recipe, sign
from chorister.transparency.client import HTTPSource, RegistryClient
from chorister.transparency.entries import EndReason, RecipeEnd, RecipeEntry, SignedEntry

_T = TypeVar("_T")
_POLL_SECONDS: Final = 5.0
_FINISH_SECONDS: Final = 120  # after a window closes: enough for the aggregators' last jobs
_COLLECT_SECONDS: Final = 10  # from the last report to a result, typically
_RECIPE_UNKNOWN: Final = "urn:chorister:problem:recipe-unknown"  # the registry's answer
_Path = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000, strict=True)
]
_FILES: Final = ("policy", "author_key", "collector_key", "token", "folder", "ca_bundle")


class Profile(Model):
    """How an analyst reaches a fleet: a TOML file. Its paths are relative to the file."""

    policy: _Path
    """The policy that the devices have."""
    registry: URL
    """Where recipes are published."""
    author_key: _Path
    """The Ed25519 private key that signs recipes (PEM); the policy lists its public half."""
    collector_key: _Path
    """The HPKE key pair that results are sealed to: a file of `chorister keygen collector`."""
    token: _Path
    """Authenticates us to the leader: a file of `chorister keygen token`, or `env:NAME`."""
    folder: _Path = "studies"
    """Where studies are kept."""
    devices: Annotated[Int, Field(ge=1)] | None = None
    """About how many devices may answer, for planning."""
    margin: Number = Decimal("0.8")
    """The share of the expected reports that a minimum cohort relies on."""
    ca_bundle: _Path | None = None
    """The only certificate authorities to trust (PEM); the system's if left out."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a profile; its paths come back absolute."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path}: {error}") from None
        try:
            profile = cls.model_validate(values)
        except ValidationError as error:
            field, message = first_error(error)
            raise InvalidInput(f"{path}: {field}: {message}") from None
        base = path.resolve().parent
        found = {name: getattr(profile, name) for name in _FILES}
        moved = {
            name: str(base / value)
            for name, value in found.items()
            if value is not None and not value.startswith("env:")
        }
        return profile.model_copy(update=moved)

    def access(self) -> FleetAccess:
        """Read the policy and the keys."""
        try:
            collector_key = key_files.read_collector_key(Path(self.collector_key))
        except ServiceError as error:
            raise InvalidInput(str(error)) from None
        return FleetAccess(
            policy=Policy.load(Path(self.policy)),
            registry=self.registry,
            author_key=key_files.read_signing_key(Path(self.author_key)),
            collector_key=collector_key,
            token=key_files.read_token(self.token),
            ca_bundle=None if self.ca_bundle is None else Path(self.ca_bundle),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetAccess:
    """Where a fleet is, and the keys that an analyst uses there."""

    policy: Policy
    registry: str  # its URL
    author_key: Ed25519PrivateKey = field(repr=False)
    collector_key: HPKEKeypair = field(repr=False)
    token: str = field(repr=False)
    ca_bundle: Path | None = None  # the only certificate authorities to trust


def connect(profile: str | os.PathLike[str] | Profile) -> LiveFleet:
    """Connect to the fleet that a profile describes; see docs/reference/analyst.md."""
    found = profile if isinstance(profile, Profile) else Profile.load(Path(profile))
    return LiveFleet(
        found.access(),
        folder=Path(found.folder),
        devices=found.devices,
        margin=float(found.margin),
    )


class LiveFleet(Fleet):
    """Real devices, reached through the registry and the leader."""

    def __init__(
        self,
        access: FleetAccess,
        *,
        folder: Path | None,
        devices: int | None = None,
        margin: float = 0.8,
        transport: httpx2.BaseTransport | None = None,
        clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep,
        finish_seconds: int = _FINISH_SECONDS,
    ) -> None:
        """`transport` replaces the network, `clock` and `pause` the time: for rehearsals."""
        self.policy = access.policy
        self.clock: Clock = clock or SystemClock()
        self.archive = Archive(folder)
        self.identity = f"live {access.registry}"
        self.devices = devices
        self.margin = margin
        self._access = access
        self._transport = transport
        self._pause = pause
        self._finish_seconds = finish_seconds
        self._logged = LoggedRecipes(access.policy, self.log_source)

    def __repr__(self) -> str:
        return f"<LiveFleet at {self._access.registry} under {self.policy.name}>"

    def log_source(self) -> HTTPSource:
        """Open the public log for reading; the caller closes it."""
        return HTTPSource(
            self._access.registry, ca_bundle=self._access.ca_bundle, transport=self._transport
        )

    def others(self) -> OthersQuestions:
        """What is in the public log but not in our archive."""
        recipes, problem = self._logged.read()
        own = {round_.recipe.digest for round_ in self.archive.all_rounds()}
        others = tuple(recipe for recipe in recipes if recipe.digest not in own)
        return OthersQuestions(recipes=others, problem=problem)

    def collector(self, analysis: str) -> str:
        """Return the digest of our HPKE configuration, which the analysis has to list."""
        digest = sha256(self._access.collector_key.config).hex()
        if digest not in self.policy.analyses[analysis].collectors:
            raise InvalidInput(
                f"the policy does not list our collector key {digest[:16]}… for {analysis}, so no "
                "device would answer: use the key that it lists"
            )
        return digest

    def publish(self, round_: Round) -> None:
        """Put the signed recipe into the public log."""
        self.publish_recipe(round_.recipe)

    def publish_recipe(self, recipe: Recipe) -> None:
        """Put a recipe into the public log, whether it belongs to a study or not."""
        jws = sign(recipe, self._access.author_key)
        self._submit(RecipeEntry.of(jws, self._access.author_key), jws)

    def withdraw(self, round_: Round) -> None:
        """Put the withdrawal of the question into the public log.

        A question that we do not know to be published may be: the registry's answer can be lost.
        """
        try:
            self._end(round_.recipe, EndReason.WITHDRAWN)
        except SubmissionRefused as error:
            if round_.published or error.problem != _RECIPE_UNKNOWN:
                raise

    def _end(self, recipe: Recipe, reason: EndReason) -> None:
        end = RecipeEnd(recipe_digest=recipe.digest, reason=reason)
        self._submit(end.signed(self._access.author_key))

    def pause(self, seconds: float) -> None:
        """Wait, between two looks at what has arrived."""
        self._pause(seconds)

    def _submit(self, entry: SignedEntry, body: bytes = b"") -> None:
        with RegistryClient(
            self._access.registry, ca_bundle=self._access.ca_bundle, transport=self._transport
        ) as client:
            client.submit(entry, body)

    def progress(self, round_: Round) -> Progress:
        """Ask the leader, which reports only tenths below the minimum cohort."""
        window = round_.window
        try:
            status = self._status(round_)
        except (Unreachable, ProblemError) as error:
            why = f"the leader can't say yet: {error}"
            if isinstance(error, ProblemError) and error.status == HTTPStatus.NOT_FOUND:
                why = (
                    "the leader does not know the question yet; it will once both aggregators "
                    "have cosigned the log"
                )
            return Progress(waiting_for=why, closes=window.closes, ends=window.ends)
        return self._as_progress(round_, status)

    def _status(self, round_: Round) -> RecipeStatus:
        opens = None if round_.number_in_series is None else round_.window.opens
        return self._collector(round_.recipe).status(round_.recipe.digest, opens)

    def _as_progress(self, round_: Round, status: RecipeStatus) -> Progress:
        window, now = round_.window, self.clock.now()
        waiting = status.waiting_for or status.state
        reached = round_.target is not None and (status.reports or 0) >= round_.target
        if status.state == "ready" and now < window.closes and not reached:
            until = f"{round_.target:,} reports" if round_.target else "the end of the window"
            waiting = f"{until}; the minimum cohort is reached"
        return Progress(
            waiting_for=waiting,
            filled=1.0 if status.filled is None else status.filled,
            reports=status.reports,
            closes=window.closes,
            ends=window.ends,
            expected=self._expected(round_, status),
            rejected={
                "leader": dict(status.rejected.leader),
                "helper": dict(status.rejected.helper),
            },
        )

    def _expected(self, round_: Round, status: RecipeStatus) -> int | None:
        """When the result is expected: with a target, if reports keep coming as they did so far."""
        window, now = round_.window, self.clock.now()
        end = max(window.closes, now)
        if round_.target is not None and now < window.closes:
            least = round_.recipe.privacy.min_cohort
            came = status.reports if status.reports is not None else (status.filled or 0.0) * least
            passed = max(now - window.opens, 1)
            if came <= 0 or round_.target * passed > came * (window.closes - window.opens):
                return window.closes + _COLLECT_SECONDS
            end = max(math.ceil(window.opens + passed * round_.target / came), now)
        return end + _COLLECT_SECONDS

    def collect(
        self, round_: Round, on_progress: OnProgress, save: Callable[[Round], None]
    ) -> ReleasedSums:
        """Wait for the cohort, then for the result.

        Raises `ResultPending` if the aggregators take longer than usual: collecting again resumes.
        """
        if not round_.handles:
            self._await_cohort(round_, on_progress)
            round_ = self._request_batches(round_, save)
        return self._await_batches(round_, on_progress)

    def acknowledge(self, round_: Round) -> None:
        """Let the leader delete the result. If it can't be reached, it deletes it later anyway."""
        collector = self._collector(round_.recipe)
        for text in round_.handles.values():
            try:
                collector.delete(CollectionHandle.from_json(str(text).encode()))
            except (Unreachable, ProblemError):
                return

    # --- Waiting and collecting -----------------------------------------------------------------

    def _await_cohort(self, round_: Round, on_progress: OnProgress) -> None:
        """Wait until the target is reached or the window closes."""
        window = round_.window
        while self.clock.now() < window.closes:
            progress = self.progress(round_)
            on_progress(progress)
            if round_.target is not None and (progress.reports or 0) >= round_.target:
                try:
                    self._end(round_.recipe, EndReason.TARGET_REACHED)
                except ServiceError as error:  # it may pass, and the window's end comes anyway
                    why = f"the registry, to tell devices that the target is reached ({error})"
                    on_progress(replace(progress, waiting_for=why))
                else:
                    return
            self._pause(min(_POLL_SECONDS, window.closes - self.clock.now()))

    def _request_batches(self, round_: Round, save: Callable[[Round], None]) -> Round:
        """Request the batch of every group from the leader, and save the handles of its jobs."""
        collector = self._collector(round_.recipe)
        handles: dict[str, str] = {}
        for task in self._tasks(round_):
            handle = self._retrying(round_, partial(collector.create, task))
            handles[task.task_id.hex()] = handle.to_json().decode()
        requested = replace(round_, handles=handles)
        save(requested)
        return requested

    def _await_batches(self, round_: Round, on_progress: OnProgress) -> ReleasedSums:
        recipe = round_.recipe
        collector = self._collector(recipe)
        trials = recipe.privacy.noise_trials
        waiting = {task.task_id: task for task in self._tasks(round_)}
        found: dict[bytes, Part] = {}
        deadline = max(self.clock.now(), round_.window.closes) + self._finish_seconds
        last_look = False
        while waiting:
            try:
                for task_id, task in list(waiting.items()):
                    handle = CollectionHandle.from_json(str(round_.handles[task_id.hex()]).encode())
                    outcome = self._retrying(
                        round_, partial(collector.poll, handle, noise_trials=trials)
                    )
                    if isinstance(outcome, Collected):
                        del waiting[task_id]
                        found[task_id] = _part(task, outcome)
            except WindowOver:
                if not found:
                    raise
                break  # the groups that are left are lost; the others are not
            if waiting:
                progress, finished = self._finishing(round_)
                on_progress(progress)
                # Nothing more can arrive: what is left stays too small. One more look, because the
                # leader may have released a batch since we asked for it.
                if finished and last_look:
                    break
                if not finished and self.clock.now() >= deadline:
                    raise self._pending(round_, progress)
                last_look = finished
                self._pause(_POLL_SECONDS)
        if not found:
            raise self._too_small(round_)
        order = self._tasks(round_)
        return ReleasedSums(
            parts=tuple(found[task.task_id] for task in order if task.task_id in found),
            missing=tuple(_group(task) for task in order if task.task_id not in found),
        )

    def _finishing(self, round_: Round) -> tuple[Progress, bool]:
        """The progress, and whether the leader has released all that it ever will."""
        try:
            status = self._status(round_)
        except (Unreachable, ProblemError):
            return self.progress(round_), False
        return self._as_progress(round_, status), status.finished

    def _check_window(self, round_: Round) -> None:
        window = round_.window
        if self.clock.now() >= window.ends:
            single = round_.number_in_series is None
            what = f"round {round_.number}" if single else f"window {round_.number_in_series}"
            again = ". Ask it again with `question.again()`" if single else ""
            raise WindowOver(
                f"{what} could be collected until {duration_text(window.grace_seconds)} after its "
                f"window closed; by now its reports are deleted{again}"
            )

    def _retrying(self, round_: Round, call: Callable[[], _T]) -> _T:
        """Retry while the leader can't be reached and the window is not over."""
        while True:
            self._check_window(round_)
            try:
                return call()
            except Unreachable:
                self._pause(_POLL_SECONDS)

    def _pending(self, round_: Round, progress: Progress) -> ResultPending:
        left = max(0, round_.window.ends - self.clock.now())
        return ResultPending(
            f"the aggregators have not released the result yet ({progress.waiting_for}): collect "
            f"it again later; there are {duration_text(left)} left"
        )

    def _too_small(self, round_: Round) -> CohortTooSmall:
        least = round_.recipe.privacy.min_cohort
        progress = self.progress(round_)
        share = (
            f"about {progress.filled:.0%} of " if progress.filled else "no more than a tenth of "
        )
        return CohortTooSmall(
            f"the window is over with {share}the {least:,} reports that a release needs. Ask a "
            "larger share, a longer window or fewer groups; if hardly any device answered, check "
            "with `chorister recipe explain` whether their policy refuses the recipe",
            reports=None,
            needed=least,
        )

    def _tasks(self, round_: Round) -> list[Task]:
        return list(task_configurations(self.policy, round_.recipe, [round_.number_in_series or 0]))

    def _collector(self, recipe: Recipe) -> Collector:
        return Collector(
            recipe.aggregators.leader,
            self._access.token,
            self._access.collector_key,
            ca_bundle=self._access.ca_bundle,
            transport=self._transport,
            clock=self.clock,
        )


def _group(task: Task) -> tuple[str, ...]:
    values = tuple(value for _, value in task.group.values)
    return values if task.group.arm is None else (*values, task.group.arm)


def _part(task: Task, outcome: Collected) -> Part:
    sums = np.array(outcome.counts, dtype=np.uint64)
    return Part(group=_group(task), reports=outcome.report_count, sums=sums)
