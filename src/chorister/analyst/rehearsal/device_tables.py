"""Reading a population: data frames become tables whose rows are sorted by class of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from chorister.analyst.arguments import MAX_COUNT
from chorister.analyst.rehearsal.columns import Ints
from chorister.analyst.tables import needed
from chorister.errors import InvalidInput
from chorister.fleet.first_policy import field_name
from chorister.policy import Policy

if TYPE_CHECKING:
    import polars


_NOUNS: Final = {"integer": "a whole number", "real": "a number", "text": "text"}
_ROLES: Final = ("device", "count")  # options that name the columns which are not fields


@dataclass(frozen=True, eq=False, slots=True)
class DeviceTable:
    """A stream or profile, with the rows of all classes of devices."""

    owners: Ints  # the class of each row, increasing
    frame: polars.DataFrame


def polars_type(policy: Policy, ref: str) -> Any:  # noqa: ANN401 (a polars type)
    return _polars_type(policy.fields[ref].type)


def _polars_type(kind: str) -> Any:  # noqa: ANN401 (a polars type)
    pl = needed("polars")
    return {"integer": pl.Int64, "real": pl.Float64, "text": pl.String}[kind]


def as_frame(source: object, policy: Policy) -> polars.DataFrame:
    """Convert a table, a mapping of columns or the path of a file to a polars frame."""
    pl = needed("polars")
    frame: polars.DataFrame
    try:
        if isinstance(source, str | Path):
            frame = _read_file(Path(source), policy)
        elif isinstance(source, pl.LazyFrame):
            frame = source.collect()
        elif type(source).__module__.partition(".")[0] == "pandas":
            frame = pl.from_pandas(source)
        else:
            frame = pl.DataFrame(source)
    except InvalidInput:
        raise
    except (  # polars panics about some numbers that are none
        OverflowError, RuntimeError, TypeError, ValueError,
        pl.exceptions.PolarsError, pl.exceptions.PanicException,
    ) as error:  # fmt: skip
        raise InvalidInput(
            "a population is a polars, pandas or Arrow table, columns by name, or the path of a "
            f".csv or .parquet file: {error}"
        ) from None
    return frame


def _read_file(path: Path, policy: Policy) -> polars.DataFrame:
    pl = needed("polars")
    if path.suffix not in (".csv", ".parquet"):
        raise InvalidInput(f"{path}: a population's file is a .csv or .parquet table")
    frame: polars.DataFrame
    try:
        path.stat()  # what polars says about a missing file names no reason
        if path.suffix == ".parquet":
            frame = pl.read_parquet(path)
        else:  # whose text may look like something else: true, 2026-01-03, 01234
            names = pl.read_csv(path, n_rows=0).columns
            texts = {
                name: pl.String
                for name in names
                if any(policy.fields[ref].type == "text" for ref in _refs(name, policy))
            }
            frame = pl.read_csv(path, schema_overrides=texts, infer_schema_length=None)
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror or error}") from None
    return frame


def _refs(column: str, policy: Policy) -> list[str]:
    """The fields that a column may be: by their names, or by the name that a first policy gave."""
    found = [ref for ref in policy.fields if column in (ref, ref.partition(".")[2])]
    if found:
        return found
    try:
        own = field_name(column)
    except InvalidInput:
        return []
    return [ref for ref in policy.fields if ref.partition(".")[2] == own]


def _fitting(frame: polars.DataFrame, table: str, policy: Policy) -> polars.DataFrame:
    """Return the frame with the types that the policy declares: devices store nothing else."""
    fields = {
        name: field
        for name in frame.columns
        if (field := policy.fields.get(f"{table}.{name}")) is not None
    }
    return frame.with_columns(
        [_stored(frame[name], f"{table}.{name}", field.type) for name, field in fields.items()]
    )


def _stored(column: polars.Series, ref: str, kind: str) -> polars.Series:
    """The values of a field as a device stores them; what is not a number is NULL."""
    pl = needed("polars")
    given: Any = column.dtype
    found: polars.Series
    if given == pl.Null:
        return column.cast(_polars_type(kind))
    if kind == "text":
        fits = given in (pl.String, pl.Categorical, pl.Enum)
    else:
        fits = given.is_numeric() or given == pl.Boolean
    if fits:
        known = column.fill_nan(None) if given.is_float() else column
        found = known.cast(_polars_type(kind), strict=False)
        lost = known.is_not_null() & found.is_null()
        if kind == "integer" and (given.is_float() or given.is_decimal()):
            lost |= known.is_not_null() & (found.cast(given, strict=False) != known)
        if not lost.any():
            return found
        column = known.filter(lost)
    example = next((value for value in column.to_list() if value is not None), None)
    raise InvalidInput(
        f"{ref} is {_NOUNS[kind]} in the policy, but the population has {example!r}: a device "
        "would refuse it; convert the column",
        field=ref,
    )


def split_by_table(
    source: object, policy: Policy, *, device: str, count: str
) -> dict[str, polars.DataFrame]:
    """Return one frame per stream and profile; one frame is split by the names of its columns."""
    tables = {**policy.streams, **policy.profiles}
    if isinstance(source, Mapping) and source and set(source) <= set(tables):
        return {
            name: _fitting(as_frame(frame, policy), name, policy) for name, frame in source.items()
        }
    frame = as_frame(source, policy)
    if not len(frame):
        raise InvalidInput("a population has at least one row")
    own = [column for column in frame.columns if column in (device, count)]
    places: dict[str, dict[str, str]] = {}
    for column in frame.columns:
        if column in own:
            continue
        refs = _refs(column, policy)
        if len(refs) != 1:
            why = "several fields have" if refs else "no field has"
            raise InvalidInput(
                f"{why} the name {column!r}: name columns as fields of the policy "
                f"({', '.join(policy.fields)}), or drop it"
            )
        table, _, name = refs[0].partition(".")
        taken = places.setdefault(table, {})
        if name in (device, count):
            raise InvalidInput(
                f"the column {column!r} is the field {refs[0]}, but a column {name!r} says which "
                f"device a row belongs to, or how many: pass {_ROLES[name == count]}= with another "
                "name for that column"
            )
        if name in taken.values():
            raise InvalidInput(f"several columns are the field {refs[0]}: drop all but one")
        taken[column] = name
    if not places:
        raise InvalidInput(f"no column is a field of the policy: {', '.join(policy.fields)}")
    rows: list[str] = own
    if device not in own:  # every row is one device, or one class of devices
        pl = needed("polars")
        frame = frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(device))
        rows = [device, *own]
    found = {table: frame.select([*rows, *names]).rename(names) for table, names in places.items()}
    streams = [table for table in found if table in policy.streams]
    for table in found:
        # Next to a stream, the values of a profile repeat in every row: one row per device is
        # meant.
        if table in policy.profiles and streams:
            found[table] = found[table].unique(device, keep="first", maintain_order=True)
    return {table: _fitting(each, table, policy) for table, each in found.items()}


def number_devices(
    frames: dict[str, polars.DataFrame], *, device: str, count: str
) -> tuple[dict[str, DeviceTable], Ints]:
    """Number the classes of devices, sort every table by class, and count the devices of each."""
    pl = needed("polars")
    for name, frame in frames.items():
        if device not in frame.columns:
            raise InvalidInput(
                f"the table {name} has no column {device!r} that says which device a row belongs to"
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
        tables[name] = DeviceTable(np.ascontiguousarray(whose, dtype=np.int64), kept.drop(dropped))
    return tables, weights


def _counts(values: polars.Series) -> Ints:
    if not values.dtype.is_integer() or values.null_count() or (values < 0).any():
        raise InvalidInput("counts are whole numbers of devices, 0 or more")
    if values.cast(needed("polars").Float64).sum() > MAX_COUNT:
        raise InvalidInput(f"counts add up to at most {MAX_COUNT:,} devices")
    found: Ints = values.cast(needed("polars").Int64).to_numpy()
    return found


def class_rows(owners: Ints, size: int) -> Iterator[tuple[int, int]]:
    """Yield where the rows of each class begin and end."""
    ends = np.searchsorted(owners, np.arange(size), side="right")
    begin = 0
    for end in ends.tolist():
        yield begin, end
        begin = end
