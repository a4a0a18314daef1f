"""Products of features: the paper's 272 bins, bijections, and the choice of a row."""

from __future__ import annotations

import itertools
from collections import Counter
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.encoding import (
    Categories,
    DenyList,
    Encoding,
    Feature,
    Grid,
    Intervals,
    PrefixTree,
)
from chorister.errors import InvalidInput

AGE = Intervals(column="age", edges=tuple(Decimal(n) for n in range(10, 90, 10)))
NGRAMS = PrefixTree(
    column="ngram",
    prefixes=("hello world", "how are", "i got"),
    vocabulary=("a", "all", "home", "it", "the", "to", "up", "world", "you"),
)
PAPER = Encoding((AGE, NGRAMS))


def test_the_papers_272_bins_by_arithmetic() -> None:
    """Appendix B: (1 + 7) x (1 + 3 x (1 + 1 + 9))."""
    assert PAPER.size == (1 + 7) * (1 + 3 * (1 + 1 + 9)) == 272


def test_the_papers_272_bins_by_listing_rows() -> None:
    """Rows that between them reach every bin, found one by one and counted."""
    ages: list[Any] = [None, *range(15, 85, 10)]
    words = ["a", "all", "home", "it", "the", "to", "up", "world", "you"]
    texts = ["something else"]
    for prefix in ("Hello world", "How are", "I got"):
        texts += [prefix, f"{prefix} unheard-of", *(f"{prefix} {word}" for word in words)]
    rows = list(itertools.product(ages, texts))
    bins = PAPER.find({"age": [age for age, _ in rows], "ngram": [text for _, text in rows]})
    assert len(rows) == 272
    assert sorted(bins) == list(range(272))


def test_labels_and_bins_are_inverse() -> None:
    labels = [PAPER.labels(i) for i in range(PAPER.size)]
    assert labels[0] == ("OOV", "OOV")
    assert labels[1] == ("OOV", "hello world END")
    assert labels[34] == ("[10, 20)", "OOV")
    assert [PAPER.index(label) for label in labels] == list(range(PAPER.size))
    assert len(set(labels)) == PAPER.size


FEATURES: st.SearchStrategy[Feature] = st.one_of(
    st.integers(1, 6).map(
        lambda n: Intervals(column="a", edges=tuple(Decimal(i) for i in range(n + 1)))
    ),
    st.integers(1, 6).map(lambda n: Categories(column="b", values=tuple(range(n)))),
    st.tuples(st.integers(1, 3), st.integers(0, 3)).map(
        lambda n: PrefixTree(
            column="c",
            prefixes=tuple(f"p{i}" for i in range(n[0])),
            vocabulary=tuple(f"w{i}" for i in range(n[1])),
        )
    ),
    st.integers(1, 2).map(
        lambda n: Grid(
            columns=("x", "y"), box=(Decimal(0), Decimal(0), Decimal(1), Decimal(1)), level=n
        )
    ),
)


@given(st.lists(FEATURES, min_size=1, max_size=3), st.data())
def test_products_are_bijections(features: list[Feature], data: st.DataObject) -> None:
    encoding = Encoding(tuple(features))
    assert encoding.size == np.prod([feature.size for feature in features])
    bin_ = data.draw(st.integers(0, encoding.size - 1))
    labels = encoding.labels(bin_)
    assert encoding.index(labels) == bin_
    cells = encoding.cells(bin_)
    assert tuple(f.label(c) for f, c in zip(features, cells, strict=True)) == labels
    # And onto: cells drawn independently give the bin that decodes to them.
    chosen = [data.draw(st.integers(0, feature.size - 1)) for feature in features]
    index = encoding.index([f.label(c) for f, c in zip(features, chosen, strict=True)])
    assert encoding.cells(index) == tuple(chosen)


def test_wrong_columns_are_named() -> None:
    with pytest.raises(InvalidInput, match="'ngram'"):
        PAPER.find({"age": [1]})
    with pytest.raises(InvalidInput, match="length"):
        PAPER.find({"age": [1], "ngram": []})
    for bin_ in (-1, 272):
        with pytest.raises(InvalidInput, match=r"0\.\.271"):
            PAPER.labels(bin_)
    with pytest.raises(InvalidInput, match="1 labels for 2"):
        PAPER.index(["OOV"])


def test_too_many_bins_are_refused() -> None:
    wide = Categories(column="x", values=tuple(range(100_000)))
    with pytest.raises(InvalidInput, match="bins"):
        Encoding((wide, wide))
    with pytest.raises(InvalidInput, match="at least one"):
        Encoding(())


def test_selection_prefers_rows_that_fall_into_a_bucket() -> None:
    bins = PAPER.find({"age": [25] * 3, "ngram": ["no match", "how are you", "i got it"]})
    matching = {PAPER.index(["[20, 30)", label]) for label in ("how are you", "i got it")}
    drawn = {PAPER.encoder.select(bins, "uniform") for _ in range(200)}
    assert drawn == matching
    assert PAPER.encoder.select(bins, "first") == min(matching)


def test_selection_among_half_matching_rows() -> None:
    """Nobody's age is known: the n-gram still counts, and rows with both missing do not."""
    bins = PAPER.find({"age": [None, None], "ngram": ["how are you", "no match"]})
    assert {PAPER.encoder.select(bins, "uniform") for _ in range(50)} == {
        PAPER.index(["OOV", "how are you"])
    }


def test_selection_is_uniform_over_rows() -> None:
    bins = [40, 40, 40, 50]
    tickets = iter(range(4))
    counts = Counter(
        PAPER.encoder.select(bins, "uniform", randbelow=lambda _: next(tickets)) for _ in range(4)
    )
    assert counts == {40: 3, 50: 1}


def test_no_rows_and_denied_rows_report_oov() -> None:
    assert PAPER.encoder.select(PAPER.find({"age": [], "ngram": []}), "uniform") == 0
    denying = Encoding((AGE, NGRAMS), (DenyList(column="ngram", phrases=("how are you",)),))
    bins = denying.find({"age": [25, 25], "ngram": ["How are you?", "how are all"]})
    assert bins == [-1, PAPER.index(["[20, 30)", "how are all"])]
    assert denying.encoder.select(bins[:1], "uniform") == 0
    assert denying.encoder.select(bins, "first") == bins[1]
