"""The comparison with other systems: every row has its source, in both tables."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "concepts" / "comparison.md").read_text()


def systems(text: str) -> list[str]:
    """The first cells of a table's rows, without its head."""
    return re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)[1:]


def test_both_tables_have_the_same_systems_with_sources() -> None:
    who, how = (part.split("\n## ")[0] for part in PAGE.split("\n## ")[1:3])
    assert systems(who) == systems(how)
    cited = [int(number) for row in systems(who) for number in re.findall(r"\[(\d)\]", row)]
    assert len(cited) == len(systems(who)) - 2  # Chorister itself and the paper
    sources = PAGE.split("\n## Sources")[1]
    assert cited == [int(number) for number in re.findall(r"^(\d)\. \*", sources, re.MULTILINE)]


def test_the_readme_says_nothing_that_the_page_does_not() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    table = readme.split("## Comparison with other systems")[1].split("\n## ")[0]
    names = [row.strip("*") for row in re.findall(r"^\| ([^-|]+?) \|", table, re.MULTILINE) if row]
    assert len(names) == 8
    assert [name for name in names if name.removesuffix(" with Nebula") not in PAGE] == []
