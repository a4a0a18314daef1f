"""The public log of a live fleet, checked as an auditor checks it, for the page of recipes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from chorister.console.connections import FleetConnection
from chorister.errors import ChoristerError
from chorister.policy import Policy
from chorister.recipe import SignedRecipe
from chorister.transparency.auditor import audit
from chorister.transparency.entries import RecipeEnd
from chorister.transparency.sources import Source
from chorister.transparency.trust import Authority

__all__ = ["LogPage", "LoggedQuestion", "PublicLogs", "read_log"]

_FRESH: Final = 10.0  # seconds for which a reading is shown again
_KEPT: Final = 5_000  # entries kept in memory, so that they are fetched once


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedQuestion:
    """A recipe of the log."""

    index: int
    signed: SignedRecipe
    open: bool  # on the list that devices are shown now
    ended: bool  # taken back, or its target was reached


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPage:
    """What the log says, or why that can't be shown."""

    origin: str
    time: int = 0  # the checkpoint's
    size: int = 0
    cosignatures: int = 0
    questions: tuple[LoggedQuestion, ...] = ()  # the newest first
    problem: str = ""


def read_log(source: Source, policy: Policy) -> LogPage:
    """Verify a log from its first entry; whatever is wrong is what the page says."""
    origin = policy.log.origin
    try:
        found = audit(source, authority=Authority.of([policy]), judge_all=False)
    except ChoristerError as error:
        return LogPage(origin=origin, problem=str(error))
    current = {address for _, address in found.current.recipes}
    ended = {
        logged.entry.recipe_digest
        for logged in found.entries
        if isinstance(logged.entry, RecipeEnd)
    }
    questions = [
        LoggedQuestion(
            index=logged.index,
            signed=logged.recipe,
            open=logged.address in current,
            ended=logged.recipe.digest in ended,
        )
        for logged in found.entries
        # Of a log that serves others, too, only what this policy speaks of.
        if logged.recipe is not None and logged.recipe.recipe.analysis in policy.analyses
    ]
    return LogPage(
        origin=origin,
        time=found.checkpoint.time,
        size=found.checkpoint.size,
        cosignatures=len(found.cosignatures),
        questions=tuple(reversed(questions)),
    )


class PublicLogs:
    """The logs of all live connections, each read at most every few seconds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._read: dict[str, tuple[float, LogPage]] = {}
        self._entries: dict[str, dict[str, bytes]] = {}

    def of(self, connection: FleetConnection) -> LogPage | None:
        """A connection's log; None for a rehearsal, which has none."""
        source = connection.log_source
        if source is None:
            return None
        with self._lock:
            turn = self._turns.setdefault(connection.name, threading.Lock())
        with turn:
            when, page = self._read.get(connection.name, (-_FRESH, None))
            if page is None or time.monotonic() >= when + _FRESH:
                page = self._fetch(connection, source)
                self._read[connection.name] = (time.monotonic(), page)
            return page

    def _fetch(
        self, connection: FleetConnection, open_source: Callable[[], AbstractContextManager[Source]]
    ) -> LogPage:
        kept = self._entries.setdefault(connection.name, {})
        with open_source() as source:
            return read_log(_Remembering(source, kept), connection.policy)


class _Remembering:
    """Entries are named by their digests and never change: each is fetched once."""

    def __init__(self, source: Source, kept: dict[str, bytes]) -> None:
        self._source = source
        self._kept = kept

    def read(self, path: str, *, limit: int) -> bytes:
        """The file, of at most `limit` bytes."""
        if path in self._kept:
            return self._kept[path]
        data = self._source.read(path, limit=limit)
        if path.startswith("entry/") and len(self._kept) < _KEPT:
            self._kept[path] = data
        return data
