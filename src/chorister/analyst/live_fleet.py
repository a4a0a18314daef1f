"""A live fleet: publish a recipe, wait for its cohort, collect what both aggregators release.

Everything needed to resume after a crash is written to the round's file before it is relied upon:
the recipe before it is published, the handles of the collection jobs as soon as the leader assigns
them. Asking again resumes. A batch is released once, and the leader keeps it until told that it is
saved.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
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
from chorister.analyst.fleet import Fleet, ReleasedSums
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
    ServiceError,
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

    def read_policy(self) -> Policy:
        return Policy.load(Path(self.policy))

    def read_author_key(self) -> Ed25519PrivateKey:
        return key_files.read_signing_key(Path(self.author_key))

    def read_token(self) -> str:
        return key_files.read_token(self.token)

    def read_collector_key(self) -> HPKEKeypair:
        try:
            return key_files.read_collector_key(Path(self.collector_key))
        except ServiceError as error:
            raise InvalidInput(str(error)) from None


def connect(profile: str | os.PathLike[str] | Profile) -> LiveFleet:
    """Connect to the fleet that a profile describes; see docs/reference/analyst.md."""
    found = profile if isinstance(profile, Profile) else Profile.load(Path(profile))
    return LiveFleet(
        found.read_policy(),
        registry=found.registry,
        author=found.read_author_key(),
        keypair=found.read_collector_key(),
        token=found.read_token(),
        folder=Path(found.folder),
        devices=found.devices,
        margin=float(found.margin),
        ca_file=None if found.ca_bundle is None else Path(found.ca_bundle),
    )


class LiveFleet(Fleet):
    """Real devices, reached through the registry and the leader."""

    def __init__(
        self,
        policy: Policy,
        *,
        registry: str,
        author: Ed25519PrivateKey,
        keypair: HPKEKeypair,
        token: str,
        folder: Path | None,
        devices: int | None = None,
        margin: float = 0.8,
        ca_file: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
        clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep,
        finish_seconds: int = _FINISH_SECONDS,
    ) -> None:
        """`transport` replaces the network, `clock` and `pause` the time: for rehearsals."""
        self.policy = policy
        self.clock: Clock = clock or SystemClock()
        self.archive = Archive(folder)
        self.identity = f"live {registry}"
        self.devices = devices
        self.margin = margin
        self._registry = registry
        self._author = author
        self._keypair = keypair
        self._token = token
        self._ca_file = ca_file
        self._transport = transport
        self._pause = pause
        self._finish_seconds = finish_seconds

    def __repr__(self) -> str:
        return f"<LiveFleet at {self._registry} under {self.policy.name}>"

    def log_source(self) -> HTTPSource:
        """Open the public log for reading; the caller closes it."""
        return HTTPSource(self._registry, ca_bundle=self._ca_file, transport=self._transport)

    def collector(self, analysis: str) -> str:
        """Return the digest of our HPKE configuration, which the analysis has to list."""
        digest = sha256(self._keypair.config).hex()
        if digest not in self.policy.analyses[analysis].collectors:
            raise InvalidInput(
                f"the policy does not list our collector key {digest[:16]}… for {analysis}, so no "
                "device would answer: use the key that it lists"
            )
        return digest

    def publish(self, round_: Round) -> None:
        """Put the signed recipe into the public log."""
        jws = sign(round_.recipe, self._author)
        self._submit(RecipeEntry.of(jws, self._author), jws)

    def withdraw(self, round_: Round) -> None:
        """Put the withdrawal of the question into the public log."""
        self._end(round_.recipe, EndReason.WITHDRAWN)

    def _end(self, recipe: Recipe, reason: EndReason) -> None:
        self._submit(RecipeEnd(recipe_digest=recipe.digest, reason=reason).signed(self._author))

    def _submit(self, entry: SignedEntry, body: bytes = b"") -> None:
        with RegistryClient(
            self._registry, ca_bundle=self._ca_file, transport=self._transport
        ) as client:
            client.submit(entry, body)

    def progress(self, round_: Round) -> Progress:
        """Ask the leader, which reports only tenths below the minimum cohort."""
        window = round_.recipe.window
        try:
            status = self._collector(round_.recipe).status(round_.recipe.digest)
        except (Unreachable, ProblemError) as error:
            why = f"the leader can't say yet: {error}"
            if isinstance(error, ProblemError) and error.status == HTTPStatus.NOT_FOUND:
                why = (
                    "the leader does not know the question yet; it will once both aggregators "
                    "have cosigned the log"
                )
            return Progress(waiting_for=why, closes=window.closes, ends=window.ends)
        return self._as_progress(round_, status)

    def _as_progress(self, round_: Round, status: RecipeStatus) -> Progress:
        window, now = round_.recipe.window, self.clock.now()
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
            expected=None if round_.target else window.closes + self._finish_seconds,
            rejected={
                "leader": dict(status.rejected.leader),
                "helper": dict(status.rejected.helper),
            },
        )

    def collect(
        self, round_: Round, on_progress: OnProgress, save: Callable[[Round], None]
    ) -> ReleasedSums:
        """Wait for the cohort, then for the result."""
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
        window = round_.recipe.window
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
        for task in self._tasks(round_.recipe):
            handle = self._retrying(round_, partial(collector.create, task))
            handles[task.task_id.hex()] = handle.to_json().decode()
        requested = replace(round_, handles=handles)
        save(requested)
        return requested

    def _await_batches(self, round_: Round, on_progress: OnProgress) -> ReleasedSums:
        recipe = round_.recipe
        collector = self._collector(recipe)
        trials = recipe.privacy.noise_trials
        waiting = {task.task_id: task for task in self._tasks(recipe)}
        found: dict[bytes, Part] = {}
        deadline = max(self.clock.now(), recipe.window.closes) + self._finish_seconds
        while waiting:
            self._check_window(round_)
            for task_id, task in list(waiting.items()):
                handle = CollectionHandle.from_json(str(round_.handles[task_id.hex()]).encode())
                outcome = self._retrying(
                    round_, partial(collector.poll, handle, noise_trials=trials)
                )
                if isinstance(outcome, Collected):
                    del waiting[task_id]
                    found[task_id] = _part(task, outcome)
            if waiting:
                on_progress(self.progress(round_))
                if self.clock.now() >= deadline:
                    break  # nothing more can arrive after the window: these stay too small
                self._pause(_POLL_SECONDS)
        if not found:
            raise self._too_small(round_)
        order = self._tasks(recipe)
        return ReleasedSums(
            parts=tuple(found[task.task_id] for task in order if task.task_id in found),
            missing=tuple(_group(task) for task in order if task.task_id not in found),
        )

    def _check_window(self, round_: Round) -> None:
        window = round_.recipe.window
        if self.clock.now() >= window.ends:
            raise WindowOver(
                f"round {round_.number} could be collected until "
                f"{duration_text(window.grace_seconds)} after its window closed; by now its "
                "reports are deleted. Ask it again with `question.again()`"
            )

    def _retrying(self, round_: Round, call: Callable[[], _T]) -> _T:
        """Retry while the leader can't be reached and the window is not over."""
        while True:
            self._check_window(round_)
            try:
                return call()
            except Unreachable:
                self._pause(_POLL_SECONDS)

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

    def _tasks(self, recipe: Recipe) -> list[Task]:
        return list(task_configurations(self.policy, recipe))

    def _collector(self, recipe: Recipe) -> Collector:
        return Collector(
            recipe.aggregators.leader,
            self._token,
            self._keypair,
            ca_file=self._ca_file,
            transport=self._transport,
            clock=self.clock,
        )


def _group(task: Task) -> tuple[str, ...]:
    values = tuple(value for _, value in task.group.values)
    return values if task.group.arm is None else (*values, task.group.arm)


def _part(task: Task, outcome: Collected) -> Part:
    sums = np.array(outcome.counts, dtype=np.uint64)
    return Part(group=_group(task), reports=outcome.report_count, sums=sums)
