"""Weights: how many bits a report may set, and what the total weight of a sum must look like.

**Bounded reports.** A hostile client with a plain vector could set every bit. So an honest device
redraws its report while the weight exceeds w, and the aggregators verify the bound. With
`tau = Pr[weight > w] <= 2^-80` the price in the aggregate is tiny and stated by
:func:`delta_with_bound`.

**Total weight.** With OOV as a coordinate every report has exactly one own coordinate, so the
weight of the sum is `Bin(n, h) + Bin(n(|D|-1) + 2M|D|, q)` whatever the data (up to n 2^-80). A
result far outside that law was tampered with. Moving mass between bins is not seen by this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np

from chorister.errors import InvalidInput
from chorister.privacy.binomials import binomial, lower_tail, upper_tail
from chorister.privacy.decimals import DOWN, NEAREST

__all__ = [
    "BOUND_DELTA",
    "MARKED_BELOW",
    "WEIGHT_TAIL",
    "TotalWeight",
    "covers_bound",
    "delta_before_bound",
    "delta_with_bound",
    "least_weight_bound",
    "weight_tail",
]

# Largest chance that an honest report has to be drawn again.
WEIGHT_TAIL = NEAREST.divide(Decimal(1), Decimal(2**80))
MARKED_BELOW = 2e-9  # a total weight less likely than this (two-sided) marks the result

_MOST_WEIGHTED = 1.2e12  # 2^-80 times this is just below 1e-12
BOUND_DELTA = Decimal("1e-12")  # what a recipe's delta sets aside for bounded reports


def _tails(length: int, q_threshold: int, h_threshold: int) -> tuple[int, Decimal]:
    """Least w with Pr[weight > w] <= 2^-80, and that chance, for the law actually sampled."""
    unit = Decimal(2**64)
    others = length - 1
    # Decimal sums, products and quotients are correctly rounded by specification, so w is the same
    # on every machine. 80 digits leave 50 to the complement 1 - cdf at 2^-80.
    with localcontext(NEAREST):
        q, h = Decimal(q_threshold) / unit, Decimal(h_threshold) / unit
        odds = q / (1 - q)
        mass = ((1 - q).ln() * others).exp()  # ln and exp are correctly rounded; ** need not be
        reach = Decimal(1)  # Pr[Bin(|D|-1, q) >= w]
        for w in range(length):
            beyond = reach - mass  # Pr[Bin(|D|-1, q) >= w + 1]
            tail = h * reach + (1 - h) * beyond
            if tail <= WEIGHT_TAIL:
                return w, max(tail, Decimal(0))
            reach = beyond
            mass = mass * odds * (others - w) / (w + 1)
    return length, Decimal(0)


@lru_cache(maxsize=1024)
def least_weight_bound(length: int, q_threshold: int, h_threshold: int) -> int:
    """Least w with Pr[weight > w] <= 2^-80, never above |D|.

    `Pr[weight > w] = h Pr[Bin(|D|-1,q) >= w] + (1-h) Pr[Bin(|D|-1,q) >= w+1]`: a function of the
    domain's size and the thresholds alone, exact to 50 digits, hence the same everywhere.
    """
    return _tails(length, q_threshold, h_threshold)[0]


def weight_tail(length: int, q_threshold: int, h_threshold: int) -> float:
    """tau: the chance that an honest report exceeds its weight bound and is drawn again."""
    return float(_tails(length, q_threshold, h_threshold)[1])


def delta_with_bound(delta: float, epsilon: float, honest: int, tau: float) -> float:
    """The aggregate's delta when `honest` reports are conditioned on their weight bound.

    Conditioning on an event of probability p = (1-tau)^honest that is equally likely under both
    datasets: `P(S|ok) <= P(S)/p` and `Q(S) <= p Q(S|ok) + (1-p)`, therefore
    `delta' <= (delta + e^eps (1-p)) / p`.
    """
    if not 0.0 <= tau < 1.0 or honest < 1:
        raise InvalidInput("tau must lie in [0, 1) and honest must be at least 1")
    log_kept = honest * math.log1p(-tau)
    return (delta - math.exp(epsilon) * math.expm1(log_kept)) / math.exp(log_kept)


def covers_bound(epsilon: float, honest: int) -> bool:
    """Whether 1e-12 of delta pays for so many bounded reports at this epsilon."""
    return honest >= 1 and epsilon <= math.log(_MOST_WEIGHTED / honest)


def delta_before_bound(delta: Decimal, epsilon: Decimal, honest: int) -> Decimal:
    """The delta left for amplification out of a recipe's, which includes the price of the bound.

    At tau <= 2^-80 the price is below 1e-12 as long as `honest e^eps <= 1.2e12`; `honest` is 1 in a
    noised crowd, where nobody else's report matters. Beyond that, or where nothing would be left,
    it refuses.
    """
    if not covers_bound(float(epsilon), honest):
        raise InvalidInput(
            f"bounded reports need 1 <= honest reports x e^epsilon <= {_MOST_WEIGHTED:g}: epsilon "
            f"{epsilon:f} with {honest:,} is out of range"
        )
    if not BOUND_DELTA < delta < 1:
        raise InvalidInput(
            f"with bounded reports delta must lie strictly between {BOUND_DELTA} and 1, not {delta}"
        )
    return DOWN.subtract(delta, BOUND_DELTA)


@dataclass(frozen=True, kw_only=True, slots=True)
class TotalWeight:
    """The law Bin(reports, h) + Bin(other_bits + noise_bits, q) of a sum's total weight."""

    reports: int  # n: every report has one own coordinate
    other_bits: int  # n (|D| - 1): all its other coordinates
    noise_bits: int  # 2 M |D|: what the two aggregators added
    q: float  # chance of a 1 in other and noise bits
    h: float  # chance of a 1 at an own coordinate
    report_limit: int  # bits that one hostile report can set: w if bounded, |D| if plain

    @property
    def mean(self) -> float:
        """Expected total weight."""
        return self.reports * self.h + (self.other_bits + self.noise_bits) * self.q

    @property
    def std(self) -> float:
        """Standard deviation of the total weight."""
        own = self.reports * self.h * (1.0 - self.h)
        return math.sqrt(own + (self.other_bits + self.noise_bits) * self.q * (1.0 - self.q))

    def p_value(self, total: int) -> float:
        """Two-sided: twice the chance of a total at least as far out as this one."""
        below, above = self._tails(total)
        return min(1.0, 2.0 * min(below, above))

    def is_marked(self, total: int) -> bool:
        """Whether the total is too unlikely (two-sided p below 2e-9) to be honest chance."""
        return self.p_value(total) < MARKED_BELOW

    def least_hostile(self, total: int) -> int | None:
        """Least number of hostile reports that explains the total; None if no number does.

        With m hostile reports the other n - m follow the law and the m add anything between 0 and
        m times the report limit. Both directions are monotone in m: an honest report never weighs
        more than a full hostile one, nor less than an empty one. None means that the noise itself
        is off, so an aggregator is at fault.
        """
        if self._explains(total, 0):
            return 0
        if not self._explains(total, self.reports):
            return None
        fails, explains = 0, self.reports
        while explains - fails > 1:
            middle = (fails + explains) // 2
            if self._explains(total, middle):
                explains = middle
            else:
                fails = middle
        return explains

    def _explains(self, total: int, hostile: int) -> bool:
        honest = self.reports - hostile
        bits_each = self.other_bits // self.reports
        rest = TotalWeight(
            reports=honest,
            other_bits=honest * bits_each,
            noise_bits=self.noise_bits,
            q=self.q,
            h=self.h,
            report_limit=self.report_limit,
        )
        at_most = rest._tails(total)[0]
        at_least = rest._tails(total - hostile * self.report_limit)[1]
        return 2.0 * min(at_most, at_least) >= MARKED_BELOW

    def _tails(self, total: int) -> tuple[float, float]:
        """Pr[weight <= total] and Pr[weight >= total], each summed on its own side."""
        bits = float(self.other_bits + self.noise_bits)
        own = binomial(self.reports, self.h, 1e-18)
        rest = total - own.first - np.arange(own.mass.size, dtype=np.float64)
        below = float(np.dot(own.mass, lower_tail(rest, bits, self.q)))
        above = float(np.dot(own.mass, upper_tail(rest - 1.0, bits, self.q)))
        return min(below, 1.0), min(above, 1.0)
