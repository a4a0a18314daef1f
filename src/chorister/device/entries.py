"""The entries of the ledger: models, one canonical encoding each, and the chain of hashes.

Every entry names its place, the hash of the one before it, and from when on none of the charges up
to it counts any more (`clear`): so the newest entry alone, kept in a `HeadStore`, tells how much a
ledger has lost and for how long that matters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from chorister.canonical import MAX_INT, WIRE, Hex32, Int, Model, culprit, loads
from chorister.device.budget import Charge
from chorister.device.counting import PolicyTerms
from chorister.errors import DecodeError

__all__ = [
    "FIRST",
    "MAX_BYTES",
    "MAX_OFFSET",
    "Charged",
    "Created",
    "Entry",
    "PolicyTaken",
    "Restarted",
    "Resumed",
    "decode",
]

FIRST: Final = "00" * 32
"""What the first entry has for the hash of the one before it."""
MAX_BYTES: Final = 4_000_000
MAX_OFFSET: Final = 2**52
"""Offsets are drawn below this: modulo any period (100 years at most) they are all but uniform."""

_Time: TypeAlias = Annotated[Int, Field(ge=0, le=MAX_INT)]


class _Entry(Model):
    sequence: Annotated[Int, Field(ge=0, le=MAX_INT)]
    previous: Hex32
    time: _Time
    clear: _Time | Literal["never"]
    """From when on no charge up to here counts against anything."""


class Created(_Entry):
    """A new ledger: its age begins."""

    kind: Literal["created"] = "created"
    offset: Annotated[Int, Field(ge=0, lt=MAX_OFFSET)]
    """Where the device's periods begin, drawn at random."""


class Restarted(_Entry):
    """The head was missing or old, so entries may be too: the ledger's age begins again."""

    kind: Literal["restarted"] = "restarted"
    why: Literal["head-missing", "head-behind"]


class Resumed(_Entry):
    """Entries were lost, and by now none of them counts any more."""

    kind: Literal["resumed"] = "resumed"
    lost: Annotated[Int, Field(ge=0, le=MAX_INT)]
    """The place of the newest entry that was lost."""


class PolicyTaken(_Entry):
    """A policy took effect."""

    kind: Literal["policy"] = "policy"
    terms: PolicyTerms


class Charged(_Entry):
    """An answer was charged."""

    kind: Literal["charge"] = "charge"
    charge: Charge


Entry: TypeAlias = Created | Restarted | Resumed | PolicyTaken | Charged

_ADAPTER: Final[TypeAdapter[Entry]] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


@lru_cache(maxsize=64)  # the head is the newest entry, and an entry is read as it is written
def decode(data: bytes) -> Entry:
    """Exactly what `Entry.canonical()` wrote; anything else raises `DecodeError`."""
    value: Any = loads(data, max_bytes=MAX_BYTES)
    try:
        entry = _ADAPTER.validate_python(value, context=WIRE)
    except ValidationError as error:
        field, message = culprit(error)
        raise DecodeError(message, field=field) from None
    if entry.canonical() != data:
        raise DecodeError("an entry is not in its canonical form")
    return entry
