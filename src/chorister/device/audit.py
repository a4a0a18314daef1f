"""The audit log: what was asked of this device, what it decided and why, and what left it.

Append-only and hash-chained, in the same encrypted database as the ledger, and written in the
transaction of the event that it records: an entry exists if, and only if, that happened. It holds
what was sent, never the data behind it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import apsw
from pydantic import (
    Field,
    PlainValidator,
    StringConstraints,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from chorister.canonical import (
    MAX_INT,
    WIRE,
    FieldError,
    Hex32,
    Int,
    Model,
    b64url_decode,
    b64url_encode,
    sha256,
)
from chorister.device.database import upgrade
from chorister.device.ledger.budget import Charge
from chorister.device.ledger.ledger_entries import FIRST, MAX_BYTES, decode_canonical
from chorister.errors import DecodeError, InvalidInput, LedgerTampered
from chorister.policy import Policy
from chorister.policy.values import URL, FieldRef, Identifier, Name, SQLName
from chorister.recipe import SignedRecipe
from chorister.unicode14 import separate_unassigned

_MAX_TEXT: Final = 20_000
_Text: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=_MAX_TEXT, strict=True)
]


def _words(value: object, info: ValidationInfo) -> str:
    """Turn other people's words (a server's answer, for example) into a form that can be hashed."""
    if not isinstance(value, str) or not value:
        raise ValueError("a reason must be text, and not empty")
    if info.context is not WIRE:
        value = value.encode("utf-8", "replace").decode("utf-8")[:_MAX_TEXT]
        value = unicodedata.normalize("NFC", separate_unassigned(value))[:_MAX_TEXT]
    if len(value) > _MAX_TEXT:
        raise ValueError(f"a reason has at most {_MAX_TEXT} characters")
    return value


_Words: TypeAlias = Annotated[
    str, PlainValidator(_words), WithJsonSchema({"type": "string", "minLength": 1})
]

_SCHEMA: Final = (
    """
    CREATE TABLE audit (sequence INTEGER PRIMARY KEY, record BLOB NOT NULL) STRICT;
    CREATE TRIGGER audit_is_never_changed BEFORE UPDATE ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
    CREATE TRIGGER audit_is_never_shortened BEFORE DELETE ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
    """,
)


class Event(StrEnum):
    """What happened. The text is what a person reads."""

    REFUSED = "refused"
    NOT_DRAWN = "not drawn"
    DRAWN = "windows drawn"
    CHARGED = "charged"
    REPORTED = "report made"
    UPLOADED = "report sent"
    POSTPONED = "report postponed"
    DROPPED = "report dropped"
    RECOVERED = "charge recovered"
    SILENT = "silent"
    POLICY = "policy changed"
    PAUSED = "paused"
    UNPAUSED = "unpaused"
    OPTED_IN = "opted in"
    OPTED_OUT = "opted out"
    PURGED = "data deleted"


class RecipeSummary(Model):
    """What was asked, and by whom."""

    recipe: Hex32
    id: Identifier
    study: Identifier
    analysis: Identifier
    purpose: _Text | None = None
    """As the policy words it; absent if the policy has no such analysis."""
    author: _Text
    """The id of the key that signed it."""
    collector: Hex32
    query: _Text
    fields: tuple[FieldRef, ...]
    group_by: tuple[FieldRef, ...]
    bins: Int
    window: Int | None = None
    """Of a series: the number of the window, from 0."""
    windows: Int | None = None
    """Of a series: how many windows it has."""
    periods: dict[SQLName, Int] | None = None
    """How long before the window opens, in seconds, events of a stream count."""

    @classmethod
    def of(cls, signed: SignedRecipe, policy: Policy, number: int = 0) -> RecipeSummary:
        """Return the question that a recipe asks, in one of its windows."""
        recipe = signed.recipe
        analysis = policy.analyses.get(recipe.analysis)
        return cls(
            recipe=recipe.digest.hex(),
            id=recipe.id,
            study=recipe.study,
            analysis=recipe.analysis,
            purpose=None if analysis is None else analysis.purpose,
            author=signed.key_id,
            collector=recipe.collector,
            query=recipe.query,
            fields=recipe.fields_read,
            group_by=recipe.group_by,
            bins=recipe.encoding.size,
            window=None if recipe.series is None else number,
            windows=None if recipe.series is None else recipe.window_count,
            periods=None if recipe.periods is None else dict(recipe.periods),
        )


class Sent(Model):
    """What left the device, or is about to."""

    report: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$", strict=True)]
    """The report's id."""
    leader: URL
    group: dict[FieldRef, _Text] = Field(default_factory=dict)
    arm: Name | None = None
    length: Annotated[Int, Field(ge=1)]
    """How many bits the randomized vector has."""
    bits: str
    """The randomized bits, eight per byte, the first one highest, as base64url."""
    digest: Hex32
    """SHA-256 of the sealed report, byte for byte as it is uploaded."""

    @property
    def ones(self) -> tuple[int, ...]:
        """The indices of the bits that are 1."""
        data = b64url_decode(self.bits)
        return tuple(i for i in range(self.length) if data[i // 8] >> (7 - i % 8) & 1)

    @model_validator(mode="after")
    def _whole(self) -> Sent:
        try:
            data = b64url_decode(self.bits)
        except DecodeError as error:
            raise FieldError("bits", error.why) from None
        padding = -self.length % 8
        if len(data) != (self.length + 7) // 8 or data[-1] & ((1 << padding) - 1):
            raise FieldError("bits", f"these are not {self.length} bits")
        return self


class AuditEntry(Model):
    """One line of the log, without the parts that do not apply."""

    time: Annotated[Int, Field(ge=0, le=MAX_INT)]
    event: Event
    why: _Words
    """In words: which check refused, what was drawn, what the server answered."""
    check: _Text | None = None
    """The rule or limit that decided, by the name that the policy gives it."""
    question: RecipeSummary | None = None
    charge: Charge | None = None
    sent: Sent | None = None


class Record(Model):
    """An entry at its place in the chain."""

    sequence: Annotated[Int, Field(ge=0, le=MAX_INT)]
    previous: Hex32
    entry: AuditEntry

    @property
    def digest(self) -> str:
        """What the next record names as `previous`."""
        return sha256(self.canonical()).hex()


_ADAPTER: Final = TypeAdapter(Record)
_DIGITS: Final = b"01".ljust(256)


def pack_bits(bits: bytes) -> str:
    """Encode a vector of bytes 0 and 1 as `Sent.bits`."""
    if not bits or max(bits) > 1:
        raise InvalidInput("pack_bits() takes one byte per bit, each 0 or 1, and at least one")
    # As one number in base 2, the last byte filled up with zeros.
    number = int(bits.translate(_DIGITS), 2) << (-len(bits) % 8)
    return b64url_encode(number.to_bytes((len(bits) + 7) // 8, "big"))


_PAGE_ROWS: Final = 256


class AuditLog:
    """The log in the ledger's database."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        upgrade(connection, "audit", _SCHEMA)

    def append(self, entry: AuditEntry) -> Record:
        """Write an entry, inside the transaction of what it records."""
        if self._connection.txn_state("main") != apsw.SQLITE_TXN_WRITE:
            raise InvalidInput("append() belongs inside transaction(): commit what goes with it")
        sequence, previous = self._next()
        record = Record(sequence=sequence, previous=previous, entry=entry)
        data = record.canonical()
        if len(data) > MAX_BYTES:
            raise InvalidInput(f"an audit entry of {len(data):,} bytes: {MAX_BYTES:,} at most")
        self._connection.execute("INSERT INTO audit VALUES (?, ?)", (record.sequence, data))
        return record

    def records(self, *, newest: int | None = None) -> Iterator[Record]:
        """Iterate over all records, or the `newest` ones, oldest first, and verify each."""
        first = 0
        if newest is not None:
            last = self._last()
            first = 0 if last is None else max(0, last.sequence + 1 - newest)
        previous = FIRST if first == 0 else self._record(first - 1).digest
        for expected, (sequence, data) in enumerate(self._rows(first), start=first):
            if sequence != expected:
                raise LedgerTampered("the audit log has no such entry", sequence=expected)
            record = decode_record(sequence, data)
            if record.previous != previous:
                raise LedgerTampered(
                    "the entry of the audit log does not follow the one before", sequence=sequence
                )
            previous = record.digest
            yield record

    def _rows(self, first: int) -> Iterator[tuple[Any, Any]]:
        """Read the rows page by page: an open statement would keep a run from writing."""
        page: list[Any] = [(first - 1, b"")]
        while page:
            rows = self._connection.execute(
                "SELECT sequence, record FROM audit WHERE sequence > ? ORDER BY sequence LIMIT ?",
                (page[-1][0], _PAGE_ROWS),
            )
            page = list(rows.fetchall())
            yield from page

    def verify(self) -> int:
        """Verify the whole chain and return its length; raise `LedgerTampered` if it was changed.

        A log that was cut off at the end is still an intact chain: compare `head()` with an earlier
        one.
        """
        return sum(1 for _ in self.records())

    def head(self) -> str:
        """Return the hash of the newest record. Keep it to notice a log that was cut off."""
        last = self._last()
        return FIRST if last is None else last.digest

    def _next(self) -> tuple[int, str]:
        """Return the number of the next record, and what it names as `previous`.

        The last record is hashed as it is: it was verified when written, and will be when read.
        """
        row = self._connection.execute(
            "SELECT sequence, record FROM audit ORDER BY sequence DESC LIMIT 1"
        ).fetchone()
        if row is None:
            return 0, FIRST
        sequence, data = row
        if not isinstance(sequence, int) or not isinstance(data, bytes):
            raise LedgerTampered("this row of the audit log is not a record", sequence=0)
        return sequence + 1, sha256(data).hex()

    def _last(self) -> Record | None:
        sequence = self._connection.execute("SELECT max(sequence) FROM audit").get
        return self._record(sequence) if isinstance(sequence, int) else None

    def _record(self, sequence: int) -> Record:
        row = self._connection.execute(
            "SELECT record FROM audit WHERE sequence = ?", (sequence,)
        ).fetchone()
        if row is None:
            raise LedgerTampered("the audit log has no such entry", sequence=sequence)
        return decode_record(sequence, row[0])


def decode_record(sequence: int, data: object) -> Record:
    """Decode a stored row, or raise `LedgerTampered`."""
    try:
        record = decode_canonical(_ADAPTER, data)
    except DecodeError as error:
        why = f"this row of the audit log is not a record ({error})"
        raise LedgerTampered(why, sequence=sequence) from None
    if record.sequence != sequence:
        raise LedgerTampered("the entry of the audit log is out of place", sequence=sequence)
    return record
