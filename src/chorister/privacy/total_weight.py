"""The total weight of a sum: what it must look like, whatever the data.

With OOV as a coordinate every report has exactly one own coordinate, so the
weight of the sum is `Bin(n, h) + Bin(n(|D|-1) + 2M|D|, q)` whatever the data (up to n 2^-80). A
result far outside that law was tampered with. Moving mass between bins is not seen by this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import scipy  # which loads its parts when they are first used
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

MARKED_BELOW = 2e-9  # a total weight less likely than this (two-sided) marks the result


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


# --- Binomials -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CountLaw:
    """The law of a count: `mass[i]` is the chance of `first + i`."""

    first: int  # the smallest count in the window
    mass: Floats  # chances; positive
    missing: float  # bound on the mass outside the window


def binomial(trials: int, p: float, cut: float) -> CountLaw:
    """Bin(trials, p) on a window that misses at most `cut` of its mass on either side.

    The window is cut by tail mass, never by a number of sigmas. By Bernstein,
    `Pr[|X - np| >= s] <= 2 exp(-s^2 / (2(v + s/3)))`, v = np(1-p); solving for s gives the window.
    Inside, the ratio of neighbours is exact and products run outwards from the mode, so the
    relative error is about the window's length in roundings (1e-12 at a length of 1e4).
    """
    rest = 1.0 - p
    c = -math.log(cut)
    variance = trials * p * rest
    reach = c / 3.0 + math.sqrt(c * c / 9.0 + 2.0 * c * variance) + 1.0
    first = max(0, math.floor(trials * p - reach))
    last = min(trials, math.ceil(trials * p + reach))
    mode = min(max(math.floor((trials + 1) * p), first), last)
    odds = p / rest
    up = np.arange(mode, last, dtype=np.float64)
    down = np.arange(mode, first, -1, dtype=np.float64)
    mass = np.concatenate(
        (
            np.cumprod(down / (odds * (trials - down + 1.0)))[::-1],
            np.ones(1),
            np.cumprod(odds * (trials - up) / (up + 1.0)),
        )
    )
    mass /= mass.sum()
    return CountLaw(first=first, mass=mass, missing=2.0 * cut)


def upper_tail(count: Floats, trials: Floats | float, p: float) -> Floats:
    """Pr[Bin(trials, p) > count] for whole counts, by the incomplete beta function.

    scipy.stats says the same; importing it would take a second.
    """
    inside = (count >= 0.0) & (count < trials)
    safe = np.where(inside, count, 0.0)
    tail = scipy.special.betainc(safe + 1.0, np.maximum(trials - safe, 1.0), p)
    return np.where(inside, tail, np.where(count < 0.0, 1.0, 0.0))


def lower_tail(count: Floats, trials: Floats | float, p: float) -> Floats:
    """Pr[Bin(trials, p) <= count] for whole counts."""
    inside = (count >= 0.0) & (count < trials)
    safe = np.where(inside, count, 0.0)
    tail = scipy.special.betaincc(safe + 1.0, np.maximum(trials - safe, 1.0), p)
    return np.where(inside, tail, np.where(count < 0.0, 0.0, 1.0))
