"""Rounds on disk: one JSON file each, replaced as a whole, so that a study survives a crash."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from chorister.analyst.files import require_format, write_atomically
from chorister.analyst.result import Result
from chorister.analyst.saving import result_to_tree
from chorister.canonical import WIRE
from chorister.errors import ChoristerError, DecodeError, StudyError
from chorister.recipe import Recipe

__all__ = ["Archive", "Round", "State"]

_FORMAT: Final = "chorister-round-1"
_STUDY_FORMAT: Final = "chorister-study-1"


class State(StrEnum):
    """How far a round is."""

    ASKED = "asked"
    COLLECTED = "collected"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Round:
    """One question of a study: as it was asked, and what became of it."""

    sequence: int  # among all rounds that the fleet was asked, of all studies
    number: int  # in its study, from 1
    digest: str  # of the question: the same question is not asked twice
    recipe: Recipe
    target: int | None  # reports at which to collect; None: at the window's end
    state: State = State.ASKED
    published: bool = False  # the fleet knows it
    result: Result | None = None
    failure: dict[str, Any] | None = None  # the error's name, message and fields
    handles: dict[str, Any] = field(default_factory=dict)  # what a collection needs to go on

    def to_json(self) -> str:
        """Everything, as JSON."""
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
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Round:
        """What `to_json` wrote; anything else raises `DecodeError`."""
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
                state=State(tree["state"]),
                published=bool(tree["published"]),
                result=None if result is None else Result.from_tree(result),
                failure=tree["failure"],
                handles=dict(tree["handles"]),
            )
        except DecodeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DecodeError(f"not a saved round: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Identity:
    """What a study on disk belongs to."""

    name: str
    analysis: str
    policy: str  # its digest
    fleet: str  # live, or which rehearsal


class Archive:
    """The rounds of all studies that one fleet was asked: in memory, or in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._rounds: dict[str, dict[int, Round]] = {}
        self._threads = threading.RLock()  # one thread of this process asks at a time
        self._waiting: dict[tuple[str, int], threading.Lock] = {}  # and one waits for a round
        if folder is not None:
            for path in sorted(folder.glob("*/round-*.json")):
                self._load(path)

    def _load(self, path: Path) -> None:
        try:
            found = Round.from_json(path.read_bytes())
        except (OSError, ChoristerError) as error:
            raise StudyError(
                f"{path} can't be read ({error}): restore it, or move its study's folder away"
            ) from None
        self._rounds.setdefault(path.parent.name, {})[found.number] = found

    def register(self, *, name: str, analysis: str, policy: str, fleet: str) -> None:
        """Begin a study, or check that this is the study that was begun under this name."""
        self._rounds.setdefault(name, {})
        if self.folder is None:
            return
        identity = asdict(_Identity(name=name, analysis=analysis, policy=policy, fleet=fleet))
        path = self.folder / name / "study.json"
        if not path.exists():
            document = {"format": _STUDY_FORMAT, **identity}
            write_atomically(path, json.dumps(document, indent=2).encode())
            return
        try:
            stored = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise StudyError(f"{path} can't be read ({error}): restore it") from None
        for key in ("analysis", "fleet"):
            if stored.get(key) != identity[key]:
                raise StudyError(
                    f"the study {name!r} in {self.folder} belongs to the {key} "
                    f"{stored.get(key)!r}, not {identity[key]!r}: choose another name or folder"
                )

    def rounds(self, study: str) -> list[Round]:
        """The rounds of a study, in order."""
        return [self._rounds.get(study, {})[n] for n in sorted(self._rounds.get(study, {}))]

    def all_rounds(self) -> list[Round]:
        """Those of all studies, in the order in which the fleet was asked."""
        found = [round_ for rounds in self._rounds.values() for round_ in rounds.values()]
        return sorted(found, key=lambda round_: round_.sequence)

    def write(self, study: str, round_: Round) -> None:
        """Keep a round, durably if there is a folder."""
        if self.folder is not None:
            path = self.folder / study / f"round-{round_.number:04}.json"
            write_atomically(path, round_.to_json().encode())
        self._rounds.setdefault(study, {})[round_.number] = round_

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Only one process asks at a time; its threads wait for each other."""
        with self._threads, self._locked(".lock", "asking from"):
            yield

    @contextmanager
    def waiting(self, study: str, number: int) -> Iterator[None]:
        """Only one process waits for a round; others may ask and wait for something else."""
        with self._threads:
            turn = self._waiting.setdefault((study, number), threading.Lock())
        with (
            turn,
            self._locked(f"{study}/.round-{number:04}.lock", f"waiting for round {number} in"),
        ):
            yield

    @contextmanager
    def _locked(self, name: str, what: str) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StudyError(
                    f"another process is {what} {self.folder}: let it finish, or stop it"
                ) from None
            yield
        finally:
            os.close(descriptor)
