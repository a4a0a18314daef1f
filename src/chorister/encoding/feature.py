"""What all features share: a list of cells of which the first, 0, is OOV ("out of vocabulary").

A feature turns a value (or a pair of values) of a query's row into the index of a cell. Whatever
has no cell, NULL, NaN, a wrong type and an out-of-range value included, is OOV: every row of every
device lands somewhere, so that silence tells nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import StringConstraints

from chorister.canonical import Model
from chorister.errors import InvalidInput

__all__ = ["OOV", "Column", "Feature", "Indices", "Values", "as_numbers"]

OOV: Final = "OOV"
"""The label of cell 0 of every feature."""

Column: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$", strict=True)
]
"""The name of a column of the query's result."""

Values: TypeAlias = Sequence[Any]
"""A column as SQLite gives it: None, int, float, str or bytes."""

Indices: TypeAlias = NDArray[np.int64]


class Feature(Model, ABC):
    """A bucketing rule. Cells are numbered 0 (OOV) to `size` - 1."""

    @property
    @abstractmethod
    def columns_read(self) -> tuple[str, ...]:
        """The columns of the query's result that `find` takes, in this order."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of cells, OOV included."""

    @abstractmethod
    def label(self, index: int) -> str:
        """The name of a cell; no two cells share one."""

    @abstractmethod
    def index(self, label: str) -> int:
        """The cell with this name."""

    @abstractmethod
    def find(self, *columns: Values) -> Indices:
        """The cell of every row."""

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.size:
            raise InvalidInput(f"index {index} is outside 0..{self.size - 1}")

    def _unknown(self, label: str) -> InvalidInput:
        return InvalidInput(f"{label[:80]!r} is not a label of this {type(self).__name__} feature")


class Listed(Feature):
    """A feature short enough to keep all its labels."""

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """The names of all cells, OOV first."""

    @property
    def size(self) -> int:
        """The number of cells, OOV included."""
        return len(self.labels)

    @cached_property
    def _label_index(self) -> dict[str, int]:
        return {label: i for i, label in enumerate(self.labels)}

    def label(self, index: int) -> str:
        """The name of a cell."""
        self._check_index(index)
        return self.labels[index]

    def index(self, label: str) -> int:
        """The cell with this name."""
        try:
            return self._label_index[label]
        except KeyError:
            raise self._unknown(label) from None


_NUMBERS: Final = frozenset({int, float, type(None)})


def as_numbers(values: Values) -> NDArray[np.float64]:
    """A column as doubles; whatever is not a number (text that spells one, too) becomes NaN."""
    try:
        if _NUMBERS.issuperset(map(type, values)):
            return np.array(values, dtype=np.float64)
    except OverflowError:
        pass  # an integer beyond the doubles: told apart below
    return np.array([_as_number(value) for value in values], dtype=np.float64)


def _as_number(value: object) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    return float("nan")
