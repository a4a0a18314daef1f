"""Check 3 against the reference values of the accounting, and its refusals."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from chorister.errors import InvalidInput
from chorister.policy.bounds import Claim
from chorister.privacy.randomizers import Mechanism


def claim(**changes: Any) -> Claim:
    values: dict[str, Any] = {
        "mechanism": Mechanism.ASYMMETRIC,
        "local_epsilon": Decimal(3),
        "epsilon": Decimal("0.5"),
        "delta": Decimal("1e-6"),
        "crowd": "noised",
        "honest_fraction": None,
        "report": "plain",
    }
    return Claim(**{**values, **changes})


HONEST: dict[str, Any] = {"crowd": "honest", "honest_fraction": Fraction(1)}


@pytest.mark.parametrize(
    ("changes", "cohort"),
    [
        ({}, 586),
        ({"epsilon": Decimal(1)}, 152),
        ({"local_epsilon": Decimal(6)}, 12998),
        (HONEST, 586),
        ({"report": "bounded"}, 586),
        ({**HONEST, "honest_fraction": Fraction(1, 2)}, 1172),
        ({"mechanism": Mechanism.SYMMETRIC}, 2467),
    ],
)
def test_minimum_cohorts(changes: dict[str, Any], cohort: int) -> None:
    found = claim(**changes)
    assert found.least_cohort() == cohort
    assert found.holds(cohort)
    assert not found.holds(cohort - 1)


def test_an_honest_crowd_of_symmetric_reports_is_bounded_from_both_sides() -> None:
    assert 2784 <= claim(**HONEST, mechanism=Mechanism.SYMMETRIC).least_cohort() <= 2786


def test_local_epsilon_alone_can_be_enough() -> None:
    assert claim(local_epsilon=Decimal("0.5")).least_cohort() == 2


def test_bounded_reports_are_refused_where_nothing_is_proven() -> None:
    with pytest.raises(InvalidInput, match="bounded reports need"):
        claim(report="bounded", epsilon=Decimal(30)).certified_epsilon(1000)
    with pytest.raises(InvalidInput, match="delta must lie"):
        claim(report="bounded", delta=Decimal("1e-12")).certified_epsilon(1000)


@pytest.mark.parametrize("changes", [{"crowd": "honest"}, {"honest_fraction": Fraction(1, 2)}])
def test_a_fraction_belongs_to_an_honest_crowd(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="only if"):
        claim(**changes).certified_epsilon(1000)


def test_nobody_honest() -> None:
    with pytest.raises(InvalidInput, match="is no device"):
        claim(**{**HONEST, "honest_fraction": Fraction(1, 2000)}).certified_epsilon(1000)
