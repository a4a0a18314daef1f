"""Levels and differences of two windows over their exact laws: no interval misses too often."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from chorister.analyst.estimate import quantile
from chorister.analyst.trend_intervals import (
    Levels,
    found_with_chance,
    pair_weights,
    smallest_shift,
    step_weights,
    z_of,
)
from chorister.errors import InvalidInput
from chorister.privacy import OneHotRandomizer

Floats = NDArray[np.float64]
ALPHAS = (0.05, 1e-5)
TRUE_SHARES = (0.0, 0.02, 0.5, 1.0)
LAWS = [(m, e) for m in ("asymmetric", "symmetric") for e in ("2", "10")]


def levels(law: OneHotRandomizer, n: float, trials: int, shares: Floats, w: float = 0.0) -> Levels:
    return Levels(
        shares=np.atleast_2d(shares),
        reports=np.full(len(np.atleast_2d(shares)), float(n)),
        law=law,
        noise_trials=trials,
        overlap=w,
    )


def exact(law: OneHotRandomizer, n: int, trials: int, p: float) -> tuple[Floats, Floats]:
    """The chance of every sum that n devices and both aggregators release, and its estimate."""
    r = law.q + (law.h - law.q) * p
    chance = binom.pmf(np.arange(n + 1), n, r)
    if trials:
        chance = np.convolve(chance, binom.pmf(np.arange(2 * trials + 1), 2 * trials, law.q))
    sums = np.arange(len(chance))
    shares: Floats = np.array((sums - (n + 2 * trials) * law.q) / (n * (law.h - law.q)))
    kept = chance > 1e-14
    return chance[kept], shares[kept]


@pytest.mark.parametrize(("mechanism", "epsilon"), LAWS)
def test_a_level_misses_no_more_often_than_stated(mechanism: str, epsilon: str) -> None:
    law = OneHotRandomizer(mechanism=mechanism, local_epsilon=epsilon, length=10)
    for n in (50, 200):
        for trials in (0, n - 1):
            for p in TRUE_SHARES:
                chance, shares = exact(law, n, trials, p)
                for alpha in ALPHAS:
                    low, high = levels(law, n, trials, shares).ends(quantile(1 - alpha))
                    for missed in (low[0] > p, high[0] < p):
                        assert chance[missed].sum() <= 1.02 * alpha / 2, (n, trials, p, alpha)


@pytest.mark.parametrize(("mechanism", "epsilon"), LAWS)
def test_a_difference_misses_no_more_often_than_stated(mechanism: str, epsilon: str) -> None:
    law = OneHotRandomizer(mechanism=mechanism, local_epsilon=epsilon, length=10)
    truths = ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (0.02, 0.5), (0.02, 0.98))
    for sizes in ((50, 50), (50, 150)):
        for trials in (0, 49):
            for truth in truths:
                one, other = (exact(law, n, trials, p) for n, p in zip(sizes, truth, strict=True))
                chance = np.outer(one[0], other[0]).ravel()
                shares = np.stack([np.repeat(one[1], len(other[1])),
                                   np.tile(other[1], len(one[1]))])  # fmt: skip
                both = Levels(shares=shares, reports=np.array(sizes, dtype=np.float64), law=law,
                              noise_trials=trials, overlap=0.0)  # fmt: skip
                for alpha in ALPHAS:
                    _, low, high = both.contrasts(np.array([[-1.0, 1.0]]), quantile(1 - alpha))
                    true = truth[1] - truth[0]
                    for missed in (low[0] > true, high[0] < true):
                        assert chance[missed].sum() <= 1.02 * alpha / 2, (sizes, trials, truth)


def test_weights_compare_windows() -> None:
    assert pair_weights(3).tolist() == [[-1, 1, 0], [-1, 0, 1], [0, -1, 1]]
    assert step_weights(3).tolist() == [[-1.0, 0.5, 0.5], [-0.5, -0.5, 1.0]]


def test_devices_in_several_windows_widen_what_they_can_make_uncertain() -> None:
    law = OneHotRandomizer(mechanism="asymmetric", local_epsilon="8", length=4)
    shares = np.full((4, 1), 0.5)
    pair, mean = np.array([[-1.0, 1.0, 0.0, 0.0]]), np.full((1, 4), 0.25)
    widths = []
    for w in (0.0, 0.3, 1.0):
        found = levels(law, 1000, 0, shares, w)
        widths.append([float((h - lo)[0, 0]) for _, lo, h in
                       (found.contrasts(pair, 3.0), found.contrasts(mean, 3.0))])  # fmt: skip
    assert widths[0] < widths[1] < widths[2]
    # Everybody changes sides between two windows that everybody answers: the difference of two
    # samples of the same people has the standard deviation 2 sqrt(1/4 / n), on top of the noise.
    noise = 2.0 * float(law.variance(1000, 500.0, 0)) / 1000**2
    assert widths[2][0] / 6.0 >= np.sqrt(noise + 4.0 * 0.25 / 1000)
    one_bin = levels(law, 1000, 0, np.zeros((4, 1)), 1.0)
    assert np.isfinite(one_bin.contrasts(pair, 3.0)[1]).all()


def test_the_smallest_shift_is_found_with_the_chance_and_a_smaller_one_is_not() -> None:
    law = OneHotRandomizer(mechanism="asymmetric", local_epsilon="6", length=4)
    two = np.array([[-1.0, 1.0]])

    def make(a: float, b: float) -> tuple[Levels, Floats]:
        return levels(law, 5000, 4999, np.array([[a], [b]])), two

    z = z_of(0.05, 1000)
    shift = smallest_shift(0.1, make, z, 0.8)
    assert shift is not None
    assert found_with_chance(*make(0.1, 0.1 + shift), z) == pytest.approx(0.8, abs=1e-6)
    assert found_with_chance(*make(0.1, 0.1 + shift / 2), z) < 0.2
    assert found_with_chance(*make(0.1, 0.1), z) < 0.05
    tiny = smallest_shift(0.5, lambda a, b: (levels(law, 10, 9, np.array([[a], [b]])), two), z, 0.8)
    assert tiny is None
    # What was promised is what happens: 4,000 series; 6 sigma are 1e-9.
    rng, n = np.random.default_rng(3), 5000
    sums = [
        rng.binomial(n, law.q + (law.h - law.q) * p, 4000) + rng.binomial(2 * (n - 1), law.q, 4000)
        for p in (0.1, 0.1 + shift)
    ]
    seen = (np.array(sums) - (3 * n - 2) * law.q) / (n * (law.h - law.q))
    found = (levels(law, n, n - 1, seen).contrasts(two, z)[1] > 0.0).mean()
    assert abs(found - 0.8) < 6 * np.sqrt(0.16 / 4000) + 0.02


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0])
def test_rates_are_between_0_and_1(alpha: float) -> None:
    with pytest.raises(InvalidInput, match="strictly between"):
        z_of(alpha, 10)
