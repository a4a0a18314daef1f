"""The ledger's entries: models with one canonical encoding each, and the chain of their hashes.

Every entry has its number, the hash of the one before it, and the time from which none of the
charges up to it counts any more (`clear`). So the newest entry alone, kept in a `HeadStore`, says
how much a ledger has lost and for how long that matters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from chorister.canonical import MAX_INT, WIRE, Hex32, Int, Model, first_error, loads, sha256
from chorister.device.ledger.budget import Charge
from chorister.device.ledger.counting import Counts, PolicyTerms
from chorister.errors import DecodeError, InvalidInput, LedgerTampered

FIRST: Final = "00" * 32
"""What the first entry has instead of the hash of the one before it."""
MAX_BYTES: Final = 4_000_000
"""The longest entry of the ledger, and of the audit log."""
MAX_OFFSET: Final = 2**52
"""Offsets are drawn below this: modulo any period (at most 100 years) they are almost uniform."""

_Time: TypeAlias = Annotated[Int, Field(ge=0, le=MAX_INT)]


class _Entry(Model):
    sequence: Annotated[Int, Field(ge=0, le=MAX_INT)]
    previous: Hex32
    time: _Time
    clear: _Time | Literal["never"]
    """From this time, no charge up to this entry counts against anything."""


class Created(_Entry):
    """A new ledger: its age begins."""

    kind: Literal["created"] = "created"
    offset: Annotated[Int, Field(ge=0, lt=MAX_OFFSET)]
    """When the device's periods begin, drawn at random."""


class Restarted(_Entry):
    """The head was missing or old, so entries may be missing too: the ledger's age begins again."""

    kind: Literal["restarted"] = "restarted"
    why: Literal["head-missing", "head-behind"]


class Resumed(_Entry):
    """Entries were lost, but none of them counts any more."""

    kind: Literal["resumed"] = "resumed"
    lost: Annotated[Int, Field(ge=0, le=MAX_INT)]
    """The number of the newest entry that was lost."""


class PolicyTaken(_Entry):
    """A policy took effect."""

    kind: Literal["policy"] = "policy"
    terms: PolicyTerms


class Charged(_Entry):
    """An answer was charged."""

    kind: Literal["charge"] = "charge"
    charge: Charge


Entry: TypeAlias = Created | Restarted | Resumed | PolicyTaken | Charged

_ADAPTER: Final[TypeAdapter[Entry]] = TypeAdapter(
    Annotated[Entry, Field(discriminator="kind")], config=ConfigDict(defer_build=True)
)


_M = TypeVar("_M", bound=Model)
_E = TypeVar("_E", Created, Restarted, Resumed, PolicyTaken, Charged)


def decode_canonical(adapter: TypeAdapter[_M], data: object) -> _M:
    """Decode what `Model.canonical()` returned; raise `DecodeError` for anything else."""
    if not isinstance(data, bytes):
        raise DecodeError("not bytes")
    value: Any = loads(data, max_bytes=MAX_BYTES)
    try:
        model = adapter.validate_python(value, context=WIRE)
    except ValidationError as error:
        field, message = first_error(error)
        raise DecodeError(message, field=field) from None
    if model.canonical() != data:
        raise DecodeError("not in its canonical form")
    return model


@lru_cache(maxsize=64)  # an app may open its device again, which reads the same entries
def decode(data: bytes) -> Entry:
    """Decode an entry, or raise `DecodeError`."""
    return decode_canonical(_ADAPTER, data)


class Chain:
    """All entries from the first one, without a gap."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.data = b""  # of the newest entry
        self.counts = Counts(offset=0)  # the device's own comes with the first entry
        self.born = 0  # when the ledger's age began, for the last time
        # Digests of all recipes ever charged, with the windows that were: None without a series.
        self.recipes: dict[str, set[int | None]] = {}
        # Studies, with the analysis that each belongs to, and their recipes.
        self.studies: dict[tuple[str, str], set[str]] = {}

    @property
    def time(self) -> int:
        return self.entries[-1].time if self.entries else 0

    @property
    def digest(self) -> str:
        """The hash that the next entry has as `previous`."""
        return sha256(self.data).hex() if self.entries else FIRST

    def place(self, now: int) -> dict[str, Any]:
        """Return the fields that every kind of next entry has."""
        time = max(now, self.time)
        return {
            "sequence": len(self.entries),
            "previous": self.digest,
            "time": time,
            "clear": time,
        }

    def dated(self, entry: _E) -> _E:
        """Return the entry with its `clear` filled in."""
        clear = self._after(entry).clear
        return entry.model_copy(update={"clear": "never" if clear is None else clear})

    def extend(self, sequence: object, data: object) -> None:
        """Add a stored row, or raise `LedgerTampered`."""
        place = len(self.entries)
        if sequence != place or not isinstance(data, bytes):
            raise LedgerTampered("the row that should be here is missing", sequence=place)
        try:
            entry = decode(data)
        except DecodeError as error:
            raise LedgerTampered(str(error), sequence=place) from None
        self.append(entry, data)

    def append(self, entry: Entry, data: bytes) -> None:
        """Add an entry and its encoding, or raise `LedgerTampered` if it does not belong here."""
        place = len(self.entries)
        try:
            self._check_place(entry)
            counts = self._after(entry)
        except (DecodeError, InvalidInput) as error:
            raise LedgerTampered(str(error), sequence=place) from None
        self.counts = counts
        if isinstance(entry, Created | Restarted):
            self.born = entry.time
        if isinstance(entry, Charged):
            charge = entry.charge
            self.recipes.setdefault(charge.recipe, set()).add(charge.window)
            self.studies.setdefault((charge.analysis, charge.study), set()).add(charge.recipe)
        self.entries.append(entry)
        self.data = data

    def answered(self, charge: Charge) -> str | None:
        """Say why this may not be charged again, if so: only what is written here counts."""
        charged = self.recipes.get(charge.recipe, set())
        if charge.window is None:
            why = "this recipe was charged before: it is answered at most once"
            return why if charged else None
        if charge.window in charged:
            return f"window {charge.window + 1} of this series was charged before"
        if charge.answers is None or len(charged) >= charge.answers:
            return f"{len(charged):,} windows of this series were charged, the maximum"
        return None

    def has(self, head: Entry) -> bool:
        return head.sequence < len(self.entries) and self.entries[head.sequence] == head

    def continues_with(self, head: Entry) -> bool:
        return head.sequence == len(self.entries) and head.previous == self.digest

    def _check_place(self, entry: Entry) -> None:
        if entry.sequence != len(self.entries):
            raise DecodeError(f"it claims to be entry {entry.sequence}")
        if entry.previous != self.digest:
            raise DecodeError("it does not follow the entry before it")
        if entry.time < self.time:
            raise DecodeError("it is dated earlier than the entry before it")
        if isinstance(entry, Created) == bool(self.entries):
            raise DecodeError("the first entry creates a ledger, and no other")
        if isinstance(entry, Charged) and (why := self.answered(entry.charge)) is not None:
            raise DecodeError(why)

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
