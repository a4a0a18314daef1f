"""Tokenisation version 1, case by case and as properties."""

from __future__ import annotations

import hashlib
import sys
import time
import timeit
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.encoding import tokenizer
from chorister.encoding.tokenizer import (
    canonical_text,
    canonical_texts,
    effort,
    split_words,
)
from chorister.unicode14 import JOINING
from tests.encoding import reference

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  \t\n ", []),
        ("Hello, World!", ["hello", "world"]),
        ("don't", ["don't"]),
        ("don\u2019t", ["don't"]),  # the apostrophe that phones type
        ("'quoted' words'", ["quoted", "words"]),
        ("rock''n''roll", ["rock", "n", "roll"]),
        ("a'b'c", ["a'b'c"]),
        ("snake_case", ["snake", "case"]),
        ("STRASSE straße", ["strasse", "strasse"]),
        ("ﬁne ２１", ["fine", "21"]),  # compatibility forms
        ("e\u0301te\u0301 été", ["été", "été"]),
        ("हिन्दी में", ["हिन्दी", "में"]),  # marks belong to words
        ("ΌΔΟΣ όδος", ["όδοσ", "όδοσ"]),  # both sigmas fold to one
        ("ok👍great", ["ok", "great"]),
        ("nul\0nul", ["nul", "nul"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words
    assert canonical_text(text) == " ".join(words)


def test_every_character_folds_to_a_fixed_point() -> None:
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]
    once = canonical_texts(characters)
    assert canonical_texts(once) == once


@given(ANY_TEXT)
def test_canonical_text_is_a_fixed_point(text: str) -> None:
    canonical = canonical_text(text)
    assert canonical_text(canonical) == canonical
    assert canonical == " ".join(split_words(text))


@given(st.lists(ANY_TEXT, max_size=6))
def test_many_at_once_is_one_by_one(texts: list[str]) -> None:
    assert canonical_texts(texts) == [canonical_text(text) for text in texts]


def test_words_are_the_same_on_every_python() -> None:
    """A digest of the words of every character, and of many together, pinned for ever.

    Marks are taken in pairs on a letter, so that normalising sorts and composes them.
    """
    characters = list(map(chr, range(sys.maxunicode + 1)))
    marks = sorted(JOINING)
    texts = [
        *characters,
        *(f"{base}{a}{b}" for base in "aΩカक" for a, b in pairwise(marks)),
        *("".join(characters[i::0x2000]) for i in range(0x2000)),
    ]
    digest = hashlib.sha256("\n".join(canonical_texts(texts)).encode()).hexdigest()
    assert digest == "aba58a7b78824ff51637efa7e0b3e8c723a387c48c38403cc14cc0c08ab1d263"


def test_a_newer_python_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this Python were newer: U+1C89 (of Unicode 16.0) is a letter, a mark, and decomposes.

    Whatever the tokenizer asks about characters that Unicode 14.0 does not have, it gets another
    answer here; it must not ask.
    """
    newer, combining = "\u1c89", unicodedata.combining
    normalize, category = unicodedata.normalize, unicodedata.category
    texts = [f"x{newer}y", f"a{newer}\u0301b", newer * 40, f"e{newer}\u0301 ́{newer}", f"{newer}'s"]
    expected = [reference.words_of(text) for text in texts]
    monkeypatch.setattr(tokenizer, "_FOLDED", tokenizer._Folded())
    monkeypatch.setattr(tokenizer, "_WORD_CHARACTERS", tokenizer._WordCharacters({0x2019: "'"}))
    monkeypatch.setattr(tokenizer, "_NON_STARTERS", tokenizer._NonStarters())
    monkeypatch.setattr(
        unicodedata,
        "normalize",
        lambda form, text: normalize(form, text.replace(newer, "n")),
    )
    monkeypatch.setattr(unicodedata, "category", lambda c: "Lu" if c == newer else category(c))
    monkeypatch.setattr(unicodedata, "combining", lambda c: 230 if c == newer else combining(c))
    assert [split_words(text) for text in texts] == expected
    assert not any(newer in word or "n" in word for each in expected for word in each)


# --- piled marks ----------------------------------------------------------------------------------

ACUTE, BELOW = "\u0301", "\u0316"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x" + BELOW * 30, ["x" + BELOW * 30]),
        ("x" + BELOW * 31, ["x" + BELOW * 30]),
        ("x" + BELOW * 31 + "y", ["x" + BELOW * 30, "y"]),
        ("x" + ACUTE * 16 + BELOW * 16 + "y", ["x" + BELOW * 14 + ACUTE * 16, "y"]),
        (BELOW * 100, [BELOW * 30]),
        ("x" + BELOW * 20 + " " + BELOW * 20, ["x" + BELOW * 20, BELOW * 20]),
        ("e" + ACUTE * 31, ["é" + ACUTE * 29]),  # the first one is part of the letter
        ("a" + "\u0f73" * 20 + "b", ["a" + "\u0f71" * 20 + "\u0f72" * 10, "b"]),  # two of each
        ("ㅠ" * 40, ["\u1172" * 40]),  # no marks
    ],
)
def test_of_piled_marks_thirty_count(text: str, words: list[str]) -> None:
    assert split_words(text) == words == reference.words_of(text)
    assert canonical_text(canonical_text(text)) == canonical_text(text)


PILES = st.lists(
    st.sampled_from(["a", "ǖ", "ΐ", "A", " ", "カ", *sorted(JOINING)])
    | st.sampled_from(sorted(JOINING)),
    max_size=90,
).map("".join)


@settings(max_examples=300)
@given(PILES)
def test_piles_of_marks_are_cut_by_the_rule_and_only_once(text: str) -> None:
    canonical = canonical_text(text)
    assert canonical == " ".join(reference.words_of(text))
    assert canonical_text(canonical) == canonical


def test_normalising_is_linear_in_the_length() -> None:
    """Ten times the text takes about ten times as long; sorting its marks would take a hundred."""

    def seconds(size: int) -> float:
        text = "a" + (ACUTE + BELOW) * size
        timer = timeit.Timer(lambda: canonical_text(text), timer=time.process_time)
        return min(timer.repeat(number=1, repeat=5))

    seconds(1000)
    assert seconds(100_000) < 40 * seconds(10_000)


@given(ANY_TEXT)
def test_effort_is_at_least_the_length(text: str) -> None:
    first = effort([text])
    canonical_text(text)  # from here on its characters are known
    assert first >= effort([text]) >= len(text)
    assert 2 * len(text) <= effort([text + text]) == effort([text, text]) <= 2 * effort([text])


def test_the_characters_that_expand_most_are_known() -> None:
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code <= 0xDFFF:
            assert len(unicodedata.normalize("NFKC", chr(code))) <= tokenizer._EXPANDING.get(
                chr(code), 6
            )
