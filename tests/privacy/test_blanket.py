"""What the bound is compared with: the privacy blanket, the best decomposition of a randomizer.

Among all decompositions of the others' reports into a part that does not depend on their data and a
rest that is given away, the privacy blanket (Balle et al., CRYPTO 2019) is optimal (arXiv
2504.07414), and recent accountants compute it numerically (also arXiv 2601.19154). Here it is
computed for the two coordinates that change, by summing over all counts, from Lemma 5.3 of Balle et
al.: with omega the pointwise minimum of all reports' laws, gamma its mass and
`L = (R_0 - e^eps R_1) / omega`,

    delta <= E[(sum_{i<=m} L(Y_i))+] / n,   m ~ Bin(n, gamma),   Y_i ~ omega / gamma.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from chorister.privacy import Mechanism, Setting, epsilon
from tests.privacy.former import probabilities

Counts = NDArray[np.int64]


def window(trials: int, p: float) -> Counts:
    """All counts but 1e-16 of mass on either side."""
    first, last = binom.ppf(1e-16, trials, p), binom.isf(1e-16, trials, p)
    return np.arange(max(0, int(first) - 2), int(last) + 3)


def blanket_delta(n: int, mechanism: Mechanism, local: float, target: float) -> float:
    """Delta of n reports at epsilon `target` by the privacy blanket."""
    q, h = probabilities(mechanism, local)
    g = math.exp(target)

    def law(first: float, second: float) -> NDArray[np.float64]:
        """Both bits set, the first, the second, none."""
        one, two = np.array([1 - first, first]), np.array([1 - second, second])
        table = np.outer(one, two)
        return np.array([table[1, 1], table[1, 0], table[0, 1], table[0, 0]])

    mine, instead, other = law(h, q), law(q, h), law(q, q)
    omega = np.minimum(np.minimum(mine, instead), other)
    loss = (mine - g * instead) / omega
    assert loss[3] < 0.0
    total = 0.0
    for both in window(n, omega[0]):
        rest = n - both
        share = 1.0 - omega[0]
        first = window(rest, omega[1] / share)[:, None]
        second = window(rest, omega[2] / share)[None, :]
        first, second = np.broadcast_arrays(first, second)
        mass = binom.pmf(both, n, omega[0]) * binom.pmf(first, rest, omega[1] / share)
        share -= omega[1]
        mass = mass * binom.pmf(second, rest - first, omega[2] / share)
        share -= omega[2]
        trials = rest - first - second
        sums = both * loss[0] + first * loss[1] + second * loss[2]
        keep = (sums > 0.0) & (trials >= 1) & (mass > 0.0)
        mass, trials, sums = mass[keep], trials[keep], sums[keep]
        # E[(s + D loss)+] over D ~ Bin(trials, p), loss < 0: a partial expectation.
        p = omega[3] / share
        most = np.floor(sums / -loss[3])
        inside = binom.cdf(most, trials, p)
        partial = trials * p * binom.cdf(most - 1, trials - 1, p)
        total += float(np.dot(mass, sums * inside + loss[3] * partial))
    return total / n


@pytest.mark.parametrize(
    ("local", "blanket", "clones"), [("3", 0.5299, 0.8231), ("5", 1.4614, 4.9992)]
)
def test_the_documented_comparison_at_a_thousand(local: str, blanket: float, clones: float) -> None:
    """docs/privacy.md: clones, the blanket and the certified bound at delta 1e-6."""
    setting = Setting(local_epsilon=local)
    below = blanket_delta(1000, setting.mechanism, float(local), blanket * 0.999)
    above = blanket_delta(1000, setting.mechanism, float(local), blanket * 1.001)
    assert above < 1e-6 < below
    by_clones = epsilon(setting, cohort=1000, delta="1e-6", method="clones").upper
    assert by_clones == pytest.approx(clones, abs=1e-4)
    assert epsilon(setting, cohort=1000, delta="1e-6").upper < blanket < clones


def test_the_documented_cohorts() -> None:
    """(3, 0.5, 1e-6): 2350 by clones, 1116 by the blanket, 586 certified."""
    assert blanket_delta(1116, Mechanism.ASYMMETRIC, 3.0, 0.5) <= 1e-6
    assert blanket_delta(1107, Mechanism.ASYMMETRIC, 3.0, 0.5) > 1e-6
