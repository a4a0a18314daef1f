"""The characters that canonical forms and words are made of, whatever Python knows."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable

import pytest

from chorister import unicode14
from chorister.canonical import dumps, loads
from chorister.encoding.tokenizer import canonical_text
from chorister.errors import DecodeError, InvalidInput, PolicyError, RecipeError
from chorister.policy import Policy
from chorister.recipe import Recipe
from chorister.unicode14 import (
    JOINING,
    find_unassigned,
    is_word_character,
    separate_unassigned,
)
from tests.keyboard import POLICY_FILE, RECIPE

LETTER = "\u0560"  # Armenian, since Unicode 11.0
NEWER = "\u1c89"  # Cyrillic, since Unicode 16.0: Python 3.11 does not know it
NEVER = "\uffff"  # a noncharacter


def runs(keep: Callable[[str], bool]) -> list[int]:
    """The table of a set of categories, by the tables of this Python."""
    found, inside, length = [], False, 0
    for code in range(sys.maxunicode + 1):
        if keep(unicodedata.category(chr(code))) != inside:
            found.append(length)
            inside, length = not inside, 0
        length += 1
    return [*found, length] if inside else found


def test_the_tables_are_those_of_unicode_14() -> None:
    assigned = [int(run) for run in unicode14._ASSIGNED.split()]
    word = [int(run) for run in unicode14._WORD.split()]
    if unicodedata.unidata_version == unicode14.VERSION:
        assert assigned == runs(lambda category: category not in ("Cn", "Cs"))
        assert word == runs(lambda category: category[0] in "LMN")
    else:  # what is assigned stays so
        known = (chr(code) for code in range(sys.maxunicode + 1))
        assert not any(
            unicodedata.category(character) == "Cn" and find_unassigned(character) is None
            for character in known
        )


def second_halves() -> set[str]:
    """What a composite may end with, by the tables of this Python; Hangul composes by rule."""
    found = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            halves = [chr(int(part, 16)) for part in parts]
            if unicodedata.normalize("NFC", "".join(halves)) == chr(code):
                found.add(halves[1])
    return found


def test_joining_characters_are_those_that_normalisation_joins() -> None:
    """Never fewer: without one of them, text would be normalised as if it stood alone."""
    second = second_halves()

    def joins(character: str) -> bool:
        first = unicodedata.normalize("NFKD", character)[0]
        return unicodedata.combining(first) > 0 or first in second

    everything = (chr(code) for code in range(sys.maxunicode + 1))
    found = {c for c in everything if find_unassigned(c) is None and joins(c)}
    if unicodedata.unidata_version == unicode14.VERSION:
        assert found == JOINING
    else:  # no character of Unicode 14.0 begins to join one that it has
        assert found >= JOINING
    # What folding makes of any other character begins with none of them.
    for code in range(sys.maxunicode + 1):
        text = chr(code)
        if text not in JOINING and find_unassigned(text) is None:
            for _ in range(3):
                text = unicodedata.normalize("NFKC", text)
                assert text[0] not in JOINING
                text = text.casefold()
                assert text[0] not in JOINING


def test_characters() -> None:
    assert find_unassigned(f"a{LETTER}\ue000\U0010fffd") is None  # private use never changes
    for character in (NEWER, NEVER, "\ud800", "\u0378"):
        assert find_unassigned(f"a{character}b") == character
        assert separate_unassigned(f"a{character}b") == "a b"
    assert [c for c in "a1\u0301 .'\u2019" if is_word_character(ord(c))] == ["a", "1", "\u0301"]
    assert is_word_character(ord(LETTER))
    assert not is_word_character(ord(NEWER))
    assert not is_word_character(sys.maxunicode)


def test_canonical_json_has_no_newer_characters() -> None:
    assert loads(dumps([LETTER]), max_bytes=99) == [LETTER]
    for text in (NEWER, NEVER):
        with pytest.raises(InvalidInput, match=f"U.{ord(text):04X} is not a character of Unicode"):
            dumps({"a": text})
        with pytest.raises(DecodeError) as caught:
            loads(f'{{"a":"{text}"}}'.encode(), max_bytes=99)
        assert caught.value.field == "a"


def test_recipes_and_policies_have_no_newer_characters() -> None:
    payload, policy = RECIPE.canonical(), POLICY_FILE.read_bytes()
    word = RECIPE.features[1].vocabulary[0].encode()  # type: ignore[union-attr]
    assert payload.count(b'"%s"' % word) == 1
    Recipe.draft(payload.replace(b'"%s"' % word, f'"{LETTER}"'.encode()))
    Policy.load(policy.replace(b'"de_DE"', f'"{LETTER}"'.encode()))
    with pytest.raises(RecipeError) as caught:
        Recipe.draft(payload.replace(b'"%s"' % word, f'"{NEWER}"'.encode()))
    assert caught.value.field == "features.1.vocabulary.0"
    with pytest.raises(PolicyError) as refused:
        Policy.load(policy.replace(b'"de_DE"', f'"{NEWER}"'.encode()))
    assert refused.value.field == "profiles.user.fields.locale.group_values.0"


def test_words_do_not_depend_on_the_tables_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this Python were newer: it folds and decomposes a character that 14.0 does not have."""
    real = unicodedata.normalize
    monkeypatch.setattr(
        "chorister.encoding.tokenizer.unicodedata.normalize",
        lambda form, text: real(form, text.replace(NEWER, "a")),
    )
    assert canonical_text(f"x{NEWER}y{LETTER}") == f"x y{LETTER}"
