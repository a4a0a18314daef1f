"""The policy's streams and profiles as tables, and the check of each row that is donated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from types import NoneType
from typing import Any, Final, Literal, TypeAlias

from chorister.errors import EventRefused
from chorister.policy import DataField, Policy

MAX_TEXT_BYTES: Final = 65_536
"""The longest text of a field, in UTF-8."""

FieldType: TypeAlias = Literal["integer", "real", "text"]
Value: TypeAlias = int | float | str | None
Row: TypeAlias = tuple[Value, ...]

_SQL_TYPES: Final[Mapping[FieldType, str]] = {"integer": "INTEGER", "real": "REAL", "text": "TEXT"}
_MAX_INTEGER: Final = 2**63 - 1
_MAX_EXACT: Final = 2**53


def quoted(name: str) -> str:
    """Quote a name for SQL, even though names in policies have no quotation marks."""
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """One stream or profile."""

    name: str
    fields: Mapping[str, FieldType]
    retention: int  # seconds
    is_profile: bool

    @property
    def table(self) -> str:
        """The name of its table in the store."""
        return f"{'profile' if self.is_profile else 'stream'}_{self.name}"

    @property
    def columns(self) -> dict[str, str]:
        """The table's columns that hold fields, with their SQL types."""
        return {f"field_{name}": _SQL_TYPES[kind] for name, kind in self.fields.items()}

    @cached_property
    def _values(self) -> Callable[[Mapping[str, object]], tuple[Any, ...]]:
        names = list(self.fields)
        if len(names) == 1:
            only = names[0]
            return lambda event: (event[only],)
        return itemgetter(*names)

    def row(self, event: Mapping[str, object]) -> Row:
        """Return an event's values in the table's order; `EventRefused` names a wrong field."""
        try:
            values = self._values(event)
        except (KeyError, TypeError, IndexError):
            raise self._misshapen(event) from None
        if len(event) != len(values):
            raise self._misshapen(event)
        return tuple(
            [
                value if type(value) is NoneType else _CHECKS[kind](value, self, name)
                for value, (name, kind) in zip(values, self.fields.items(), strict=True)
            ]
        )

    def rows(self, events: Iterable[Mapping[str, object]]) -> list[Row]:
        """Return many events' values: checked by column, which is faster, or else one by one."""
        events = list(events)
        width = len(self.fields)
        try:
            values = list(map(self._values, events))
            plain = set(map(len, events)) == {width}
        except (KeyError, TypeError, IndexError):
            plain = False
        if plain and all(map(_is_plain, zip(*values, strict=True), self.fields.values())):
            return values
        return [self.row(event) for event in events]

    def refuse(self, field: str, why: str) -> EventRefused:
        return EventRefused(why, field=f"{self.name}.{field}")

    def _misshapen(self, event: object) -> EventRefused:
        what = "profile" if self.is_profile else "stream"
        if not isinstance(event, Mapping):
            why = f"an event is a mapping of fields to values, not {type(event).__name__}"
            return EventRefused(why, field=self.name)
        for name in self.fields:
            if name not in event:
                why = "missing; pass None for a value that is not known"
                return self.refuse(name, why)
        unknown = next(name for name in event if name not in self.fields)
        return self.refuse(str(unknown)[:64], f"the {what} has no such field")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All tables of a policy."""

    tables: Mapping[str, TableSchema]

    @classmethod
    def of(cls, policy: Policy) -> Schema:
        tables: dict[str, TableSchema] = {}
        for group, is_profile in ((policy.streams, False), (policy.profiles, True)):
            for name, table in group.items():
                tables[name] = TableSchema(
                    name=name,
                    fields=_types(table.fields),
                    retention=table.retention,
                    is_profile=is_profile,
                )
        return cls(tables=tables)

    def table(self, name: str, *, is_profile: bool | None = None) -> TableSchema:
        """Return a stream (`is_profile` False), a profile (True), or either (None)."""
        table = self.tables.get(name)
        if table is None or is_profile not in (None, table.is_profile):
            what = {None: "stream or profile", False: "stream", True: "profile"}[is_profile]
            raise EventRefused(f"the policy has no such {what}", field=name[:64])
        return table


def _types(fields: Mapping[str, DataField]) -> dict[str, FieldType]:
    return {name: field.type for name, field in fields.items()}


# --- values --------------------------------------------------------------------------------------


def _is_plain(column: Sequence[Any], kind: FieldType) -> bool:
    """Return True if every value of a column is certainly valid; False says nothing."""
    types = set(map(type, column))
    if kind == "integer":
        return types == {int} and min(column) >= -_MAX_INTEGER and max(column) <= _MAX_INTEGER
    if kind == "real":
        return types == {float} and all(map(math.isfinite, column))
    if types != {str}:
        return False
    joined = "".join(column)
    # In ASCII a character is a byte, and there are no surrogates.
    return joined.isascii() and "\0" not in joined and max(map(len, column)) <= MAX_TEXT_BYTES


def _integer(value: object, table: TableSchema, field: str) -> int:
    # Python says that a bool is an int; nobody else does.
    if not isinstance(value, int) or isinstance(value, bool):
        raise table.refuse(field, f"an integer, not {type(value).__name__}")
    if not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise table.refuse(field, "an integer of at most 64 bits")
    return int(value)


def _real(value: object, table: TableSchema, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise table.refuse(field, f"a real number, not {type(value).__name__}")
    if isinstance(value, int) and abs(value) > _MAX_EXACT:
        raise table.refuse(field, "an integer this large is not an exact real number: pass a float")
    if not math.isfinite(value):
        raise table.refuse(field, "a finite number; pass None for one that is not known")
    return float(value)


def _text(value: object, table: TableSchema, field: str) -> str:
    if not isinstance(value, str):
        raise table.refuse(field, f"text, not {type(value).__name__}")
    if "\0" in value:
        raise table.refuse(field, "text without NUL characters")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise table.refuse(field, "text without lone surrogates") from None
    if size > MAX_TEXT_BYTES:
        raise table.refuse(field, f"{size} bytes of text, but at most {MAX_TEXT_BYTES} are allowed")
    return str(value)


_CHECKS: Final[Mapping[FieldType, Callable[[object, TableSchema, str], Value]]] = {
    "integer": _integer,
    "real": _real,
    "text": _text,
}
