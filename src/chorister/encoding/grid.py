"""Quadtree cells over a bounding box: a map at one level, or finer where it matters."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from chorister.canonical import Int, Number
from chorister.encoding.feature import OOV, Column, Feature, Indices, Values, as_numbers

__all__ = ["Grid"]

MAX_LEVEL: Final = 24
_QUADKEY: Final = re.compile(r"[0-3]{1,24}")


class Grid(Feature):
    """Cells named by quadkeys: each digit halves the box in both directions.

    A digit is (1 if in the upper half of x) + (2 if in the upper half of y). Either `level` (all
    4^level cells, in the order of their quadkeys) or `cells` (quadkeys, none inside another, in
    any order). Points outside the box, or outside every cell, are OOV.
    """

    kind: Literal["grid"] = "grid"
    columns: tuple[Column, Column]
    box: tuple[Number, Number, Number, Number]
    """x and y of the lower corner, then of the upper one, which lies outside."""
    level: Annotated[Int, Field(ge=1, le=12)] | None = None
    cells: Annotated[tuple[str, ...], Field(min_length=1, max_length=1_000_000)] | None = None

    @field_validator("box")
    @classmethod
    def _not_empty(cls, box: tuple[Number, Number, Number, Number]) -> tuple[Decimal, ...]:
        x0, y0, x1, y1 = (float(edge) for edge in box)
        if not (x0 < x1 and y0 < y1):
            raise ValueError("the box is [x0, y0, x1, y1] with x0 < x1 and y0 < y1, as doubles too")
        return box

    @model_validator(mode="after")
    def _one_way(self) -> Grid:
        if (self.level is None) == (self.cells is None):
            raise ValueError("a grid has either a level or a list of cells")
        for key in self.cells or ():
            if not _QUADKEY.fullmatch(key):
                raise ValueError(f"{key[:40]!r} is not a quadkey: 1 to 24 digits 0 to 3")
        ordered = sorted(self.cells or ())
        for a, b in itertools.pairwise(ordered):
            if b.startswith(a):
                raise ValueError(f"cell {b} lies inside cell {a}")
        return self

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The columns of x and y."""
        return self.columns

    @property
    def size(self) -> int:
        """OOV and the cells."""
        return 1 + (len(self.cells) if self.cells is not None else 4 ** (self.level or 0))

    def label(self, index: int) -> str:
        """The quadkey of a cell."""
        self._check_index(index)
        if index == 0:
            return OOV
        if self.cells is not None:
            return self.cells[index - 1]
        return np.base_repr(index - 1, 4).zfill(self._depth)

    def index(self, label: str) -> int:
        """The cell with this quadkey."""
        if label == OOV:
            return 0
        if self.cells is not None:
            found = self._positions.get(label)
        elif len(label) == self.level and _QUADKEY.fullmatch(label):
            found = int(label, 4) + 1
        else:
            found = None
        if found is None:
            raise self._unknown(label)
        return found

    def rectangle(self, index: int) -> tuple[float, float, float, float]:
        """(x0, y0, x1, y1) of a cell other than OOV."""
        key = self.label(index)
        if index == 0:
            raise self._unknown(OOV)
        x0, y0, x1, y1 = (float(edge) for edge in self.box)
        width, height = (x1 - x0) / 2 ** len(key), (y1 - y0) / 2 ** len(key)
        column = int("".join(str(int(digit) & 1) for digit in key), 2)
        row = int("".join(str(int(digit) >> 1) for digit in key), 2)
        left, lower = x0 + column * width, y0 + row * height
        return left, lower, left + width, lower + height

    @cached_property
    def _depth(self) -> int:
        """The level of the finest cell."""
        return self.level or max(len(key) for key in self.cells or ("",))

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.cells or (), start=1)}

    @cached_property
    def _ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """First and last Morton code (at the finest level) of each cell, and its index."""
        depth = self._depth
        rows = sorted(
            (int(key, 4) << 2 * (depth - len(key)), 4 ** (depth - len(key)), i)
            for key, i in self._positions.items()
        )
        table = np.array(rows, dtype=np.int64)
        return table[:, 0], table[:, 0] + table[:, 1] - 1, table[:, 2]

    def find(self, *columns: Values) -> Indices:
        """The cell of every point."""
        x, y = (as_numbers(values) for values in columns)
        x0, y0, x1, y1 = (float(edge) for edge in self.box)
        inside = (x >= x0) & (x < x1) & (y >= y0) & (y < y1)  # false for NaN
        cells = np.zeros(len(x), dtype=np.int64)
        code = _morton(
            _steps(x[inside], x0, x1, self._depth), _steps(y[inside], y0, y1, self._depth)
        )
        if self.cells is None:
            cells[inside] = code + 1
            return cells
        first, last, index = self._ranges
        at = np.searchsorted(first, code, side="right") - 1
        cells[inside] = np.where((at >= 0) & (code <= last[at]), index[at], 0)
        return cells


def _steps(values: NDArray[np.float64], low: float, high: float, depth: int) -> Indices:
    """Which of 2^depth equal parts; scaling by a power of two is exact, so levels nest."""
    parts = np.floor((values - low) / (high - low) * 2.0**depth).astype(np.int64)
    # The quotient of a value just below `high` can round to 1.
    parts[parts == 2**depth] -= 1
    return parts


def _morton(x: Indices, y: Indices) -> Indices:
    """Interleave the bits: x in the even places, y in the odd ones."""
    return _spread(x) | (_spread(y) << 1)


def _spread(n: Indices) -> Indices:
    for shift, mask in (
        (16, 0x0000FFFF0000FFFF),
        (8, 0x00FF00FF00FF00FF),
        (4, 0x0F0F0F0F0F0F0F0F),
        (2, 0x3333333333333333),
        (1, 0x5555555555555555),
    ):
        n = (n | (n << shift)) & mask
    return n
