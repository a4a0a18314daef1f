"""Short ways to write the features of a question; see `chorister.encoding` for what they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import TypeAlias

from chorister.encoding import Categories, Grid, Intervals, PrefixTree, canonical_texts
from chorister.errors import InvalidInput
from chorister.privacy.decimals import as_decimal

__all__ = ["as_exact", "categories", "grid", "intervals", "prefix_tree"]

Real: TypeAlias = int | float | str | Decimal


def as_exact(value: Real) -> Decimal:
    """A number as the decimal that it prints as."""
    if isinstance(value, bool):
        raise InvalidInput("a number, not a boolean")
    try:
        return as_decimal(value)
    except (ArithmeticError, TypeError, ValueError):
        raise InvalidInput(f"{value!r} is not a number") from None


def intervals(column: str, edges: Iterable[Real]) -> Intervals:
    """Cells [a, b) between neighbouring edges; everything else is OOV."""
    return Intervals(column=column, edges=tuple(as_exact(edge) for edge in edges))


def categories(column: str, values: Iterable[str | int]) -> Categories:
    """One cell a value, by exact equality; everything else is OOV."""
    return Categories(column=column, values=tuple(values))


def prefix_tree(
    column: str, vocabulary: Iterable[str], prefixes: Iterable[str] = ("",)
) -> PrefixTree:
    """Known beginnings and the word that follows; texts are put into canonical form."""
    return PrefixTree(
        column=column,
        prefixes=tuple(canonical_texts(list(prefixes))),
        vocabulary=tuple(canonical_texts(list(vocabulary))),
    )


def grid(
    columns: Sequence[str],
    box: Sequence[Real],
    *,
    level: int | None = None,
    cells: Iterable[str] | None = None,
) -> Grid:
    """Quadtree cells over a box (x0, y0, x1, y1): all of a level, or those listed by quadkey."""
    if len(columns) != 2 or len(box) != 4:
        raise InvalidInput("a grid has two columns and a box (x0, y0, x1, y1)")
    x0, y0, x1, y1 = (as_exact(edge) for edge in box)
    return Grid(
        columns=(columns[0], columns[1]),
        box=(x0, y0, x1, y1),
        level=level,
        cells=None if cells is None else tuple(cells),
    )
