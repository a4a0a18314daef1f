"""The encodings that cost most, on the rows that make them cost most.

Each has as many rows as a device encodes before it gives up, so that its time is the longest that
an encoding of its kind can take. `seconds` is what a sandbox does after it has the encoding, query
aside: make the tables, then weigh, find and select.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, TypeAlias

from chorister.device.sandbox.query import MAX_ROWS, ROWS_PER_BLOCK
from chorister.encoding import Categories, DenyList, Encoding, Grid, Intervals, PrefixTree
from chorister.encoding.encoder import MAX_EFFORT, Encoder, WorkLimit
from chorister.encoding.lookup import MAX_TEXT_CHARACTERS
from chorister.errors import InvalidInput
from chorister.unicode14 import JOINING

Rows: TypeAlias = Callable[[int], dict[str, list[Any]]]
"""Columns of so many rows, the next ones each time."""
Case: TypeAlias = Callable[[], tuple[Encoding, Rows]]


def seconds(encoding: Encoding, rows: Rows) -> tuple[float, float]:
    """Of the processor; and the share of the permitted effort or rows that was used."""
    data = encoding.canonical
    start = time.process_time()
    encoder = Encoder.parse(data)
    spent = time.process_time() - start
    bins: list[int] = []
    budget, step = WorkLimit(), _block(encoder, rows)
    while len(bins) + step <= MAX_ROWS:
        left, columns = budget.left, rows(step)
        start = time.process_time()
        try:
            bins += encoder.find(columns, budget)
        except InvalidInput:
            budget = WorkLimit(left)
            break
        finally:
            spent += time.process_time() - start
    start = time.process_time()
    encoder.select(bins, "uniform")
    spent += time.process_time() - start
    return spent, max(1 - budget.left / MAX_EFFORT, len(bins) / MAX_ROWS)


def _block(encoder: Encoder, rows: Rows) -> int:
    """As many rows as a sandbox takes at once, or as fit several times."""
    budget = WorkLimit(10 * MAX_EFFORT)
    encoder.find(rows(1), budget)
    one = 10 * MAX_EFFORT - budget.left
    return max(1, min(ROWS_PER_BLOCK, MAX_EFFORT // (20 * one)))


def _filled(unit: str) -> str:
    """A text as long as is looked at."""
    return (unit * MAX_TEXT_CHARACTERS)[:MAX_TEXT_CHARACTERS]


def _texts(*some: str) -> Rows:
    """The same texts again and again, as new objects: a hash that one keeps helps no other."""
    pool = itertools.cycle(text.encode() for text in some)
    return lambda count: {"x": [next(pool).decode() for _ in range(count)]}


def _all_characters(end: str) -> Rows:
    """Texts of which each has characters that none before it had, and the same end."""
    known = filter(lambda code: not 0xD800 <= code < 0xE000, range(1, 0x110000))
    return lambda count: {
        "x": ["".join(map(chr, itertools.islice(known, 5_000))) + end for _ in range(count)]
    }


def _numbered(form: str) -> Rows:
    """Texts that all differ."""
    numbers = itertools.count()
    return lambda count: {"x": [form.format(next(numbers)) for _ in range(count)]}


def _points(count: int) -> dict[str, list[Any]]:
    rng = random.Random(1)  # noqa: S311 (synthetic data)
    return {name: [rng.random() for _ in range(count)] for name in "xy"}


def _uniform(limit: float) -> Rows:
    rng = random.Random(1)  # noqa: S311 (synthetic data)
    return lambda count: {"x": [limit * rng.random() for _ in range(count)]}


def _denying(*lists: tuple[str, ...]) -> Encoding:
    return Encoding((TREE,), tuple(DenyList(column="x", phrases=each) for each in lists))


def _piled_marks() -> str:
    """Letters with 30 marks each, in a bad order, and capitals that make folding go on."""
    rng, marks = random.Random(1), sorted(JOINING)  # noqa: S311 (synthetic data)
    return _filled("".join("Aǖ" + "".join(rng.choices(marks, k=30)) for _ in range(300)))


def _quadkeys(count: int) -> tuple[str, ...]:
    rng = random.Random(1)  # noqa: S311 (synthetic data)
    return tuple({"".join(rng.choices("0123", k=24)): None for _ in range(count)})


def colliding(count: int, size: int) -> tuple[list[int], int]:
    """Integers, and one more, that a hash table of `size` slots would find last of all.

    Python's dictionaries look at slot h, then s becomes 5 s + 1 + (h >> 5), and so on, where the
    shifted h ends in 0: so the integers fill the slots in the order in which the last one looks.
    """
    absent = size + 1
    slot, perturb, found = absent % size, absent, dict[int, None]()
    while len(found) < count:
        found[slot] = None
        perturb >>= 5
        slot = (5 * slot + perturb + 1) % size
    return list(found), absent


WORDS: Final = tuple(f"w{i}" for i in range(990))
TREE: Final = PrefixTree(column="x", prefixes=("a", "b"), vocabulary=WORDS)
DEEP: Final = PrefixTree(
    column="x",
    prefixes=tuple(" ".join([*["a"] * depth, "b"]) for depth in range(8)),
    vocabulary=WORDS,
)
THIN: Final = PrefixTree(column="x", prefixes=DEEP.prefixes[-1:], vocabulary=("a",))
"""With so few cells that eight of them are permitted."""
SALT: Final = bytes(16)
BOX: Final = (Decimal(0), Decimal(0), Decimal(1), Decimal(1))
NEARLY: Final = tuple(  # phrases of all lengths that almost match a text of one repeated word
    tuple(f"{'a ' * length}b{number} {ending}" for length in range(1, 15) for ending in "cdefg")
    for number in range(8)
)

_TEXTS: Final = {
    "disordered marks": _filled("a\u0300\u0316"),
    "nothing but disordered marks": "a" + _filled("\u0300\u0316")[1:],
    "marks of class 0 that decompose": _filled("a\u0f73\u0f75\u0f81\u0300"),
    "nothing but marks of class 0": _filled("\u0f73\u0f75\u0f81\u0300"),
    "half-width voiced marks": _filled("カ\uff9e\uff9f\u0316"),
    "piled marks of all kinds": _piled_marks(),
    "Greek with three accents": _filled("\u1f82\u0390\u03b0A\u0301"),
    "squared katakana": _filled("\u3300\u3301\u3316"),
    "squared katakana and a mark": _filled("\u3300\u3301\u3316A\u0301"),
    "characters that become eighteen": _filled("\ufdfa"),
    "eighteen, and a mark": _filled("\ufdfaA\u0301")[:20_000],
    "ligatures that fold to three": _filled("\ufb03\ufb04\u0390"),
    "Hangul letters": _filled("\u1100\u1161\u11a8"),
    "characters beyond the BMP": _filled("\U0001d400\U00020000\U0001f600"),
    "unassigned characters": _filled("\u0378\U0003ffff"),
    "unassigned characters and a mark": _filled("\u0378\U0003ffffA\u0301"),
    "many different characters": "".join(map(chr, range(0x4E00, 0x4E00 + 20_000))),
    "short words": _filled("a "),
    "apostrophes": _filled("a' 'b''"),
    "spaces": _filled(" "),
    "NUL": _filled("\0"),
    "an empty text": "",
}
CASES: Final[dict[str, Case]] = {
    **{name: lambda text=text: (Encoding((TREE,)), _texts(text)) for name, text in _TEXTS.items()},  # type: ignore[misc]
    "texts that are too long": lambda: (
        Encoding((TREE,)),
        _texts("x" * (MAX_TEXT_CHARACTERS + 1)),
    ),
    "all characters": lambda: (Encoding((TREE,)), _all_characters("")),
    "all characters and a mark": lambda: (Encoding((TREE,)), _all_characters("\u0301")),
    "piled marks, denied": lambda: (_denying(*NEARLY), _texts(_piled_marks())),
    "short words, denied": lambda: (_denying(*NEARLY), _texts(_filled("a "))),
    "short words in many rows, denied": lambda: (_denying(*NEARLY), _texts("a a", "a b", "é a")),
    "200,000 different words denied": lambda: (
        _denying(tuple(" ".join(f"{w:x}{i:x}" for w in range(16)) for i in range(12_500))),
        _numbered("0{:x} 0"),
    ),
    "200,000 words denied after one that repeats": lambda: (
        _denying(tuple(f"{'a ' * (i % 14)}b{i}" for i in range(26_000))),
        _texts(_filled("a ")),
    ),
    "100,000 words denied": lambda: (
        _denying(tuple(f"{i:x}" for i in range(100_000))),
        _numbered("{} z"),
    ),
    "a tree of all depths": lambda: (Encoding((DEEP,)), _texts("a a a a a a a a c")),
    "eight trees": lambda: (Encoding((THIN,) * 8), _texts("a a a a a a a a c")),
    "100,000 prefixes": lambda: (
        Encoding(
            (
                PrefixTree(
                    column="x",
                    prefixes=tuple(f"{i:x} {i:x}" for i in range(100_000)),
                    vocabulary=WORDS[:7],
                ),
            )
        ),
        _numbered("{0:x} {0:x} w1"),
    ),
    "a hashed tree": lambda: (Encoding((TREE.hashed(SALT),)), _numbered("{} b")),
    "a hashed tree of all depths": lambda: (
        Encoding((DEEP.hashed(SALT),)),
        _numbered("{} a a a a a a a a"),
    ),
    "a hashed tree and long words": lambda: (
        Encoding((DEEP.hashed(SALT),)),
        _numbered("{} " + ("x" * 44 + " ") * 9),
    ),
    "eight hashed trees": lambda: (
        Encoding((THIN.hashed(SALT),) * 8),
        _numbered("{} a a a a a a a a"),
    ),
    "colliding integers": lambda: (
        Encoding((Categories(column="x", values=tuple(colliding(690_000, 2**20)[0])),)),
        lambda count: {"x": [2**20 + 1 for _ in range(count)]},
    ),
    "many integers": lambda: (
        Encoding((Categories(column="x", values=tuple(colliding(690_000, 2**20)[0])),)),
        lambda count: {"x": list(map(int, _uniform(2**20)(count)["x"]))},
    ),
    "many texts": lambda: (
        Encoding((Categories(column="x", values=tuple(f"value {i}" for i in range(400_000))),)),
        _numbered("value {}"),
    ),
    "integers among texts": lambda: (
        Encoding((Categories(column="x", values=("a", "b", 1)),)),
        lambda count: {"x": ([1, "a"] * count)[:count]},
    ),
    "many intervals": lambda: (
        Encoding((Intervals(column="x", edges=tuple(map(Decimal, range(700_000)))),)),
        _uniform(700_000),
    ),
    "integers and NULL in intervals": lambda: (
        Encoding((Intervals(column="x", edges=tuple(map(Decimal, range(1000)))),)),
        lambda count: {"x": ([10**18, None] * count)[:count]},
    ),
    "eight intervals": lambda: (
        Encoding((Intervals(column="x", edges=(Decimal(0), Decimal(1))),) * 8),
        _uniform(2),
    ),
    "a grid of many cells": lambda: (
        Encoding((Grid(columns=("x", "y"), box=BOX, cells=_quadkeys(200_000)),)),
        _points,
    ),
    "eight grids": lambda: (Encoding((Grid(columns=("x", "y"), box=BOX, level=1),) * 8), _points),
}
