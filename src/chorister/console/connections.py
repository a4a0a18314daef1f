"""The fleets that a console asks: live ones by their profiles, rehearsed ones at a walking pace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from chorister.analyst.extras import needed
from chorister.analyst.fleet import Gathered, Progress, Tell
from chorister.analyst.live import Connection, connect
from chorister.analyst.population import Population
from chorister.analyst.rehearsal import Rehearsal
from chorister.analyst.rounds import Round, State
from chorister.analyst.study import Study
from chorister.console.config import ConnectionConfig
from chorister.errors import ChoristerError, CohortTooSmall, ServiceError
from chorister.policy import Policy
from chorister.transparency.sources import HTTPSource

__all__ = ["FleetConnection", "PacedRehearsal", "open_connection"]

AnyFleet: TypeAlias = "PacedRehearsal | Connection"
_TENTHS: Final = 10


class PacedRehearsal(Rehearsal):
    """A rehearsal whose cohorts take some seconds to fill, for several threads at once."""

    def __init__(
        self, population: Population, policy: Policy, *, folder: Path | None, fill_seconds: float,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            population, policy, device_policy=policy, reach=1.0, seed=seed, folder=folder,
            clock=None,
        )  # fmt: skip
        self.fill_seconds = fill_seconds
        self._begun: dict[int, float] = {}  # when each round began to fill, by its sequence
        self._turn = threading.Lock()
        self._drawn: dict[int, Gathered | CohortTooSmall] = {}

    def publish(self, round_: Round) -> None:
        """From now on the cohort fills."""
        self._begun.setdefault(round_.sequence, time.monotonic())

    def progress(self, round_: Round) -> Progress:
        """In tenths, as a live fleet would tell it."""
        window = round_.recipe.window
        begun = self._begun.get(round_.sequence)
        passed = 0.0 if begun is None else time.monotonic() - begun
        filled = 1.0 if self.fill_seconds <= 0 else min(1.0, passed / self.fill_seconds)
        whole = int(filled * _TENTHS) / _TENTHS
        return Progress(
            waiting_for="simulated devices answer" if whole < 1.0 else "reports are being added up",
            filled=whole,
            closes=window.closes,
            ends=window.ends,
        )

    def gather(self, round_: Round, tell: Tell, keep: Callable[[Round], None]) -> Gathered:
        """Wait for the cohort, then draw what the aggregators would release."""
        self.publish(round_)
        while (progress := self.progress(round_)).filled < 1.0:
            tell(progress)
            time.sleep(max(self.fill_seconds / _TENTHS, 0.01))
        with self._turn:
            # Devices answered in the order in which they were asked, whoever waits first.
            for earlier in self.archive.all_rounds():
                if earlier.sequence >= round_.sequence:
                    break
                if earlier.state is State.ASKED and earlier.sequence not in self._drawn:
                    self._drawn[earlier.sequence] = self._draw(earlier, keep)
            found = self._drawn.pop(round_.sequence, None) or self._draw(round_, keep)
        if isinstance(found, CohortTooSmall):
            raise found
        return found

    def _draw(self, round_: Round, keep: Callable[[Round], None]) -> Gathered | CohortTooSmall:
        try:
            return super().gather(round_, lambda _: None, keep)
        except CohortTooSmall as error:
            return error


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConnection:
    """A fleet with what the pages need to know about it."""

    name: str
    title: str
    fleet: AnyFleet = field(repr=False)
    folder: Path
    analysts: frozenset[str] | None  # who may use it; None: everybody
    look_seconds: float  # between two looks at an open round

    @property
    def live(self) -> bool:
        """Whether real devices answer."""
        return not isinstance(self.fleet, Rehearsal)

    @property
    def log_source(self) -> Callable[[], HTTPSource] | None:
        """Opens the public log; None for a rehearsal."""
        return self.fleet.log_source if isinstance(self.fleet, Connection) else None

    @property
    def policy(self) -> Policy:
        """What the devices allow."""
        return self.fleet.policy

    @property
    def one_operator(self) -> bool:
        """Whether one operator runs both aggregators, so that nothing protects against it."""
        return any(pair.one_operator for pair in self.policy.aggregators)

    def permits(self, analyst: str) -> bool:
        """Whether somebody may use it."""
        return self.analysts is None or analyst in self.analysts

    def studies(self) -> dict[str, str]:
        """The analysis of every study in the folder, by the study's whole name."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*/study.json")):
            try:
                document: Any = json.loads(path.read_bytes())
                name, analysis = str(document["name"]), str(document["analysis"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not a study's; opening it by name says what is wrong
            if name == path.parent.name and analysis in self.policy.analyses:
                found[name] = analysis
        return found

    def study(self, name: str, analysis: str) -> Study:
        """Begin or resume a study, with what a notebook asked in it meanwhile."""
        self.fleet.archive.refresh()
        return self.fleet.study(name, analysis=analysis)


def open_connection(config: ConnectionConfig) -> FleetConnection:
    """The fleet that settings describe."""
    fleet: AnyFleet
    try:
        fleet = _rehearsal(config) if config.profile is None else connect(config.profile)
        folder = fleet.archive.folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except (ChoristerError, OSError) as error:
        raise ServiceError(f"connection {config.name}: {error}") from error
    if folder is None:  # both kinds were given one
        raise ServiceError(f"connection {config.name}: its studies are kept nowhere")
    return FleetConnection(
        name=config.name,
        title=config.title or config.name,
        fleet=fleet,
        folder=folder,
        analysts=None if config.analysts is None else frozenset(config.analysts),
        look_seconds=5.0 if config.profile is not None else 0.2,
    )


def _rehearsal(config: ConnectionConfig) -> PacedRehearsal:
    policy = Policy.load(Path(config.policy or ""))
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
        raise ServiceError(f"{path}: a population is a .csv or .parquet file")
    try:
        return readers[path.suffix](path)
    except (OSError, polars.exceptions.PolarsError) as error:
        raise ServiceError(f"can't read {path}: {error}") from None
