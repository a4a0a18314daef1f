"""A closed list of values."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import Field, StringConstraints, field_validator

from chorister.canonical import Int
from chorister.encoding.feature import OOV, Column, Indices, Listed, Values

__all__ = ["Categories"]

Value: TypeAlias = Annotated[str, StringConstraints(max_length=200, strict=True)] | Int


class Categories(Listed):
    """Cell i (from 1) is the i-th value, by exact equality of type and value; all else is OOV.

    Text is compared code point by code point, without folding: a category is a code, not prose.
    """

    kind: Literal["categories"] = "categories"
    column: Column
    values: Annotated[tuple[Value, ...], Field(min_length=1, max_length=1_000_000)]

    @field_validator("values")
    @classmethod
    def _distinct(cls, values: tuple[Value, ...]) -> tuple[Value, ...]:
        labels = {OOV}
        for value in values:
            # Also refuses 1 beside "1": both would read the same in a result.
            if str(value) in labels:
                raise ValueError(f"the label {str(value)!r} occurs twice (OOV is always there)")
            labels.add(str(value))
        return values

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """OOV and the values."""
        return (OOV, *(str(value) for value in self.values))

    @cached_property
    def _table(self) -> dict[Value, int]:
        return {value: i for i, value in enumerate(self.values, start=1)}

    def find(self, *columns: Values) -> Indices:
        """The cell of every value."""
        (values,) = columns
        get = self._table.get
        if {str, int, type(None)}.issuperset(map(type, values)):
            # None is never a key; equality of int and str keys is by type here.
            cells = [get(value, 0) for value in values]
        else:  # 1.0 and True equal 1 in Python, but are of the wrong type
            cells = [get(v, 0) if type(v) in (str, int) else 0 for v in values]
        return np.array(cells, dtype=np.int64)
