"""Watches a log for a third party: every new entry, and that the log only ever grows.

A monitor reads everything that is new since it looked last, checks it as an auditor does, and keeps
the newest checkpoint in a file. So it notices a fork or a rewind between two looks, even across its
own restarts, and even if both aggregators collude with the registry.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from chorister.clock import Clock
from chorister.errors import DecodeError, LogForked, LogRewound, ServiceError, StorageDamaged
from chorister.recipe import SignedRecipe
from chorister.transparency.auditor import check_extends, check_fresh, check_proof, replay
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.client import CHECKPOINT
from chorister.transparency.disk import Disk
from chorister.transparency.note import MAX_NOTE
from chorister.transparency.state import Logged, LogState
from chorister.transparency.tiles import Source, read_entries
from chorister.transparency.tree import leaf_hash
from chorister.transparency.trust import Authority


class LogMonitor:
    """One log, watched from its first entry."""

    def __init__(
        self, source: Source, *, authority: Authority, clock: Clock, kept: Path | None = None
    ) -> None:
        """`kept` is the file with the newest checkpoint; entries that it covers are not new."""
        self._source = source
        self._authority = authority
        self._clock = clock
        self._kept = kept
        self._state = LogState()
        self._leaves: list[bytes] = []
        self._last = self._read_kept()
        self._known = self._last.checkpoint.size if self._last else 0
        # What was read by calls that failed later: it is still new for the next one.
        self._unreported: list[Logged] = []
        # The recipes that were read, by the index of their entry.
        self.recipes: dict[int, SignedRecipe] = {}

    def fetch_new(self) -> list[Logged]:
        """Return the entries that are new; raises an error that says what is wrong with the log."""
        signed = SignedCheckpoint.parse(self._source.read(CHECKPOINT, limit=MAX_NOTE))
        cosignatures = self._authority.check_signatures(signed)
        time = min(cosignature.time for cosignature in cosignatures)
        check_fresh(time, self._clock.now(), self._authority.max_age)
        self._unreported += self._read_new(signed)
        self._state.check_current(time)
        if self._last is not None:
            check_extends(self._last, signed, self._leaves, self._authority)
        check_proof(self._source, signed, self._leaves, self._authority)
        self._last = signed
        new = [logged for logged in self._unreported if logged.index >= self._known]
        self._unreported = []
        return new

    def _read_new(self, signed: SignedCheckpoint) -> list[Logged]:
        checkpoint = signed.checkpoint
        if checkpoint.size < self._state.size:
            raise LogRewound(
                f"the log showed {self._state.size} entries, and now {checkpoint.size}",
                evidence=(() if self._last is None else (self._last.encode(), signed.encode())),
            )
        entries = list(read_entries(self._source, self._state.size, checkpoint.size))
        root = self._state.frontier.extend(leaf_hash(data) for data in entries).root
        if not hmac.compare_digest(root, checkpoint.root):
            raise LogForked(
                f"the log of {checkpoint.size} entries does not extend the {self._state.size} seen "
                "before",
                evidence=(() if self._last is None else (self._last.encode(), signed.encode())),
            )
        # A copy, so that a body that is missing now is asked for again at the next look.
        state, recipes = self._state.copy(), dict(self.recipes)
        new = list(replay(self._source, state, entries, recipes))
        for logged in new:
            if self._authority.covers(logged):
                self._authority.check_entry(logged)
        self._state, self.recipes = state, recipes
        self._leaves += [logged.leaf for logged in new]
        return new

    def _read_kept(self) -> SignedCheckpoint | None:
        if self._kept is None or not self._kept.exists():
            return None
        try:
            return SignedCheckpoint.parse(self._kept.read_bytes())
        except (DecodeError, OSError) as error:
            raise StorageDamaged(
                f"{self._kept} is not a checkpoint ({error}); restore it, or remove it to start "
                "over"
            ) from error

    def keep(self) -> None:
        """Write the newest checkpoint to the file, once whoever watches knows what is new."""
        if self._kept is not None and self._last is not None:
            try:
                Disk().replace(self._kept, self._last.encode())
            except OSError as error:
                raise ServiceError(f"can't write {self._kept}: {error.strerror}") from error
