"""Random bits follow the stated law. Each statistical test fails by chance with at most 1e-6.

The generator is the operating system's and takes no seed: one-shot tests with that rate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from chorister._native import randomize_one_hot, sample_binomials
from chorister.errors import InvalidInput

FALSE_ALARM = 1e-6
HALF = 2**63


def draw(index: int, n: int, length: int, *, q: int, h: int, max_weight: int) -> Any:
    bits = randomize_one_hot(
        np.full(n, index, np.uint64), length, q_threshold=q, h_threshold=h, max_weight=max_weight
    )
    return np.frombuffer(bits, np.uint8).reshape(n, length)


@pytest.mark.parametrize("q", [2**60 + 12345, 2**63 // 7, 2**64 // 100, HALF])
@pytest.mark.parametrize("index", [0, 63, 64, 129])
def test_bits_have_their_probabilities_and_are_independent(q: int, index: int) -> None:
    n, length = 20_000, 130
    bits = draw(index, n, length, q=q, h=HALF, max_weight=length)
    probabilities = np.full(length, q / 2**64)
    probabilities[index] = 0.5
    ones = bits.sum(axis=0)
    chi2 = ((ones - n * probabilities) ** 2 / (n * probabilities * (1 - probabilities))).sum()
    assert stats.chi2.sf(chi2, length) > FALSE_ALARM / 10
    # Neighbours, and lanes 64 apart (one word apart in the generator), are uncorrelated. Products
    # of rare bits are skewed, which makes the normal law's tails too thin: the limit leaves room.
    centred = (bits - probabilities) / np.sqrt(probabilities * (1 - probabilities))
    for lag in (1, 64):
        z = (centred[:, :-lag] * centred[:, lag:]).sum() / np.sqrt(n * (length - lag))
        assert 2 * stats.norm.sf(abs(z)) > FALSE_ALARM / 1000


def test_reports_are_conditioned_on_their_weight() -> None:
    """Over all 16 outcomes of a small domain: the law given weight <= 2, by chi-squared."""
    n, q, h = 100_000, 2**64 // 5, 2**64 // 3
    bits = draw(1, n, 4, q=q, h=h, max_weight=2)
    assert bits.sum(axis=1).max() == 2
    outcomes = bits @ np.array([1, 2, 4, 8])
    expected = np.zeros(16)
    for outcome in range(16):
        vector = [outcome >> i & 1 for i in range(4)]
        if sum(vector) <= 2:
            chances = [(h if i == 1 else q) / 2**64 for i in range(4)]
            expected[outcome] = np.prod(
                [p if bit else 1 - p for bit, p in zip(vector, chances, strict=True)]
            )
    expected *= n / expected.sum()
    seen = np.bincount(outcomes, minlength=16)
    possible = expected > 0
    assert seen[~possible].sum() == 0
    chi2 = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    assert stats.chi2.sf(chi2, possible.sum() - 1) > FALSE_ALARM


TRIALS = [1, 63, 64, 65, 585]
THRESHOLDS = [2**64 // 21, HALF, 2**64 - 2**64 // 21]


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_binomials_follow_their_law(trials: int, threshold: int) -> None:
    n = 20_000
    draws = np.frombuffer(sample_binomials(n, trials, threshold=threshold), np.uint64)
    law = stats.binom(trials, threshold / 2**64)
    edges = np.unique(law.ppf(np.linspace(0.02, 0.98, 25)))
    expected = np.diff(np.concatenate([[0], law.cdf(edges), [1]])) * n
    seen = np.bincount(np.searchsorted(edges, draws.astype(float)), minlength=len(expected))
    kept = expected > 5
    chi2 = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    assert stats.chi2.sf(chi2, kept.sum()) > FALSE_ALARM / (len(TRIALS) * len(THRESHOLDS))


def test_certain_and_impossible_binomials() -> None:
    assert set(np.frombuffer(sample_binomials(100, 1000, threshold=0), np.uint64)) == {0}
    assert set(np.frombuffer(sample_binomials(100, 0, threshold=HALF), np.uint64)) == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "length must be 1 to 1048576"),
        ({"length": 2**40}, "length must be 1 to 1048576"),
        ({"max_weight": 0}, "max_weight must be 1 to"),
        ({"max_weight": 11}, "max_weight must be 1 to"),
        ({"q_threshold": 0}, "protects nobody"),
        ({"q_threshold": 2**63 + 1}, "protects nobody"),
        ({"indices": np.array([10], np.uint64)}, "index must be 0 to 9, got 10"),
        ({"indices": np.array([2**64 - 1], np.uint64)}, "index must be 0 to 9"),
        ({"indices": np.array([-1], np.int64)}, "uint8 or uint64"),
        ({"indices": np.zeros(2**20, np.uint8), "length": 2**20}, "at most 1024 at a time"),
    ],
)
def test_laws_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "indices": np.array([0], np.uint64),
        "length": 10,
        "q_threshold": 2**60,
        "h_threshold": HALF,
        "max_weight": 10,
    }
    with pytest.raises(InvalidInput, match=message):
        randomize_one_hot(**arguments | change)


@pytest.mark.parametrize(("count", "trials"), [(2**21, 1), (1, 2**33)])
def test_absurd_numbers_of_draws_are_refused(count: int, trials: int) -> None:
    with pytest.raises(InvalidInput, match="at most"):
        sample_binomials(count, trials, threshold=HALF)


def test_two_calls_never_agree() -> None:
    """1,000 fair bits agree with chance 2^-1000."""
    first, second = (draw(0, 1, 1000, q=HALF, h=HALF, max_weight=1000) for _ in range(2))
    assert not np.array_equal(first, second)
