"""A population for rehearsals: events by device, or numbers of devices by value.

Devices with the same rows form a *class* with a number of devices. A frame of events by device has
one class a device; a frame of counts one class a row, however many devices it stands for. All work
is in the number of rows, never in the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.extras import needed
from chorister.analyst.queries import SimpleQuery, parse_simple
from chorister.analyst.selecting import choose
from chorister.analyst.texts import AnyColumn, Words, column_of
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


@dataclass(frozen=True, eq=False, slots=True)
class _Table:
    owners: Ints  # class of each row, increasing
    frame: polars.DataFrame


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
        frames = _frames(source, policy, device=device, count=count)
        self._tables, weights = _classes(frames, device=device, count=count)
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
        return _Rows(owners if repeat is None else owners[repeat], columns)

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
            empty = {each: _polars_type(self._policy, f"{name}.{each}") for each in fields}
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


# --- Reading what an analyst has ---------------------------------------------------------------


def _polars_type(policy: Policy, ref: str) -> Any:  # noqa: ANN401 (a polars type)
    pl = needed("polars")
    return {"integer": pl.Int64, "real": pl.Float64, "text": pl.String}[policy.fields[ref].type]


def as_frame(source: object) -> polars.DataFrame:
    """A polars frame of whatever holds columns: polars, pandas, Arrow, or a mapping."""
    pl = needed("polars")
    if isinstance(source, pl.DataFrame):
        frame: polars.DataFrame = source
        return frame
    if isinstance(source, pl.LazyFrame):
        collected: polars.DataFrame = source.collect()
        return collected
    try:
        if hasattr(source, "__arrow_c_stream__") and not _is_pandas(source):
            made: polars.DataFrame = pl.DataFrame(source)
        elif _is_pandas(source):
            made = pl.from_pandas(source)
        else:
            made = pl.DataFrame(source)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise InvalidInput(
            f"a population is a polars, pandas or Arrow table, or columns by name: {error}"
        ) from None
    return made


def _is_pandas(source: object) -> bool:
    return type(source).__module__.partition(".")[0] == "pandas"


def _frames(
    source: object, policy: Policy, *, device: str, count: str
) -> dict[str, polars.DataFrame]:
    """A frame for every stream and profile; an unnamed one is split by its fields' tables."""
    tables = {**policy.streams, **policy.profiles}
    if isinstance(source, Mapping) and source and set(source) <= set(tables):
        return {name: as_frame(frame) for name, frame in source.items()}
    frame = as_frame(source)
    if not len(frame):
        raise InvalidInput("a population has at least one row")
    own = [column for column in frame.columns if column in (device, count)]
    places: dict[str, dict[str, str]] = {}
    for column in frame.columns:
        if column in own:
            continue
        refs = [ref for ref in policy.fields if column in (ref, ref.partition(".")[2])]
        if len(refs) != 1:
            why = "several fields have" if refs else "no field has"
            raise InvalidInput(
                f"{why} the name {column!r}: name columns as fields of the policy "
                f"({', '.join(policy.fields)}), or drop it"
            )
        table, _, name = refs[0].partition(".")
        places.setdefault(table, {})[column] = name
    if not places:
        raise InvalidInput(f"no column is a field of the policy: {', '.join(policy.fields)}")
    rows: list[str] = own
    if device not in own:  # every row is a device, or a class of devices
        pl = needed("polars")
        frame = frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(device))
        rows = [device, *own]
    found = {table: frame.select([*rows, *names]).rename(names) for table, names in places.items()}
    streams = [table for table in found if table in policy.streams]
    for table in found:
        # Beside a stream, a profile's values are repeated in every row: one row a device is meant.
        if table in policy.profiles and streams:
            found[table] = found[table].unique(device, keep="first", maintain_order=True)
    return found


def _classes(
    frames: dict[str, polars.DataFrame], *, device: str, count: str
) -> tuple[dict[str, _Table], Ints]:
    """Number the devices, sort every table by them, and find how many each stands for."""
    pl = needed("polars")
    for name, frame in frames.items():
        if device not in frame.columns:
            raise InvalidInput(
                f"the table {name} has no column {device!r} that says whose a row is"
            )
    identities = [frame[device] for frame in frames.values()]
    first = identities[0]
    dense = (
        len(frames) == 1
        and first.dtype.is_integer()
        and len(first) > 0
        and first.null_count() == 0
        and bool(first.is_sorted())
    )
    if dense:
        codes = first.rle_id().cast(pl.Int64).to_numpy()
        owners = {next(iter(frames)): codes}
        total = int(codes[-1]) + 1
    else:
        known = pl.concat(
            [each.unique(maintain_order=True).cast(first.dtype) for each in identities]
        )
        known = known.unique(maintain_order=True)
        index = pl.DataFrame({device: known}).with_row_index("class")
        owners = {
            name: frame.select(pl.col(device).cast(first.dtype))
            .join(index, on=device, how="left", maintain_order="left", nulls_equal=True)["class"]
            .cast(pl.Int64)
            .to_numpy()
            for name, frame in frames.items()
        }
        total = len(known)
    weights = np.ones(total, dtype=np.int64)
    tables = {}
    for name, frame in frames.items():
        whose = owners[name]
        kept = frame
        if not dense:
            order = np.argsort(whose, kind="stable")
            if not (order == np.arange(len(order))).all():
                kept, whose = frame[order], whose[order]
        if count in frame.columns:
            weights[whose] = _counts(kept[count])
        dropped = [column for column in (device, count) if column in kept.columns]
        tables[name] = _Table(np.ascontiguousarray(whose, dtype=np.int64), kept.drop(dropped))
    return tables, weights


def _counts(values: polars.Series) -> Ints:
    if not values.dtype.is_integer() or values.null_count() or (values < 0).any():
        raise InvalidInput("counts are whole numbers of devices, 0 or more")
    found: Ints = values.cast(needed("polars").Int64).to_numpy()
    return found


def class_rows(owners: Ints, size: int) -> Iterator[tuple[int, int]]:
    """Where each class' rows begin and end."""
    ends = np.searchsorted(owners, np.arange(size), side="right")
    begin = 0
    for end in ends.tolist():
        yield begin, end
        begin = end
