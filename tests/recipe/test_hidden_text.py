"""What a reviewer reads is what devices run: no query hides or turns around a part of itself."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from chorister.cli import app
from chorister.errors import RecipeError
from chorister.policy.values import find_hidden, legible, visible
from chorister.recipe import Recipe
from tests.keyboard import ANALYSIS, POLICY_FILE, changed, policy_at, recipe_tree, recipe_with

TROJAN = (
    "SELECT user.age AS age FROM user /*\u202e } \u2066WHERE user.age = 33\u2069 \u2066 begin*/"
)
QUERY = "SELECT user.age AS age FROM user WHERE 'TEXT' = ''"
HIDDEN = [
    *("\x00", "\x1b", "\r", "\x0b", "\x7f", "\x85", "\x9b"),
    *("\u061c", "\u200e", "\u200f", "\u202a", "\u202e", "\u2066", "\u2069"),
    *("\u00ad", "\u034f", "\u115f", "\u17b4", "\u180e", "\u200b", "\u2060", "\u2064", "\u3164"),
    *("\ufeff", "\uffa0", "\ufff9", "\u2028", "\u2029", "\ue000", "\U0001d173", "\U000e0041"),
    *("\U000f0000", "\U0010fffd"),
]


def test_a_trojan_query_is_refused() -> None:
    tree = changed(recipe_tree(), {"query": TROJAN})
    with pytest.raises(RecipeError, match=r"query: .*U\+202E") as caught:
        Recipe.draft(json.dumps(tree).encode())
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("hidden", HIDDEN, ids=lambda each: f"U+{ord(each):04X}")
def test_what_nobody_sees_is_refused(hidden: str) -> None:
    with pytest.raises(ValidationError):
        recipe_with(query=QUERY.replace("TEXT", hidden))
    with pytest.raises(Exception, match="queries"):
        policy_at(
            {
                f"analyses/{ANALYSIS}/query_class": "exact",
                f"analyses/{ANALYSIS}/queries": [f"SELECT '{hidden}'"],
            }
        )


def test_every_control_of_direction_and_every_control_character_is_refused() -> None:
    """By Python's own tables, which a newer Unicode may only add to."""
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        if character in "\t\n" or 0xD800 <= code < 0xE000:
            continue
        if unicodedata.bidirectional(character) in turning or unicodedata.category(character) in {
            "Cc",
            "Co",
            "Zl",
            "Zp",
        }:
            assert visible(character) != character
            assert find_hidden(character) == character


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم",  # Persian: a word with a non-joiner
        "क्\u200dष",  # Hindi: a joiner
        "👩\u200d👩\u200d👧",
        "❤\ufe0f",
        "שלום",
        "naïve café ﷺ 日本語",
        "tab\tand\nnewline",
    ],
)
def test_text_of_any_language_can_be_asked_for(text: str) -> None:
    query = QUERY.replace("TEXT", text)
    assert recipe_with(query=query).query == query


def test_what_is_left_is_shown() -> None:
    assert visible("a\u200db\u202ec\x1b\nd\te é") == "a\\u{200d}b\\u{202e}c\\u{1b}\nd\te é"
    assert visible("SELECT\u00a0age\u3000FROM user") == "SELECT\\u{a0}age\\u{3000}FROM user"


def test_words_stay_words() -> None:
    """Labels and purposes are read, not reviewed letter by letter."""
    assert (
        legible("👩\u200d👧 می\u200cخواهم\u202e\x1b[2J")
        == "👩\u200d👧 می\u200cخواهم\\u{202e}\\u{1b}[2J"
    )


def test_explain_prints_nothing_hidden(tmp_path: Path) -> None:
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(changed(recipe_tree(), {"query": TROJAN}), ensure_ascii=False))
    run = CliRunner().invoke(app, ["recipe", "explain", str(draft), "--policy", str(POLICY_FILE)])
    assert run.exit_code == 2
    assert "U+202E" in run.output
    assert visible(run.output) == run.output


def test_no_purpose_turns_a_policy_around(tmp_path: Path) -> None:
    """In `policy check` and `policy diff`, on a terminal that obeys."""
    trojan = tmp_path / "policy.toml"
    before = next(x for x in POLICY_FILE.read_text().splitlines() if x.startswith("purpose = "))
    hidden = 'purpose = "counts words \u202e\\u001b[2J of nobody"'
    trojan.write_text(POLICY_FILE.read_text().replace(before, hidden))
    for arguments in (["check", str(trojan)], ["diff", str(POLICY_FILE), str(trojan)]):
        run = CliRunner().invoke(app, ["policy", *arguments])
        assert "counts words \\u{202e}\\u{1b}[2J of" in run.output
        assert legible(run.output) == run.output
