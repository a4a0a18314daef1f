"""The page that contributors read first: its modules exist, and every package has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src" / "chorister"
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()


def test_every_module_that_is_named_exists() -> None:
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*\.py)`", PAGE))
    assert len(named) > 40
    here = {"conftest.py"}
    missing = [name for name in named - here if not (SOURCE / name).is_file()]
    outside = [name for name in missing if not (REPOSITORY / name).is_file()]
    assert outside == []


def where_to_change() -> dict[str, tuple[list[str], int, list[str]]]:
    """The rows of "Where do I change ...?": source files, their limit, documents and tests."""
    table = PAGE.split("## Where do I change ...?")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (an? .*?) \| (.*?) \| (\d+).*? \| (.*?) \|$", table, re.MULTILINE)
    path = r"`((?:[a-z0-9_-]+/)*[a-z0-9_-]+\.(?:pyi?|md|json))`"
    return {
        name: (re.findall(path, edit), int(limit), re.findall(path, others))
        for name, edit, limit, others in rows
    }


def test_typical_changes_touch_few_files_which_exist() -> None:
    rows = where_to_change()
    assert len(rows) >= 8
    for name, (sources, limit, others) in rows.items():
        assert 1 <= len(sources) <= limit, name
        assert len(set(sources)) == len(sources), name
        missing = [each for each in sources if not (SOURCE / each).is_file()]
        missing += [each for each in others if not (REPOSITORY / each).is_file()]
        assert missing == [], name
    limits = {name: limit for name, (_, limit, _) in rows.items()}
    assert limits["a randomizer"] <= 7
    assert limits["a key of the policy"] <= 5
    assert limits["an algorithm for analysts"] <= 5
    sources, limit, others = rows["a randomizer"]
    assert len(sources) + len(others) <= limit


def code_of(path: Path) -> str:
    """A module without its comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(value=None)
    return ast.unparse(tree)


def test_facts_of_the_privacy_model_are_written_once() -> None:
    """Trials of noise, replacement values and probabilities come from `privacy`."""
    repeated = re.compile(
        r"cohort - 1\b|Mechanism\.SYMMETRIC|is (not )?Mechanism\.|\* \S*noise_trials"
    )
    outside = [path for path in SOURCE.rglob("*.py") if path.parent.name != "privacy"]
    assert len(outside) > 100
    assert [path for path in outside if repeated.search(code_of(path))] == []
    assert repeated.search(code_of(SOURCE / "privacy" / "certified.py"))


def test_every_package_has_a_row() -> None:
    table = PAGE.split("## Packages")[1].split("\n## ")[0]
    rows = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in row.split(", ")
    }
    packages = {path.stem for path in SOURCE.iterdir() if not path.name.startswith(("_", "."))}
    packages -= {"py"}  # py.typed
    assert {f"`{package}`" for package in packages} <= rows


def test_every_native_module_has_a_row() -> None:
    modules = {path.stem for path in (REPOSITORY / "src" / "rust" / "src").iterdir()} - {"lib"}
    table = PAGE.split("## The native module")[1]
    assert {f"`{module}`" for module in modules} <= set(
        re.findall(r"^\| (`\w+`) \|", table, re.MULTILINE)
    )
