"""Bounds from the literature, for comparison: the closed form, and amplification by clones.

No device enforces them; the exact bound is tighter (:mod:`chorister.privacy.certified`). `eps0` is
always the replacement value, and E = e^eps0.

**Closed form** (paper, Theorem 2.4; Feldman et al. 2022), for any eps0-DP randomizer, if
`eps0 <= ln(n/(8 ln(2/delta)) - 1)`:

    eps <= ln(1 + (E-1) (4 sqrt(2 ln(4/delta)) / sqrt((E+1) n) + 4/n)).

Outside that range the theorem says nothing, and the functions here raise.

**Clones** (Feldman, McMillan, Talwar), numerically. Each of the other n-1 reports is, with chance
p, a *clone*: drawn from one of the two laws that are to be told apart, either with chance 1/2. With
C ~ Bin(n-1, p) clones and a = E/(E+1), the release is a post-processing of C and the count

    P: Bin(C, 1/2) + Ber(a),   Q: Bin(C, 1/2) + Ber(1-a).

- 2020 (arXiv 2012.12803, Theorem 3.1): `p = e^-eps0`, for *any* eps0-DP randomizer.
- 2022 (arXiv 2208.04591, Theorem 3.1): `p = 2/(E+1)`. Its erratum restricts it to a class of
  randomizers; for the *sum* of private one-hot reports it holds. On coordinates (d, d') let R0,
  R1 be the laws of the two reports and `Q0 = (E R0 - R1)/(E-1)`, `Q1 = (E R1 - R0)/(E-1)`; then
  `R0 = (E Q0 + Q1)/(E+1)`, and every other user's law satisfies `R >= (R0+R1)/(E+1)` pointwise:
  asymmetric by q(1-q) >= q/2, q^2 = q^2 and (1-q)^2 >= q(1-q); symmetric, with E^2 for E, by E^2
  + 1 >= 2E. A new mechanism needs its own proof of this line.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import lru_cache

import numpy as np

from chorister.errors import InvalidInput
from chorister.privacy.losses import certified_slack, least_epsilon
from chorister.privacy.total_weight import Floats, binomial, upper_tail

_MOST_COUNTS = 4096  # beyond this many values of C neighbours share the smallest one's divergence


# --- The closed form -----------------------------------------------------------------------------


def smallest_valid_cohort(replacement_epsilon: float, delta: float) -> int:
    """Least n for which the theorem holds: n >= 8 ln(2/delta) (E + 1)."""
    return math.ceil(8.0 * math.log(2.0 / delta) * (math.exp(replacement_epsilon) + 1.0))


def closed_form_epsilon(cohort: int, replacement_epsilon: float, delta: float) -> float:
    """Epsilon by the closed form; raises where the theorem does not apply."""
    needed = smallest_valid_cohort(replacement_epsilon, delta)
    if cohort < needed:
        raise InvalidInput(
            f"the closed form needs a cohort of at least {needed:,} here "
            f"(local epsilon {replacement_epsilon:g} in the replacement model, delta {delta:g}), "
            f"not {cohort:,}; the methods exact, clones and renyi have no such limit"
        )
    grown = math.exp(replacement_epsilon)
    spread = 4.0 * math.sqrt(2.0 * math.log(4.0 / delta)) / math.sqrt((grown + 1.0) * cohort)
    return math.log1p((grown - 1.0) * (spread + 4.0 / cohort))


def closed_form_delta(cohort: int, replacement_epsilon: float, epsilon: float) -> float:
    """Least delta for which the theorem applies and gives at most `epsilon`."""

    def holds(log_delta: float) -> bool:
        trial = math.exp(log_delta)
        if cohort < smallest_valid_cohort(replacement_epsilon, trial):
            return False
        return closed_form_epsilon(cohort, replacement_epsilon, trial) <= epsilon

    if not holds(math.log(0.999)):
        raise InvalidInput(
            f"the closed form proves epsilon {epsilon:g} for no delta at a cohort of {cohort:,}; "
            "the methods exact, clones and renyi have no such limit"
        )
    low, high = -700.0, math.log(0.999)
    while high - low > 1e-9:
        middle = (low + high) / 2.0
        low, high = (low, middle) if holds(middle) else (middle, high)
    return math.exp(high)


# --- Clones --------------------------------------------------------------------------------------


class CloneBound(StrEnum):
    """Which clone probability."""

    ANY_RANDOMIZER = "2020"
    ONE_HOT_SUM = "2022"

    def probability(self, replacement_epsilon: float) -> float:
        """Chance that another report is a clone."""
        if self is CloneBound.ANY_RANDOMIZER:
            return math.exp(-replacement_epsilon)
        return 2.0 / (math.exp(replacement_epsilon) + 1.0)


def conditional_divergence(clones: Floats, replacement_epsilon: float, epsilon: float) -> Floats:
    """H_c: the divergence given c clones; nonincreasing in c.

    With g = e^eps, `y = (ga - 1 + a)/(a - g(1-a))` and `k* = floor((c+1) y/(1+y)) + 1`:
    `H_c = (a - g(1-a)) Pr[Bin(c,1/2) >= k*-1] - (ga - 1 + a) Pr[Bin(c,1/2) >= k*]`.
    """
    shrunk = math.exp(-replacement_epsilon)
    a = 1.0 / (1.0 + shrunk)
    not_a = shrunk / (1.0 + shrunk)
    g = math.exp(epsilon)
    gain, loss = a - g * not_a, g * a - not_a
    least = np.floor((clones + 1.0) * (loss / (gain + loss))) + 1.0
    # The tail is Pr[> k], so Pr[>= k*] is the tail of k* - 1.
    reached = upper_tail(least - 2.0, clones, 0.5)
    value = gain * reached - loss * upper_tail(least - 1.0, clones, 0.5)
    return np.maximum(value, 0.0)


def clones_delta(
    cohort: int, replacement_epsilon: float, epsilon: float, bound: CloneBound, cut: float = 1e-18
) -> float:
    """Delta at epsilon; what the window of C leaves out counts with H_0."""
    if epsilon >= replacement_epsilon:
        return 0.0
    law = binomial(cohort - 1, min(1.0 - 2e-16, bound.probability(replacement_epsilon)), cut)
    mass, first = law.mass, law.first
    step = math.ceil(mass.size / _MOST_COUNTS)
    if step > 1:
        mass = np.add.reduceat(mass, np.arange(0, mass.size, step))
    clones = first + step * np.arange(mass.size, dtype=np.float64)
    none = conditional_divergence(np.zeros(1), replacement_epsilon, epsilon)[0]
    divergence = conditional_divergence(clones, replacement_epsilon, epsilon)
    return float(np.dot(mass, divergence) + law.missing * none)


@lru_cache(maxsize=512)
def clones_epsilon(
    cohort: int, replacement_epsilon: float, delta: float, bound: CloneBound
) -> float:
    """Epsilon at delta, from above."""
    slack = certified_slack(delta)
    cut = max(delta * 1e-9, 1e-290)
    return least_epsilon(
        lambda e: clones_delta(cohort, replacement_epsilon, e, bound, cut) + slack,
        delta,
        replacement_epsilon,
    )


def clones_certified_delta(cohort: int, replacement_epsilon: float, epsilon: float) -> float:
    """Delta of a one-hot sum at epsilon, from above."""
    value = clones_delta(cohort, replacement_epsilon, epsilon, CloneBound.ONE_HOT_SUM, 1e-30)
    return min(1.0, value + certified_slack(value))


def clones_hold(cohort: int, replacement_epsilon: float, epsilon: float, delta: float) -> bool:
    """Whether a one-hot sum is certified to be (epsilon, delta)-DP."""
    cut = delta * 1e-9
    value = clones_delta(cohort, replacement_epsilon, epsilon, CloneBound.ONE_HOT_SUM, cut)
    return value + certified_slack(delta) <= delta
