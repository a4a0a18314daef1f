"""What questions cost, and what accuracy costs."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from chorister.errors import BudgetExceeded, InvalidInput
from chorister.policy.bounds import Claim
from chorister.privacy import (
    BasicFilter,
    Cost,
    Crowd,
    PlannedQuestion,
    RenyiFilter,
    Setting,
    accuracy_for_cohort,
    cost,
    cost_of_accuracy,
    epsilon,
)

NOISED = Setting(local_epsilon=3, crowd="noised")
QUESTION = PlannedQuestion(
    setting=NOISED, epsilon=Decimal("0.5"), delta=Decimal("1e-6"), length=100, reports=10_000
)


def test_a_question_is_priced() -> None:
    budget = BasicFilter(epsilon=Decimal(2), delta=Decimal("1e-5"))
    plan = cost([QUESTION], budget)
    (price,) = plan.each
    assert price.min_cohort == 586
    assert price.local_epsilon == 3
    assert price.more == 3
    # Sum variance (n + 2M) q (1-q), scaled by 1/(h - q)^2: 1.057 times the noiseless 46.97.
    assert price.std_error == pytest.approx(49.6, abs=0.1)
    assert price.relative_error == pytest.approx(price.std_error / 10_000)
    assert plan.remaining is not None
    assert plan.remaining.spent.epsilon == Decimal("0.5")
    assert plan.total is not None
    assert plan.total.exact == pytest.approx(0.49983, rel=1e-3)


def test_a_plan_charges_in_turn_and_says_when_it_does_not_fit() -> None:
    budget = BasicFilter(epsilon=Decimal("1.2"), delta=Decimal("1e-5"))
    plan = cost([QUESTION, QUESTION], budget)
    assert [price.more for price in plan.each] == [1, 0]
    assert plan.total is not None
    assert plan.total.exact < plan.total.basic <= 1.0 + 1e-9
    with pytest.raises(BudgetExceeded):
        cost([QUESTION] * 3, budget, total=False)


def test_a_renyi_budget_allows_more_questions_than_a_basic_one() -> None:
    basic = cost([QUESTION], BasicFilter(epsilon=Decimal(2), delta=Decimal("1e-5")), total=False)
    renyi = cost(
        [QUESTION],
        RenyiFilter(epsilon=Decimal(2), delta=Decimal("1e-5"), orders=(12,)),
        total=False,
    )
    assert basic.each[0].more is not None
    assert renyi.each[0].more is not None
    assert renyi.each[0].more > basic.each[0].more


def test_bounded_reports_are_priced_with_what_they_set_aside() -> None:
    """A device checks delta - 1e-12: at a delta of 2e-12 that is half, and the cohort grows."""
    tiny: dict[str, Any] = {
        "setting": NOISED,
        "epsilon": Decimal("0.5"),
        "delta": Decimal("2e-12"),
        "length": 10,
    }
    bounded = cost([PlannedQuestion(**tiny)], total=False)
    plain = cost([PlannedQuestion(**tiny, bounded=False)], total=False)
    assert bounded.each[0].min_cohort > plain.each[0].min_cohort
    with pytest.raises(InvalidInput, match="delta"):
        cost([PlannedQuestion(**(tiny | {"delta": Decimal("1e-12")}))])


def holds(price: Cost) -> bool:
    """Whether a device's check of the amplification accepts what is charged."""
    setting = price.charge.release.setting
    honest = setting.crowd is Crowd.HONEST
    claim = Claim(
        mechanism=setting.mechanism,
        local_epsilon=setting.local_epsilon,
        epsilon=price.charge.epsilon,
        delta=price.charge.delta,
        crowd="honest" if honest else "noised",
        honest_fraction=setting.honest_fraction if honest else None,
        report="bounded",
    )
    return claim.holds(price.min_cohort)


@pytest.mark.parametrize("crowd", ["honest", "noised"])
@pytest.mark.parametrize("delta", ["1e-6", "1e-9", "1e-10", "1.1e-12"])
def test_what_is_planned_passes_the_devices_check(crowd: str, delta: str) -> None:
    setting = Setting(local_epsilon=3, crowd=crowd)
    assert holds(cost_of_accuracy(setting, relative_error=0.03, delta=delta))
    assert holds(accuracy_for_cohort(setting, std_error=200, reports=5000, delta=Decimal(delta)))
    question = PlannedQuestion(
        setting=setting, epsilon=Decimal("0.5"), delta=Decimal(delta), length=50
    )
    assert holds(cost([question], total=False).each[0])


def test_plain_reports_have_all_of_delta() -> None:
    price = cost_of_accuracy(NOISED, relative_error=0.03, delta="1.1e-12", bounded=False)
    assert not holds(price)
    bounded = cost_of_accuracy(NOISED, relative_error=0.03, delta="1.1e-12")
    assert bounded.charge.epsilon > price.charge.epsilon
    for least in ("1e-12", "1e-13"):
        with pytest.raises(InvalidInput, match="more than"):
            cost_of_accuracy(NOISED, relative_error=0.03, delta=least)


@pytest.mark.parametrize("count", [1, 3])
def test_a_total_sets_aside_what_every_question_does(count: int) -> None:
    """At 1.1e-12 each, a tenth is left: the total is no smaller than what that certifies."""
    tiny = PlannedQuestion(
        setting=NOISED, epsilon=Decimal("0.5"), delta=Decimal("1.1e-12"), length=100
    )
    plan = cost([tiny] * count)
    assert plan.total is not None
    left = epsilon(NOISED, cohort=plan.each[0].min_cohort, delta="1e-13")
    assert plan.total.basic == pytest.approx(count * left.upper)
    assert left.lower is not None
    assert plan.total.best[1] >= left.lower


def test_too_few_reports_are_refused() -> None:
    few = PlannedQuestion(
        setting=NOISED, epsilon=Decimal("0.5"), delta=Decimal("1e-6"), length=100, reports=500
    )
    with pytest.raises(InvalidInput, match="at least 586"):
        cost([few])
    with pytest.raises(InvalidInput, match="at least one question"):
        cost([])


@pytest.mark.parametrize("crowd", ["honest", "noised"])
def test_a_wanted_relative_error_gives_cohort_and_epsilon(crowd: str) -> None:
    setting = Setting(local_epsilon=3, crowd=crowd)
    found = cost_of_accuracy(setting, relative_error=0.01, delta="1e-6", bounded=False)
    assert found.relative_error <= 0.01
    assert found.relative_error == pytest.approx(0.01, rel=1e-2)
    certified = epsilon(setting, cohort=found.min_cohort, delta="1e-6").upper
    assert certified <= float(found.charge.epsilon) <= certified + 1.1e-6


@pytest.mark.parametrize("crowd", ["honest", "noised"])
def test_a_wanted_standard_error_gives_the_least_local_epsilon(crowd: str) -> None:
    setting = Setting(local_epsilon=1, crowd=crowd)
    found = accuracy_for_cohort(setting, std_error=60.0, reports=10_000, delta="1e-6")
    assert 59.9 < found.std_error <= 60.0
    assert found.charge.release.cohort == 10_000
    more = accuracy_for_cohort(setting, std_error=30.0, reports=10_000, delta="1e-6")
    assert more.local_epsilon > found.local_epsilon
    assert more.charge.epsilon > found.charge.epsilon


def test_impossible_accuracy_says_what_to_do() -> None:
    with pytest.raises(InvalidInput, match="more reports"):
        accuracy_for_cohort(NOISED, std_error=1e-6, reports=10_000, delta="1e-6")
    with pytest.raises(InvalidInput, match="larger one"):
        cost_of_accuracy(NOISED, relative_error=1e-7, delta="1e-6")
    with pytest.raises(InvalidInput, match="relative_error"):
        cost_of_accuracy(NOISED, relative_error=0.0, delta="1e-6")
    with pytest.raises(InvalidInput, match="std_error"):
        accuracy_for_cohort(NOISED, std_error=0.0, reports=100, delta="1e-6")
