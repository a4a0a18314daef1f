"""Levels and changes of shares over many windows, with intervals that hold. Functions of arrays.

**What is estimated.** In every window, the share p of the fleet's devices that would report a bin
if they were asked in it. Each device draws at random which windows it answers, so a window's n
reports are a random sample of the fleet, and of different devices than those of another window.
Comparing windows therefore has to cover two things: the noise, and which devices were drawn. (The
intervals of a `Result` cover the noise alone, for the devices that answered.)

**The law of one level.** A drawn device sets the bin's bit with the chance `r = q + (h - q) p`. So
the sum that is released is Bin(n, r), plus Bin(2M, q) if both aggregators add noise. (The fleet is
finite and nobody is drawn twice: then the sum of the samples is less variable than this, never
more; Hoeffding 1963, theorem 4.) An end of the interval is the p at which the sum seen lies at the
edge of what that p makes likely: z standard deviations *at that p*, the first term of Cornish and
Fisher for the skew of rare bits, and half a bit because sums are whole numbers. So small cohorts
and rare bits need no other rule.

**Changes.** The interval of `sum c_k p_k`, such as `p_2 - p_1`, joins the ends of its levels: its
lower end is lower than the estimate by the root of `sum c_k^2 d_k^2`, where d_k is the distance
from the estimate to the lower end of p_k if c_k > 0, and to its upper end otherwise (Newcombe 1998;
Zou and Donner 2008). Tails longer than a normal variable's do not join like that: the part of d_k
that stands for them is kept apart, and its root is added. Near 0 and 1 an end hardly moves with z,
so that two levels can both be near their ends: hence the interval is at least as wide as two levels
reach that deviate by z / sqrt(2) each, or many by z standard errors. Over exact laws of two
windows this holds everywhere (tests/analyst/test_trend_intervals.py).

**Devices that answer several windows.** If each device answers exactly a of W windows, a device
that answers one window answers another one with the chance `w = (a - 1) / (W - 1)`. Let e_k be what
a device holds in window k, less p_k. Then `n Var(sum c_k p'_k)` due to the draw is at most
`sum c_k^2 Var(e_k) + 2 w sum_{k<l} c_k c_l Cov(e_k, e_l)`. (What is left out, `-E(sum c_k e_k)^2`
times a constant, only lowers it.) How people's answers in two windows depend on each other is
unknown, but two events of chance p and p' have a covariance between `-min(p p', (1-p)(1-p'))` and
`min(p (1-p'), p' (1-p))` (Frechet). The worst of them is added, at the ends of the levels'
intervals. With a = 1 nothing is added.

**Many at once.** Each interval is stated at its part of alpha (Bonferroni): over all rows and all
pairs of the windows that the series *will* have. So it does not matter how often somebody looks
before the series is over, and all intervals of all looks hold together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Final

import numpy as np
from scipy.special import ndtr

from chorister.analyst.estimate import Floats, quantile
from chorister.errors import InvalidInput
from chorister.privacy import OneHotRandomizer
from chorister.privacy.randomizers import bits_per_bin

_HALVINGS: Final = 40


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """Estimated shares of one cohort (the fleet, a group or an arm), window by window."""

    shares: Floats  # by window and bin; not cut to [0, 1]
    reports: Floats  # by window
    law: OneHotRandomizer
    noise_trials: int
    overlap: float  # w: the chance that a device of one window answers another one too

    @cached_property
    def _bit(self) -> Floats:
        """By how much one bit changes a share."""
        return self.law.step / self.reports[:, None]

    @cached_property
    def _chances(self) -> tuple[float, float, float]:
        """Of a bit where nobody and where somebody holds a bin; the variance of the noise."""
        q, h = self.law.q, self.law.h
        return q, h, bits_per_bin(0, self.noise_trials) * q * (1.0 - q)

    def _cumulants(self, shares: Floats, sign: float = 1.0) -> tuple[Floats, Floats]:
        """The variance of an estimate at true shares, and its skew to one side as a part of it.

        A device's bit and the noise may be skewed to opposite sides. The skews cancel in the sum,
        but its tails don't: only what is skewed to the side of `sign` counts there.
        """
        q, h, added = self._chances
        r = q + (h - q) * np.clip(shares, 0.0, 1.0)
        drawn = self.reports[:, None] * r * (1.0 - r)
        third = drawn * np.maximum(sign * (1.0 - 2.0 * r), 0.0)
        third += added * max(sign * (1.0 - 2.0 * q), 0.0)
        return self._bit**2 * (drawn + added), self._bit * third / (drawn + added)

    @property
    def std_error(self) -> Floats:
        """Of the noise and the draw together, at the estimates."""
        return np.sqrt(self._cumulants(self.shares)[0])

    def ends(self, z: float) -> tuple[Floats, Floats]:
        """The ends of intervals of z standard deviations, each on its own; not cut to [0, 1]."""
        if z not in self._known_ends:
            self._known_ends[z] = self._end(z, 1.0), self._end(z, -1.0)
        return self._known_ends[z]

    @cached_property
    def _known_ends(self) -> dict[float, tuple[Floats, Floats]]:
        return {}

    def _end(self, z: float, sign: float) -> Floats:
        """The p furthest below (or with -1 above) the estimate that makes it not too unlikely."""
        # The variance is concave in p, so there is one crossing; it lies within the widest reach.
        added = self._chances[2]
        widest = z * np.sqrt(self.reports[:, None] / 4.0 + added) + max(z * z, 1.0) / 6.0 + 0.5
        kept, lost = self.shares, self.shares - sign * self._bit * widest
        for _ in range(_HALVINGS):
            middle = (kept + lost) / 2.0
            second, skew = self._cumulants(middle, sign)
            reach = z * np.sqrt(second) + self._tail(skew, z)
            likely = sign * (self.shares - middle) <= reach
            kept, lost = np.where(likely, middle, kept), np.where(likely, lost, middle)
        return lost

    def _tail(self, skew: Floats, z: float) -> Floats:
        """How much further than a normal variable's a sum's tail reaches: its skew, half a bit."""
        return skew * max(z * z - 1.0, 0.0) / 6.0 + self._bit / 2.0

    def contrasts(self, weights: Floats, z: float) -> tuple[Floats, Floats, Floats]:
        """Estimates and intervals of `sum c_k p_k`; `weights` has one row per contrast."""
        spreads, tails = self._distances(z)
        plus, minus = np.maximum(weights, 0.0), np.maximum(-weights, 0.0)
        shared = z * z * self._shared(weights, *self.ends(z))
        estimate = weights @ self.shares
        below, above = (
            np.sqrt(
                np.maximum(
                    plus**2 @ spreads[one] ** 2 + minus**2 @ spreads[other] ** 2,
                    self._together(plus, minus, z, one) ** 2,
                )
                + shared
            )
            + np.sqrt(plus**2 @ tails[one] ** 2 + minus**2 @ tails[other] ** 2)
            for one, other in ((0, 1), (1, 0))
        )
        return estimate, estimate - below, estimate + above

    def _distances(self, z: float) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """From the estimates down to the lower and up to the upper ends, less their tails."""
        low, high = self.ends(z)
        down, up = (
            self._tail(self._cumulants(end, sign)[1], z) for end, sign in ((low, 1.0), (high, -1.0))
        )
        return (self.shares - low - down, high - self.shares - up), (down, up)

    def _together(self, plus: Floats, minus: Floats, z: float, one: int) -> Floats:
        """How far levels reach that all deviate, each by its part of z: two of them, or many."""
        pairs = np.count_nonzero(plus + minus, axis=1) == 2
        found = z * np.sqrt((plus + minus) ** 2 @ self.std_error**2)
        spreads, _ = self._distances(z / math.sqrt(2.0))
        found[pairs] = plus[pairs] @ spreads[one] + minus[pairs] @ spreads[1 - one]
        return found

    def _shared(self, weights: Floats, low: Floats, high: Floats) -> Floats:
        """The variance that devices in several windows can add, at most."""
        found = np.zeros((len(weights), self.shares.shape[1]))
        if self.overlap <= 0.0:
            return found
        low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
        plus, minus = np.maximum(weights, 0.0), np.maximum(-weights, 0.0)
        scale = 1.0 / np.sqrt(self.reports[:, None] * self.reports)
        np.fill_diagonal(scale, 0.0)
        for b in range(found.shape[1]):
            held, left = high[:, b], 1.0 - low[:, b]
            opposite = np.minimum(np.outer(held, held), np.outer(left, left)) * scale
            same = np.minimum(np.outer(held, left), np.outer(left, held)) * scale
            found[:, b] = 2.0 * ((plus @ opposite) * minus).sum(axis=1)
            found[:, b] += ((plus @ same) * plus + (minus @ same) * minus).sum(axis=1)
        return self.overlap * found


def pair_weights(windows: int) -> Floats:
    """All pairs of windows, the earlier one subtracted from the later one."""
    first, second = np.triu_indices(windows, 1)
    weights = np.zeros((len(first), windows))
    weights[np.arange(len(first)), first] = -1.0
    weights[np.arange(len(first)), second] = 1.0
    return weights


def step_weights(windows: int) -> Floats:
    """For every window but the first: the mean from it on, less the mean before it."""
    weights = np.zeros((windows - 1, windows))
    for k in range(1, windows):
        weights[k - 1, :k] = -1.0 / k
        weights[k - 1, k:] = 1.0 / (windows - k)
    return weights


def z_of(alpha: float, candidates: int) -> float:
    """Standard deviations that none of so many intervals exceeds, but for the chance alpha."""
    if not isinstance(alpha, Real) or not 0.0 < alpha < 1.0:
        raise InvalidInput(f"a rate of false alarms lies strictly between 0 and 1, not {alpha!r}")
    return quantile(1.0 - alpha, candidates)


# --- Before asking ------------------------------------------------------------------------------


def found_with_chance(levels: Levels, weights: Floats, z: float) -> float:
    """The chance that the interval of one contrast lies above 0, if these are the true shares."""
    estimate, low, _ = levels.contrasts(weights, z)
    spread = float(np.sqrt((weights**2) @ levels.std_error**2)[0, 0])
    # The interval at the expected estimate is as wide, nearly, as that at the one that will be.
    return float(ndtr(float(low[0, 0]) / spread)) if estimate[0, 0] > 0.0 else 0.0


def smallest_shift(
    level: float, make: Callable[[float, float], tuple[Levels, Floats]], z: float, chance: float
) -> float | None:
    """The smallest rise from a level that is found with this chance; None if none up to 1 is.

    `make` gives the levels and the contrast of a series that goes from one level to another.
    """
    if not 0.0 < chance < 1.0:
        raise InvalidInput(f"a chance lies strictly between 0 and 1, not {chance}")
    least, most = 0.0, 1.0 - level
    if found_with_chance(*make(level, level + most), z) < chance:
        return None
    for _ in range(_HALVINGS):
        middle = (least + most) / 2.0
        enough = found_with_chance(*make(level, level + middle), z) >= chance
        least, most = (least, middle) if enough else (middle, most)
    return most
