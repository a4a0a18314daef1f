"""Text of strangers on a terminal: no command obeys it, hides a part of it or spells it otherwise.

Whoever reviews a recipe runs `chorister recipe explain` on a file that an analyst has sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chorister.cli import app
from chorister.policy.values import legible
from tests.keyboard import POLICY_FILE, changed, recipe_tree

# It would clear the screen and say so.
TROJAN = "x\u202e\x1b[2J\x9b2Jrefused"
SPELLED = r"x\u{202e}\u{1b}[2J\u{9b}2Jrefused"


def output(*arguments: str | Path) -> str:
    return CliRunner().invoke(app, [str(argument) for argument in arguments]).output


def explained(folder: Path, tree: dict[str, Any]) -> str:
    draft = folder / "draft.json"
    draft.write_text(json.dumps(tree, ensure_ascii=False))
    return output("recipe", "explain", draft, "--policy", POLICY_FILE)


@pytest.mark.parametrize(
    "place", ["version", TROJAN, f"reads/{TROJAN}", f"privacy/{TROJAN}", f"window/{TROJAN}"]
)
def test_an_error_about_a_recipe_is_spelled_out(tmp_path: Path, place: str) -> None:
    printed = explained(tmp_path, changed(recipe_tree(), {place: TROJAN}))
    assert SPELLED in printed
    assert legible(printed) == printed


@pytest.mark.parametrize("command", ["check", "diff"])
def test_an_error_about_a_policy_is_spelled_out(tmp_path: Path, command: str) -> None:
    trojan = tmp_path / "policy.toml"
    field = json.dumps(TROJAN).replace("\x9b", "\\u009b")
    trojan.write_text(POLICY_FILE.read_text().replace("[device]", f"[device]\n{field} = 1"))
    files = [trojan] if command == "check" else [POLICY_FILE, trojan]
    printed = output("policy", command, *files)
    assert f"device.{SPELLED}: unknown field" in printed
    assert legible(printed) == printed


def test_a_word_between_colons_is_not_drawn(tmp_path: Path) -> None:
    query = f"{recipe_tree()['query']} -- :smile:"
    assert ":smile:" in explained(tmp_path, changed(recipe_tree(), {"query": query}))
