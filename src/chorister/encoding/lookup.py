"""Finding cells: the part of every feature that touches data.

The models in `features` and `prefix_tree` say what a recipe may ask. A lookup is built from a
model's fields, or from the same fields in the recipe's JSON. Devices run lookups inside the
sandbox, so only the standard library is imported here: `map`, `bisect` and `dict.get` are as fast
as numpy on these columns.

Tables are built before there is data. An author can't choose keys that collide: numbers are sorted
or spelled out, and text is hashed with the process' random seed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, repeat
from operator import itemgetter
from typing import Any, Final, TypeAlias

from chorister.encoding.tokenizer import canonical_texts, effort

Values: TypeAlias = Sequence[Any]
"""A column as SQLite returns it: None, int, float, str or bytes."""
Fields: TypeAlias = Mapping[str, Any]
"""A feature's fields by name: the attributes of its model, or its JSON."""

MAX_TEXT_CHARACTERS: Final = 65_536
"""A longer text is not split into words: it is OOV, or denied."""
MAX_PHRASE_CHARACTERS: Final = 400
"""The longest prefix, word of a vocabulary or denied phrase."""
MAX_INT: Final = 2**53 - 1
"""The largest category; as in canonical JSON."""
NO_TEXT: Final = "\0"
TOO_LONG: Final = "\0\0"
EXTRA_STEPS: Final = 2
"""END and OOV, the first two cells of every prefix of a tree."""


def canonical_column(values: Values) -> list[str]:
    """Return the canonical form of every text; `NO_TEXT` or `TOO_LONG` where there is none."""
    if set(map(type, values)) <= {str} and max(map(len, values), default=0) <= MAX_TEXT_CHARACTERS:
        return canonical_texts(values)
    found = [TOO_LONG if type(value) is str else NO_TEXT for value in values]
    rows = [
        i
        for i, value in enumerate(values)
        if type(value) is str and len(value) <= MAX_TEXT_CHARACTERS
    ]
    for i, text in zip(rows, canonical_texts([values[i] for i in rows]), strict=True):
        found[i] = text
    return found


def _bisection(table: Sequence[object]) -> int:
    """Return the effort of a bisection. Its last comparisons miss the processor's caches."""
    comparisons = len(table).bit_length()
    return comparisons // 2 + 3 * max(comparisons - 14, 0)


def column_effort(values: Values) -> int:
    """Return the most that `canonical_column` costs, in the unit of `tokenizer.effort`."""
    return effort(v for v in values if type(v) is str and len(v) <= MAX_TEXT_CHARACTERS)


class Lookup(ABC):
    """Finds the cells of one feature; 0 is OOV, for everything that has no other cell."""

    columns: tuple[str, ...]
    """The columns of the query's result that `find` takes, in order."""
    of_words = False
    """Whether `find` takes columns in canonical form, from `canonical_column`."""
    _row_effort: int

    def effort(self, *columns: Values) -> int:
        """Return the most that `find` costs, in the unit of `tokenizer.effort`."""
        return self._row_effort * len(columns[0])

    @abstractmethod
    def find(self, *columns: Values) -> list[int]:
        """Return the cell of every row."""


class _IntervalsLookup(Lookup):
    def __init__(self, fields: Fields) -> None:
        self.columns = (fields["column"],)
        self._edges = list(map(float, fields["edges"]))
        self._row_effort = 2 + _bisection(self._edges)
        # Below the first edge is 0; above the last, and for NaN, bisection ends after it.
        self._cells = [*range(len(self._edges)), 0]

    def find(self, *columns: Values) -> list[int]:
        places = map(partial(bisect_right, self._edges), _as_numbers(columns[0]))
        return list(map(self._cells.__getitem__, places))


class _CategoriesLookup(Lookup):
    def __init__(self, fields: Fields) -> None:
        self.columns = (fields["column"],)
        # A long table does not fit into the processor's caches.
        self._row_effort = 6 if len(fields["values"]) <= 10_000 else 14
        self._tables: dict[type, dict[str, int]] = {str: {}, int: {}}
        for i, value in enumerate(fields["values"], start=1):
            # Integers are spelled out: their hashes are predictable and can be made to collide.
            self._tables[type(value)][str(value)] = i

    def effort(self, *columns: Values) -> int:
        """Add the length of texts, which are read when hashed."""
        texts = (value for value in columns[0] if type(value) is str)
        return super().effort(*columns) + sum(map(len, texts))

    def find(self, *columns: Values) -> list[int]:
        (values,) = columns
        texts, integers = self._tables[str].get, self._tables[int].get
        if set(map(type, values)) <= {str, type(None)}:  # the most common case
            return list(map(texts, values, repeat(0)))
        # By type, because True and 1.0 equal 1; huge integers would take long to spell.
        return [
            texts(value, 0)
            if type(value) is str
            else integers(str(value), 0)
            if type(value) is int and -MAX_INT <= value <= MAX_INT
            else 0
            for value in values
        ]


class _GridLookup(Lookup):
    """Numbers points by their Morton codes at the finest level, from 1; 0 is outside."""

    def __init__(self, fields: Fields) -> None:
        self.columns = tuple(fields["columns"])
        self._box = tuple(map(float, fields["box"]))
        cells = fields.get("cells")
        self._row_effort = 8 + 2 * _bisection(cells or ())
        depth = fields["level"] if cells is None else max(map(len, cells))
        self._parts = 2.0**depth
        # Tables by the upper bits of x and y, and by the lower ones, so that none is long. There
        # is one extra entry: the quotient of a value just below the box' end can round to 1.
        self._low = max(depth - 12, 0)
        upper = [_spread(n << self._low) for n in range(2 ** (depth - self._low))]
        upper.append(_spread(2**depth - 1))
        lower = [_spread(n) for n in range(2**self._low)]
        self._x = upper, [code + 1 for code in lower]
        self._y = [2 * code for code in upper], [2 * code for code in lower]
        self._ranges: tuple[list[int], list[int], list[int]] | None = None
        if cells is not None:
            # The first and the last number in each cell, and the cell's index. Quadkeys sort like
            # their codes, because none begins another.
            order = sorted(range(len(cells)), key=cells.__getitem__)
            first = [int(cells[i].ljust(depth, "0"), 4) + 1 for i in order]
            last = [int(cells[i].ljust(depth, "3"), 4) + 1 for i in order]
            self._ranges = first, last, [i + 1 for i in order]

    def find(self, *columns: Values) -> list[int]:
        numbers = self._numbers(*map(_as_numbers, columns))
        if self._ranges is None:
            return numbers
        first, last, index = self._ranges
        places = map(partial(bisect_right, first), numbers)
        return [
            index[place - 1] if place and number <= last[place - 1] else 0
            for place, number in zip(places, numbers, strict=True)
        ]

    def _numbers(self, across: Sequence[float], up: Sequence[float]) -> list[int]:
        """Scaling by a power of two is exact, so levels nest."""
        x0, y0, x1, y1 = self._box
        width, height, parts, low = x1 - x0, y1 - y0, self._parts, self._low
        mask = (1 << low) - 1
        (x_upper, x_lower), (y_upper, y_lower) = self._x, self._y
        return [
            x_upper[(i := int((x - x0) / width * parts)) >> low] + x_lower[i & mask]
            + y_upper[(j := int((y - y0) / height * parts)) >> low] + y_lower[j & mask]
            if x0 <= x < x1 and y0 <= y < y1 else 0
            for x, y in zip(across, up, strict=True)
        ]  # fmt: skip


def _spread(number: int) -> int:
    """Insert a zero bit between any two bits."""
    return int(f"{number:b}", 4)


class TreeLookup(Lookup):
    """Finds the cells of a prefix tree, plain or hashed."""

    of_words = True
    _step_effort = 6

    def __init__(self, fields: Fields) -> None:
        self.columns = (fields["column"],)
        prefixes, vocabulary = fields["prefixes"], fields["vocabulary"]
        width = EXTRA_STEPS + len(vocabulary)
        self.bases = {prefix: 1 + i * width for i, prefix in enumerate(prefixes)}
        """The first cell of each prefix, by the prefix as the recipe spells it."""
        self.steps = {word: i for i, word in enumerate(vocabulary, start=EXTRA_STEPS)}
        """The distance of each word from a prefix's first cell."""
        self._depths = self._find_depths(fields)
        self._row_effort = self._step_effort * (1 + len(self._depths))

    def find(self, *columns: Values) -> list[int]:
        (texts,) = columns
        cells = [0] * len(texts)
        bases, steps, depths = self.bases, self.steps, self._depths
        key, most = self._key(), depths[-1] + 1
        for i in self._promising(texts):
            parts = texts[i].split(" ", most)
            for depth in depths:
                if depth > len(parts):
                    break
                base = bases.get(key(" ".join(parts[:depth])))
                if base is not None:
                    ends = depth == len(parts) or not parts[depth]
                    cells[i] = base if ends else base + steps.get(key(parts[depth]), 1)
                    break
        return cells

    @abstractmethod
    def _find_depths(self, fields: Fields) -> Sequence[int]:
        """Return how many words the prefixes have, increasing."""

    def _promising(self, texts: Values) -> Iterable[int]:
        """Return which texts may match a prefix; all others are OOV."""
        return [i for i, text in enumerate(texts) if not text.startswith(NO_TEXT)]

    @abstractmethod
    def _key(self) -> Callable[[str], str]:
        """Return the function that spells text as the recipe does, or "" if it can't."""


class _PlainTreeLookup(TreeLookup):
    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        shortest = min(map(len, self.bases))
        self._head = itemgetter(slice(0, shortest))
        self._heads = frozenset(map(self._head, self.bases))

    def _find_depths(self, fields: Fields) -> Sequence[int]:
        return sorted({len(prefix.split()) for prefix in fields["prefixes"]})

    def _promising(self, texts: Values) -> Iterable[int]:
        if "" in self.bases:
            return super()._promising(texts)
        # Those that begin with the same letters as a prefix: few do, and the loop runs in C.
        return compress(range(len(texts)), map(self._heads.__contains__, map(self._head, texts)))

    def _key(self) -> Callable[[str], str]:
        return str


class _HashedTreeLookup(TreeLookup):
    _step_effort = 20

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self._salt = bytes.fromhex(fields["salt"])

    def _find_depths(self, fields: Fields) -> Sequence[int]:
        return tuple(fields["depths"])

    def _key(self) -> Callable[[str], str]:
        salt = self._salt
        # Real text repeats itself: each phrase is hashed once per column.
        known: dict[str, str] = {}

        def key(text: str) -> str:
            found = known.get(text)
            if found is None:
                short = len(text) <= MAX_PHRASE_CHARACTERS
                found = known[text] = hash_phrase(salt, text) if short else ""
            return found

        return key


def hash_phrase(salt: bytes, text: str) -> str:
    """Hash a prefix or a word as hashed trees do: 16 bytes of SHA-256(salt || text)."""
    return hashlib.sha256(salt + text.encode("utf-8")).hexdigest()[:32]


_KINDS: Final[Mapping[str, Callable[[Fields], Lookup]]] = {
    "intervals": _IntervalsLookup,
    "categories": _CategoriesLookup,
    "grid": _GridLookup,
    "prefix_tree": _PlainTreeLookup,
    "hashed_prefix_tree": _HashedTreeLookup,
}


def make_lookup(fields: Fields) -> Lookup:
    return _KINDS[fields["kind"]](fields)


def count_cells(fields: Fields) -> int:
    """Return the number of a feature's cells, including OOV."""
    match fields["kind"]:
        case "intervals":
            return len(fields["edges"])
        case "categories":
            return 1 + len(fields["values"])
        case "grid":
            cells = fields.get("cells")
            return 1 + (4 ** fields["level"] if cells is None else len(cells))
        case _:
            return 1 + len(fields["prefixes"]) * (EXTRA_STEPS + len(fields["vocabulary"]))


_NAN: Final = float("nan")


def _as_numbers(values: Values) -> Sequence[float]:
    """Convert a column to doubles; what is not a number, even numeric text, becomes NaN."""
    types = set(map(type, values))
    if types <= {float}:
        return values
    if types <= {int}:
        try:
            return list(map(float, values))
        except OverflowError:
            pass  # an integer beyond the doubles becomes infinite below
    return list(map(_as_number, values))


def _as_number(value: object) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    return _NAN
