"""A live fleet: publish a recipe, wait for its cohort, collect what both aggregators release.

What is needed to go on after a crash is in the round's file before it is relied upon: the recipe
before it is published, the handles of the collection jobs as soon as the leader named them. Asking
again resumes; a batch is released once, and the leader keeps it until it is told that it is safe.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

import httpx2
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister._native import HPKEKeypair
from chorister.analyst.fleet import Gathered, Progress, Tell
from chorister.analyst.profile import Profile
from chorister.analyst.rounds import Archive, Round
from chorister.analyst.study import Study
from chorister.analyst.view import Part
from chorister.canonical import sha256
from chorister.clock import Clock, SystemClock
from chorister.dap.collector import Collected, CollectionHandle, Collector
from chorister.dap.status import RecipeStatus
from chorister.dap.task import Task, task_configurations
from chorister.errors import CohortTooSmall, InvalidInput, ProblemError, Unreachable, WindowOver
from chorister.policy import Policy
from chorister.policy.values import duration_text
from chorister.recipe import Recipe, sign
from chorister.transparency.client import RegistryClient
from chorister.transparency.entries import EndReason, RecipeEnd, RecipeEntry
from chorister.transparency.sources import HTTPSource

__all__ = ["Connection", "connect"]

_T = TypeVar("_T")
_LOOK: Final = 5.0  # seconds between two looks at a round
_SETTLE: Final = 120  # seconds after a window within which aggregators finish their jobs


def connect(profile: str | os.PathLike[str] | Profile) -> Connection:
    """The fleet that a profile (a TOML file) leads to; see docs/reference/analyst.md."""
    found = profile if isinstance(profile, Profile) else Profile.load(Path(profile))
    return Connection(
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


class Connection:
    """A live fleet; `study` begins or resumes a study of it."""

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
        settle: int = _SETTLE,
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
        self._settle = settle

    def __repr__(self) -> str:
        return f"<Connection to {self._registry} under {self.policy.name}>"

    def study(self, name: str, *, analysis: str | None = None) -> Study:
        """Begin a study, or resume the one of this name."""
        if analysis is None:
            if len(self.policy.analyses) != 1:
                raise InvalidInput(f"say which analysis: {', '.join(self.policy.analyses)}")
            analysis = next(iter(self.policy.analyses))
        return Study(self, name, analysis)

    def log_source(self) -> HTTPSource:
        """The public log, to be read by anybody; close it."""
        return HTTPSource(self._registry, transport=self._transport)

    # --- What a study asks of a fleet -----------------------------------------------------------

    def collector(self, analysis: str) -> str:
        """The digest of our HPKE configuration, which the analysis has to list."""
        digest = sha256(self._keypair.config).hex()
        if digest not in self.policy.analyses[analysis].collectors:
            raise InvalidInput(
                f"the policy does not list our collector key {digest[:16]}… for {analysis}: no "
                "device would answer; use the key that it lists"
            )
        return digest

    def publish(self, round_: Round) -> None:
        """Put the signed recipe into the public log. Twice changes nothing."""
        entry = RecipeEntry(
            author_key=self._author.public_key().public_bytes_raw(),
            jws=sign(round_.recipe, self._author),
        )
        with RegistryClient(self._registry, transport=self._transport) as client:
            client.submit(entry)

    def withdraw(self, round_: Round) -> None:
        """Let the log say that the question is asked no more."""
        self._end(round_.recipe, EndReason.WITHDRAWN)

    def _end(self, recipe: Recipe, reason: EndReason) -> None:
        end = RecipeEnd(recipe_digest=recipe.digest, reason=reason).signed(self._author)
        with RegistryClient(self._registry, transport=self._transport) as client:
            client.submit(end)

    def progress(self, round_: Round) -> Progress:
        """What the leader says: tenths below the minimum cohort, reasons, times."""
        window = round_.recipe.window
        try:
            status = self._collector(round_.recipe).status(round_.recipe.digest)
        except (Unreachable, ProblemError) as error:
            why = f"the leader says nothing yet: {error}"
            if isinstance(error, ProblemError) and error.status == HTTPStatus.NOT_FOUND:
                why = (
                    "the leader does not know the question yet: it does once both aggregators "
                    "cosigned the log"
                )
            return Progress(
                waiting_for=why,
                closes=window.closes,
                ends=window.ends,
            )
        return self._shown(round_, status)

    def _shown(self, round_: Round, status: RecipeStatus) -> Progress:
        window, now = round_.recipe.window, self.clock.now()
        waiting = status.waiting_for or status.state
        reached = round_.target is not None and (status.reports or 0) >= round_.target
        if status.state == "ready" and now < window.closes and not reached:
            until = f"{round_.target:,} reports" if round_.target else "the window's end"
            waiting = f"{until}; the minimum cohort is there"
        return Progress(
            waiting_for=waiting,
            filled=1.0 if status.filled is None else status.filled,
            reports=status.reports,
            closes=window.closes,
            ends=window.ends,
            expected=None if round_.target else window.closes + self._settle,
            rejected={
                "leader": dict(status.rejected.leader),
                "helper": dict(status.rejected.helper),
            },
        )

    def gather(self, round_: Round, tell: Tell, keep: Callable[[Round], None]) -> Gathered:
        """Wait for the cohort, then for the result."""
        if not round_.handles:
            self._await_cohort(round_, tell)
            round_ = self._begin(round_, keep)
        return self._collect(round_, tell)

    def settle(self, round_: Round) -> None:
        """The result is safe: the leader may forget it. If it can't be told, it forgets later."""
        collector = self._collector(round_.recipe)
        for text in round_.handles.values():
            try:
                collector.delete(CollectionHandle.from_json(str(text).encode()))
            except (Unreachable, ProblemError):
                return

    # --- Waiting and collecting -----------------------------------------------------------------

    def _await_cohort(self, round_: Round, tell: Tell) -> None:
        """Until the target is reached, or until the window closes."""
        window = round_.recipe.window
        while self.clock.now() < window.closes:
            progress = self.progress(round_)
            tell(progress)
            enough = progress.reports is not None and round_.target is not None
            if enough and (progress.reports or 0) >= (round_.target or 0):
                self._end(round_.recipe, EndReason.TARGET_REACHED)
                return
            self._pause(min(_LOOK, window.closes - self.clock.now()))

    def _begin(self, round_: Round, keep: Callable[[Round], None]) -> Round:
        """Ask the leader for every group's batch, and remember what it called the jobs."""
        collector = self._collector(round_.recipe)
        handles: dict[str, str] = {}
        for task in self._tasks(round_.recipe):
            self._in_time(round_)
            handle = self._patiently(round_, partial(collector.create, task))
            handles[task.task_id.hex()] = handle.to_json().decode()
        begun = replace(round_, handles=handles)
        keep(begun)
        return begun

    def _collect(self, round_: Round, tell: Tell) -> Gathered:
        recipe = round_.recipe
        collector = self._collector(recipe)
        trials = recipe.privacy.min_cohort - 1 if recipe.privacy.crowd == "noised" else 0
        waiting = {task.task_id: task for task in self._tasks(recipe)}
        found: dict[bytes, Part] = {}
        patience = max(self.clock.now(), recipe.window.closes) + self._settle
        while waiting:
            self._in_time(round_)
            for task_id, task in list(waiting.items()):
                handle = CollectionHandle.from_json(str(round_.handles[task_id.hex()]).encode())
                outcome = self._patiently(
                    round_, partial(collector.poll, handle, noise_trials=trials)
                )
                if isinstance(outcome, Collected):
                    del waiting[task_id]
                    found[task_id] = _part(task, outcome)
            if waiting:
                tell(self.progress(round_))
                if self.clock.now() >= patience:
                    break  # no report has come since the window closed: these stay too small
                self._pause(_LOOK)
        if not found:
            raise self._too_small(round_)
        order = self._tasks(recipe)
        return Gathered(
            parts=tuple(found[task.task_id] for task in order if task.task_id in found),
            missing=tuple(_values(task) for task in order if task.task_id not in found),
        )

    def _in_time(self, round_: Round) -> None:
        window = round_.recipe.window
        if self.clock.now() >= window.ends:
            raise WindowOver(
                f"round {round_.number} could be collected until "
                f"{duration_text(window.grace_seconds)} after its window closed, and that time is "
                "over: its reports are deleted. Ask it again with `question.again()`"
            )

    def _patiently(self, round_: Round, call: Callable[[], _T]) -> _T:
        """Try again while the leader can't be reached, as long as there is time."""
        while True:
            self._in_time(round_)
            try:
                return call()
            except Unreachable:
                self._pause(_LOOK)

    def _too_small(self, round_: Round) -> CohortTooSmall:
        least = round_.recipe.privacy.min_cohort
        progress = self.progress(round_)
        share = (
            f"about {progress.filled:.0%} of " if progress.filled else "no more than a tenth of "
        )
        return CohortTooSmall(
            f"the window is over with {share}the {least:,} reports that a release needs. Ask a "
            "larger share, a longer window or fewer groups; if hardly any device answered, look "
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


def _values(task: Task) -> tuple[str, ...]:
    values = tuple(value for _, value in task.group.values)
    return values if task.group.arm is None else (*values, task.group.arm)


def _part(task: Task, outcome: Collected) -> Part:
    sums = np.array(outcome.counts, dtype=np.uint64)
    return Part(group=_values(task), reports=outcome.report_count, sums=sums)
