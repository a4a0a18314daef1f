"""Running a recipe's query on all classes of devices of a rehearsal.

A query that needs no database runs on all devices at once: it selects fields of streams and
profiles, each once, possibly with a device's own table-valued functions. Any other query runs in
SQLite, class by class. The rows are the same either way; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import apsw
import apsw.ext
import numpy as np

from chorister.analyst.rehearsal.columns import AnyColumn, Ints, WordIndex, column_of, joined_keys
from chorister.analyst.rehearsal.device_tables import DeviceTable, class_rows, polars_type
from chorister.analyst.tables import needed
from chorister.device.sandbox.functions import TABLE_FUNCTIONS, block_table_functions, register
from chorister.errors import QueryRefused
from chorister.policy import Policy
from chorister.recipe import Recipe

if TYPE_CHECKING:
    import polars

_CACHED_QUERIES: Final = 4
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
_FUNCTION_COLUMNS: Final = {"ngrams": "ngram", "words": "word"}  # no table has these names
_MAX_N: Final = 16


@dataclass(frozen=True, slots=True)
class SelectedColumn:
    """One column of a result: a field of a table, or the output of a table-valued function."""

    name: str
    table: str  # or the name of the function
    field: str


@dataclass(frozen=True, slots=True)
class SimpleQuery:
    """SELECT [DISTINCT] items FROM tables [, ngrams(table.field, n)]."""

    items: tuple[SelectedColumn, ...]
    tables: tuple[str, ...]
    cut: tuple[str, str, int] | None  # cut a table's field into n-grams of n words
    function: str | None  # by which one
    distinct: bool  # equal rows of one device count once


def parse_simple(query: str, columns: dict[str, tuple[str, ...]]) -> SimpleQuery | None:
    """Parse a query, or return None if it is not simple. `columns` are the declared fields."""
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
    items: list[SelectedColumn] = []
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
            items.append(SelectedColumn(name, function, field))
            continue
        place = _locate(item, columns, tables)
        if place is None:
            return None
        items.append(SelectedColumn(name, *place))
    if not tables or len({item.name for item in items}) != len(items):
        return None
    return SimpleQuery(tuple(items), tuple(tables), cut, function, found["distinct"] is not None)


def _locate(
    found: re.Match[str], columns: dict[str, tuple[str, ...]], tables: list[str]
) -> tuple[str, str] | None:
    """Return the table and field that a name stands for, unless it is ambiguous."""
    field = (found["field"] or found["fieldq"]).lower()
    owner = found["table"] or found["tableq"]
    if owner:
        owner = owner.lower()
        return (owner, field) if owner in tables and field in columns[owner] else None
    places = [table for table in tables if field in columns[table]]
    return (places[0], field) if len(places) == 1 else None


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


# --- Running them -------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class QueryRows:
    """A query's result for every class of devices."""

    owners: Ints  # the class of each row, increasing
    columns: dict[str, AnyColumn]


class QueryRunner:
    """Runs queries on the tables of all classes, and caches the latest results."""

    def __init__(self, tables: Mapping[str, DeviceTable], policy: Policy, classes: int) -> None:
        self._tables = tables
        self._policy = policy
        self._classes = classes
        self._results: dict[str, QueryRows] = {}
        self._words: dict[str, WordIndex] = {}

    def run(self, recipe: Recipe) -> QueryRows:
        key = f"{recipe.query}\0{sorted(recipe.reads.items())}"
        if key not in self._results:
            while len(self._results) >= _CACHED_QUERIES:
                self._results.pop(next(iter(self._results)))
            simple = parse_simple(recipe.query, dict(recipe.reads))
            rows = None if simple is None else self._run_simple(simple, recipe)
            self._results[key] = self._run_sqlite(recipe) if rows is None else rows
        return self._results[key]

    def _table(self, name: str, recipe: Recipe) -> tuple[Ints, polars.DataFrame]:
        """The declared fields of a table; devices that lack a field hold NULL there."""
        pl = needed("polars")
        fields = recipe.reads[name]
        held = self._tables.get(name)
        if held is None:
            empty = {each: polars_type(self._policy, f"{name}.{each}") for each in fields}
            return np.zeros(0, dtype=np.int64), pl.DataFrame(schema=empty)
        frame = held.frame
        missing = [each for each in fields if each not in frame.columns]
        if missing:
            frame = frame.with_columns([pl.lit(None).alias(each) for each in missing])
        return held.owners, frame.select(fields)

    # --- All devices at once --------------------------------------------------------------------

    def _run_simple(self, query: SimpleQuery, recipe: Recipe) -> QueryRows | None:
        streams = [table for table in query.tables if table in self._policy.streams]
        if len(streams) > 1:
            return None
        main = streams[0] if streams else query.tables[0]
        if query.cut is not None and query.cut[0] != main:
            return None
        functions = self._policy.analyses[recipe.analysis].functions
        if query.function is not None and query.function not in functions:
            return None  # SQLite will report that it does not exist
        owners, frame = self._table(main, recipe)
        others = [table for table in query.tables if table != main]
        places: dict[str, Ints] = {}
        for other in others:  # a profile: one row per class, or none, and then the join has none
            their_owners, _ = self._table(other, recipe)
            if len(np.unique(their_owners)) != len(their_owners):
                return None
            place = np.full(self._classes, -1, dtype=np.int64)
            place[their_owners] = np.arange(len(their_owners))
            places[other] = place
        keep = np.ones(len(owners), dtype=np.bool_)
        for place in places.values():
            keep &= place[owners] >= 0
        if not keep.all():
            owners, frame = owners[keep], frame.filter(keep)
        columns: dict[str, AnyColumn] = {}
        repeat: Ints | None = None
        if query.cut is not None:
            key = f"{main}.{query.cut[1]} {places.keys()}"
            if key not in self._words:  # cut once for all lengths of n-grams
                self._words[key] = WordIndex(frame[query.cut[1]])
            repeat, ngrams = self._words[key].ngrams(query.cut[2])
            for item in query.items:
                if item.table in _FUNCTION_COLUMNS:
                    columns[item.name] = ngrams
        for item in query.items:
            if item.table in _FUNCTION_COLUMNS:
                continue
            if item.table == main:
                values = frame[item.field]
            else:
                values = self._table(item.table, recipe)[1][item.field][places[item.table][owners]]
            column = column_of(values)
            columns[item.name] = column if repeat is None else column.take(repeat)
        rows = QueryRows(owners if repeat is None else owners[repeat], columns)
        return _distinct(rows) if query.distinct else rows

    # --- Class by class, in SQLite --------------------------------------------------------------

    def _run_sqlite(self, recipe: Recipe) -> QueryRows:
        functions = self._policy.analyses[recipe.analysis].functions
        tables = {name: self._table(name, recipe) for name in recipe.reads}
        owners, values = _run_by_class(recipe, functions, tables, self._classes)
        for column in recipe.encoding.columns:
            if column not in values:
                raise no_column(column)
        return QueryRows(owners, {name: column_of(column) for name, column in values.items()})


def no_column(name: str) -> QueryRefused:
    return QueryRefused(check="query", why=f"its result has no column {name!r}", field="query")


def _distinct(rows: QueryRows) -> QueryRows:
    """Keep one of each set of equal rows of a class."""
    key = rows.owners
    for column in rows.columns.values():
        theirs = column.keys
        key = joined_keys([key, theirs], int(theirs.max(initial=0)) + 1)
    order = np.lexsort((key, rows.owners))
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = key[order][1:] != key[order][:-1]
    kept = np.sort(order[fresh])
    return QueryRows(rows.owners[kept], {name: c.take(kept) for name, c in rows.columns.items()})


def _run_by_class(
    recipe: Recipe,
    functions: Sequence[str],
    tables: dict[str, tuple[Ints, polars.DataFrame]],
    classes: int,
) -> tuple[Ints, dict[str, polars.Series]]:
    """Return the class of every row, and the rows; no rows where the query fails on the data."""
    pl = needed("polars")
    connection = apsw.Connection(":memory:")
    block_table_functions(connection)
    for name in functions:
        if name in TABLE_FUNCTIONS:
            register(connection, name)
    inserts = {}
    for name, fields in recipe.reads.items():
        columns = ", ".join(f'"{each}"' for each in fields)
        connection.execute(f'CREATE TABLE "{name}" ({columns})')
        places = ", ".join("?" * len(fields))
        inserts[name] = f'INSERT INTO "{name}" VALUES ({places})'  # noqa: S608 (identifiers)
    try:
        cursor = connection.execute(recipe.query)
        names = [column[0] for column in cursor.get_description()]
    except apsw.ExecutionCompleteError:
        names = [name for name, _ in apsw.ext.query_info(connection, recipe.query).description]
    except apsw.Error as error:
        raise QueryRefused(check="query", why=str(error), field="query") from None
    rows = {name: frame.rows() for name, (_, frame) in tables.items()}
    spans = {name: list(class_rows(owners, classes)) for name, (owners, _) in tables.items()}
    found: list[tuple[object, ...]] = []
    owners: list[int] = []
    for one in range(classes):
        connection.execute("BEGIN")
        for name, insert in inserts.items():
            begin, end = spans[name][one]
            connection.executemany(insert, rows[name][begin:end])
        try:
            answer = connection.execute(recipe.query).fetchall()
        except apsw.Error:
            answer = []  # the device reports OOV
        connection.execute("ROLLBACK")
        found.extend(answer)
        owners.extend([one] * len(answer))
    columns_found = list(zip(*found, strict=True)) if found else [()] * len(names)
    series = {
        name: pl.Series(name, list(column), dtype=None if column else pl.String, strict=False)
        for name, column in zip(names, columns_found, strict=True)
    }
    return np.array(owners, dtype=np.int64), series
