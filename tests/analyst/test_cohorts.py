"""Plans: what rounds cost before they are asked; static and interactive spend the same."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

import chorister as ch
from chorister.analyst.cohorts import conditional_shares, plan_rounds
from chorister.errors import InvalidInput
from chorister.policy import Policy
from tests.analyst.fleets import decades, fleet, generous
from tests.keyboard import ANALYSIS

AGE = {"user": ["age"]}


def renyi(reports: int = 3) -> Policy:
    changes: dict[str, Any] = {
        f"analyses/{ANALYSIS}/budget/composition": {"renyi": [16, 32]},
        "device/composition": {"renyi": [16, 32]},
    }
    return generous(reports, **changes)


def test_conditional_shares() -> None:
    shares = conditional_shares([".08", ".25", ".67"])
    assert shares[0] == Decimal("0.08")
    assert float(shares[1]) == pytest.approx(0.25 / 0.92)
    assert shares[2] == 1
    for wrong in ([], [0], ["0.7", "0.7"], [2]):
        with pytest.raises(InvalidInput):
            conditional_shares(wrong)


def test_one_report_a_device_means_disjoint_cohorts() -> None:
    policy = generous(1)
    plan = (
        fleet(policy)
        .study("plan", analysis=ANALYSIS)
        .plan_rounds([".08", ".25", ".67"], reads=AGE, epsilon="0.5", delta="1e-6")
    )
    assert plan.cohorts == "disjoint"
    assert [planned.epsilon for planned in plan.rounds] == [Decimal("0.5")] * 3
    assert plan.epsilon == Decimal("0.5")
    reports = [planned.expected_reports for planned in plan.rounds]
    assert reports == pytest.approx([0.08 * 89_100, 0.25 * 89_100, 0.67 * 89_100], rel=0.01)
    assert all(p.min_cohort <= p.expected_reports for p in plan.rounds)
    assert "one round at most" in plan.explain()


@pytest.mark.parametrize("policy", [generous(3), renyi(3)], ids=["basic", "renyi"])
def test_several_reports_a_device_means_everyone_and_a_split_budget(policy: Policy) -> None:
    plan = (
        fleet(policy)
        .study("plan", analysis=ANALYSIS)
        .plan_rounds([5, 25, 70], reads=AGE, epsilon=1, delta="1e-5", crowd="noised")
    )
    assert plan.cohorts == "everyone"
    assert plan.epsilon <= 1
    # Epsilons go as the roots of the shares: 1/sigma^2 goes as the shares.
    first, second, third = (float(planned.epsilon) for planned in plan.rounds)
    assert second / first == pytest.approx(5**0.5, rel=1e-3)
    assert third / first == pytest.approx(14**0.5, rel=1e-3)
    assert "every device answers every round" in plan.explain()


def test_a_renyi_policy_buys_more_than_a_basic_one() -> None:
    plans = [
        fleet(policy)
        .study("plan", analysis=ANALYSIS)
        .plan_rounds([1, 1, 1], reads=AGE, epsilon=1, delta="1e-5")
        for policy in (generous(3), renyi(3))
    ]
    assert plans[1].rounds[0].std_error < 0.9 * plans[0].rounds[0].std_error


def test_a_plan_that_the_policy_does_not_allow() -> None:
    study = fleet(generous(2)).study("plan", analysis=ANALYSIS)
    with pytest.raises(InvalidInput, match="disjoint"):
        study.plan_rounds([1, 1, 1], reads=AGE, cohorts="everyone")
    with pytest.raises(InvalidInput, match="has no analysis"):
        plan_rounds(generous(), "nobody", [1], refs=["user.age"], devices=10)


@pytest.mark.parametrize("reports", [1, 3])
def test_static_and_interactive_spend_the_same(reports: int) -> None:
    """One question with everything, or a plan of three: a device is charged no more."""
    policy = generous(reports)
    static = fleet(policy).study("static", analysis=ANALYSIS)
    static.histogram(decades(), epsilon=1, delta="1e-6").run()
    interactive = fleet(policy).study("interactive", analysis=ANALYSIS)
    plan = interactive.plan_rounds([".1", ".3", ".6"], reads=AGE, epsilon=1, delta="1e-6")
    edges = [range(10, 90, 40), range(10, 90, 20), range(10, 90, 10)]
    for planned, cells in zip(plan.rounds, edges, strict=True):
        interactive.ask(interactive.histogram(ch.intervals("age", cells), **planned.settings))
    spent = [
        next(s for s in study.budget.limits if s.limit.endswith(".budget")).spent
        for study in (static, interactive)
    ]
    assert spent[1].epsilon <= spent[0].epsilon
    assert float(spent[1].epsilon) == pytest.approx(1, rel=1e-4)
    assert float(spent[1].delta) == pytest.approx(1e-6, rel=1e-4)
    assert len(interactive.rounds) == 3
    if reports == 1:  # every device answered one round at most, and almost all answered one
        total = sum(r.result.n_reports for r in interactive.rounds if r.result is not None)
        assert total == 89_100
