"""How the pages write numbers and times."""

from __future__ import annotations

from decimal import Decimal

import pytest

from chorister.console.web import FILTERS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0", "0"),
        ("6", "6"),
        ("0.5", "0.5"),
        ("4.576639", "4.58"),
        ("4.571", "4.58"),  # up: what is spent is never more than a page says
        ("0.9999", "1"),
        ("1.66666e-6", "1.67e-6"),
        ("1234.5", "1240"),
    ],
)
def test_what_is_spent_is_rounded_up(value: str, text: str) -> None:
    assert FILTERS["brief"](Decimal(value)) == text


def test_one_thing_and_several() -> None:
    counted = FILTERS["counted"]
    found = [counted(number, "round") for number in (0, 1, 2, 1000)]
    assert found == ["0 rounds", "1 round", "2 rounds", "1,000 rounds"]


def test_a_minus_is_one() -> None:
    assert FILTERS["percent"](-0.0006) == "−0.06%"
    assert FILTERS["rounded"](-15.2) == "−15"


def test_a_time_that_no_calendar_has_is_shown_all_the_same() -> None:
    assert FILTERS["time"](0) == "1970-01-01 00:00 UTC"
    assert FILTERS["time"](2**62) == f"{2**62} s after 1970"
