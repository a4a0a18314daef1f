"""What a device sends: its law, its guarantee, its estimates."""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from chorister._native import sample_binomials
from chorister.errors import InvalidInput
from chorister.privacy import Mechanism, OneHotRandomizer
from tests.privacy.former import own

LOCAL_EPSILONS = ["0.01", "0.1", "1", "2.5", "3", "5", "8", "12", "20"]


def exact_chances(randomizer: OneHotRandomizer) -> tuple[Fraction, Fraction]:
    """The chances actually used, as rationals."""
    return Fraction(randomizer.q_threshold, 2**64), Fraction(randomizer.h_threshold, 2**64)


def report_chance(report: tuple[int, ...], held: int, q: Fraction, h: Fraction) -> Fraction:
    chance = Fraction(1)
    for place, bit in enumerate(report):
        p = h if place == held else q
        chance *= p if bit else 1 - p
    return chance


def power_of_e(exponent: Decimal) -> Fraction:
    """e^exponent rounded down at 60 digits."""
    value = Context(prec=70).exp(exponent)
    return Fraction(value) * (1 - Fraction(1, 10**60))


@pytest.mark.parametrize("local", LOCAL_EPSILONS)
@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("length", [2, 3, 4])
def test_no_likelihood_ratio_exceeds_the_local_guarantee_in_exact_arithmetic(
    mechanism: Mechanism, local: str, length: int
) -> None:
    """Every report of every pair of values, with the integer thresholds; bounded or not."""
    randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon=local, length=length)
    q, h = exact_chances(randomizer)
    limit = power_of_e(randomizer.replacement_epsilon)
    for bound in range(1, length + 1):
        reports = [r for r in product((0, 1), repeat=length) if sum(r) <= bound]
        laws = []
        for held in range(length):
            law = [report_chance(report, held, q, h) for report in reports]
            laws.append([chance / sum(law) for chance in law])  # redrawn until within the bound
        for one, other in product(laws, repeat=2):
            for p, p_other in zip(one, other, strict=True):
                assert p <= limit * p_other


@pytest.mark.parametrize("local", LOCAL_EPSILONS)
def test_symmetric_meets_the_deletion_guarantee(local: str) -> None:
    randomizer = OneHotRandomizer(mechanism="symmetric", local_epsilon=local, length=3)
    q, h = exact_chances(randomizer)
    limit = power_of_e(randomizer.local_epsilon)
    for p, reference in ((h, q), (1 - h, 1 - q), (q, h), (1 - q, 1 - h)):
        assert p <= limit * reference


@given(
    local=st.decimals(min_value="0.001", max_value="20", places=6),
    mechanism=st.sampled_from(list(Mechanism)),
)
def test_thresholds_round_towards_more_noise(local: Decimal, mechanism: Mechanism) -> None:
    randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon=local, length=10)
    q, h = exact_chances(randomizer)
    nominal = 1 / (power_of_e(local) + 1)  # a little above the nominal q
    assert -Fraction(1, 2**60) < q - nominal < Fraction(1, 2**63)
    assert q < h
    assert h == own(mechanism, q)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("local", ["0.001", "1.5", "3.3333333333333333333333333333", "20"])
def test_replacement_values_are_the_largest_likelihood_ratio(
    mechanism: Mechanism, local: str
) -> None:
    randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon=local, length=5)
    q, h = exact_chances(randomizer)
    ratio = h * (1 - q) / (q * (1 - h))
    stated = randomizer.replacement_epsilon
    assert ratio <= power_of_e(stated) <= ratio * (1 + Fraction(1, 10**8))
    back = mechanism.largest_local_epsilon(stated)
    assert back <= randomizer.local_epsilon
    assert float(back) == float(randomizer.local_epsilon)
    assert mechanism.replacement_epsilon(back) <= stated


def test_replacement_values() -> None:
    assert Mechanism.SYMMETRIC.replacement_epsilon(Decimal("1.5")) == 3
    assert Mechanism.ASYMMETRIC.replacement_epsilon(Decimal("1.5")) == Decimal("1.5")
    assert Mechanism.SYMMETRIC.largest_local_epsilon(Decimal(3)) == Decimal("1.5")


def test_local_epsilon_is_kept_exactly() -> None:
    texts: list[str | Decimal | float] = ["0.1", Decimal("0.1"), 0.1]
    made = {
        OneHotRandomizer(mechanism="asymmetric", local_epsilon=text, length=5) for text in texts
    }
    assert len(made) == 1
    assert made.pop().local_epsilon == Decimal("0.1")


@pytest.mark.parametrize("length", [0, 1, -1, 1_000_001, True])
def test_bad_lengths_are_refused_with_the_range(length: int) -> None:
    with pytest.raises(InvalidInput, match="between 2 and 1,000,000"):
        OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=length)


def test_bad_indices_and_counts_are_refused() -> None:
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=5)
    for index in (-1, 5):
        with pytest.raises(InvalidInput, match="between 0 and 4"):
            randomizer.randomize(index)
        with pytest.raises(InvalidInput, match="between 0 and 4"):
            randomizer.randomize_many([0, index])
    with pytest.raises(InvalidInput, match="at least 1"):
        randomizer.debias([1.0], 0)


# --- Estimates ----------------------------------------------------------------------------------


def expected_sum(randomizer: OneHotRandomizer, n: int, held: int, trials: int = 0) -> float:
    return held * randomizer.h + (n - held + 2 * trials) * randomizer.q


def test_the_papers_printed_asymmetric_formula_is_biased_and_ours_is_not() -> None:
    """n = 10,000, f = 700, eps0 = 3: subtracting n/(E-1) gives 1224 in expectation."""
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=20)
    n, held, grown = 10_000, 700, math.exp(3)
    total = expected_sum(randomizer, n, held)
    printed = 2 * (1 + grown) / (grown - 1) * total - n / (grown - 1)
    assert printed == pytest.approx(1224, abs=0.5)
    corrected = 2 * (1 + grown) / (grown - 1) * total - 2 * n / (grown - 1)
    assert corrected == pytest.approx(held, abs=1e-6)
    assert randomizer.debias([total], n)[0] == pytest.approx(held, abs=1e-6)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("trials", [0, 585])
def test_estimates_are_unbiased_with_the_stated_variance(mechanism: Mechanism, trials: int) -> None:
    randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon=3, length=20)
    n, held, grown = 10_000, 700, math.exp(3)
    total = expected_sum(randomizer, n, held, trials)
    assert randomizer.debias([total], n, trials)[0] == pytest.approx(held, abs=1e-6)
    q, h = randomizer.q, randomizer.h
    spread = held * h * (1 - h) + (n - held + 2 * trials) * q * (1 - q)
    assert randomizer.variance(n, held, trials) == pytest.approx(spread / (h - q) ** 2)
    if not trials:
        base = n * grown / (grown - 1) ** 2
        stated = 4 * base + held if mechanism is Mechanism.ASYMMETRIC else base
        assert randomizer.variance(n, held) == pytest.approx(stated)


def test_aggregator_noise_costs_what_is_stated() -> None:
    """Standard error x 1.06 at n = 1e4 with min_cohort 586, x 1.73 at n = min_cohort."""
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=20)
    many = randomizer.std_error(10_000, 0.0, 585) / randomizer.std_error(10_000)
    least = randomizer.std_error(586, 0.0, 585) / randomizer.std_error(586)
    assert float(many) == pytest.approx(1.06, abs=0.005)
    assert float(least) == pytest.approx(1.73, abs=0.005)


# --- What is really sampled -----------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("local", ["1", "4"])
def test_sampled_reports_follow_the_stated_law(mechanism: Mechanism, local: str) -> None:
    """Each of the 2^4 reports' counts against its exact binomial law; the generator has no seed.

    Twice the smaller tail falls below p with chance at most p, so that all 16 counts in all four
    cases raise a false alarm with chance at most 1e-6. (Chi-squared would not: some reports are
    expected less than once.)
    """
    randomizer = OneHotRandomizer(mechanism=mechanism, local_epsilon=local, length=4)
    draws = randomizer.randomize_many(np.full(200_000, 2))
    seen = np.bincount(draws @ np.array([8, 4, 2, 1]), minlength=16)
    q, h = exact_chances(randomizer)
    chances = np.array(
        [float(report_chance(report, 2, q, h)) for report in product((0, 1), repeat=4)]
    )
    assert randomizer.max_weight == 4
    law = stats.binom(200_000, chances)
    tails = 2 * np.minimum(law.cdf(seen), law.sf(seen - 1))
    assert tails.min() > 1e-6 / (16 * 4)


def test_single_reports_are_bytes_of_zeros_and_ones() -> None:
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=1000)
    report = np.frombuffer(randomizer.randomize(17), dtype=np.uint8)
    assert report.shape == (1000,)
    assert set(np.unique(report)) <= {0, 1}
    assert report.sum() <= randomizer.max_weight
    assert len(randomizer.randomize(17, bounded=False)) == 1000


def test_sampled_binomials_follow_the_stated_law() -> None:
    """The aggregators' noise at the device's threshold: chi-squared at 1e-6."""
    randomizer = OneHotRandomizer(mechanism="asymmetric", local_epsilon=3, length=20)
    draws = np.frombuffer(
        sample_binomials(200_000, 585, threshold=randomizer.q_threshold), dtype=np.uint64
    )
    edges = np.arange(14, 43)
    law = stats.binom(585, randomizer.q)
    chances = np.diff(np.concatenate(([0.0], law.cdf(edges), [1.0])))
    seen = np.bincount(np.searchsorted(edges, draws), minlength=edges.size + 1)
    assert stats.chisquare(seen, 200_000 * chances).pvalue > 1e-6
