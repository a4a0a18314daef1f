"""The encoder turns the rows of a query's result into one bin: everything that touches data.

Devices run it inside the sandbox; rehearsals and analysts run the same code. Only the standard
library is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from random import SystemRandom
from typing import Final, Literal, TypeAlias

from chorister.encoding.lookup import (
    TOO_LONG,
    Fields,
    Lookup,
    Values,
    canonical_column,
    column_effort,
    count_cells,
    make_lookup,
)
from chorister.errors import InvalidInput

Selection: TypeAlias = Literal["uniform", "first"]

MAX_EFFORT: Final = 10_000_000
"""The most that all rows of an answer may cost. An ASCII character costs 1, or a tenth of a
microsecond at worst. A device with more reports OOV."""

_randbelow: Final = SystemRandom().randrange


class PhraseMatcher:
    """Tells whether a text contains one of many phrases, in time linear in its words.

    The automaton of Aho and Corasick (1975) with words for letters: a state is the longest start
    of a phrase that the words read so far end with.
    """

    def __init__(self, phrases: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._ends = [False]
        for phrase in (*phrases, TOO_LONG):  # text that can't be read might contain anything
            self._add(phrase.split(" "))
        self._fallback = [0] * len(self._next)
        self._link()

    def _add(self, words: Sequence[str]) -> None:
        state = 0
        for word in words:
            if self._next[state] is _NOWHERE:
                self._next[state] = {}
            following = self._next[state].setdefault(word, len(self._next))
            if following == len(self._next):
                self._next.append(_NOWHERE)
                self._ends.append(False)
            state = following
        self._ends[state] = True

    def _link(self) -> None:
        """Link each state to the longest other one with the same end, shortest states first."""
        states = list(self._next[0].values())
        for state in states:  # the list grows in this loop
            for word, following in self._next[state].items():
                states.append(following)
                self._fallback[following] = self._step(self._fallback[state], word)
                self._ends[following] |= self._ends[self._fallback[following]]

    def _step(self, state: int, word: str) -> int:
        while (following := self._next[state].get(word)) is None and state:
            state = self._fallback[state]
        return following or 0

    def contained(self, texts: Iterable[str]) -> list[bool]:
        """Return which of the texts, in canonical form, contain a phrase."""
        begins = self._next[0].keys()
        return [
            not begins.isdisjoint(words := text.split(" ")) and self._contains(words)
            for text in texts
        ]

    def _contains(self, words: Iterable[str]) -> bool:
        state, step, ends = 0, self._step, self._ends
        for word in words:
            state = step(state, word)
            if ends[state]:
                return True
        return False


_NOWHERE: Final[dict[str, int]] = {}
"""Shared by all states without a successor, and never written to."""


class WorkLimit:
    """Limits the work for all rows of an answer."""

    def __init__(self, effort: int = MAX_EFFORT) -> None:
        self.left = effort

    def spend(self, effort: int) -> None:
        """Pay for work before it is done; raise `InvalidInput` beyond the limit."""
        self.left -= effort
        if self.left < 0:
            raise InvalidInput("the query's result takes too much work to be encoded")


class _Texts:
    """The distinct texts of a column in canonical form: real text repeats itself."""

    def __init__(self, values: Values, limit: WorkLimit | None, weight: int) -> None:
        # By type: an author could make numbers collide, so they must not be keys of a table.
        self._texts = values
        if not set(map(type, values)) <= {str}:
            self._texts = [value if type(value) is str else None for value in values]
        if limit is not None:
            # Each is hashed, also one that is too long to be looked at: 32 characters cost 1.
            limit.spend(2 * len(values) + sum(map(len, filter(None, self._texts))) // 32)
        self._different = list(dict.fromkeys(self._texts))
        if limit is not None:
            limit.spend(weight * column_effort(self._different))
        self.canonical = canonical_column(self._different)

    def spread(self, found: Iterable[int]) -> list[int]:
        """Return for every row what was found for its text."""
        of_text = dict(zip(self._different, found, strict=True))
        return list(map(of_text.__getitem__, self._texts))


class Encoder:
    """Finds and selects bins, given features and deny lists as model fields or JSON.

    Bins are numbered in row-major order: the last feature changes fastest. Bin 0 is OOV in every
    feature.
    """

    def __init__(self, features: Sequence[Fields], deny: Sequence[Fields] = ()) -> None:
        self._lookups = [make_lookup(fields) for fields in features]
        self._sizes = [count_cells(fields) for fields in features]
        phrases: dict[str, list[str]] = {}
        for fields in deny:
            phrases.setdefault(fields["column"], []).extend(fields["phrases"])
        self._deny = {column: PhraseMatcher(each) for column, each in phrases.items()}
        read = [column for lookup in self._lookups for column in lookup.columns]
        self.columns = tuple(dict.fromkeys([*read, *self._deny]))
        """The columns that a row must have, without repetition."""
        of_words = {c for lookup in self._lookups if lookup.of_words for c in lookup.columns}
        self._of_words = of_words | self._deny.keys()

    @classmethod
    def parse(cls, data: bytes) -> Encoder:
        """Build an encoder from an encoding's canonical JSON."""
        tree = json.loads(data)
        return cls(tree["features"], tree["deny"])

    def find(self, columns: Mapping[str, Values], limit: WorkLimit | None = None) -> list[int]:
        """Return the bin of every row of the query's result, given by columns; -1 if denied."""
        for column in self.columns:
            if column not in columns:
                raise InvalidInput(f"the query's result has no column {column!r}")
        if len({len(columns[column]) for column in self.columns}) > 1:
            raise InvalidInput("the columns differ in length")
        texts = {
            name: _Texts(columns[name], limit, 2 if name in self._deny else 1)
            for name in self._of_words
        }
        bins: list[int] = []
        for lookup, size in zip(self._lookups, self._sizes, strict=True):
            cells = _cells(lookup, columns, texts, limit)
            if bins:
                cells = [bin_ * size + cell for bin_, cell in zip(bins, cells, strict=True)]
            bins = cells
        for name, matcher in self._deny.items():
            denied = texts[name].spread(matcher.contained(texts[name].canonical))
            bins = [-1 if no else bin_ for no, bin_ in zip(denied, bins, strict=True)]
        return bins

    def select(
        self,
        bins: Sequence[int],
        selection: Selection,
        *,
        randbelow: Callable[[int], int] = _randbelow,
    ) -> int:
        """Return the bin that a device reports, among the bins of its rows.

        Candidates are the rows that fit best: not denied, and OOV in as few features as possible.
        `uniform` draws one of these rows, `first` takes the smallest bin. Without any row it is 0:
        OOV in every feature.
        """
        if self._deny:
            bins = [bin_ for bin_ in bins if bin_ >= 0]
        if not bins:
            return 0
        misses = self._misses(bins)
        least = min(misses)
        candidates = list(compress(bins, map(least.__eq__, misses)))
        return min(candidates) if selection == "first" else candidates[randbelow(len(candidates))]

    def _misses(self, bins: Sequence[int]) -> list[int]:
        """Count for each row the features in which it is OOV."""
        size = math.prod(self._sizes)
        if size <= len(bins):  # then a loop over all bins is shorter
            table = [0]
            for cells in self._sizes:
                table = [count + (cell == 0) for count in table for cell in range(cells)]
            return list(map(table.__getitem__, bins))
        misses = [0] * len(bins)
        for cells in self._sizes:
            size //= cells
            misses = [
                count + (bin_ // size % cells == 0)
                for count, bin_ in zip(misses, bins, strict=True)
            ]
        return misses


def _cells(
    lookup: Lookup,
    columns: Mapping[str, Values],
    texts: Mapping[str, _Texts],
    limit: WorkLimit | None,
) -> list[int]:
    if lookup.of_words:
        (column,) = (texts[name] for name in lookup.columns)
        read: tuple[Values, ...] = (column.canonical,)
    else:
        read = tuple(columns[name] for name in lookup.columns)
    if limit is not None:
        limit.spend(lookup.effort(*read))
    found = lookup.find(*read)
    return column.spread(found) if lookup.of_words else found
