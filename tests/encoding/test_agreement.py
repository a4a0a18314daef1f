"""The one encoder agrees with a slow and simple reading of its rules, on whatever values."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.encoding import (
    Categories,
    DenyList,
    Encoder,
    Encoding,
    Feature,
    Grid,
    Intervals,
    PrefixTree,
    canonical_text,
    canonical_texts,
    split_words,
)
from chorister.encoding.encoder import WorkLimit
from chorister.errors import InvalidInput
from tests.encoding.reference import LONGEST_TEXT, bin_of, cell_of, first_of, words_of

PIECES = [
    *("a", "b", "c", "hello", "don't", "don\u2019t", "'", "''", " ", "  ", ".", "_", "\0", "\1"),
    *("É", "e\u0301", "\u0301", "\u0316", "\u0301\u0316" * 16, "\u0345", "ǖ", "ΐ", "ﬁ", "ß", "İ"),
    *("\u0f73", "\u0f73" * 31, "カ\uff9e", "ㅠ" * 35, "ᄀ", "ᅡ", "ᆨ", "क्", "\ufdfa", "㌀", "½"),
    *("中", "👍", "\U0001d400", "\u1c89", "\u0378", "\uffff", "\ud800", "\udfff", "ς", "OOV"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(
    st.characters(exclude_categories=()), max_size=20
)
WORDS = ("a", "b", "c", "hello", "don't", "é", "fi", "中")
VALUES = st.one_of(
    TEXTS,
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**53, 2**53 + 1, 2**63 - 1, -(2**63)]),
    st.floats(),
    st.floats(-2, 12),
    st.binary(max_size=3),
    st.sampled_from(["x" * (LONGEST_TEXT + 1), "a " + "é" * 401, "b" * 401, "a " * 500]),
)
PHRASES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
DECIMALS = st.integers(-40, 100).map(lambda n: Decimal(n) / 8)


def leaves(prefixes: list[str]) -> tuple[str, ...]:
    """Those that no other one begins."""
    return tuple(p for p in prefixes if not any(p.startswith(f"{q} ") for q in prefixes))


INTERVALS = st.lists(DECIMALS, min_size=2, max_size=6, unique=True).map(
    lambda edges: Intervals(column="x", edges=tuple(sorted(edges)))
)
CATEGORIES = st.lists(
    st.sampled_from([*WORDS, "A", "É", "👍"])
    | st.integers(-3, 12)
    | st.integers(1 - 2**53, 2**53 - 1),
    min_size=1,
    max_size=8,
    unique_by=str,
).map(lambda values: Categories(column="x", values=tuple(values)))
TREES = st.tuples(
    st.just([""]) | st.lists(PHRASES, min_size=1, max_size=6, unique=True).map(leaves),
    st.lists(st.sampled_from(WORDS), max_size=6, unique=True),
).map(lambda lists: PrefixTree(column="x", prefixes=tuple(lists[0]), vocabulary=tuple(lists[1])))
HASHED = st.tuples(TREES, st.binary(min_size=16, max_size=16)).map(
    lambda pair: pair[0].hashed(pair[1])
)
BOXES = st.tuples(DECIMALS, DECIMALS, st.integers(1, 99), st.integers(1, 99)).map(
    lambda b: (b[0], b[1], b[0] + Decimal(b[2]) / 10, b[1] + Decimal(b[3]) / 10)
)


def apart(keys: list[str]) -> tuple[str, ...]:
    """Cells that lie in no other one."""
    return tuple(k for k in keys if not any(k != q and k.startswith(q) for q in keys))


GRIDS = st.tuples(
    BOXES,
    st.integers(1, 4)
    | st.lists(st.text("0123", min_size=1, max_size=24), min_size=1, max_size=9, unique=True),
).map(
    lambda pair: (
        Grid(columns=("x", "y"), box=pair[0], level=pair[1])
        if isinstance(pair[1], int)
        else Grid(columns=("x", "y"), box=pair[0], cells=apart(pair[1]))
    )
)
FEATURES: st.SearchStrategy[Feature] = st.one_of(INTERVALS, CATEGORIES, TREES, HASHED, GRIDS)
DENY = st.lists(
    st.tuples(st.sampled_from("xy"), st.lists(PHRASES, min_size=1, max_size=6, unique=True)).map(
        lambda pair: DenyList(column=pair[0], phrases=tuple(pair[1]))
    ),
    max_size=3,
)
ENCODINGS = st.tuples(st.lists(FEATURES, min_size=1, max_size=3), DENY).map(
    lambda parts: Encoding(tuple(parts[0]), tuple(parts[1]))
)
ROWS = st.lists(st.tuples(VALUES, VALUES), max_size=8)


def columns(rows: list[tuple[Any, Any]]) -> dict[str, list[Any]]:
    return {name: [row[i] for row in rows] for i, name in enumerate("xy")}


@settings(max_examples=500)
@given(ENCODINGS, ROWS)
def test_bins_are_those_of_the_rules(encoding: Encoding, rows: list[tuple[Any, Any]]) -> None:
    expected = [bin_of(encoding, dict(zip("xy", row, strict=True))) for row in rows]
    found = encoding.find(columns(rows))
    assert found == expected
    assert all(type(bin_) is int for bin_ in found)
    # One by one, in another order, and by an encoder made from JSON, as in a sandbox.
    assert [encoding.find(columns([row]))[0] for row in rows] == expected
    assert encoding.find(columns(rows[::-1])) == expected[::-1]
    sandboxed = Encoder.parse(encoding.canonical)
    assert set(sandboxed.columns) == set(encoding.columns)
    assert sandboxed.find(columns(rows)) == expected
    assert sandboxed.select(expected, "first") == first_of(encoding, expected)
    assert sandboxed.select(expected, "uniform") in {0, *expected} - {-1}


@settings(max_examples=500)
@given(FEATURES, st.lists(st.tuples(VALUES, VALUES), max_size=8))
def test_cells_are_those_of_the_rules(feature: Feature, rows: list[tuple[Any, Any]]) -> None:
    given_ = [[row[i] for row in rows] for i in range(len(feature.columns_read))]
    expected = [cell_of(feature, *row[: len(given_)]) for row in rows]
    assert feature.find(*given_) == expected
    assert all(0 <= cell < feature.size for cell in expected)


@settings(max_examples=500)
@given(st.lists(TEXTS, max_size=6))
def test_words_are_those_of_the_rules(texts: list[str]) -> None:
    expected = [words_of(text) for text in texts]
    assert [split_words(text) for text in texts] == expected
    canonical = canonical_texts(texts)
    assert canonical == [" ".join(words) for words in expected]
    assert canonical_texts(canonical) == canonical
    assert all(canonical_text(text) == one for text, one in zip(texts, canonical, strict=True))


@given(st.lists(VALUES, max_size=8))
def test_work_is_paid_for_before_it_is_done(values: list[Any]) -> None:
    tree = PrefixTree(column="x", prefixes=("a",), vocabulary=("b",))
    encoder = Encoding((tree,), (DenyList(column="x", phrases=("c",)),)).encoder

    def effort(*some: Any) -> int:
        budget = WorkLimit(10**9)
        encoder.find({"x": some}, budget)
        return 10**9 - budget.left

    encoder.find({"x": values})  # characters cost more when they are first seen
    alone = {(type(value), repr(value)): effort(value) for value in values}
    assert all(spent > 0 for spent in alone.values())
    # Each different text counts once, and so does what is no text.
    assert effort(*values) <= sum(effort(value) for value in values) + len(values)
    assert effort(*values) >= max(alone.values(), default=0)
    with pytest.raises(InvalidInput, match="too much work"):
        encoder.find({"x": [*values, "a"]}, WorkLimit(effort(*values, "a") - 1))
