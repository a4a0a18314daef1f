"""Bounds of a distribution function that hold for any data: from measured edges alone.

A round counts devices between edges, so it measures the distribution function at its edges and says
nothing about where values lie between two of them: all of a cell may sit at either end. What holds
for every distribution is therefore a step: between the edges a and b the function is at least what
it is at a and at most what it is at b. No fit enters.

**What is proven.** Take a share p and its quantile x among the devices inside the range, a fixed
number, and one round. Let b be the first edge above x: at least the share p of the devices lies
below b. Let `S` be the number of devices below b and `I` the number inside the range; the estimate
of `S - p I` is a sum of independent bins with a known mean and variance, so the test that rejects
`S >= p I` where the estimate is z standard deviations below 0 errs with chance alpha / 2 (normal,
with the first term of Cornish and Fisher for the skew of rare bits). The interval's lower end is
above x only if b itself is rejected, since the scan from the range's lower end stops at the first
edge that is not: one test decides, so there is nothing to correct for the number of edges. The
upper end is the mirror image.

*Edges that follow the data.* Edges are fixed before their round's noise is drawn, so b does not
depend on it, whatever was seen before. Each round is tested at its own part of alpha, fixed
beforehand, and the intervals are cut with each other: a union bound over rounds. A tenth of alpha
is kept for what the normal law leaves out (variances are taken at the estimate).

*Ties and gaps.* All nine definitions of a quantile in use (Hyndman and Fan, 1996) lie between the
values of rank `floor(p I)` and `floor(p I) + 2`. The tests allow for one device on either side,
so the interval holds all of them.

*How wide.* Between two asked edges nothing is known, so no interval that holds for any
distribution is narrower than the cell that its quantile lies in. Where the noise is small beside a
cell, which is nearly always, these are exactly that cell: only more edges make them narrower.

*Whose quantile.* Where everyone answers each round: that of the devices that answered the last one.
Nobody can tell whether the same devices answered an earlier round, so it counts as another sample
of the fleet, with the variance `p (1 - p) (1/n + 1/n_last)` of a share. Where cohorts are disjoint:
that of all devices that answered; a cohort is a sample of them, drawn by their own coins. (Which
devices an earlier cohort took may then move the number of edges below x a little, and with it the
variance; that is the one dependence which is measured, not proven away: benchmarks/
coverage_quantiles.py, settings k1 and k1local.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from chorister.analyst.algorithms.algorithm_run import devices_of
from chorister.analyst.cohorts import Cohorts
from chorister.analyst.estimate import quantile
from chorister.analyst.result import Result
from chorister.encoding import Intervals
from chorister.errors import InvalidInput
from chorister.privacy.randomizers import bits_per_bin

Floats: TypeAlias = NDArray[np.float64]

_SPARE: Final = 0.1  # of alpha, for what a normal law leaves out
_PILOT: Final = 0.1  # of alpha: the first of several rounds has few edges
_LAST: Final = 0.6  # of alpha, if rounds lie between: only the last one has edges near quantiles
_HALVINGS: Final = 24  # of an interval of shares: to 1e-7, rounded outwards
_TIE: Final = 1.0  # devices: all definitions of a quantile lie within one rank more or less


@dataclass(frozen=True, kw_only=True, eq=False)
class _RoundBounds:
    """One round: bounds of the distribution function at its edges, monotone outwards."""

    edges: Floats
    lower: Floats
    upper: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Band:
    """Where the distribution function lies: for each place, or each share, at the confidence."""

    rounds: tuple[_RoundBounds, ...]

    def at(self, places: Floats) -> tuple[Floats, Floats]:
        """Bounds of the share below each place."""
        lower, upper = np.zeros(len(places)), np.ones(len(places))
        for each in self.rounds:
            last = len(each.edges) - 1
            before = np.clip(np.searchsorted(each.edges, places, side="right") - 1, 0, last)
            after = np.clip(np.searchsorted(each.edges, places, side="left"), 0, last)
            lower = np.maximum(lower, each.lower[before])
            upper = np.minimum(upper, each.upper[after])
        return np.minimum(lower, upper), np.maximum(lower, upper)

    def quantiles(self, shares: Floats) -> tuple[Floats, Floats]:
        """Bounds of each share's quantile; every end is an edge that was asked."""
        ends = []
        for each in self.rounds:
            reached = np.searchsorted(each.upper, shares, side="left")
            passed = np.searchsorted(each.lower, shares, side="right")
            ends.append((each.edges[reached - 1], each.edges[passed]))
        lows, highs = (np.stack(each) for each in zip(*ends, strict=True))
        low, high = lows.max(axis=0), highs.min(axis=0)
        # Rounds that contradict each other: at least one errs, so no part of either is cut off.
        apart = low >= high
        return np.where(apart, lows.min(axis=0), low), np.where(apart, highs.max(axis=0), high)


def distribution_band(
    results: Sequence[Result], cohorts: Cohorts, confidence: float, *, drawn: bool = False
) -> Band:
    """The band that these rounds give at a confidence, pointwise: see the module.

    With `drawn` it also covers which of its rows each device drew: for the distribution over all
    rows, those of each device together weighing as much as one device.
    """
    quantile(confidence)  # raises if it is invalid
    devices = devices_of(results, cohorts)
    between, left = len(results) - 2, 1.0 - _SPARE
    if between < 0:
        parts = [left]
    elif between == 0:
        parts = [_PILOT, left - _PILOT]
    else:
        parts = [_PILOT, *[(left - _PILOT - _LAST) / between] * between, _LAST]
    rounds = []
    for number, (result, part) in enumerate(zip(results, parts, strict=True)):
        sampled = 1.0 - result.n_reports / devices  # of all devices, by coins
        if cohorts == "everyone":
            last = number == len(results) - 1
            sampled = 0.0 if last else 1.0 + result.n_reports / results[-1].n_reports
        z = -float(ndtri(part * (1.0 - confidence) / 2.0))
        rounds.append(_steps(result, z, sampled + drawn))
    return Band(rounds=tuple(rounds))


def _steps(result: Result, z: float, sampled: float) -> _RoundBounds:
    """Bounds at the edges of one round, each at z standard deviations."""
    (feature,) = result.features
    if not isinstance(feature, Intervals):
        raise InvalidInput("a band needs one feature in intervals")
    ends = np.zeros(2), np.ones(2)
    # What is at most above an edge is at least below it: both at once, the second backwards.
    most = np.column_stack([ends[0], _most_below(result, z, sampled), ends[1]])
    return _RoundBounds(
        edges=np.array(feature.edges, dtype=np.float64),
        lower=np.minimum.accumulate(1.0 - most[1])[::-1],
        upper=np.maximum.accumulate(most[0]),
    )


def _most_below(result: Result, z: float, sampled: float) -> Floats:
    """The largest shares below, and above, the inner edges that no test rejects, by bisection.

    All bins add up to the reports, so the excess of their estimates is noise, and is taken out.
    `count` bins below an edge then weigh `1 - p - k`, those above it `-p - k` and the one outside
    the range `-k`, with k = `common`: what makes the variance of `S - p I` least.
    """
    n, counts = result.n_reports, result.rows.value
    bins = len(counts)
    base, rise = result.rows.base[0], result.rows.slope[0]
    skew, skew_rise = third_cumulants(result)
    count = np.arange(1.0, bins - 1)
    cells = counts[1:] - (counts.sum() - n) / bins
    inside = cells.sum()
    below = np.stack([np.cumsum(cells), np.cumsum(cells[::-1])])[:, :-1]
    held = min(max(inside, 0.0), float(n))
    widening = max(z * z - 1.0, 0.0) / 6.0

    def possible(p: Floats) -> NDArray[np.bool_]:
        """Whether the estimate of S - p I is not too far below 0."""
        common = (count - p * (bins - 1)) / bins
        low, high = 1.0 - p - common, p + common
        second = low * low * (base * count + rise * held * p)
        second += high * high * (base * (bins - 1 - count) + rise * held * (1.0 - p))
        second += common * common * (base + rise * (n - held)) + sampled * held * p * (1.0 - p)
        third = low**3 * (skew * count + skew_rise * held * p)
        third -= high**3 * (skew * (bins - 1 - count) + skew_rise * held * (1.0 - p))
        third -= common**3 * (skew + skew_rise * (n - held))
        reach = z * np.sqrt(second) + np.maximum(-third, 0.0) * widening / second
        found: NDArray[np.bool_] = below - p * inside + _TIE + reach >= 0.0
        return found

    least, most = np.zeros(below.shape), np.ones(below.shape)
    everything = possible(most)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2.0
        kept = possible(middle)
        least, most = np.where(kept, middle, least), np.where(kept, most, middle)
    return np.where(everything, 1.0, most)


def third_cumulants(result: Result) -> tuple[float, float]:
    """Of an estimate: of a bin that nobody holds, and what one holder adds."""
    law, bits = result.recipe.randomizer, bits_per_bin(result.n_reports, result.noise_trials)
    other = law.q * (1.0 - law.q) * (1.0 - 2.0 * law.q)
    own = law.h * (1.0 - law.h) * (1.0 - 2.0 * law.h)
    return law.step**3 * bits * other, law.step**3 * (own - other)
