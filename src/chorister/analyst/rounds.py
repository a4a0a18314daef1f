"""Rounds on disk: one JSON file each, replaced atomically, so that a study survives a crash."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from chorister.analyst.json_files import require_format, result_to_tree, write_atomically
from chorister.analyst.result import Result
from chorister.canonical import WIRE
from chorister.errors import ChoristerError, DecodeError, StudyBusy, StudyError
from chorister.recipe import Recipe, Window

_FORMAT: Final = "chorister-round-1"
_STUDY_FORMAT: Final = "chorister-study-1"
_PLANS_FORMAT: Final = "chorister-plans-1"


class RoundState(StrEnum):
    """How far a round has come."""

    ASKED = "asked"
    COLLECTED = "collected"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Round:
    """One question of a study, or one window of a series: as it was asked, and its outcome."""

    sequence: int  # among all rounds of the fleet, in all studies
    number: int  # in its study, from 1
    digest: str  # of the question, so that it is not asked twice
    recipe: Recipe
    target: int | None  # collect at this many reports; None: when the window ends
    state: RoundState = RoundState.ASKED
    published: bool = False
    result: Result | None = None
    failure: dict[str, Any] | None = None  # the error's name, message and fields
    handles: dict[str, Any] = field(default_factory=dict)  # of the leader's collection jobs
    number_in_series: int | None = None  # of the window, from 0; None: the whole question

    @property
    def window(self) -> Window:
        """When it is answered: of a series as a whole, its first window."""
        return self.recipe.window_at(self.number_in_series or 0)

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": _FORMAT,
                "sequence": self.sequence,
                "number": self.number,
                "digest": self.digest,
                "recipe": json.loads(self.recipe.canonical()),
                "target": self.target,
                "state": self.state,
                "published": self.published,
                "result": None if self.result is None else result_to_tree(self.result),
                "failure": self.failure,
                "handles": self.handles,
                **({} if self.number_in_series is None else {"window": self.number_in_series}),
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Round:
        """Read what `to_json` wrote; raise `DecodeError` for anything else."""
        try:
            tree = json.loads(text)
            require_format(tree, _FORMAT)
            result = tree["result"]
            return cls(
                sequence=int(tree["sequence"]),
                number=int(tree["number"]),
                digest=str(tree["digest"]),
                recipe=Recipe.model_validate(tree["recipe"], context=WIRE),
                target=tree["target"],
                state=RoundState(tree["state"]),
                published=bool(tree["published"]),
                result=None if result is None else Result.from_tree(result),
                failure=tree["failure"],
                handles=dict(tree["handles"]),
                number_in_series=None if (at := tree.get("window")) is None else int(at),
            )
        except DecodeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DecodeError(f"not a saved round: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBasis:
    """What a plan counted as spent. A run that resumes plans by the same again."""

    sequence: int  # our rounds up to this one
    time: int  # POSIX seconds: what had not renewed by then
    others: tuple[str, ...] = ()  # the digests of other analysts' recipes


class Archive:
    """The rounds of all studies of one fleet, in memory or in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.lock_seconds = 10.0  # to wait for another process that is asking
        self._rounds: dict[str, dict[int, Round]] = {}
        self._windows: dict[tuple[str, int], dict[int, Round]] = {}  # by study and round
        self._seen: dict[Path, tuple[int, int]] = {}  # versions of the files last read or written
        self._plans: dict[tuple[str, str], PlanBasis] = {}  # by study and key
        self._memory = threading.RLock()  # guards the four above
        self._threads = threading.RLock()  # lets one thread of this process ask at a time
        self._waiting: dict[tuple[str, int], threading.Lock] = {}  # lets one wait per round
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have written since."""
        if self.folder is None:
            return
        with self._memory:
            for pattern in ("*/round-*.json", "*/window-*.json"):
                for path in sorted(self.folder.glob(pattern)):
                    if self._seen.get(path) != (version := _version(path)):
                        self._load(path)
                        self._seen[path] = version

    def _load(self, path: Path) -> None:
        try:
            found = Round.from_json(path.read_bytes())
        except (OSError, ChoristerError) as error:
            raise StudyError(
                f"can't read {path} ({error}): restore it, or move the folder of its study away"
            ) from None
        self._keep(path.parent.name, found)

    def _keep(self, study: str, found: Round) -> None:
        if found.number_in_series is None:
            self._rounds.setdefault(study, {})[found.number] = found
        else:
            of_series = self._windows.setdefault((study, found.number), {})
            of_series[found.number_in_series] = found

    def register(self, *, name: str, analysis: str, policy: str, fleet: str) -> None:
        """Begin a study, or check that the one of this name belongs to the same fleet."""
        with self._memory:
            self._rounds.setdefault(name, {})
        if self.folder is None:
            return
        identity = {"name": name, "analysis": analysis, "policy": policy, "fleet": fleet}
        path = self.folder / name / "study.json"
        if not path.exists():
            document = {"format": _STUDY_FORMAT, **identity}
            write_atomically(path, json.dumps(document, indent=2).encode())
            return
        stored = read_study(path)
        for key in ("analysis", "fleet"):
            if stored.get(key) != identity[key]:
                raise StudyError(
                    f"the study {name!r} in {self.folder} belongs to the {key} "
                    f"{stored.get(key)!r}, not {identity[key]!r}: choose another name or folder"
                )

    def studies(self) -> dict[str, str]:
        """The analysis of every study in the folder, by its name."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*/study.json")) if self.folder is not None else ():
            stored = read_study(path)
            if stored.get("name") == path.parent.name:
                found[path.parent.name] = str(stored.get("analysis"))
        return found

    def rounds(self, study: str) -> list[Round]:
        """The rounds of a study, in order."""
        with self._memory:
            return [round_ for _, round_ in sorted(self._rounds.get(study, {}).items())]

    def windows(self, study: str, number: int) -> dict[int, Round]:
        """The windows of a series whose collection has begun, by their number."""
        with self._memory:
            return dict(sorted(self._windows.get((study, number), {}).items()))

    def all_rounds(self) -> list[Round]:
        """The rounds of all studies, in the order in which the fleet was asked."""
        with self._memory:
            found = [round_ for rounds in self._rounds.values() for round_ in rounds.values()]
        return sorted(found, key=lambda round_: round_.sequence)

    def write(self, study: str, round_: Round) -> None:
        """Store a round, durably if there is a folder."""
        with self._memory:
            if self.folder is not None:
                path = self.folder / study / _file_name(round_)
                write_atomically(path, round_.to_json().encode())
                self._seen[path] = _version(path)
            self._keep(study, round_)

    def plan_basis(self, study: str, key: str) -> PlanBasis | None:
        """What the run with this key counted as spent when it began, if it has begun."""
        with self._memory:
            if self.folder is not None and (path := self.folder / study / "plans.json").exists():
                self._plans |= {(study, each): basis for each, basis in _read_plans(path).items()}
            return self._plans.get((study, key))

    def keep_plan_basis(self, study: str, key: str, basis: PlanBasis) -> None:
        """Remember it, durably if there is a folder; the first one stays."""
        with self.asking(), self._memory:
            if self.plan_basis(study, key) is not None:
                return
            self._plans[study, key] = basis
            if self.folder is None:
                return
            plans = {name: asdict(each) for (of, name), each in self._plans.items() if of == study}
            document = {"format": _PLANS_FORMAT, "plans": plans}
            write_atomically(self.folder / study / "plans.json", json.dumps(document).encode())

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Let only one process ask at a time, and read what others have written before.

        Threads of this process wait for each other as long as it takes.
        """
        with self._threads, self._locked(".lock", self.lock_seconds):
            yield

    @contextmanager
    def waiting(self, study: str, number: int) -> Iterator[None]:
        """Let only one process wait for a round; others may ask, and wait for other rounds."""
        with self._memory:
            turn = self._waiting.setdefault((study, number), threading.Lock())
        with turn, self._locked(f"{study}/.round-{number:04}.lock", 0.0):
            yield

    @contextmanager
    def alerting(self, study: str) -> Iterator[None]:
        """Let only one process raise alerts about a study."""
        with self._locked(f"{study}/.alerts.lock", 0.0):
            yield

    @contextmanager
    def _locked(self, name: str, seconds: float) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _acquire(descriptor, path.parent, seconds)
            self.refresh()
            yield
        finally:
            os.close(descriptor)


def _file_name(round_: Round) -> str:
    if round_.number_in_series is None:
        return f"round-{round_.number:04}.json"
    return f"window-{round_.number:04}-{round_.number_in_series:04}.json"


def read_study(path: Path) -> dict[str, Any]:
    """Read which analysis and fleet a study on disk belongs to."""
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        require_format(stored, _STUDY_FORMAT)
    except (OSError, ValueError, RecursionError) as error:
        raise StudyError(f"can't read {path} ({error}): restore it") from None
    return stored


def _read_plans(path: Path) -> dict[str, PlanBasis]:
    try:
        tree: Any = json.loads(path.read_bytes())
        require_format(tree, _PLANS_FORMAT)
        return {
            str(key): PlanBasis(
                sequence=int(each["sequence"]),
                time=int(each["time"]),
                others=tuple(str(digest) for digest in each["others"]),
            )
            for key, each in tree["plans"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StudyError(f"can't read {path} ({error}): restore it") from None


def _acquire(descriptor: int, folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StudyBusy(
                    f"another process is asking from {folder}: let it finish, or stop it"
                ) from None
            time.sleep(0.02)
        else:
            return


def _version(path: Path) -> tuple[int, int]:
    """Changes whenever a file is replaced."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
