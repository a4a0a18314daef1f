"""Estimates: unbiased, covering, also for cells that an earlier round selected."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm

import chorister as ch
from chorister.analyst.estimate import Estimates, check_weight, estimate, quantile
from chorister.analyst.rehearsal.population import GroupCounts, Population
from chorister.analyst.rehearsal.simulation import draw_sums
from chorister.errors import InvalidInput
from chorister.privacy import Mechanism, OneHotRandomizer
from chorister.recipe import Recipe
from tests.analyst.fleets import AGES, DEVICES, fleet, generous
from tests.keyboard import ANALYSIS

RUNS = 2000
ALARM = 1e-6


def within_binomial_error(hits: int, trials: int, chance: float) -> bool:
    """Whether a count is likely enough: false alarms in one of a million runs at most."""
    low = float(binom.ppf(ALARM / 2, trials, chance))
    return low <= hits <= float(binom.isf(ALARM / 2, trials, chance))


def recipe(crowd: str = "noised", cells: int = 20, mechanism: str = "asymmetric") -> Recipe:
    changes: dict[str, Any] = {
        f"analyses/{ANALYSIS}/crowds": ["noised", "honest"],
        f"analyses/{ANALYSIS}/honest_fraction": "1/1",
    }
    policy = generous(**changes)
    study = fleet(policy).study("coverage", analysis=ANALYSIS)
    question = study.histogram(
        ch.intervals("age", range(cells)),
        local_epsilon=3,
        epsilon=1,
        min_cohort=1000,
        crowd=crowd,  # type: ignore[arg-type]
        mechanism=mechanism,
    )
    return question.recipe(number=1, opens=0)


def truth(cells: int, devices: int) -> NDArray[np.int64]:
    """Heavy, light and empty cells."""
    counts = np.zeros(cells, dtype=np.int64)
    counts[:8] = [0, 1, 5, 20, 50, 100, 200, 400]
    counts[8] = devices - counts.sum()
    return counts


def estimates(asked: Recipe, sums: NDArray[np.uint64], devices: int) -> Estimates:
    trials = asked.privacy.min_cohort - 1 if asked.privacy.crowd == "noised" else 0
    return estimate(asked.randomizer, sums, devices, trials)


@pytest.mark.parametrize("crowd", ["noised", "honest"])
@pytest.mark.parametrize("mechanism", ["asymmetric", "symmetric"])
def test_estimates_are_unbiased_and_intervals_cover(crowd: str, mechanism: str) -> None:
    asked = recipe(crowd, mechanism=mechanism)
    devices, size = 2000, asked.encoding.size
    counts = truth(size, devices)
    rng = np.random.default_rng(11)
    seen = np.empty((RUNS, size))
    covered = np.zeros(size, dtype=np.int64)
    for run in range(RUNS):
        found = estimates(asked, draw_sums(asked, counts, devices, rng), devices)
        seen[run] = found.value
        ends = found.interval(step=asked.randomizer.step)
        covered += (ends.low <= counts) & (counts <= ends.high)
    trials = asked.privacy.min_cohort - 1 if crowd == "noised" else 0
    exact = asked.randomizer.std_error(devices, counts, trials) / np.sqrt(RUNS)
    z = norm.isf(ALARM / 2 / size)
    assert (np.abs(seen.mean(axis=0) - counts) < z * exact).all()
    # Sums are whole numbers, for which intervals allow; so they cover a little more than .95.
    assert 0.949 < covered.sum() / (RUNS * size) < 0.97
    assert all(count >= binom.ppf(ALARM / size, RUNS, 0.949) for count in covered)


def test_a_fresh_cohort_covers_selected_cells_and_pooling_does_not() -> None:
    """Select the largest of many empty-ish cells in one round; ask another cohort about it."""
    asked = recipe(cells=60)
    devices, size = 2000, asked.encoding.size
    counts = np.full(size, 10, dtype=np.int64)
    counts[0] = devices - counts[1:].sum()
    rng = np.random.default_rng(5)
    fresh = pooled = 0
    for _ in range(RUNS):
        first = estimates(asked, draw_sums(asked, counts, devices, rng), devices)
        second = estimates(asked, draw_sums(asked, counts, devices, rng), devices)
        chosen = 1 + int(np.argmax(first.value[1:]))
        ends = second.interval(step=asked.randomizer.step)
        fresh += bool(ends.low[chosen] <= 10 <= ends.high[chosen])
        both = Estimates(
            first.value + second.value,
            first.base + second.base,
            first.slope,
            first.reports + second.reports,
        ).interval(step=asked.randomizer.step)
        pooled += bool(both.low[chosen] <= 20 <= both.high[chosen])
    assert within_binomial_error(fresh, RUNS, 0.95)
    assert not within_binomial_error(pooled, RUNS, 0.95)


class WatchedPopulation(Population):
    """Devices whose true answers to the last round are remembered."""

    held: NDArray[np.int64]

    def answers(self, recipe: Recipe, answering: Any, rng: np.random.Generator) -> GroupCounts:
        found = super().answers(recipe, answering, rng)
        self.held = found.counts[0]
        return found


def test_adaptively_selected_cells_are_covered_by_whole_studies() -> None:
    """The same through 2,000 studies: cohorts are disjoint, the second is asked about what the
    first showed; the interval is the result's own, the truth is of the devices that answered.
    """
    policy = generous()
    people = WatchedPopulation(AGES, policy)
    settings: dict[str, Any] = {"local_epsilon": 3, "epsilon": 1, "min_cohort": 1000}
    covered, errors, chosen = 0, np.empty(RUNS), set()
    for seed in range(RUNS):
        study = ch.rehearse(people, policy, seed=seed).study("adaptive", analysis=ANALYSIS)
        every_age = ch.intervals("age", range(5, 95))
        first = study.ask(study.histogram(every_age, participation=".3", **settings))
        age = 5 + int(np.argmax(first.counts[1:]))
        question = study.histogram(
            ch.intervals("age", [age, age + 1]), participation="0.4", **settings
        )
        second = study.ask(question)
        ends = second.intervals()
        covered += bool(ends.low[1] <= people.held[1] <= ends.high[1])
        errors[seed] = (second.counts[1] - people.held[1]) / second.std_error[1]
        chosen.add(age)
        if seed == 0:
            assert second.n_reports < 0.4 * 0.75 * DEVICES
    assert len(chosen) > 5  # which cell is asked about hangs on the noise
    assert within_binomial_error(covered, RUNS, 0.95)
    assert abs(errors.mean()) < norm.isf(ALARM / 2) / np.sqrt(RUNS)


def test_simultaneous_intervals_cover_all_at_once() -> None:
    asked = recipe(cells=60)
    devices, size = 2000, asked.encoding.size
    counts = truth(size, devices)
    rng = np.random.default_rng(3)
    all_hold = 0
    for _ in range(RUNS):
        found = estimates(asked, draw_sums(asked, counts, devices, rng), devices)
        ends = found.interval(candidates=size, step=asked.randomizer.step)
        all_hold += bool(((ends.low <= counts) & (counts <= ends.high)).all())
    # Bonferroni never falls short; a lattice adds or takes a little.
    assert all_hold / RUNS > 0.94
    assert quantile(0.95, 1000) > quantile(0.95) > 1.95


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("held", [0, 50, 2000])
def test_intervals_cover_at_their_rate(mechanism: Mechanism, held: int) -> None:
    """20,000 seeded sums: coverage within a percent of 90% (five standard errors: 1e-6)."""
    randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon=2, length=20)
    rng = np.random.default_rng(7)
    n, trials, draws = 5000, 300, 20_000
    sums = rng.binomial(held, randomizer.h, draws)
    sums = sums + rng.binomial(n - held + 2 * trials, randomizer.q, draws)
    low, high = estimate(randomizer, sums, n, trials).interval(0.9, step=randomizer.step)
    assert np.mean((low <= held) & (held <= high)) == pytest.approx(0.9, abs=0.0106)


def test_intervals_exist_for_every_sum_that_can_occur() -> None:
    for mechanism in Mechanism:
        randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon="0.5", length=20)
        sums = np.arange(0, 101)
        low, high = estimate(randomizer, sums, 100).interval(0.999999, step=randomizer.step)
        assert np.all(low < high)


def test_normal_intervals_are_symmetric() -> None:
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=2, length=5)
    found = estimate(randomizer, [100, 200, 300, 150, 120], 1000, 99)
    normal = found.interval(step=randomizer.step, method="normal")
    np.testing.assert_allclose(normal.low + normal.high, 2 * found.value)
    np.testing.assert_allclose(found.std_error, randomizer.std_error(1000, found.value, 99))


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0])
def test_a_confidence_lies_between_0_and_1(confidence: float) -> None:
    with pytest.raises(InvalidInput, match="confidence"):
        quantile(confidence)


def test_a_strange_total_weight_is_marked_with_the_least_number_of_hostile_reports() -> None:
    asked = recipe(cells=100)
    devices, size = 10_000, asked.encoding.size
    counts = truth(size, devices)
    sums = draw_sums(asked, counts, devices, np.random.default_rng(1))
    trials = asked.privacy.min_cohort - 1
    good = check_weight(asked.randomizer, sums, devices, trials)
    assert not good.marked
    assert good.least_hostile == 0
    assert "nothing unusual" in good.explain()
    limit = asked.randomizer.max_weight
    hostile = 300
    bad = check_weight(asked.randomizer, sums + np.uint64(hostile * limit // size), devices, trials)
    assert bad.marked
    assert bad.least_hostile is not None
    assert hostile * 0.8 < bad.least_hostile < hostile * 1.2
    assert "hostile" in bad.explain()
    worse = check_weight(asked.randomizer, sums + np.uint64(10**9), devices, trials)
    assert worse.least_hostile is None
    assert "aggregator" in worse.explain()


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("local_epsilon", ["1", "4", "6.26", "8"])
@pytest.mark.parametrize(("reports", "trials"), [(97, 19), (706, 533), (5000, 2000)])
def test_far_out_the_law_of_rare_bits_is_no_normal_one(
    mechanism: Mechanism, local_epsilon: str, reports: int, trials: int
) -> None:
    """By the exact law, each end over many candidates is missed as rarely as it says, nearly."""
    randomizer = OneHotRandomizer(
        length=100, local_epsilon=Decimal(local_epsilon), mechanism=mechanism
    )
    for held in (0, 5, 50):
        others = reports + 2 * trials - held
        reach = min(others, int(others * randomizer.q + 12 * (others * randomizer.q) ** 0.5) + 60)
        law = np.convolve(
            binom.pmf(np.arange(held + 1), held, randomizer.h),
            binom.pmf(np.arange(reach + 1), others, randomizer.q),
        )
        found = estimate(randomizer, np.arange(len(law)), reports, trials)
        for candidates in (44, 1681, 10_000):
            ends = found.interval(candidates=candidates, step=randomizer.step)
            nominal = 0.025 / candidates
            assert law[ends.low > held].sum() < 1.5 * nominal
            assert law[ends.high < held].sum() < 1.5 * nominal


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("local_epsilon", ["0.7", "2", "3.3", "6", "8"])
def test_intervals_of_small_cohorts_cover_by_the_exact_law(
    mechanism: Mechanism, local_epsilon: str
) -> None:
    """Sums are whole numbers: an interval that forgets it covers as little as 79%."""
    randomizer = OneHotRandomizer(
        length=21, local_epsilon=Decimal(local_epsilon), mechanism=mechanism
    )
    for reports, trials in ((20, 0), (37, 0), (66, 0), (100, 0), (66, 5), (300, 0), (300, 40)):
        sums = np.arange(reports + 2 * trials + 1)
        ends = estimate(randomizer, sums, reports, trials).interval(step=randomizer.step)
        for held in range(0, reports + 1, max(1, reports // 25)):
            law = np.convolve(
                binom.pmf(np.arange(held + 1), held, randomizer.h),
                binom.pmf(np.arange(len(sums) - held), reports + 2 * trials - held, randomizer.q),
            )
            covered = law[(ends.low <= held) & (held <= ends.high)].sum()
            assert covered >= 0.945, (reports, trials, held)


def test_many_candidates_need_the_step_of_one_bit() -> None:
    found = estimate(OneHotRandomizer(mechanism="asymmetric", local_epsilon=2, length=5), [1], 9)
    with pytest.raises(InvalidInput, match="step"):
        found.interval(candidates=2, step=0.0)
