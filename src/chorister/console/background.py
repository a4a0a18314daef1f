"""What runs in the background: algorithms, and threads that wait for the results of rounds.

A run is a file with its arguments, its progress and the chart of its latest step. If a restart
interrupts a run, an analyst can resume it: starting it again with the same arguments asks only what
was not asked yet. Rounds are on disk as well, so that a restart waits for them again.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from chorister.analyst.algorithms.algorithm_run import AlgorithmResult, AlgorithmRun, Step
from chorister.analyst.algorithms.crosstab import Crosstab
from chorister.analyst.algorithms.distribution import Distribution
from chorister.analyst.algorithms.heatmap import HeatMap
from chorister.analyst.algorithms.ngrams import Ngrams
from chorister.analyst.algorithms.words import Words
from chorister.analyst.json_files import require_format, write_atomically
from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.study import Study
from chorister.analyst.study_status import Progress
from chorister.errors import (
    ChoristerError,
    InvalidInput,
    QuestionWithdrawn,
    ServiceError,
    StudyError,
)

StudyKey: TypeAlias = tuple[str, str]
"""The names of a connection and of a study there."""
_log = logging.getLogger("chorister.console")
_MAX_PLANS: Final = 50
_FORMAT: Final = "chorister-run-1"
_RESULTS: Final[dict[str, type[AlgorithmResult]]] = {
    "ngrams": Ngrams,
    "words": Words,
    "heatmap": HeatMap,
    "distribution": Distribution,
    "crosstab": Crosstab,
}
_FILE_NAME: Final = re.compile(r"run-(\d{4,9})\.json")


def unexpected(what: str, error: Exception) -> str:
    """Log an error that is nobody's mistake; return what to tell analysts about it."""
    if isinstance(error, OSError):
        _log.error("%s failed: %s", what, error, exc_info=error)
        reason = error.strerror or type(error).__name__
        return f"the server can't use its files ({reason}): tell its operator"
    _log.error("%s failed because of a bug in Chorister", what, exc_info=error)
    return "there is a bug in Chorister; the server's log has the details"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run of an algorithm in a study."""

    number: int  # in its study, from 1
    algorithm: str
    values: dict[str, str]  # of the form that started it
    by: str  # the analyst who started it
    state: str = "running"  # running, finished, failed, interrupted
    planned: int  # rounds
    rounds: tuple[int, ...] = ()  # of the study, so far
    words: str = ""  # what was found, or what went wrong

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def can_resume(self) -> bool:
        return self.state in ("interrupted", "failed")


class RunStore:
    """All runs of algorithms. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._records: dict[StudyKey, dict[int, RunRecord]] = {}
        self._planned: OrderedDict[Hashable, AlgorithmRun[Any]] = OrderedDict()

    def planned(
        self, key: Hashable, plan: Callable[[], AlgorithmRun[Any]], *, take: bool
    ) -> AlgorithmRun[Any]:
        """Return the run planned with this key, or plan it now, which takes seconds.

        With `take` it is about to start, so it is not cached any longer.
        """
        with self._lock:
            run = self._planned.pop(key, None)
        if run is None:
            run = plan()
        if not take:
            with self._lock:
                self._planned[key] = run
                while len(self._planned) > _MAX_PLANS:
                    self._planned.popitem(last=False)
        return run

    def of(self, study: StudyKey) -> list[RunRecord]:
        """The runs of a study, the newest first."""
        with self._lock:
            records = self._runs_of(study)
            return [records[number] for number in sorted(records, reverse=True)]

    def get(self, study: StudyKey, number: int) -> RunRecord | None:
        with self._lock:
            return self._runs_of(study).get(number)

    def result(self, study: StudyKey, number: int) -> AlgorithmResult | None:
        """What a finished run found."""
        record = self.get(study, number)
        kind = None if record is None else _RESULTS.get(record.algorithm)
        path = self._path(study, number).with_suffix(".result")
        if kind is None or not path.exists():
            return None
        found: AlgorithmResult = kind.load(path)
        return found

    def picture(self, study: StudyKey, number: int) -> dict[str, Any] | None:
        """The Vega-Lite specification of a run's latest chart."""
        path = self._path(study, number).with_suffix(".picture")
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        return found

    def start(
        self,
        study: StudyKey,
        *,
        algorithm: str,
        values: dict[str, str],
        by: str,
        run: AlgorithmRun[Any],
        number: int | None = None,
    ) -> RunRecord:
        """Start a new run in the background, or resume an interrupted one."""
        with self._lock:
            records = self._runs_of(study)
            if any(record.running for record in records.values()):
                raise InvalidInput(
                    "an algorithm is already running in this study: let it finish first"
                )
            chosen = number if number is not None else max(records, default=0) + 1
            earlier = records[chosen].rounds if chosen in records else ()
            record = RunRecord(
                number=chosen, algorithm=algorithm, values=values, by=by,
                planned=len(run.plan.rounds),
            )  # fmt: skip
            self._keep(study, record)
        threading.Thread(
            target=self._follow, args=(study, record, run, earlier), daemon=True,
            name=f"{algorithm} in {study[1]}",
        ).start()  # fmt: skip
        return record

    def _follow(
        self, study: StudyKey, record: RunRecord, run: AlgorithmRun[Any], earlier: tuple[int, ...]
    ) -> None:
        """Follow a run to its end. `earlier` are the rounds that it had before it was resumed."""
        path = self._path(study, record.number)
        try:
            for step in run:
                self._draw(path.with_suffix(".picture"), step)
                record = replace(record, rounds=(*record.rounds, step.result.round or 0))
                self._keep(study, record)
            found = run.result
            write_atomically(path.with_suffix(".result"), found.to_json().encode())
            record = replace(record, state="finished", words=str(found.explain()))
        except ChoristerError as error:
            record = replace(record, state="failed", words=str(error))
        except Exception as error:  # the edge of this thread
            record = replace(record, state="failed", words=unexpected("an algorithm", error))
        if len(record.rounds) < len(earlier):
            record = replace(record, rounds=earlier)  # what was found before stays in view
        with self._lock:
            self._runs_of(study)[record.number] = record  # even if it can't be stored
        self._keep(study, record)

    @staticmethod
    def _draw(path: Path, step: Step) -> None:
        """Keep the chart of a step.

        Devices have paid for the round, so whatever goes wrong in drawing may not end the run. The
        page then shows the words below the chart, which say what it would show.
        """
        try:
            write_atomically(path, json.dumps(step.picture.to_dict()).encode())
        except Exception as error:
            unexpected("drawing a chart", error)

    # --- Files ----------------------------------------------------------------------------------

    def _path(self, study: StudyKey, number: int) -> Path:
        return Path(self._folder, *study, f"run-{number:04}.json")

    def _keep(self, study: StudyKey, record: RunRecord) -> None:
        document = {"format": _FORMAT, **asdict(record)}
        with self._lock:
            data = json.dumps(document, ensure_ascii=True).encode()
            write_atomically(self._path(study, record.number), data)
            self._runs_of(study)[record.number] = record

    def _runs_of(self, study: StudyKey) -> dict[int, RunRecord]:
        """The runs of one study by number, read from disk once."""
        if study not in self._records:
            found = sorted(Path(self._folder, *study).glob("run-*.json"))
            records = [_read(path) for path in found if _FILE_NAME.fullmatch(path.name)]
            self._records[study] = {record.number: record for record in records}
        return self._records[study]


def _read(path: Path) -> RunRecord:
    """Read a run; if it was running when the process ended, it is interrupted."""
    try:
        tree: Any = json.loads(path.read_bytes())
        require_format(tree, _FORMAT)
        state = str(tree["state"])
        return RunRecord(
            number=int(tree["number"]),
            algorithm=str(tree["algorithm"]),
            values={str(name): str(value) for name, value in tree["values"].items()},
            by=str(tree["by"]),
            state="interrupted" if state == "running" else state,
            planned=int(tree["planned"]),
            rounds=tuple(int(number) for number in tree["rounds"]),
            words=str(tree["words"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"can't read {path} ({error}): restore or remove it") from None


@dataclass(kw_only=True, slots=True)
class _Waiter:
    thread: threading.Thread | None = None
    error: str | None = None  # why waiting ended
    seen: Progress | None = None
    polled: float = 0.0


class RoundWaiters:
    """Threads that wait for rounds, by connection, study and number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[tuple[str, str, int], _Waiter] = {}

    def wait(self, connection: str, study: Study, round_: Round) -> None:
        """Wait for a round in the background, unless a thread already does."""
        key = (connection, study.name, round_.number)
        with self._lock:
            waiter = self._waiters.setdefault(key, _Waiter())
            if waiter.thread is not None and waiter.thread.is_alive():
                return
            waiter.error = None
            # A daemon: a live round may take days, and a restart waits for it again.
            waiter.thread = threading.Thread(
                target=self._run, args=(waiter, study, round_), daemon=True,
                name=f"wait {study.name} {round_.number}",
            )  # fmt: skip
            waiter.thread.start()

    def _run(self, waiter: _Waiter, study: Study, round_: Round) -> None:
        try:
            study.wait(round_, bar=False)
        except (QuestionWithdrawn, StudyError) as error:
            # The round itself says if it is too small, too late or cancelled; a lock does not.
            stored = study.rounds[round_.number - 1]
            if stored.state is RoundState.ASKED:
                waiter.error = str(error)
        except ChoristerError as error:
            waiter.error = str(error)
        except Exception as error:  # the edge of this thread
            waiter.error = unexpected("waiting for a round", error)

    def error(self, connection: str, study: str, number: int) -> str | None:
        """Why waiting for a round has ended."""
        with self._lock:
            waiter = self._waiters.get((connection, study, number))
            return None if waiter is None else waiter.error

    def progress(
        self, connection: str, study: Study, round_: Round, poll_seconds: float
    ) -> Progress:
        """The progress of an open round; asks the fleet at most every `poll_seconds`."""
        key = (connection, study.name, round_.number)
        with self._lock:
            waiter = self._waiters.setdefault(key, _Waiter())
        now = time.monotonic()
        if waiter.seen is None or now - waiter.polled >= poll_seconds:
            waiter.polled = now
            waiter.seen = study.fleet.progress(round_)
        return waiter.seen
