"""Features: bucketing rules that turn a value of a query's row into the index of a cell.

Cell 0 is OOV ("out of vocabulary"). Whatever has no other cell is OOV, including NULL, NaN, a wrong
type and an out-of-range value: every row of every device lands somewhere, so that silence reveals
nothing.

The models say what a recipe may ask; `chorister.encoding.lookup` finds the cells.
"""

from __future__ import annotations

import itertools
import operator
import re
from abc import ABC, abstractmethod
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints, field_validator, model_validator

from chorister.canonical import Int, Model, Number, decimal_text
from chorister.encoding.lookup import (
    MAX_PHRASE_CHARACTERS,
    Lookup,
    Values,
    canonical_column,
    count_cells,
    make_lookup,
)
from chorister.encoding.tokenizer import canonical_texts
from chorister.errors import InvalidInput

OOV: Final = "OOV"
"""The label of cell 0 of every feature."""

Column: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$", strict=True)
]
"""A column of the query's result."""

Phrase: TypeAlias = Annotated[str, StringConstraints(max_length=MAX_PHRASE_CHARACTERS, strict=True)]
"""Words in canonical form."""


def check_phrases(phrases: tuple[str, ...], *, max_words: int) -> tuple[str, ...]:
    """Raise `ValueError` unless all phrases are different, canonical and short enough."""
    if len(set(phrases)) != len(phrases):
        raise ValueError("an entry occurs twice")
    for phrase, canonical in zip(phrases, canonical_texts(phrases), strict=True):
        if phrase != canonical:
            raise ValueError(f"{phrase!r} is not in canonical form: write {canonical!r}")
        if phrase.count(" ") >= max_words:
            raise ValueError(f"{phrase!r} has more than {max_words} words")
    return phrases


class Feature(Model, ABC):
    """A bucketing rule. Cells are numbered 0 (OOV) to `size` - 1."""

    @property
    def size(self) -> int:
        """The number of cells, OOV included."""
        return count_cells(vars(self))

    @cached_property
    def lookup(self) -> Lookup:
        """The lookup that finds the cells."""
        return make_lookup(vars(self))

    def find(self, *columns: Values) -> list[int]:
        """Return the cell of every row, given the values of `lookup.columns`."""
        lookup = self.lookup
        return lookup.find(*(map(canonical_column, columns) if lookup.of_words else columns))

    @property
    @abstractmethod
    def columns_read(self) -> tuple[str, ...]:
        """The columns of the query's result that `find` takes, in order."""

    @abstractmethod
    def label(self, index: int) -> str:
        """Return the name of a cell, which is unique."""

    @abstractmethod
    def index(self, label: str) -> int:
        """The cell with this name."""

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.size:
            raise InvalidInput(f"index {index} is not in 0..{self.size - 1}")

    def _unknown(self, label: str) -> InvalidInput:
        return InvalidInput(f"{label[:80]!r} is not a label of this {type(self).__name__} feature")


class LabelledFeature(Feature):
    """A feature with few enough cells to keep all their labels."""

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """The names of all cells, OOV first."""

    @cached_property
    def _label_index(self) -> dict[str, int]:
        return {label: i for i, label in enumerate(self.labels)}

    def label(self, index: int) -> str:
        self._check_index(index)
        return self.labels[index]

    def index(self, label: str) -> int:
        try:
            return self._label_index[label]
        except KeyError:
            raise self._unknown(label) from None


class Intervals(LabelledFeature):
    """Half-open intervals of a number: `[10, 20)`, `[20, 30)`, ...

    Cell i (from 1) has `edges[i-1] <= value < edges[i]`; anything else is OOV. Edges are compared
    as the nearest doubles, which is what SQLite and JSON writers store.
    """

    kind: Literal["intervals"] = "intervals"
    column: Column
    edges: Annotated[tuple[Number, ...], Field(min_length=2, max_length=1_000_001)]

    @field_validator("edges")
    @classmethod
    def _increasing(cls, edges: tuple[Number, ...]) -> tuple[Number, ...]:
        doubles = list(map(float, edges))
        if not all(map(operator.lt, doubles, doubles[1:])):
            raise ValueError("edges must increase strictly, even as doubles")
        return edges

    @property
    def columns_read(self) -> tuple[str, ...]:
        return (self.column,)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        text = [decimal_text(edge) for edge in self.edges]
        return (OOV, *(f"[{a}, {b})" for a, b in itertools.pairwise(text)))

    def bounds(self, index: int) -> tuple[Number, Number]:
        """Return both ends of a cell other than OOV."""
        self._check_index(index)
        if index == 0:
            raise self._unknown(OOV)
        return self.edges[index - 1], self.edges[index]


Value: TypeAlias = Annotated[str, StringConstraints(max_length=200, strict=True)] | Int


class Categories(LabelledFeature):
    """A closed list of values: cell i (from 1) is the i-th one, anything else is OOV.

    Type and value must be equal. Text is compared by code point, without case folding: a category
    is a code, not prose.
    """

    kind: Literal["categories"] = "categories"
    column: Column
    values: Annotated[tuple[Value, ...], Field(min_length=1, max_length=1_000_000)]

    @field_validator("values")
    @classmethod
    def _distinct(cls, values: tuple[Value, ...]) -> tuple[Value, ...]:
        labels = {OOV}
        for value in values:
            # Also refuses 1 next to "1": both would look the same in a result.
            if str(value) in labels:
                raise ValueError(f"the label {str(value)!r} occurs twice (OOV always exists)")
            labels.add(str(value))
        return values

    @property
    def columns_read(self) -> tuple[str, ...]:
        return (self.column,)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return (OOV, *(str(value) for value in self.values))


_QUADKEY: Final = re.compile(r"[0-3]{1,24}")


class Grid(Feature):
    """Quadtree cells over a bounding box: a map at one level, or finer where it matters.

    Cells are named by quadkeys: each digit halves the box in both directions, and is (1 if in the
    upper half of x) + (2 if in the upper half of y). A grid has either a `level` (all 4^level cells
    in the order of their quadkeys) or a list of `cells` (quadkeys in any order, none inside
    another). Points outside the box, or outside every cell, are OOV.
    """

    kind: Literal["grid"] = "grid"
    columns: tuple[Column, Column]
    box: tuple[Number, Number, Number, Number]
    """x and y of the lower corner, then of the upper corner, which is outside."""
    level: Annotated[Int, Field(ge=1, le=12)] | None = None
    cells: Annotated[tuple[str, ...], Field(min_length=1, max_length=1_000_000)] | None = None

    @field_validator("box")
    @classmethod
    def _not_empty(cls, box: tuple[Number, Number, Number, Number]) -> tuple[Decimal, ...]:
        x0, y0, x1, y1 = (float(edge) for edge in box)
        if not (x0 < x1 and y0 < y1):
            raise ValueError(
                "the box must be [x0, y0, x1, y1] with x0 < x1 and y0 < y1, even as doubles"
            )
        return box

    @model_validator(mode="after")
    def _one_way(self) -> Grid:
        if (self.level is None) == (self.cells is None):
            raise ValueError("a grid needs either a level or a list of cells")
        for key in self.cells or ():
            if not _QUADKEY.fullmatch(key):
                raise ValueError(f"{key[:40]!r} is not a quadkey: 1 to 24 digits 0 to 3")
        ordered = sorted(self.cells or ())
        for a, b in itertools.pairwise(ordered):
            if b.startswith(a):
                raise ValueError(f"cell {b} is inside cell {a}: keep one of them")
        return self

    @property
    def columns_read(self) -> tuple[str, ...]:
        return self.columns

    def label(self, index: int) -> str:
        self._check_index(index)
        if index == 0:
            return OOV
        if self.cells is not None:
            return self.cells[index - 1]
        level, code = self.level or 0, index - 1
        return "".join(str(code >> 2 * (level - 1 - digit) & 3) for digit in range(level))

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
        """Return (x0, y0, x1, y1) of a cell other than OOV."""
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
    def _positions(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.cells or (), start=1)}
