"""What the public log says was asked of the same devices, by whomever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from chorister.errors import ChoristerError
from chorister.policy import Policy
from chorister.recipe import Recipe, refusal
from chorister.transparency.auditor import audit
from chorister.transparency.client import HTTPSource
from chorister.transparency.tiles import Source
from chorister.transparency.trust import Authority

_CACHE_SECONDS: Final = 60.0
_MAX_CACHED_ENTRIES: Final = 5_000


class CachedSource:
    """Fetches bodies, full tiles and full bundles only once: they never change."""

    def __init__(self, source: Source, kept: dict[str, bytes]) -> None:
        self._source = source
        self._kept = kept

    def read(self, path: str, *, limit: int) -> bytes:
        """Read a file of at most `limit` bytes."""
        if path in self._kept:
            return self._kept[path]
        data = self._source.read(path, limit=limit)
        whole = path.startswith(("body/", "tile/")) and ".p/" not in path
        if whole and len(self._kept) < _MAX_CACHED_ENTRIES:
            self._kept[path] = data
        return data


class LoggedRecipes:
    """The recipes in a log that devices with a policy would answer. Thread-safe.

    The log is verified from its first entry, at most once a minute.
    """

    def __init__(self, policy: Policy, connect: Callable[[], HTTPSource]) -> None:
        self._policy = policy
        self._connect = connect
        self._lock = threading.Lock()
        self._entries: dict[str, bytes] = {}
        self._answered: dict[bytes, bool] = {}  # whether devices would answer, by digest
        self._read: tuple[tuple[Recipe, ...], str] = ((), "")
        self._until = 0.0

    def read(self) -> tuple[tuple[Recipe, ...], str]:
        """The recipes; and why there may be more of them, if the log can't be read."""
        with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._read = (self._recipes(), "")
                except ChoristerError as error:
                    self._read = (self._read[0], f"the public log can't be read ({error})")
                self._until = time.monotonic() + _CACHE_SECONDS
            return self._read

    def _recipes(self) -> tuple[Recipe, ...]:
        with self._connect() as source:
            found = audit(
                CachedSource(source, self._entries),
                authority=Authority.of([self._policy]),
                judge_all=False,
            )
        recipes = []
        for signed in found.recipes.values():
            if signed.digest not in self._answered:
                self._answered[signed.digest] = refusal(signed, self._policy) is None
            if self._answered[signed.digest]:
                recipes.append(signed.recipe)
        return tuple(recipes)
