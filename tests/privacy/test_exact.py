"""The exact accountant against reference values, exact rationals and every composition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest

from chorister.privacy import Mechanism
from chorister.privacy.certified import exact_delta, exact_epsilon, witness_delta
from chorister.privacy.losses import exact_envelope
from tests.privacy.former import (
    composition_delta,
    coordinate,
    native_composition_delta,
    own,
    probabilities,
)

ASYMMETRIC, SYMMETRIC = Mechanism.ASYMMETRIC, Mechanism.SYMMETRIC


# mpmath, 40 digits.
REFERENCE = [
    (10, 1, ASYMMETRIC, 0, 0, 0.3, 0.0125082038990432),
    (10, 1, ASYMMETRIC, 3, 2, 0.3, 0.0105171800821448),
    (100, 3, ASYMMETRIC, 0, 0, 0.5, 0.00759369605047727),
    (1000, 3, ASYMMETRIC, 0, 0, 0.3, 2.44085658948803e-5),
    (1000, 3, ASYMMETRIC, 10, 5, 0.3, 1.99167546450122e-5),
    (1000, 6, ASYMMETRIC, 0, 0, 1.5, 1.15013240990679e-5),
    (1000, 3, SYMMETRIC, 999, 0, 0.9, 1.85944577619919e-6),
    (1000, 1, SYMMETRIC, 999, 0, 0.15, 1.1912777186225e-5),
]


@pytest.mark.parametrize(("n", "local", "mechanism", "k", "kk", "epsilon", "delta"), REFERENCE)
def test_single_compositions_match_mpmath_to_twelve_digits(
    n: int, local: float, mechanism: Mechanism, k: int, kk: int, epsilon: float, delta: float
) -> None:
    found = native_composition_delta(n, mechanism, local, epsilon, held=k, instead=kk)
    assert found == pytest.approx(delta, rel=1e-12)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("local", [0.01, 0.7, 3.0, 9.0])
@pytest.mark.parametrize("n", [2, 9, 40, 300, 900])
def test_compositions_match_a_computation_by_other_means(
    mechanism: Mechanism, local: float, n: int
) -> None:
    """The native recurrence beside direct convolution, for crowds of all shapes."""
    q, h = probabilities(mechanism, local)
    others = n - 1
    for k, kk in ((0, 0), (others, 0), (others // 2, others // 3), (1, others - 1), (others, 0)):
        gained = coordinate(others - k, k, q, h, 1e-40)
        lost = coordinate(others - kk, kk, q, h, 1e-40)
        for epsilon in (0.02, 0.4):
            found = native_composition_delta(n, mechanism, local, epsilon, held=k, instead=kk)
            reference = composition_delta(gained, lost, epsilon)
            assert found == pytest.approx(reference, rel=1e-9, abs=1e-17), (k, kk, epsilon)


EPSILONS = [  # at delta 1e-6, asymmetric: eps0, n, lower, certified
    (1.0, 10**3, 0.083558, 0.083566),
    (1.0, 10**5, 0.006917, 0.006918),
    (3.0, 10**3, 0.376195, 0.376212),
    (3.0, 10**4, 0.110007, 0.110009),
    (3.0, 10**5, 0.031942, 0.031943),
    (3.0, 10**6, 0.009157, 0.009157),
    (6.0, 10**4, 0.574772, 0.574776),
    (6.0, 10**5, 0.168261, 0.168264),
    (6.0, 10**6, 0.049000, 0.049002),
]


@pytest.mark.parametrize(("local", "n", "lower", "certified"), EPSILONS)
def test_asymmetric_epsilons_match_the_table(
    local: float, n: int, lower: float, certified: float
) -> None:
    found = exact_epsilon(n, ASYMMETRIC, local, 1e-6, noised=False)
    assert found.lower == pytest.approx(lower, abs=6e-7)
    assert found.lower <= found.upper <= certified + 6e-7


@pytest.mark.parametrize(
    ("local", "n", "delta", "lower", "certified"),
    [
        (3.0, 10**4, 1e-6, 0.240967, 0.241060),
        (6.0, 10**5, 1e-6, 0.377576, 0.377777),
        (5.0, 10**5, 1e-9, 0.29735, 0.29750),
        (6.5, 10**5, 1e-9, 0.70010, 0.70035),
        (7.0, 10**5, 1e-9, 0.95040, 0.95065),
    ],
)
def test_symmetric_epsilons_match_the_table(
    local: float, n: int, delta: float, lower: float, certified: float
) -> None:
    found = exact_epsilon(n, SYMMETRIC, local, delta, noised=False)
    assert lower - 6e-7 <= found.lower <= found.upper <= certified + 6e-7


def test_the_witness_is_far_below_the_truth_on_a_tiny_cohort() -> None:
    """n = 15, eps0 = 3: whoever enforced the witness would be off by a third."""
    found = exact_epsilon(15, ASYMMETRIC, 3.0, 1e-6, noised=False)
    assert found.lower == pytest.approx(2.154, abs=5e-4)
    assert found.upper == pytest.approx(2.930, abs=5e-4)


# --- Exact rationals over all datasets --------------------------------------------------------


def sum_law(data: tuple[int, ...], size: int, q: int, h: int, unit: int) -> list[int]:
    """The law of the sum of all reports, exactly: chances times unit^(n size).

    q and h are in units of 1/unit; coordinates are independent given the data.
    """
    laws = []
    for place in range(size):
        law = [1]
        for held in data:
            p = h if held == place else q
            law = [
                (law[i] if i < len(law) else 0) * (unit - p) + (law[i - 1] * p if i else 0)
                for i in range(len(law) + 1)
            ]
        laws.append(law)
    return [math.prod(chances) for chances in product(*laws)]


def neighbours(n: int, size: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Datasets that differ in the first user; the others' order does not matter."""
    for others in product(range(size), repeat=n - 1):
        if list(others) == sorted(others):
            for mine, instead in product(range(size), repeat=2):
                if mine != instead:
                    yield (mine, *others), (instead, *others)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("grown", [2, 8, 100])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_certified_covers_brute_force_with_exact_rationals(
    mechanism: Mechanism, grown: int, size: int, n: int
) -> None:
    """All datasets of all neighbours; the (k, k') family must also *equal* the truth."""
    local = math.log(grown)
    unit = 4 * (grown + 1)
    q, h = 4, int(own(mechanism, Fraction(1, grown + 1)) * unit)
    laws = [
        (sum_law(data, size, q, h, unit), sum_law(other, size, q, h, unit))
        for data, other in neighbours(n, size)
    ]
    for ratio in (Fraction(1, 2), Fraction(1), Fraction(5, 4), Fraction(2), Fraction(6)):
        a, b = ratio.as_integer_ratio()
        gap = max(
            sum(max(b * p - a * q, 0) for p, q in zip(p_law, q_law, strict=True))
            for p_law, q_law in laws
        )
        truth = float(Fraction(gap, b * unit ** (n * size)))
        epsilon = math.log(ratio)
        family = family_supremum(n, size, mechanism, local, epsilon)
        assert family == pytest.approx(truth, rel=1e-9, abs=1e-14)
        if epsilon >= 0:
            found = exact_delta(n, mechanism, local, epsilon, noised=False)
            assert found.upper >= truth * (1 - 1e-12) - 1e-16


def family_supremum(n: int, size: int, mechanism: Mechanism, local: float, epsilon: float) -> float:
    """Supremum over (k, k') that occur: with two elements everybody holds one of them."""
    others = n - 1
    return max(
        native_composition_delta(n, mechanism, local, epsilon, held=k, instead=kk)
        for k in range(others + 1)
        for kk in range(others + 1 - k)
        if size > 2 or k + kk == others
    )


# --- Every composition ---------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("local", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("n", [2, 3, 7, 16, 30])
def test_certified_covers_every_composition(mechanism: Mechanism, local: float, n: int) -> None:
    """All (k, k') with k + k' <= N, the domain large enough for each."""
    others = n - 1
    for epsilon in (0.05, 0.4, 1.2):
        supremum = max(
            native_composition_delta(n, mechanism, local, epsilon, held=k, instead=kk)
            for k in range(others + 1)
            for kk in range(others + 1 - k)
        )
        found = exact_delta(n, mechanism, local, epsilon, noised=False)
        assert found.upper >= supremum * (1 - 1e-10) - 1e-20
        assert found.lower <= supremum * (1 + 1e-10)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("n", [2, 5, 30, 200])
def test_the_envelope_dominates_every_k_at_every_ratio(mechanism: Mechanism, n: int) -> None:
    """Negative epsilons (ratios below 1) included: products need them."""
    local = 3.0
    q, h = probabilities(mechanism, local)
    envelope = exact_envelope(n, mechanism, local, 1e-6, noised=False)
    g = np.exp(np.linspace(-1.2 * local, 1.2 * local, 1501))
    bound = envelope.divergence(g)
    for k in range(n):
        pair = coordinate(n - 1 - k, k, q, h, 1e-25)
        truth = pair.excess(g) + np.maximum(1.0 - g, 0.0)
        assert np.all(bound >= truth * (1 - 1e-10) - 1e-15)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("local", [0.01, 1.0, 12.0])
@pytest.mark.parametrize("n", [1, 2, 3, 40])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.2])
def test_certified_is_at_least_the_witness_at_extremes(
    mechanism: Mechanism, local: float, n: int, delta: float
) -> None:
    limit = float(mechanism.replacement_epsilon(Decimal(local)))
    for noised in (False, True):
        found = exact_epsilon(n, mechanism, local, delta, noised=noised)
        assert 0.0 <= found.lower <= found.upper <= limit
        seen = witness_delta(n, mechanism, local, found.upper, noised=noised)
        assert seen <= delta * (1 + 1e-6)


def test_ratios_are_never_zero_over_zero() -> None:
    """A window that ends where Z vanishes must not produce 0/0 in the envelope."""
    with np.errstate(all="raise"):
        for n in (1, 2, 50):
            for local in (0.01, 12.0):
                for mechanism in Mechanism:
                    envelope = exact_envelope(n, mechanism, local, 1e-12, noised=False)
                    assert np.all(np.isfinite(envelope.excess))
                    assert np.all(np.diff(envelope.g) > 0)


# --- Monotone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_epsilon_is_monotone_in_cohort_local_epsilon_and_delta(mechanism: Mechanism) -> None:
    """Certified values wobble by their slack, so the comparison allows 0.1%."""

    def at(n: int = 2000, local: float = 3.0, delta: float = 1e-6) -> float:
        return exact_epsilon(n, mechanism, local, delta, noised=False).upper

    for values in (
        [at(n=n) for n in (100, 200, 400, 1000, 3000, 10000)],
        [at(delta=delta) for delta in (1e-12, 1e-9, 1e-6, 1e-3)],
        [at(local=local) for local in (6.0, 5.0, 4.0, 3.0, 2.0, 1.0)],
    ):
        for before, after in pairwise(values):
            assert after <= before * 1.001


# --- The noised crowd ---------------------------------------------------------------------------


def test_one_honest_aggregators_noise_gives_the_stated_epsilon_and_no_less_does() -> None:
    """M = 585 against 585 hostile clients is n = 586; with M = 584 epsilon .5 is exceeded."""
    enough = exact_epsilon(586, ASYMMETRIC, 3.0, 1e-6, noised=True)
    assert enough.upper == pytest.approx(0.49983, abs=5e-6)
    assert enough.upper - enough.lower < 1e-7
    less = exact_epsilon(585, ASYMMETRIC, 3.0, 1e-6, noised=True)
    assert less.lower > 0.5


def test_a_noised_crowd_is_never_worse_than_an_honest_one_of_its_size() -> None:
    for mechanism, local in ((ASYMMETRIC, 3.0), (SYMMETRIC, 3.0), (SYMMETRIC, 6.0)):
        honest = exact_epsilon(3000, mechanism, local, 1e-6, noised=False)
        noised = exact_epsilon(3000, mechanism, local, 1e-6, noised=True)
        assert noised.upper <= honest.upper


# --- An attack -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_a_likelihood_ratio_attack_never_beats_the_certified_curve(mechanism: Mechanism) -> None:
    """The best test against the worst known crowd, on simulated sums (seeded).

    The attacker accepts where ln(P/Q) > eps. Its advantage P(S) - e^eps Q(S), estimated from 4e5
    draws of each law, exceeds the certified delta by more than 5.2 standard errors with a chance
    below 1e-7 for each of 6 comparisons.
    """
    rng = np.random.default_rng(2024)
    n, local, draws = 200, 2.0, 400_000
    q, h = probabilities(mechanism, local)
    others = n - 1
    k, kk = (others, 0) if mechanism is SYMMETRIC else (0, 0)
    gained = coordinate(others - k, k, q, h, 1e-25)
    lost = coordinate(others - kk, kk, q, h, 1e-25)

    def losses(own: float, other: float) -> np.ndarray:
        first = (
            rng.binomial(others - k, q, draws)
            + rng.binomial(k, h, draws)
            + rng.binomial(1, own, draws)
        )
        second = (
            rng.binomial(others - kk, q, draws)
            + rng.binomial(kk, h, draws)
            + rng.binomial(1, other, draws)
        )
        at_first = np.clip(first - gained.first, 0, gained.ratio.size - 1)
        at_second = np.clip(second - lost.first, 0, lost.ratio.size - 1)
        return np.asarray(np.log(gained.ratio[at_first]) - np.log(lost.ratio[at_second]))

    under_p, under_q = losses(h, q), losses(q, h)
    for epsilon in (0.1, 0.4, 0.8):
        p, p0 = float(np.mean(under_p > epsilon)), float(np.mean(under_q > epsilon))
        advantage = p - math.exp(epsilon) * p0
        error = math.sqrt((p + math.exp(2 * epsilon) * p0) / draws) + 1.0 / draws
        certified = exact_delta(n, mechanism, local, epsilon, noised=False).upper
        assert advantage <= certified + 5.2 * error
