"""What is enforced under whatever decimal context the host has set."""

from __future__ import annotations

import decimal
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_UP, Context, Decimal
from typing import Any

import numpy as np
import pytest

from chorister.errors import BudgetExceeded, InvalidInput
from chorister.policy.bounds import CostBound
from chorister.privacy import (
    BasicFilter,
    OneHotRandomizer,
    PlannedQuestion,
    Release,
    RenyiFilter,
    Setting,
    StatedCost,
    cost,
    delta_before_bound,
    epsilon,
    local_epsilon,
)
from chorister.privacy.decimals import as_decimal, rounded_up

SETTING = Setting(local_epsilon=3, crowd="noised")
RELEASE = Release(setting=SETTING, cohort=10_000)
EDGE = "1.50000000000000000000000000001"  # twice this has 30 digits, and 28 would make it 3


@pytest.fixture(params=[ROUND_DOWN, ROUND_UP, ROUND_CEILING])
def _two_digits(request: pytest.FixtureRequest) -> Iterator[None]:
    with decimal.localcontext(Context(prec=2, rounding=request.param, Emin=-20, Emax=20)):
        yield


def symmetric(local: str) -> OneHotRandomizer:
    return OneHotRandomizer(mechanism="symmetric", local_epsilon=local, length=10)


def test_twice_a_local_epsilon_just_above_half_a_limit_exceeds_it() -> None:
    assert symmetric(EDGE).replacement_epsilon == Decimal("3.00000000000000000000000000002") > 3


@pytest.mark.usefixtures("_two_digits")
def test_local_losses_are_exact_in_a_context_of_two_digits() -> None:
    assert symmetric(EDGE).replacement_epsilon == Decimal("3.00000000000000000000000000002")
    assert symmetric("1.504").replacement_epsilon == Decimal("3.008")
    whole = CostBound(
        epsilon=Decimal(1),
        delta=Decimal("1e-6"),
        reports=3,
        local_epsilon=Decimal("1.004"),
        period=None,
    )
    assert whole.local_total == Decimal("3.012")


@pytest.mark.usefixtures("_two_digits")
def test_thresholds_and_weight_bounds_are_those_of_every_other_host() -> None:
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon="3.0071", length=1000)
    thresholds = randomizer.q_threshold, randomizer.h_threshold, randomizer.max_weight
    with decimal.localcontext(Context(prec=50)):
        same = OneHotRandomizer(mechanism="asymmetric", local_epsilon="3.00710", length=1000)
        assert (same.q_threshold, same.h_threshold, same.max_weight) == thresholds


@pytest.mark.usefixtures("_two_digits")
def test_what_is_left_of_delta_is_never_rounded_up() -> None:
    left = delta_before_bound(Decimal("1e-6"), Decimal("0.5"), 1)
    assert left == Decimal("0.000000999999")


@pytest.mark.usefixtures("_two_digits")
def test_basic_sums_are_exact_in_a_context_of_two_digits() -> None:
    budget = BasicFilter(epsilon=Decimal("3.01"), delta=Decimal("3.01e-6"))
    charge = StatedCost(release=RELEASE, epsilon=Decimal("1.004"), delta=Decimal("1.001e-6"))
    budget = budget.add(charge).add(charge)
    assert budget.spent.epsilon == Decimal("2.008")
    assert budget.spent.delta == Decimal("2.002e-6")
    with pytest.raises(BudgetExceeded):
        budget.add(charge)


def test_sums_beyond_eighty_digits_round_up() -> None:
    tiny = Decimal("1e-90")
    budget = BasicFilter(epsilon=Decimal(1), delta=Decimal("1e-5"))
    charges = [
        StatedCost(release=RELEASE, epsilon=each, delta=Decimal("1e-6"))
        for each in (Decimal(1), tiny)
    ]
    with pytest.raises(BudgetExceeded):
        budget.add(charges[0]).add(charges[1])


def test_the_renyi_filter_and_plans_do_not_depend_on_the_context() -> None:
    def totals() -> tuple[Any, ...]:
        budget = RenyiFilter(epsilon=Decimal("1.001"), delta=Decimal("1.001e-6"), orders=(12, 38))
        charge = StatedCost(release=RELEASE, epsilon=Decimal("0.11001"), delta=Decimal("1e-6"))
        spent = budget.add(charge).add(charge).spent
        question = PlannedQuestion(
            setting=SETTING, epsilon=Decimal("0.501"), delta=Decimal("1.001e-6"), length=100
        )
        plan = cost([question, question])
        most = local_epsilon(cohort=586, epsilon="0.5", delta="1e-6", crowd="noised")
        return spent, plan.total, plan.each[0].min_cohort, most

    usual = totals()
    for rounding in (ROUND_DOWN, ROUND_UP):
        with decimal.localcontext(Context(prec=2, rounding=rounding)):
            assert totals() == usual


def test_numpy_numbers_are_read_as_the_numbers_that_they_print_as() -> None:
    plain = epsilon(Setting(local_epsilon=3.1), cohort=1000, delta=1e-6)
    local = Setting(local_epsilon=np.float64(3.1))
    assert local.local_epsilon == Decimal("3.1")
    assert epsilon(local, cohort=1000, delta=np.float64(1e-6)) == plain
    assert as_decimal(np.float64(0.1)) == Decimal("0.1")
    with pytest.raises(InvalidInput):
        Setting(local_epsilon=np.float64("nan"))


@pytest.mark.usefixtures("_two_digits")
def test_floats_are_rounded_up() -> None:
    assert rounded_up(0.1, Decimal("1e-12")) == Decimal("0.100000000001")
    assert rounded_up(123.5, Decimal("1e-6")) == Decimal("123.5")
