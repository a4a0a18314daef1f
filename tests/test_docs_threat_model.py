"""The threat model names tests: each of them exists, and every risk has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
PAGE = DOCS / "concepts" / "threat-model.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PATHS = re.compile(r"`(tests/[\w/.]+)")


def shown(page: Path) -> str:
    """A page as readers see it."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


@cache
def names_in(path: str) -> frozenset[str]:
    """The names of a file's tests, read without running it."""
    tree = ast.parse((REPOSITORY / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in ast.walk(tree) if isinstance(node, functions)]
    return frozenset(name for name in names if name.startswith("test_"))


def risks() -> dict[str, str]:
    """The text below each risk's heading."""
    parts = re.split(r"^### (.*)$", shown(PAGE), flags=re.MULTILINE)
    texts = [part.split("\n## ")[0] for part in parts[2::2]]
    return dict(zip(parts[1::2], texts, strict=True))


def test_every_named_test_exists() -> None:
    named = NAMED.findall(shown(PAGE))
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert missing == []


def test_no_test_is_named_twice() -> None:
    named = NAMED.findall(shown(PAGE))
    assert len(named) == len(set(named))


def test_every_risk_says_who_and_has_a_test() -> None:
    found = risks()
    assert len(found) == 12
    for risk, text in found.items():
        assert "*Who:*" in text, risk
        assert NAMED.search(text), risk


def test_the_paper_s_four_risks_come_first() -> None:
    section = shown(PAGE).split("## The paper's risks")[1].split("\n## ")[0]
    assert section.count("\n### ") == 4


def test_every_path_into_the_tests_exists_on_every_page() -> None:
    pages = [REPOSITORY / "README.md", *DOCS.rglob("*.md")]
    paths = {path.rstrip("./") for page in pages for path in PATHS.findall(shown(page))}
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (REPOSITORY / path).exists()] == []
