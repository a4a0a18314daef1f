"""Choosing the bin: what is too long to be encoded in time is not begun."""

from __future__ import annotations

import time

import pytest

from chorister.device import report
from chorister.device.report import choose_bin
from chorister.errors import InvalidInput
from tests.device.world import a_recipe


def columns(*texts: str) -> dict[str, list[object]]:
    names = a_recipe("one").encoding.columns
    return {name: list(texts) if name == "ngram" else [33] * len(texts) for name in names}


@pytest.mark.parametrize(
    ("fits", "too_long"),
    [
        (["x" * 100], ["x" * 101]),
        (["x"] * 100, ["x"] * 101),
        (["ä" * 25], ["ä" * 26]),
        (["\ufdfa"], ["\ufdfa" * 2]),
    ],
)
def test_what_is_encoded_has_a_most(
    fits: list[str], too_long: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_ENCODED", 100)
    recipe = a_recipe("one")
    assert "ngram" in recipe.encoding.columns
    choose_bin(recipe, columns(*fits))
    with pytest.raises(InvalidInput, match="too long"):
        choose_bin(recipe, columns(*too_long))


def test_texts_that_normalising_makes_long_are_refused_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(InvalidInput, match="too long"):
        choose_bin(a_recipe("one"), columns(*["\ufdfa" * 1000] * 2000))
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("selection", ["uniform", "first"])
def test_rows_beyond_the_first_block_count(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_ROWS_PER_BLOCK", 3)
    recipe = a_recipe("one", {"selection": selection})
    texts = ["nothing"] * 7 + ["hello world you"] + ["nothing"] * 2
    whole = recipe.encoding.find(columns("hello world you"))
    assert whole[0] > 0
    assert choose_bin(recipe, columns(*texts)) == whole[0]


def test_encoding_ends_at_the_deadline() -> None:
    many = columns(*["hello world you"] * 200_000)
    start = time.monotonic()
    with pytest.raises(InvalidInput, match="in time"):
        choose_bin(a_recipe("one"), many, until=start + 0.2)
    assert time.monotonic() - start < 2
    with pytest.raises(InvalidInput, match="in time"):
        choose_bin(a_recipe("one"), columns("hello"), until=start)
