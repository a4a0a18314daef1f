"""The ledger's entries in memory, verified one by one, and what follows from them."""

from __future__ import annotations

from typing import Any, TypeVar

from chorister.canonical import sha256
from chorister.device.counting import Counts
from chorister.device.entries import (
    FIRST,
    Charged,
    Created,
    Entry,
    PolicyTaken,
    Restarted,
    Resumed,
    decode,
)
from chorister.errors import DecodeError, InvalidInput, LedgerTampered

__all__ = ["Chain"]

_E = TypeVar("_E", Created, Restarted, Resumed, PolicyTaken, Charged)


class Chain:
    """Entries from the first on, without a gap."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.data = b""  # of the newest entry
        self.counts = Counts(offset=0)  # the device's own comes with the first entry
        self.born = 0  # when the ledger's age began, for the last time
        self.recipes: set[str] = set()  # digests of all recipes ever charged
        self.studies: set[tuple[str, str]] = set()  # with the analysis that each belongs to

    @property
    def time(self) -> int:
        """The time of the newest entry."""
        return self.entries[-1].time if self.entries else 0

    @property
    def digest(self) -> str:
        """The hash that the next entry names."""
        return sha256(self.data).hex() if self.entries else FIRST

    def place(self, now: int) -> dict[str, Any]:
        """What every kind of next entry has in common."""
        time = max(now, self.time)
        return {
            "sequence": len(self.entries),
            "previous": self.digest,
            "time": time,
            "clear": time,
        }

    def dated(self, entry: _E) -> _E:
        """The entry with the time from which on nothing up to it counts any more."""
        clear = self._after(entry).clear
        return entry.model_copy(update={"clear": "never" if clear is None else clear})

    def extend(self, sequence: object, data: object) -> None:
        """Take over a stored row, or raise `LedgerTampered`."""
        place = len(self.entries)
        if sequence != place or not isinstance(data, bytes):
            raise LedgerTampered("the row that should be here is missing", sequence=place)
        try:
            entry = decode(data)
            self._check_place(entry)
            counts = self._after(entry)
        except (DecodeError, InvalidInput) as error:
            raise LedgerTampered(str(error), sequence=place) from None
        self.counts = counts
        if isinstance(entry, Created | Restarted):
            self.born = entry.time
        if isinstance(entry, Charged):
            self.recipes.add(entry.charge.recipe)
            self.studies.add((entry.charge.analysis, entry.charge.study))
        self.entries.append(entry)
        self.data = data

    def ends_with(self, head: Entry) -> bool:
        """Whether the head is the newest entry."""
        return bool(self.entries) and self.entries[-1] == head

    def has(self, head: Entry) -> bool:
        """Whether the head is one of the entries."""
        return head.sequence < len(self.entries) and self.entries[head.sequence] == head

    def continues_with(self, head: Entry) -> bool:
        """Whether the head is the very next entry."""
        return head.sequence == len(self.entries) and head.previous == self.digest

    def _check_place(self, entry: Entry) -> None:
        if entry.sequence != len(self.entries):
            raise DecodeError(f"it says that it is entry {entry.sequence}")
        if entry.previous != self.digest:
            raise DecodeError("it does not follow the entry before it")
        if entry.time < self.time:
            raise DecodeError("it is dated before the entry before it")
        if isinstance(entry, Created) == bool(self.entries):
            raise DecodeError("a ledger is created by its first entry, and only by that")
        if isinstance(entry, Charged) and entry.charge.recipe in self.recipes:
            raise DecodeError("its recipe was charged before")

    def _after(self, entry: Entry) -> Counts:
        match entry:
            case Created():
                return Counts(offset=entry.offset)
            case PolicyTaken():
                return self.counts.with_policy(entry.terms)
            case Charged():
                return self.counts.with_charge(entry.charge, entry.time)
            case _:
                return self.counts
