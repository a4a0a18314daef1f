"""A query that only SQLite understands, run on each class of a rehearsal's devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import apsw
import numpy as np
from numpy.typing import NDArray

from chorister.analyst.extras import needed
from chorister.analyst.frames import class_rows
from chorister.device.sandbox.functions import TABLE_FUNCTIONS, bar, register
from chorister.errors import QueryRefused
from chorister.recipe import Recipe

if TYPE_CHECKING:
    import polars

__all__ = ["run_by_class"]


def run_by_class(
    recipe: Recipe,
    functions: Sequence[str],
    tables: dict[str, tuple[NDArray[np.int64], polars.DataFrame]],
    classes: int,
) -> tuple[NDArray[np.int64], dict[str, polars.Series]]:
    """The rows of every class, and whose they are. A class on whose data it fails has none."""
    pl = needed("polars")
    connection = apsw.Connection(":memory:")
    bar(connection)
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
        names = _names(connection, recipe.query)
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


def _names(connection: apsw.Connection, query: str) -> list[str]:
    import apsw.ext

    return [name for name, _ in apsw.ext.query_info(connection, query).description]
