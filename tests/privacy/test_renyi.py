"""Renyi divergences against direct sums, published values and the trap of one composition."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from chorister.errors import InvalidInput
from chorister.privacy import Mechanism
from chorister.privacy.certified import (
    MAX_ORDER,
    RenyiRelease,
    exact_delta,
    renyi_divergence,
    renyi_epsilon,
    renyi_to_delta,
    renyi_to_epsilon,
)
from tests.privacy.former import own


def direct(n: int, mechanism: Mechanism, local: float, k: int, order: int, *, lost: bool) -> float:
    """D_order of pair k by summing over every count in rational-free high precision."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        q = 1 / (mpmath.exp(local) + 1)
        h = own(mechanism, q)
        z = [mpmath.mpf(1)]
        for p in [q] * (n - 1 - k) + [h] * k:
            z = [
                (z[i] * (1 - p) if i < len(z) else 0) + (z[i - 1] * p if i else 0)
                for i in range(len(z) + 1)
            ]
        z.append(mpmath.mpf(0))

        def law(p: Any) -> list[Any]:
            return [z[i] * (1 - p) + (z[i - 1] * p if i else 0) for i in range(len(z))]

        a, b = law(h), law(q)
        if lost:
            a, b = b, a
        moment = sum(b[i] * (a[i] / b[i]) ** order for i in range(len(a)))
        return float(mpmath.log(moment) / (order - 1))


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize(("n", "local"), [(1, 2.0), (2, 4.0), (6, 1.0), (12, 3.0)])
@pytest.mark.parametrize("order", [2, 3, 10, 60])
def test_certified_divergence_covers_every_composition_and_little_more(
    mechanism: Mechanism, n: int, local: float, order: int
) -> None:
    gained = max(direct(n, mechanism, local, k, order, lost=False) for k in range(n))
    lost = max(direct(n, mechanism, local, k, order, lost=True) for k in range(n))
    found = renyi_divergence(n, mechanism, local, order, noised=False)
    assert gained + lost <= found <= (gained + lost) * (1 + 1e-3) + 1e-8
    single = direct(n, mechanism, local, 0, order, lost=False) + direct(
        n, mechanism, local, 0, order, lost=True
    )
    noised = renyi_divergence(n, mechanism, local, order, noised=True)
    assert single <= noised <= single + 1e-8


def noised_truth(n: int, mechanism: Mechanism, local: float, order: int) -> float:
    """D_order of a noised release by its first 200 counts; those beyond weigh less than e^-300."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        q = 1 / (mpmath.exp(local) + 1)
        h = own(mechanism, q)
        counts = min(n, 200)
        z = [mpmath.binomial(n - 1, i) * q**i * (1 - q) ** (n - 1 - i) for i in range(counts)]
        z = [mpmath.mpf(0), *z, *([mpmath.mpf(0)] if counts == n else [])]
        pairs = [
            (here * (1 - h) + before * h, here * (1 - q) + before * q)
            for before, here in pairwise(z)
        ]
        return float(
            sum(
                mpmath.log(sum(b * (a / b) ** order for a, b in side)) / (order - 1)
                for side in (pairs, [(b, a) for a, b in pairs])
            )
        )


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("local", [16.6, 17.0, 18.0, 19.5, 20.0])
@pytest.mark.parametrize("n", [2, 100, 10_000, 1_000_000])
@pytest.mark.parametrize("order", [4, 8, 32])
def test_large_local_epsilons_keep_their_digits(
    mechanism: Mechanism, local: float, n: int, order: int
) -> None:
    """1 - (1 - q) would leave 7 digits of q at eps0 = 20, and a divergence below the truth."""
    truth = noised_truth(n, mechanism, local, order)
    found = renyi_divergence(n, mechanism, local, order, noised=True)
    assert truth <= found <= truth + 1e-8


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("order", [4, 32])
def test_an_honest_symmetric_crowd_keeps_them_too(n: int, order: int) -> None:
    truth = 2 * max(direct(n, Mechanism.SYMMETRIC, 19.0, k, order, lost=False) for k in range(n))
    found = renyi_divergence(n, Mechanism.SYMMETRIC, 19.0, order, noised=False)
    assert truth <= found <= truth * (1 + 1e-3) + 1e-8


def test_one_composition_is_not_the_worst_case() -> None:
    """Trap: (0, 0) alone would give 3.614 at eps0 = 4, n = 10, delta 1e-10."""
    release = RenyiRelease(
        cohort=10, mechanism=Mechanism.ASYMMETRIC, local_epsilon=4.0, noised=True
    )
    alone, _ = renyi_epsilon([release], 1e-10)
    assert alone == pytest.approx(3.614, abs=5e-4)
    truth = exact_delta(10, Mechanism.ASYMMETRIC, 4.0, alone, noised=False)
    assert truth.upper == pytest.approx(2.6e-4, rel=0.05)
    honest = RenyiRelease(
        cohort=10, mechanism=Mechanism.ASYMMETRIC, local_epsilon=4.0, noised=False
    )
    assert renyi_epsilon([honest], 1e-10)[0] > 3.9


@pytest.mark.parametrize(
    ("n", "local", "delta", "published"),
    [
        (10**4, 3.0, 1e-6, 0.2636),
        (10**5, 6.0, 1e-6, 0.4145),
        (10**5, 5.0, 1e-9, 0.31602),
        (10**5, 6.5, 1e-9, 0.90574),
        (10**5, 7.0, 1e-9, 1.52798),
    ],
)
def test_symmetric_matches_the_published_two_rho(
    n: int, local: float, delta: float, published: float
) -> None:
    release = RenyiRelease(
        cohort=n, mechanism=Mechanism.SYMMETRIC, local_epsilon=local, noised=False
    )
    found, _ = renyi_epsilon([release], delta)
    assert found == pytest.approx(published, rel=6e-4)


def test_the_conversion_is_that_of_canonne_kamath_and_steinke() -> None:
    """Mironov's older conversion gives .3369 where it gives .2636."""
    release = RenyiRelease(
        cohort=10**4, mechanism=Mechanism.SYMMETRIC, local_epsilon=3.0, noised=False
    )
    found, order = renyi_epsilon([release], 1e-6)
    divergence = release.divergence(order)
    older = divergence - math.log(1e-6) / (order - 1)
    assert older > found + 0.05
    assert renyi_to_delta(divergence, order, renyi_to_epsilon(divergence, order, 1e-6)) == (
        pytest.approx(1e-6, rel=1e-9)
    )


@pytest.mark.parametrize("order", [1, 0, -3, MAX_ORDER + 1, 2.5, True])
def test_bad_orders_are_refused_with_the_range(order: Any) -> None:
    with pytest.raises(InvalidInput, match="from 2 to"):
        renyi_divergence(10, Mechanism.ASYMMETRIC, 3.0, order, noised=True)
