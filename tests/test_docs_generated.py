"""The reference's pages that are made from the code name everything that there is."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import chorister
import chorister.device
import chorister.errors
from chorister.cli import app
from tests.scripts import loaded

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    return loaded(DOCS / "generated.py")


def paths(command: Any, words: tuple[str, ...]) -> list[tuple[str, Any]]:
    found = [(" ".join(words), command)]
    for word, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            found += paths(child, (*words, word))
    return found


def test_every_command_is_there_with_its_options(generated: ModuleType) -> None:
    page = generated.commands()
    sections = dict(re.findall(r"^## `(.*?)`\n(.*?)(?=^## |\Z)", page, flags=re.M | re.S))
    all_commands = paths(typer.main.get_command(app), ("chorister",))
    assert len(all_commands) > 40
    assert set(sections) == {name for name, _ in all_commands}
    for name, command in all_commands:
        text = sections[name]
        assert command.help, f"{name} has no help"
        assert command.help.split()[0] in text
        for option in command.params:
            if option.param_type_name == "option":
                assert option.help, f"{name} {option.opts} has no help"
                assert all(f"`{each}`" in text for each in option.opts), (name, option.opts)


def test_every_public_name_is_described(generated: ModuleType) -> None:
    page = generated.python()
    described = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith(".. ")}
    for package in (chorister, chorister.device):
        names = {name for name in package.__all__ if name not in {"__version__", "errors"}}
        assert names <= described, names - described
    errors = {name for name, each in vars(chorister.errors).items() if isinstance(each, type)}
    errors -= {"Decimal", "Mapping"}
    assert len(errors) > 40
    assert errors <= described, errors - described


def test_pages_that_did_not_change_keep_their_time(generated: ModuleType, tmp_path: Path) -> None:
    generated.write(tmp_path)
    before = {each: each.stat().st_mtime_ns for each in tmp_path.iterdir()}
    generated.write(tmp_path)
    assert {each: each.stat().st_mtime_ns for each in tmp_path.iterdir()} == before
    assert {each.name for each in before} == set(generated.PAGES)
