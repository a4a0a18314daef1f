"""Queries of a rehearsal: simple ones on all devices at once, any other in SQLite, class by class.

Simple is what needs no database: columns of streams and profiles, each once, with the device's own
table-valued functions. The rows that come out are the same either way; a test compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Item", "SimpleQuery", "parse_simple"]

_NAME: Final = r'(?:"(?P<{0}q>[a-z][a-z0-9_]*)"|(?P<{0}>[a-z][a-z0-9_]*))'
_ITEM: Final = re.compile(
    rf"\s*(?:{_NAME.format('table')}\s*\.\s*)?{_NAME.format('field')}"
    rf'(?:\s+AS\s+(?:"(?P<aliasq>[A-Za-z_][A-Za-z0-9_]*)"|(?P<alias>[A-Za-z_][A-Za-z0-9_]*)))?\s*',
    re.IGNORECASE,
)
_SOURCE: Final = re.compile(rf"\s*{_NAME.format('table')}\s*", re.IGNORECASE)
_CALL: Final = re.compile(
    rf"\s*(?P<function>ngrams|words)\s*\(\s*(?:{_NAME.format('table')}\s*\.\s*)?"
    rf"{_NAME.format('field')}\s*(?:,\s*(?P<n>[0-9]{{1,2}})\s*)?\)\s*",
    re.IGNORECASE,
)
_QUERY: Final = re.compile(
    r"\s*SELECT\s(?P<distinct>\s*DISTINCT\s)?(?P<items>.*)\sFROM\s(?P<sources>.*?)\s*;?\s*",
    re.DOTALL | re.IGNORECASE,
)
_FUNCTION_COLUMNS: Final = {"ngrams": "ngram", "words": "word"}
_MAX_N: Final = 16


@dataclass(frozen=True, slots=True)
class Item:
    """One column of a result: a field of a table, or what a table-valued function gives."""

    name: str
    table: str  # or the function's name
    field: str


@dataclass(frozen=True, slots=True)
class SimpleQuery:
    """SELECT [DISTINCT] items FROM tables [, ngrams(table.field, n)]."""

    items: tuple[Item, ...]
    tables: tuple[str, ...]
    cut: tuple[str, str, int] | None  # cut this table's field into n-grams of so many words
    distinct: bool  # equal rows of a device count once


def parse_simple(query: str, columns: dict[str, tuple[str, ...]]) -> SimpleQuery | None:
    """The query if it is simple; `columns` are the fields declared, table by table."""
    found = _QUERY.fullmatch(query)
    if found is None or "--" in query or "/*" in query:
        return None
    tables: list[str] = []
    cut: tuple[str, str, int] | None = None
    function = None
    for source in _split(found["sources"]):
        if plain := _SOURCE.fullmatch(source):
            table = (plain["table"] or plain["tableq"]).lower()
            if table not in columns or table in tables:
                return None
            tables.append(table)
        elif call := _CALL.fullmatch(source):
            if cut is not None:
                return None
            function = call["function"].lower()
            number = int(call["n"] or 1)
            if (call["n"] is None) != (function == "words") or not 1 <= number <= _MAX_N:
                return None
            place = _locate(call, columns, tables)
            if place is None:
                return None
            cut = (*place, number)
        else:
            return None
    items: list[Item] = []
    for text in _split(found["items"]):
        item = _ITEM.fullmatch(text)
        if item is None:
            return None
        field = (item["field"] or item["fieldq"]).lower()
        name = item["alias"] or item["aliasq"] or item["field"] or item["fieldq"]
        owner = item["table"] or item["tableq"]
        owner = owner.lower() if owner else None
        own = function is not None and owner in (None, function)
        if own and function is not None and field == _FUNCTION_COLUMNS[function]:
            if owner is None and any(field in columns[table] for table in tables):
                return None  # ambiguous: SQLite will say so
            items.append(Item(name, function, field))
            continue
        place = _locate(item, columns, tables)
        if place is None:
            return None
        items.append(Item(name, *place))
    if not tables or len({item.name for item in items}) != len(items):
        return None
    return SimpleQuery(tuple(items), tuple(tables), cut, found["distinct"] is not None)


def _locate(
    found: re.Match[str], columns: dict[str, tuple[str, ...]], tables: list[str]
) -> tuple[str, str] | None:
    """The table and field that a name stands for, if it is plain which."""
    field = (found["field"] or found["fieldq"]).lower()
    owner = found["table"] or found["tableq"]
    if owner:
        owner = owner.lower()
        return (owner, field) if owner in tables and field in columns[owner] else None
    places = [table for table in tables if field in columns[table]]
    return (places[0], field) if len(places) == 1 else None


def _split(text: str) -> list[str]:
    """At commas outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]
