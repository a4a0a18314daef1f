"""Columns of a query's result, coded so that every value is encoded once.

Text is kept as codes into a list of its different values. n-grams are kept as numbers made of their
words' codes: to look a candidate up, its words are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.extras import needed
from chorister.encoding import Feature, canonical_texts

if TYPE_CHECKING:
    import polars

__all__ = ["Column", "Ngrams", "NumberColumn", "coded", "ngram_rows"]

Ints: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_] | None
Marking: TypeAlias = Callable[[Sequence[Any]], NDArray[np.bool_]]
_CANONICAL: Final = r"^(?:[a-z0-9]+(?: [a-z0-9]+)*)?$"


@dataclass(frozen=True, eq=False, slots=True)
class Column:
    """A column as codes into its different values."""

    codes: Ints
    distinct: list[Any]

    def cells(self, feature: Feature, keep: Mask) -> Ints:
        """The cell of every row that is kept."""
        return feature.find(self.distinct)[_kept(self.codes, keep)]

    def marked(self, marking: Marking, keep: Mask) -> NDArray[np.bool_]:
        """Which of the kept rows are marked, by their value."""
        return marking(self.distinct)[_kept(self.codes, keep)]

    def values(self, keep: Mask) -> list[Any]:
        """The kept rows' values."""
        distinct = self.distinct
        return [distinct[code] for code in _kept(self.codes, keep).tolist()]

    def take(self, rows: Ints) -> Column:
        """Some rows, perhaps repeated."""
        return Column(self.codes[rows], self.distinct)


@dataclass(frozen=True, eq=False, slots=True)
class NumberColumn:
    """A column of numbers, many of them different."""

    numbers: polars.Series

    def values(self, keep: Mask) -> list[Any]:
        """The kept rows' values."""
        chosen = self.numbers if keep is None else self.numbers.filter(keep)
        found: list[Any] = chosen.to_list()
        return found

    def cells(self, feature: Feature, keep: Mask) -> Ints:
        """The cell of every row that is kept."""
        return feature.find(self.values(keep))

    def marked(self, marking: Marking, keep: Mask) -> NDArray[np.bool_]:
        """Which of the kept rows are marked, by their value."""
        return marking(self.values(keep))

    def take(self, rows: Ints) -> NumberColumn:
        """Some rows, perhaps repeated."""
        return NumberColumn(self.numbers[rows])


def _kept(codes: Ints, keep: Mask) -> Ints:
    return codes if keep is None else codes[keep]


def coded(values: polars.Series) -> Column | NumberColumn:
    """A column, coded if it is text or repeats itself."""
    if values.dtype.is_float():
        return NumberColumn(values)
    arrow = values.to_arrow().dictionary_encode(null_encoding="encode")
    if hasattr(arrow, "combine_chunks"):
        arrow = arrow.combine_chunks()
    codes = np.asarray(arrow.indices, dtype=np.int64)
    distinct = arrow.dictionary.to_pylist()
    return Column(codes, distinct)


@dataclass(frozen=True, eq=False, slots=True)
class Ngrams:
    """What cutting texts into n-grams gives: whose row each is, and the n-grams."""

    rows: Ints  # the row of the text that each n-gram is of
    column: Column


def ngram_rows(texts: polars.Series, n: int) -> Ngrams:
    """All n-grams of n words, text by text, in order; what is not text has none."""
    pl = needed("polars")
    words = canonical(texts)
    split = words.str.split(" ")
    frame = pl.DataFrame({"row": pl.int_range(len(texts), eager=True, dtype=pl.Int64), "w": split})
    flat = frame.explode("w").filter(pl.col("w").is_not_null() & (pl.col("w") != ""))
    rows = flat["row"].to_numpy()
    single = coded(flat["w"])
    if not isinstance(single, Column):
        raise TypeError("words are text")
    whole = len(rows) - n + 1
    if whole <= 0:
        return Ngrams(np.zeros(0, dtype=np.int64), Column(np.zeros(0, dtype=np.int64), []))
    inside = rows[:whole] == rows[n - 1 :]
    if n == 1:
        return Ngrams(rows, single)
    parts = [single.codes[i : i + whole][inside] for i in range(n)]
    key, first = _numbered(parts, len(single.distinct))
    names = single.distinct
    distinct = [" ".join(names[part[at]] for part in parts) for at in first.tolist()]
    return Ngrams(rows[:whole][inside], Column(key, distinct))


def _numbered(parts: list[Ints], size: int) -> tuple[Ints, Ints]:
    """Number the different tuples of codes; where each occurs first."""
    key = parts[0]
    scale = size
    for part in parts[1:]:
        if scale > 2**62 // max(size, 1):
            _, key = np.unique(key, return_inverse=True)
            scale = int(key.max(initial=0)) + 1
        key = key * size + part
        scale *= size
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return inverse.astype(np.int64), first


def canonical(texts: polars.Series) -> polars.Series:
    """Texts in canonical form; those that plainly are in it already are not touched."""
    pl = needed("polars")
    strings = texts.cast(pl.String)
    plain = strings.str.contains(_CANONICAL).fill_null(True).to_numpy()
    if plain.all():
        return strings
    odd = np.flatnonzero(~plain)
    fixed = canonical_texts(strings[odd].to_list())
    return strings.scatter(odd, fixed)
