"""The fleets of a console: live ones with their public logs, and rehearsals in slow motion."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from chorister.analyst.fleet import Fleet, ReleasedSums
from chorister.analyst.live_fleet import connect
from chorister.analyst.public_log import CachedSource
from chorister.analyst.rehearsal import Rehearsal
from chorister.analyst.rehearsal.population import Population
from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.study import Study
from chorister.analyst.study_status import OnProgress, Progress
from chorister.analyst.tables import needed
from chorister.console.config import ConnectionConfig
from chorister.errors import ChoristerError, CohortTooSmall, ServiceError
from chorister.policy import Policy
from chorister.recipe import SignedRecipe
from chorister.transparency.auditor import audit
from chorister.transparency.entries import RecipeEnd, RecipeEntry
from chorister.transparency.tiles import Source
from chorister.transparency.trust import Authority

_TENTHS: Final = 10


class PacedRehearsal(Rehearsal):
    """A rehearsal whose cohorts take some seconds to fill. Thread-safe."""

    def __init__(
        self, population: Population, policy: Policy, *, folder: Path | None, fill_seconds: float,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            population, policy, device_policy=policy, reach=1.0, seed=seed, folder=folder,
            clock=None,
        )  # fmt: skip
        self.fill_seconds = fill_seconds
        self._begun: dict[int, float] = {}  # when each round began to fill, by sequence
        self._turn = threading.Lock()
        self._drawn: dict[int, ReleasedSums | CohortTooSmall] = {}

    def publish(self, round_: Round) -> None:
        """Let the cohort begin to fill."""
        self._begun.setdefault(round_.sequence, time.monotonic())

    def is_over(self, round_: Round) -> bool:
        """Whether a window is over: the windows of a series fill one after another."""
        begun = self._begun.setdefault(round_.sequence, time.monotonic())
        filled = (1 + (round_.number_in_series or 0)) * self.fill_seconds
        return time.monotonic() - begun >= filled

    def progress(self, round_: Round) -> Progress:
        """Report progress in tenths, as a live fleet does."""
        window = round_.window
        begun = self._begun.get(round_.sequence)
        passed = 0.0 if begun is None else time.monotonic() - begun
        filled = 1.0 if self.fill_seconds <= 0 else min(1.0, passed / self.fill_seconds)
        whole = int(filled * _TENTHS) / _TENTHS
        return Progress(
            waiting_for="simulated devices to answer"
            if whole < 1.0
            else "the reports to be added up",
            filled=whole,
            closes=window.closes,
            ends=window.ends,
        )

    def collect(
        self, round_: Round, on_progress: OnProgress, save: Callable[[Round], None]
    ) -> ReleasedSums:
        """Wait for the cohort, then draw what the aggregators would release."""
        self.publish(round_)
        while (progress := self.progress(round_)).filled < 1.0:
            on_progress(progress)
            time.sleep(max(self.fill_seconds / _TENTHS, 0.01))
        with self._turn:
            # Devices answer in the order of the questions, whichever thread waits first.
            for earlier in self.archive.all_rounds():
                if earlier.sequence >= round_.sequence:
                    break
                if earlier.recipe.series is not None:
                    continue  # its windows are drawn one by one
                if earlier.state is RoundState.ASKED and earlier.sequence not in self._drawn:
                    self._drawn[earlier.sequence] = self._draw(earlier, save)
            found = self._drawn.pop(round_.sequence, None) or self._draw(round_, save)
        if isinstance(found, CohortTooSmall):
            raise found
        return found

    def _draw(self, round_: Round, save: Callable[[Round], None]) -> ReleasedSums | CohortTooSmall:
        try:
            return super().collect(round_, lambda _: None, save)
        except CohortTooSmall as error:
            return error


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConnection:
    """A fleet, with its name, its folder and who may use it."""

    name: str
    title: str
    fleet: Fleet = field(repr=False)
    live: bool  # whether real devices answer
    folder: Path
    analysts: frozenset[str] | None  # who may use it; None: everyone
    poll_seconds: float  # between two requests about an open round
    suggestions: Mapping[str, str] = field(default_factory=dict)  # what forms begin with

    @property
    def policy(self) -> Policy:
        return self.fleet.policy

    @property
    def one_operator(self) -> bool:
        """Whether one operator runs both aggregators: then nothing protects against it."""
        return any(pair.one_operator for pair in self.policy.aggregators)

    def permits(self, analyst: str) -> bool:
        return self.analysts is None or analyst in self.analysts

    def studies(self) -> dict[str, str]:
        """The analysis of every study in the folder, by the full name of the study."""
        known = self.fleet.archive.studies()
        return {name: each for name, each in known.items() if each in self.policy.analyses}

    def study(self, name: str, analysis: str) -> Study:
        """Begin or resume a study, including what a notebook has asked in it meanwhile."""
        self.fleet.archive.refresh()
        return self.fleet.study(name, analysis=analysis)


def open_connection(config: ConnectionConfig) -> FleetConnection:
    try:
        fleet: Fleet = _rehearsal(config) if config.profile is None else connect(config.profile)
        folder = fleet.archive.folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except (ChoristerError, OSError) as error:
        raise ServiceError(f"connection {config.name}: {error}") from error
    if folder is None:  # both kinds have one
        raise ServiceError(f"connection {config.name}: there is no folder for its studies")
    return FleetConnection(
        name=config.name,
        title=config.title or config.name,
        fleet=fleet,
        live=config.profile is not None,
        folder=folder,
        analysts=None if config.analysts is None else frozenset(config.analysts),
        poll_seconds=5.0 if config.profile is not None else 0.2,
        suggestions=config.suggestions or {},
    )


def _rehearsal(config: ConnectionConfig) -> PacedRehearsal:
    policy = Policy.load_rehearsal(Path(config.policy or ""))
    source: Any
    if config.populations is not None:
        source = {table: _table(Path(path)) for table, path in config.populations.items()}
    else:
        source = _table(Path(config.population or ""))
    people = Population(source, policy, device="device", count="count", devices=config.devices)
    return PacedRehearsal(
        people, policy, folder=Path(config.folder or ""), fill_seconds=config.fill_seconds
    )


def _table(path: Path) -> Any:  # noqa: ANN401 (a polars frame)
    polars = needed("polars")
    readers = {".csv": polars.read_csv, ".parquet": polars.read_parquet}
    if path.suffix not in readers:
        raise ServiceError(f"{path}: a population must be a .csv or .parquet file")
    try:
        return readers[path.suffix](path)
    except (OSError, polars.exceptions.PolarsError) as error:
        raise ServiceError(f"can't read {path}: {error}") from None


# --- Their public logs ---------------------------------------------------------------------------


_CACHE_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedQuestion:
    """A recipe in the log."""

    index: int
    signed: SignedRecipe
    open: bool  # on the current list
    ended: bool  # withdrawn, or its target was reached


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPage:
    """What the log contains, or why it can't be shown."""

    origin: str
    time: int = 0  # of the checkpoint
    size: int = 0
    cosignatures: int = 0
    questions: tuple[LoggedQuestion, ...] = ()  # the newest first
    problem: str = ""


def read_log(source: Source, policy: Policy) -> LogPage:
    """Verify a log from its first entry, as an auditor does; the page shows any problem."""
    origin = policy.log.origin
    try:
        found = audit(source, authority=Authority.of([policy]), judge_all=False)
    except ChoristerError as error:
        return LogPage(origin=origin, problem=str(error))
    current = {recipe.address for recipe in found.current.recipes}
    ended = {
        logged.entry.recipe_digest
        for logged in found.entries
        if isinstance(logged.entry, RecipeEnd)
    }
    questions = [
        LoggedQuestion(
            index=logged.index,
            signed=found.recipes[logged.index],
            open=logged.entry.body_digest in current,
            ended=logged.entry.recipe_digest in ended,
        )
        for logged in found.entries
        # The log may serve other policies, too.
        if isinstance(logged.entry, RecipeEntry) and logged.entry.analysis in policy.analyses
    ]
    return LogPage(
        origin=origin,
        time=found.time,
        size=found.checkpoint.size,
        cosignatures=len(found.cosignatures),
        questions=tuple(reversed(questions)),
    )


class PublicLogs:
    """The logs of all live connections, cached for a few seconds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._read: dict[str, tuple[float, LogPage]] = {}
        self._entries: dict[str, dict[str, bytes]] = {}

    def of(self, connection: FleetConnection) -> LogPage | None:
        """Read the log of a connection; None for a rehearsal, which has none."""
        if not connection.live:
            return None
        with self._lock:
            turn = self._turns.setdefault(connection.name, threading.Lock())
        with turn:
            when, page = self._read.get(connection.name, (-_CACHE_SECONDS, None))
            if page is None or time.monotonic() >= when + _CACHE_SECONDS:
                source = connection.fleet.log_source()
                if source is None:
                    return None
                kept = self._entries.setdefault(connection.name, {})
                with source:
                    page = read_log(CachedSource(source, kept), connection.policy)
                self._read[connection.name] = (time.monotonic(), page)
            return page
