"""Half-open intervals of a number: `[10, 20)`, `[20, 30)`, ..."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from chorister.canonical import Number, decimal_text
from chorister.encoding.feature import OOV, Column, Indices, Listed, Values, as_numbers

__all__ = ["Intervals"]


class Intervals(Listed):
    """Cell i (from 1) is `edges[i-1] <= value < edges[i]`; below, above and no number are OOV.

    Edges are compared as the nearest doubles, which is what SQLite and JSON writers store.
    """

    kind: Literal["intervals"] = "intervals"
    column: Column
    edges: Annotated[tuple[Number, ...], Field(min_length=2, max_length=1_000_001)]

    @field_validator("edges")
    @classmethod
    def _increasing(cls, edges: tuple[Number, ...]) -> tuple[Number, ...]:
        doubles = np.array(edges, dtype=np.float64)
        if not np.all(doubles[1:] > doubles[:-1]):
            raise ValueError("edges must increase strictly, as doubles too")
        return edges

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    @property
    def size(self) -> int:
        """OOV and one cell between each two edges."""
        return len(self.edges)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """OOV, "[10, 20)", ..."""
        text = [decimal_text(edge) for edge in self.edges]
        return (OOV, *(f"[{a}, {b})" for a, b in itertools.pairwise(text)))

    def bounds(self, index: int) -> tuple[Number, Number]:
        """Both ends of a cell other than OOV."""
        self._check_index(index)
        if index == 0:
            raise self._unknown(OOV)
        return self.edges[index - 1], self.edges[index]

    @cached_property
    def _doubles(self) -> NDArray[np.float64]:
        return np.array(self.edges, dtype=np.float64)

    def find(self, *columns: Values) -> Indices:
        """The cell of every value."""
        numbers = as_numbers(columns[0])
        cells = np.searchsorted(self._doubles, numbers, side="right").astype(np.int64)
        # searchsorted puts NaN and everything above the last edge at the end.
        cells[cells == len(self.edges)] = 0
        return cells
