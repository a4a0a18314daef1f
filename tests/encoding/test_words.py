"""Tokenisation version 1, case by case and as properties."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.encoding.words import canonical_text, canonical_texts, is_canonical, split_words
from chorister.unicode14 import find_unassigned, is_word_character

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
    assert is_canonical(canonical)
    assert canonical == " ".join(split_words(text))


@given(st.lists(ANY_TEXT, max_size=6))
def test_many_at_once_is_one_by_one(texts: list[str]) -> None:
    assert canonical_texts(texts) == [canonical_text(text) for text in texts]


@given(ANY_TEXT)
def test_words_by_the_letter_of_the_rule(text: str) -> None:
    """The documented rule, spelled out slowly and without the tricks."""
    text = "".join(" " if find_unassigned(character) else character for character in text)
    for _ in range(2):
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text = text.replace("\u2019", "'")

    def word_character(i: int) -> bool:
        return 0 <= i < len(text) and is_word_character(ord(text[i]))

    kept = [
        c if word_character(i) or (c == "'" and word_character(i - 1) and word_character(i + 1))
        else " "
        for i, c in enumerate(text)
    ]  # fmt: skip
    assert split_words(text) == "".join(kept).split()
