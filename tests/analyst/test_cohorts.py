"""Plans: what rounds cost before they are asked; static and interactive spend the same."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest

import chorister as ch
from chorister.analyst.cohorts import conditional_shares, enough_for_each
from chorister.errors import BudgetExceeded, CohortTooSmall, InvalidInput
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
    assert "at most one round" in plan.explain()


def test_small_rounds_get_the_devices_that_they_need() -> None:
    shares = [Decimal("0.08"), Decimal("0.32"), Decimal("0.6")]
    assert enough_for_each(shares, 10**6, 1000) == shares
    raised = enough_for_each(shares, 5000, 1000)
    assert sum(raised) == pytest.approx(1)
    assert 5000 * raised[0] > 1000 + 6 * (5000 * 0.2 * 0.8) ** 0.5  # sure, not on average
    assert raised[2] / raised[1] == pytest.approx(Decimal("0.6") / Decimal("0.32"))
    equal = enough_for_each(shares, 3700, 1000)
    assert equal[1] >= equal[0]  # the second one had to be raised as well
    with pytest.raises(CohortTooSmall, match="fewer rounds") as caught:
        enough_for_each(shares, 3000, 1000)
    assert caught.value.needed == 1000
    with pytest.raises(CohortTooSmall, match="smaller cohorts"):
        enough_for_each([1], 999, 1000)


def test_a_plan_for_a_small_fleet_is_answered_or_says_what_to_do() -> None:
    policy = generous(1, **{f"analyses/{ANALYSIS}/cohort/smallest": 1000})
    people: dict[str, Any] = {"age": [20, 30, 40, 50], "count": [1250] * 4}
    study = ch.rehearse(people, policy, seed=1).study("small", analysis=ANALYSIS)
    plan = study.plan_rounds([".08", ".32", ".6"], reads=AGE)
    assert plan.cohorts == "disjoint"
    for planned in plan.rounds:  # eight percent alone would have been 400 devices
        asked = study.histogram(ch.intervals("age", [0, 35, 70]), **planned.settings)
        assert study.ask(asked).n_reports >= 1000
    with pytest.raises(CohortTooSmall, match="let the policy allow one report per round"):
        study.plan_rounds([".08", ".32", ".6"], reads=AGE, devices=2000)
    everyone = ch.rehearse(people, generous(3), seed=1).study("all", analysis=ANALYSIS)
    assert everyone.cohorts(3, reads=AGE) == "everyone"
    assert everyone.cohorts(4, reads=AGE) == "disjoint"
    with pytest.raises(CohortTooSmall, match="wait until there are more"):
        everyone.plan_rounds([1, 1, 1], reads=AGE, devices=20)


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
        fleet(generous()).study("plan", analysis="nobody").plan_rounds([1], reads=AGE, devices=10)


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
    if reports == 1:  # every device answered at most one round, and almost all answered one
        total = sum(r.result.n_reports for r in interactive.rounds if r.result is not None)
        assert total == 89_100


# --- Targets ------------------------------------------------------------------------------------


def _algorithm_runs(target: str) -> list[Any]:
    """Every algorithm, planned on a fleet of its own with this target."""
    people = {
        "age": [20, 30, 40] * 3, "perplexity": [1.0, 2.0, 3.0] * 3,
        "ngram": ["how are you", "the cat sat", "hello world"] * 3, "count": [4_000] * 9,
    }  # fmt: skip

    functions: dict[str, Any] = {f"analyses/{ANALYSIS}/functions": ["ngrams", "substr", "words"]}

    def study() -> ch.Study:
        return ch.rehearse(people, generous(**functions), seed=3).study("target", analysis=ANALYSIS)

    return [
        ch.discover_ngrams(study(), ["how", "are", "you"], max_n=2, field="keyboard.ngram",
                           target=target),
        ch.discover_words(study(), field="keyboard.ngram", target=target),
        ch.heatmap(study(), ("age", "perplexity"), (0, 0, 80, 8), depth=2, target=target,
                   query="SELECT user.age, keyboard.perplexity FROM user, keyboard"),
        ch.distribution(study(), "age", 0, 100, target=target),
        ch.crosstab(study(), ch.intervals("age", [0, 25, 50]),
                    ch.intervals("perplexity", [0, 2, 4]), target=target,
                    query="SELECT user.age, keyboard.perplexity FROM user, keyboard"),
    ]  # fmt: skip


def test_rounds_of_every_algorithm_end_at_their_target() -> None:
    """The cohorts are as large as the target says, not as large as the fleet."""
    for run in _algorithm_runs("0.6"):
        for planned in run.plan.rounds:
            assert planned.target is not None
            assert planned.min_cohort <= planned.target == planned.expected_reports
        assert f"ends at {run.plan.rounds[0].target:,} reports" in run.plan.explain()
        assert next(iter(run)).result.n_reports == run.plan.rounds[0].target
    study = fleet().study("target", analysis=ANALYSIS)
    whole, early = (
        study.plan_rounds((1,), reads=AGE, target=target).rounds[0] for target in (None, "0.6")
    )
    assert early.expected_reports == math.floor(0.6 * whole.expected_reports)
    assert early.min_cohort <= whole.min_cohort


def test_a_target_that_no_round_can_reach_is_refused_before_anything_is_asked() -> None:
    study = fleet().study("target", analysis=ANALYSIS)
    for wrong, words in ((2, "minimum cohort|hides nobody"), (10**9, "a share from 0 to 1"),
                         ("1.5", "a share from 0 to 1"), (-1, "a share from 0 to 1")):  # fmt: skip
        with pytest.raises(InvalidInput, match=words):
            study.plan_rounds((1,), reads={"user": ["age"]}, target=wrong)
    assert not study.rounds
    plan = study.plan_rounds((1,), reads={"user": ["age"]}, target=50_000)
    assert plan.rounds[0].target == 50_000


@pytest.mark.parametrize("kind", [list, np.array, pl.Series])
def test_a_run_with_other_words_is_another_run(kind: Any) -> None:
    """Else it would be planned by what was spent before the first one, and fail half-way."""
    study = fleet(generous(3)).study("words", analysis=ANALYSIS)
    words = [f"w{i}" for i in range(1_500)]
    one, other = (kind([*words[:700], word, *words[700:]]) for word in ("this", "that"))
    assert len(ch.discover_ngrams(study, one, max_n=2, cohorts="everyone").result.results) == 2
    again = ch.discover_ngrams(study, one, max_n=2, cohorts="everyone")
    assert len(again.plan.rounds) == 2
    with pytest.raises(BudgetExceeded):
        ch.discover_ngrams(study, other, max_n=2, cohorts="everyone")
