"""Columns of a query's result, coded so that every distinct value is encoded only once.

Text is stored as codes into a list of its distinct values. An n-gram is stored as its position in
the coded text: to find a candidate, its words are looked up one by one.

All kinds of columns have the same methods: `cells` returns the cell of every row that is kept,
`marked` which of the kept rows have a marked value, `keys` integers that are equal where the values
are, `values` the values of the kept rows, and `take` some rows, perhaps repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.tables import needed
from chorister.encoding import (
    MAX_TEXT_CHARACTERS,
    Categories,
    Feature,
    PrefixTree,
    canonical_texts,
)

if TYPE_CHECKING:
    import polars


Ints: TypeAlias = NDArray[np.int64]
_Integer = TypeVar("_Integer", np.int32, np.int64)
Mask: TypeAlias = NDArray[np.bool_] | None
Marking: TypeAlias = Callable[[Sequence[Any]], list[bool]]
_CANONICAL: Final = r"^(?:[a-z0-9]+(?: [a-z0-9]+)*)?$"
_MAX_TABLE_ENTRIES: Final = 20_000_000  # of a lookup table that is used directly


@dataclass(frozen=True, eq=False, slots=True)
class CodedColumn:
    """Codes into a list of distinct values."""

    codes: NDArray[np.int32]
    distinct: list[Any]

    def cells(self, feature: Feature, keep: Mask) -> Ints:
        cells = np.array(feature.find(self.distinct), dtype=np.int64)
        return cells[_kept(self.codes, keep)]

    def marked(self, marking: Marking, keep: Mask) -> NDArray[np.bool_]:
        return np.array(marking(self.distinct), dtype=np.bool_)[_kept(self.codes, keep)]

    @property
    def keys(self) -> Ints:
        return self.codes.astype(np.int64)

    def values(self, keep: Mask) -> list[Any]:
        distinct = self.distinct
        return [distinct[code] for code in _kept(self.codes, keep).tolist()]

    def take(self, rows: Ints) -> CodedColumn:
        return CodedColumn(self.codes[rows], self.distinct)


@dataclass(frozen=True, eq=False, slots=True)
class NumberColumn:
    """Numbers, most of them distinct."""

    numbers: polars.Series

    @property
    def keys(self) -> Ints:
        return np.unique(self.numbers.to_numpy(), return_inverse=True)[1].astype(np.int64)

    def values(self, keep: Mask) -> list[Any]:
        chosen = self.numbers if keep is None else self.numbers.filter(keep)
        found: list[Any] = chosen.to_list()
        return found

    def cells(self, feature: Feature, keep: Mask) -> Ints:
        return np.array(feature.find(self.values(keep)), dtype=np.int64)

    def marked(self, marking: Marking, keep: Mask) -> NDArray[np.bool_]:
        return np.array(marking(self.values(keep)), dtype=np.bool_)

    def take(self, rows: Ints) -> NumberColumn:
        return NumberColumn(self.numbers[rows])


def _kept(codes: NDArray[_Integer], keep: Mask) -> NDArray[_Integer]:
    return codes if keep is None else codes[keep]


def column_of(values: polars.Series) -> CodedColumn | NumberColumn:
    """Code a column, unless it holds reals, which seldom repeat."""
    return NumberColumn(values) if values.dtype.is_float() else coded(values)


def coded(values: polars.Series) -> CodedColumn:
    arrow = values.to_arrow().dictionary_encode(null_encoding="encode")
    # Read the buffer: pyarrow's own conversion would load pandas.
    whole = np.frombuffer(arrow.indices.buffers()[1], dtype=np.int32)
    codes = whole[arrow.indices.offset : arrow.indices.offset + len(arrow)]
    return CodedColumn(codes, arrow.dictionary.to_pylist())


class WordIndex:
    """The words of a column of texts: text by text, in order, as codes into a vocabulary."""

    def __init__(self, texts: polars.Series) -> None:
        pl = needed("polars")
        several = coded(
            texts.cast(pl.String)
        )  # people repeat each other: cut each distinct text once
        distinct = pl.Series(several.distinct, dtype=pl.String)
        split = canonical(distinct).str.split(" ")
        numbers = pl.int_range(len(distinct), eager=True, dtype=pl.Int64)
        flat = (
            pl.DataFrame({"text": numbers, "word": split})
            .explode("word")
            .filter(pl.col("word").is_not_null() & (pl.col("word") != ""))
        )
        column = coded(flat["word"])
        lengths = np.bincount(flat["text"].to_numpy(), minlength=len(distinct)).astype(np.int64)
        begins = np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(lengths) else lengths
        each = lengths[several.codes]
        self.rows: Ints = np.repeat(np.arange(len(texts), dtype=np.int64), each)
        """The text that each word belongs to."""
        ends = np.cumsum(each)
        shift = np.repeat(begins[several.codes] - (ends - each), each)
        self.codes: NDArray[np.int32] = column.codes[shift + np.arange(len(shift))]
        self.vocabulary: list[str] = column.distinct

    @cached_property
    def index(self) -> dict[str, int]:
        return {word: code for code, word in enumerate(self.vocabulary)}

    @cached_property
    def longest_word(self) -> int:
        return max(map(len, self.vocabulary), default=0)

    def ngrams(self, n: int) -> tuple[Ints, NgramColumn]:
        """Return all n-grams of n words: the text that each belongs to, and the n-grams."""
        whole = max(len(self.rows) - n + 1, 0)
        starts = np.flatnonzero(self.rows[:whole] == self.rows[len(self.rows) - whole :])
        return self.rows[starts], NgramColumn(self, starts, n)


@dataclass(frozen=True, eq=False)
class NgramColumn:
    """N-grams, each as the position of its first word among all words."""

    words: WordIndex
    starts: Ints
    n: int

    def cells(self, feature: Feature, keep: Mask) -> Ints:
        starts = _kept(self.starts, keep)
        if isinstance(feature, Categories):
            texts = [value if isinstance(value, str) else "" for value in feature.values]
            paths = [text.split(" ") for text in texts]
            # Anything but n canonical words can't occur.
            ends = {
                tuple(path): cell
                for cell, path in enumerate(paths, start=1)
                if len(path) == self.n and "" not in path
            }
            return self._walk(starts, ends)
        # A tree ignores texts beyond a length, which no n-gram here exceeds.
        longest = self.n * (1 + self.words.longest_word)
        if isinstance(feature, PrefixTree) and longest <= MAX_TEXT_CHARACTERS:
            return self._grow(starts, feature)
        return self._plain.cells(feature, keep)

    def _walk(self, starts: Ints, ends: dict[tuple[str, ...], int]) -> Ints:
        """Return the number of the path that each n-gram's first words complete, or 0."""
        found = np.zeros(len(starts), dtype=np.int64)
        lengths = {len(path) for path in ends}
        for length in lengths:
            chosen = {path: cell for path, cell in ends.items() if len(path) == length}
            at, cell = _follow(self.words, starts, chosen, length)
            found[at] = cell
        return found

    def _grow(self, starts: Ints, tree: PrefixTree) -> Ints:
        """Find the prefix that each n-gram begins with, then the word after it."""
        width = 2 + len(tree.vocabulary)
        paths = {tuple(prefix.split()): i for i, prefix in enumerate(tree.prefixes, start=1)}
        cells = np.zeros(len(starts), dtype=np.int64)
        following = np.full(len(self.words.vocabulary), 1, dtype=np.int64)  # OOV
        for i, word in enumerate(tree.vocabulary, start=2):
            if (code := self.words.index.get(word)) is not None:
                following[code] = i
        for depth in sorted({len(path) for path in paths}):
            if depth > self.n:
                continue
            chosen = {path: i for path, i in paths.items() if len(path) == depth}
            if depth == 0:
                at, number = np.arange(len(starts)), np.ones(len(starts), dtype=np.int64)
            else:
                at, number = _follow(self.words, starts, chosen, depth)
            step = (
                following[self.words.codes[starts[at] + depth]]
                if depth < self.n
                else np.zeros(len(at), dtype=np.int64)  # END
            )
            cells[at] = 1 + (number - 1) * width + step
        return cells

    @property
    def keys(self) -> Ints:
        size = max(len(self.words.vocabulary), 1)
        return joined_keys([self.words.codes[self.starts + i] for i in range(self.n)], size)

    @cached_property
    def _plain(self) -> CodedColumn:
        """The same with every distinct n-gram as text, for features that have to read it."""
        names = self.words.vocabulary
        parts = [self.words.codes[self.starts + i] for i in range(self.n)]
        _, first, inverse = np.unique(self.keys, return_index=True, return_inverse=True)
        distinct = [" ".join(names[part[at]] for part in parts) for at in first.tolist()]
        return CodedColumn(inverse.astype(np.int32), distinct)

    def marked(self, marking: Marking, keep: Mask) -> NDArray[np.bool_]:
        return self._plain.marked(marking, keep)

    def values(self, keep: Mask) -> list[Any]:
        return self._plain.values(keep)

    def take(self, rows: Ints) -> NgramColumn:
        return NgramColumn(self.words, self.starts[rows], self.n)


def joined_keys(parts: Sequence[NDArray[Any]], size: int) -> Ints:
    """Return one number per tuple of numbers below `size`, equal where the tuples are."""
    key = parts[0].astype(np.int64)
    for part in parts[1:]:
        if int(key.max(initial=0)) >= 2**62 // size:
            key = np.unique(key, return_inverse=True)[1].astype(np.int64)
        key = key * size + part
    return key


def _follow(
    words: WordIndex, starts: Ints, paths: dict[tuple[str, ...], int], length: int
) -> tuple[Ints, Ints]:
    """Find which n-grams begin with one of the paths, all of `length` words, and with which one.

    Level by level: after i words, an n-gram has either followed the first i words of some path or
    is dropped. Most are dropped early.
    """
    get = words.index.get
    spelled = [[get(word, -1) for word in path] for path in paths]
    table = np.array(spelled, dtype=np.int64).reshape(len(paths), length)
    numbers = np.fromiter(paths.values(), dtype=np.int64, count=len(paths))
    known = (table >= 0).all(axis=1)  # nobody uses one of its words
    table, numbers = table[known], numbers[known]
    at = np.arange(len(starts), dtype=np.int64)
    state = np.zeros(len(starts), dtype=np.int64)
    path_state = np.zeros(len(table), dtype=np.int64)
    for level in range(length):
        size = len(words.vocabulary)
        edges, next_state = np.unique(path_state * size + table[:, level], return_inverse=True)
        key = state * size + words.codes[starts[at] + level]
        state = _lookup(edges, key, size * (int(path_state.max(initial=0)) + 1))
        inside = state >= 0
        at, state = at[inside], state[inside]
        path_state = next_state.astype(np.int64)
    number_of = np.zeros(int(path_state.max(initial=-1)) + 1, dtype=np.int64)
    number_of[path_state] = numbers
    return at, number_of[state]


def _lookup(sorted_keys: Ints, keys: Ints, space: int) -> Ints:
    """Return the position of each key among the sorted ones, or -1; by a table if it is small."""
    if space <= _MAX_TABLE_ENTRIES:
        table = np.full(space, -1, dtype=np.int32)
        table[sorted_keys] = np.arange(len(sorted_keys), dtype=np.int32)
        return table[keys].astype(np.int64)
    if not len(sorted_keys):
        return np.full(len(keys), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == keys, place, -1)


def canonical(texts: polars.Series) -> polars.Series:
    """Put texts into canonical form; texts that obviously already are stay untouched."""
    plain = texts.str.contains(_CANONICAL).fill_null(True).to_numpy()
    narrow = (texts.str.len_bytes() == texts.str.len_chars()).fill_null(True).to_numpy()
    # Separately, because one text beyond ASCII would slow down all others.
    for rows in (np.flatnonzero(~plain & narrow), np.flatnonzero(~plain & ~narrow)):
        if len(rows):
            texts = texts.scatter(rows, canonical_texts(texts[rows].to_list()))
    return texts


AnyColumn: TypeAlias = CodedColumn | NumberColumn | NgramColumn
