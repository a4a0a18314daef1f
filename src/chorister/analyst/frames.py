"""Reading a population: whatever holds columns becomes tables whose rows are sorted by device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.extras import needed
from chorister.errors import InvalidInput
from chorister.policy import Policy

if TYPE_CHECKING:
    import polars

__all__ = ["Table", "class_rows", "number_devices", "polars_type", "split_by_table"]

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """A stream or profile of all classes of devices."""

    owners: Ints  # class of each row, increasing
    frame: polars.DataFrame


def polars_type(policy: Policy, ref: str) -> Any:  # noqa: ANN401 (a polars type)
    """The type of a field's column."""
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


def split_by_table(
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


def number_devices(
    frames: dict[str, polars.DataFrame], *, device: str, count: str
) -> tuple[dict[str, Table], Ints]:
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
        tables[name] = Table(np.ascontiguousarray(whose, dtype=np.int64), kept.drop(dropped))
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
