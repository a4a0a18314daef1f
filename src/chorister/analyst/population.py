"""A population for rehearsals: events by device, or numbers of devices by value.

Devices with the same rows form a *class* with a number of devices. A frame of events by device has
one class a device; a frame of counts one class a row, however many devices it stands for. All work
is in the number of rows, never in the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.extras import needed
from chorister.analyst.frames import class_rows, number_devices, polars_type, split_by_table
from chorister.analyst.queries import SimpleQuery, parse_simple
from chorister.analyst.selecting import choose
from chorister.analyst.texts import AnyColumn, Words, column_of, joined_keys
from chorister.encoding import Encoding
from chorister.errors import InvalidInput, QueryRefused
from chorister.policy import OTHER, Policy
from chorister.recipe import Recipe

if TYPE_CHECKING:
    import polars

__all__ = ["Answers", "Population"]

Ints: TypeAlias = NDArray[np.int64]
_KEPT_QUERIES: Final = 4
_CUTTING: Final = ("ngrams", "words")  # table-valued functions: no table has their names


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Answers:
    """What the devices that answer hold, group by group."""

    groups: tuple[tuple[str, ...], ...]
    reports: Ints  # devices, a group
    counts: Ints  # devices, a group and a bin


@dataclass(eq=False, slots=True)
class _Rows:
    """A query's result for every class."""

    owners: Ints  # increasing
    columns: dict[str, AnyColumn]


class Population:
    """Simulated devices' data, for one policy."""

    def __init__(
        self,
        source: object,
        policy: Policy,
        *,
        device: str = "device",
        count: str = "count",
        devices: int | None = None,
    ) -> None:
        self._policy = policy
        frames = split_by_table(source, policy, device=device, count=count)
        self._tables, weights = number_devices(frames, device=device, count=count)
        total = int(weights.sum())
        if devices is not None:
            if devices < total:
                raise InvalidInput(f"devices={devices:,} is fewer than the {total:,} in the data")
            if devices > total:  # one more class, of devices without data
                weights = np.append(weights, devices - total)
        self.weights: Ints = weights
        """Devices a class."""
        self._rows: dict[str, _Rows] = {}
        self._groups: dict[tuple[str, ...], Ints] = {}
        self._cut: dict[str, Words] = {}

    @property
    def size(self) -> int:
        """The number of devices."""
        return int(self.weights.sum())

    def __repr__(self) -> str:
        return f"<Population: {self.size:,} devices in {len(self.weights):,} classes>"

    def each_device(self) -> Iterator[dict[str, list[dict[str, object]]]]:
        """Every single device's rows, table by table: for devices that are real."""
        spans = {
            name: list(class_rows(table.owners, len(self.weights)))
            for name, table in self._tables.items()
        }
        for one, weight in enumerate(self.weights.tolist()):
            rows = {
                name: table.frame[spans[name][one][0] : spans[name][one][1]].to_dicts()
                for name, table in self._tables.items()
            }
            for _ in range(weight):
                yield rows

    def truth(self, recipe: Recipe, seed: int) -> NDArray[np.float64]:
        """The true counts if every device answered: one a bin, or a row a group."""
        found = self.answers(recipe, self.weights, np.random.default_rng([seed, 0])).counts
        return (found if recipe.group_by else found[0]).astype(np.float64)

    def answers(self, recipe: Recipe, answering: Ints, rng: np.random.Generator) -> Answers:
        """What `answering` devices a class report, each one bin, by the device's own rule."""
        rows = self._result(recipe)
        names, group_of = self._group_of(recipe.group_by)
        encoding = recipe.encoding
        everyone = bool((answering > 0).all())
        keep = None if everyone else answering[rows.owners] > 0
        bins = _bins(encoding, rows, keep)
        owners = rows.owners if keep is None else rows.owners[keep]
        if everyone and _one_each(owners, len(answering)):
            classes, held, devices = owners, np.maximum(bins, 0), answering
        else:
            classes, held, devices = choose(
                encoding, owners, bins, answering, recipe.selection, rng
            )
        size = encoding.size
        if len(names) == 1:
            flat = np.bincount(held, devices, size)
            reports = np.array([answering.sum()], dtype=np.int64)
        else:
            flat = np.bincount(group_of[classes] * size + held, devices, size * len(names))
            reports = np.bincount(group_of, answering, len(names)).astype(np.int64)
        counts = np.rint(flat).astype(np.int64).reshape(len(names), size)
        return Answers(groups=names, reports=reports, counts=counts)

    def _group_of(self, refs: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], Ints]:
        """All groups, and each class' group."""
        values = [self._policy.group_values(ref) for ref in refs]
        names = tuple(product(*values))
        if refs not in self._groups:
            found = np.zeros(len(self.weights), dtype=np.int64)
            for ref, known in zip(refs, values, strict=True):
                found = found * len(known) + self._group_codes(ref, known)
            self._groups[refs] = found
        return names, self._groups[refs]

    def _group_codes(self, ref: str, known: tuple[str, ...]) -> Ints:
        table, _, name = ref.partition(".")
        codes = np.full(len(self.weights), known.index(OTHER), dtype=np.int64)
        held = self._tables.get(table)
        if held is not None and name in held.frame.columns:
            index = {value: i for i, value in enumerate(known)}
            other = index[OTHER]
            values = held.frame[name].to_list()
            codes[held.owners] = [index.get(value, other) for value in values]
        return codes

    def _result(self, recipe: Recipe) -> _Rows:
        key = f"{recipe.query}\0{sorted(recipe.reads.items())}"
        if key not in self._rows:
            while len(self._rows) >= _KEPT_QUERIES:
                self._rows.pop(next(iter(self._rows)))
            self._rows[key] = self._run(recipe)
        return self._rows[key]

    def _run(self, recipe: Recipe) -> _Rows:
        simple = parse_simple(recipe.query, dict(recipe.reads))
        if simple is not None:
            rows = self._run_simple(simple, recipe)
            if rows is not None:
                return rows
        return self._run_sqlite(recipe)

    # --- All devices at once --------------------------------------------------------------------

    def _run_simple(self, query: SimpleQuery, recipe: Recipe) -> _Rows | None:
        streams = [table for table in query.tables if table in self._policy.streams]
        if len(streams) > 1:
            return None
        main = streams[0] if streams else query.tables[0]
        if query.cut is not None and query.cut[0] != main:
            return None
        functions = self._policy.analyses[recipe.analysis].functions
        if query.cut is not None:
            needed_function = "words" if "words(" in recipe.query.lower() else "ngrams"
            if needed_function not in functions:
                return None  # SQLite will say that it is not there
        owners, frame = self._table(main, recipe)
        others = [table for table in query.tables if table != main]
        places: dict[str, Ints] = {}
        for other in others:  # a profile: one row a class, or none, and then the join has none
            their_owners, _ = self._table(other, recipe)
            if len(np.unique(their_owners)) != len(their_owners):
                return None
            place = np.full(len(self.weights), -1, dtype=np.int64)
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
            words = self._words(f"{main}.{query.cut[1]} {places.keys()}", frame[query.cut[1]])
            repeat, ngrams = words.ngrams(query.cut[2])
            for item in query.items:
                if item.table in _CUTTING:
                    columns[item.name] = ngrams
        for item in query.items:
            if item.table in _CUTTING:
                continue
            if item.table == main:
                values = frame[item.field]
            else:
                values = self._table(item.table, recipe)[1][item.field][places[item.table][owners]]
            column = column_of(values)
            columns[item.name] = column if repeat is None else column.take(repeat)
        rows = _Rows(owners if repeat is None else owners[repeat], columns)
        return _once(rows) if query.distinct else rows

    def _words(self, key: str, texts: polars.Series) -> Words:
        """The words of a column, cut once for all lengths of n-grams."""
        if key not in self._cut:
            self._cut[key] = Words(texts)
        return self._cut[key]

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

    # --- Class by class, in SQLite --------------------------------------------------------------

    def _run_sqlite(self, recipe: Recipe) -> _Rows:
        from chorister.analyst.sqlite import run_by_class

        functions = self._policy.analyses[recipe.analysis].functions
        tables = {name: self._table(name, recipe) for name in recipe.reads}
        wanted = recipe.encoding.columns
        owners, values = run_by_class(recipe, functions, tables, len(self.weights))
        for column in wanted:
            if column not in values:
                raise QueryRefused(
                    check="query", why=f"its result has no column {column!r}", field="query"
                )
        return _Rows(owners, {name: column_of(column) for name, column in values.items()})


def _once(rows: _Rows) -> _Rows:
    """Of equal rows of one class, one."""
    key = rows.owners
    for column in rows.columns.values():
        theirs = column.keys
        key = joined_keys([key, theirs], int(theirs.max(initial=0)) + 1)
    order = np.lexsort((key, rows.owners))
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = key[order][1:] != key[order][:-1]
    kept = np.sort(order[fresh])
    return _Rows(rows.owners[kept], {name: c.take(kept) for name, c in rows.columns.items()})


def _one_each(owners: Ints, classes: int) -> bool:
    """Whether every class has exactly one row, so that there is nothing to choose."""
    return len(owners) == classes and bool((owners == np.arange(classes)).all())


def _bins(encoding: Encoding, rows: _Rows, keep: NDArray[np.bool_] | None) -> Ints:
    """The bin of every row that is kept; -1 for a denied one."""
    bins: Ints | None = None
    for feature in encoding.features:
        columns = [rows.columns.get(name) for name in feature.columns_read]
        found = [column for column in columns if column is not None]
        if len(found) != len(columns):
            missing = [name for name in feature.columns_read if name not in rows.columns]
            raise QueryRefused(
                check="query", why=f"its result has no column {missing[0]!r}", field="query"
            )
        if len(found) == 1:
            cells = found[0].cells(feature, keep)
        else:
            cells = feature.find(*(column.values(keep) for column in found))
        bins = cells if bins is None else bins * feature.size + cells
    if bins is None:
        raise InvalidInput("an encoding has at least one feature")
    for deny in encoding.deny:
        column = rows.columns.get(deny.column)
        if column is None:
            raise QueryRefused(
                check="query", why=f"its result has no column {deny.column!r}", field="query"
            )
        denied = column.marked(deny.denied, keep)
        bins = np.where(denied, -1, bins)
    return bins
