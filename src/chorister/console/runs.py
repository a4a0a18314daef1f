"""Algorithms that run in the background, and what they have drawn so far.

A run is a file: its arguments, how far it is, and the picture of its latest step. A run that a
restart interrupted is gone on with when somebody says so: starting it anew with the same arguments
asks only what was not asked yet.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from chorister.analyst.algorithms.running import Run
from chorister.analyst.files import require_format, write_atomically
from chorister.errors import ChoristerError, InvalidInput, ServiceError

__all__ = ["RunRecord", "Runs"]

_log = logging.getLogger("chorister.console")
_FORMAT: Final = "chorister-run-1"
_NAME: Final = re.compile(r"run-(\d{4,9})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run of an algorithm in a study."""

    number: int  # in its study, from 1
    algorithm: str
    values: dict[str, str]  # the form that it was started with
    by: str  # the analyst who started it
    state: str = "running"  # running, finished, failed, interrupted
    planned: int  # rounds
    rounds: tuple[int, ...] = ()  # the study's rounds that it got so far
    words: str = ""  # what was found, or what went wrong

    @property
    def running(self) -> bool:
        """Whether it still asks."""
        return self.state == "running"


@dataclass(slots=True)
class _Shelf:
    """The runs of one study."""

    records: dict[int, RunRecord] = field(default_factory=dict)


class Runs:
    """All runs. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._shelves: dict[tuple[str, str], _Shelf] = {}

    def of(self, connection: str, study: str) -> list[RunRecord]:
        """The runs of a study, the newest first."""
        with self._lock:
            records = self._shelf(connection, study).records
            return [records[number] for number in sorted(records, reverse=True)]

    def get(self, connection: str, study: str, number: int) -> RunRecord | None:
        """One run."""
        with self._lock:
            return self._shelf(connection, study).records.get(number)

    def picture(self, connection: str, study: str, number: int) -> dict[str, Any] | None:
        """The Vega-Lite specification of a run's latest picture."""
        path = self._path(connection, study, number).with_suffix(".picture")
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        return found

    def start(
        self,
        connection: str,
        study: str,
        *,
        algorithm: str,
        values: dict[str, str],
        by: str,
        run: Run[Any],
        number: int | None = None,
    ) -> RunRecord:
        """Run an algorithm in the background: a new run, or one that was interrupted."""
        with self._lock:
            records = self._shelf(connection, study).records
            if any(record.running for record in records.values()):
                raise InvalidInput("an algorithm is running in this study: let it finish first")
            chosen = number if number is not None else max(records, default=0) + 1
            record = RunRecord(
                number=chosen, algorithm=algorithm, values=values, by=by,
                planned=len(run.plan.rounds),
            )  # fmt: skip
            self._keep(connection, study, record)
        threading.Thread(
            target=self._follow, args=(connection, study, record, run), daemon=True,
            name=f"{algorithm} in {study}",
        ).start()  # fmt: skip
        return record

    def _follow(self, connection: str, study: str, record: RunRecord, run: Run[Any]) -> None:
        try:
            for step in run:
                picture = step.picture.to_dict()
                path = self._path(connection, study, record.number).with_suffix(".picture")
                write_atomically(path, json.dumps(picture).encode())
                record = replace(record, rounds=(*record.rounds, step.result.round or 0))
                self._keep(connection, study, record)
            words = str(run.result.explain())
            record = replace(record, state="finished", words=words)
        except ChoristerError as error:
            record = replace(record, state="failed", words=str(error))
        except Exception:
            _log.exception("an algorithm ended, by a bug in Chorister")
            words = "a bug in Chorister; the server's log has the details"
            record = replace(record, state="failed", words=words)
        self._keep(connection, study, record)

    # --- Files ----------------------------------------------------------------------------------

    def _path(self, connection: str, study: str, number: int) -> Path:
        return self._folder / connection / study / f"run-{number:04}.json"

    def _keep(self, connection: str, study: str, record: RunRecord) -> None:
        document = {"format": _FORMAT, **asdict(record)}
        with self._lock:
            data = json.dumps(document, ensure_ascii=True).encode()
            write_atomically(self._path(connection, study, record.number), data)
            self._shelf(connection, study).records[record.number] = record

    def _shelf(self, connection: str, study: str) -> _Shelf:
        key = (connection, study)
        if key not in self._shelves:
            shelf = _Shelf()
            for path in sorted((self._folder / connection / study).glob("run-*.json")):
                if _NAME.fullmatch(path.name):
                    record = _read(path)
                    shelf.records[record.number] = record
            self._shelves[key] = shelf
        return self._shelves[key]


def waiting_to_go_on(record: RunRecord) -> bool:
    """Whether a run may be started anew with the same arguments."""
    return record.state in ("interrupted", "failed")


def _read(path: Path) -> RunRecord:
    """A run from its file: one that was running when the process ended is interrupted."""
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
        raise ServiceError(f"{path} can't be read ({error}): restore it, or move it away") from None
