"""From noisy sums to estimates with intervals, and the check of their total weight.

Given everybody's data, the bits of one report are independent, and so are reports and the
aggregators' noise. A bin that f devices hold therefore has the estimate `x` with mean f and
variance `base + slope f`, independent of every other bin's: sums of bins add up both, exactly.

**What the intervals cover.** The noise that protects people, and nothing else: they are about the
devices that answered, not about those that might have. They stay valid for bins that were chosen
because of *earlier* rounds' answers, if the devices that answer now are others or their noise is
fresh; pooling the round that chose a bin into its estimate would bias it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from chorister.errors import InvalidInput
from chorister.privacy import Interval, Mechanism, OneHotRandomizer

__all__ = ["Estimates", "Method", "WeightCheck", "check_weight", "estimate", "quantile"]

Floats: TypeAlias = NDArray[np.float64]
Method: TypeAlias = Literal["score", "normal"]


def quantile(confidence: float, candidates: int = 1) -> float:
    """The normal quantile of a two-sided interval; simultaneous over `candidates` by Bonferroni."""
    if not 0.0 < confidence < 1.0:
        raise InvalidInput(f"confidence must lie strictly between 0 and 1, not {confidence}")
    if candidates < 1:
        raise InvalidInput(f"candidates must be at least 1, not {candidates}")
    return -float(ndtri((1.0 - confidence) / (2.0 * candidates)))


@dataclass(frozen=True, eq=False, slots=True)
class Estimates:
    """Unbiased estimates, one entry a row, with the law of their noise."""

    value: Floats  # estimated number of devices
    base: Floats  # variance of a row that nobody holds
    slope: Floats  # variance that one holder adds
    reports: NDArray[np.int64]  # in the cohort that the row is about

    def __len__(self) -> int:
        return len(self.value)

    @property
    def variance(self) -> Floats:
        """At the estimate, cut to what is possible: 0 to the number of reports."""
        held = np.clip(self.value, 0.0, self.reports.astype(np.float64))
        return self.base + self.slope * held

    @property
    def std_error(self) -> Floats:
        """Of the noise."""
        return np.sqrt(self.variance)

    def interval(
        self,
        confidence: float = 0.95,
        *,
        candidates: int = 1,
        step: float = 0.0,
        method: Method = "score",
    ) -> Interval:
        """Intervals of the noise around each estimate.

        *score*: all true counts f with `|x - f| <= z sqrt(base + slope f)`; right for weak signals
        too, where the variance at the estimate is not the variance at the truth. *normal*: the
        estimate plus or minus z standard errors. Neither is cut at 0, so that averages of
        intervals stay honest. With `candidates` they hold for so many rows at once (Bonferroni).

        So far out a sum of rare bits reaches much higher than a normal one: its third cumulant is
        up to its variance times `step`, what one bit changes an estimate by. The lower ends over
        many candidates therefore lie lower, by the first term of Cornish and Fisher; and with
        symmetric noise, where a holder's bit is missing as rarely, the upper ends higher.
        """
        z = quantile(confidence, candidates)
        if method == "normal":
            half = z * self.std_error
            return Interval(low=self.value - half, high=self.value + half)
        if method != "score":
            raise InvalidInput(f"method must be score or normal, not {method!r}")
        if candidates > 1 and step <= 0.0:
            raise InvalidInput("score intervals over many candidates need the step of one bit")
        shift = z * z * self.slope / 2.0
        skew = max(0.0, step * (z * z - 1.0) / 6.0) if candidates > 1 else 0.0
        least = self.value - skew
        most = self.value + np.where(self.slope == 0.0, skew, 0.0)
        below, above = (
            np.sqrt(np.maximum(shift * shift + z * z * (self.base + self.slope * seen), 0.0))
            for seen in (least, most)
        )
        # Far below what can be seen the quadratic has no solution; no lower end is above what is.
        return Interval(low=np.minimum(least + shift - below, least), high=most + shift + above)

    def take(self, rows: NDArray[np.int64]) -> Estimates:
        """Some of the rows."""
        return Estimates(self.value[rows], self.base[rows], self.slope[rows], self.reports[rows])

    def summed(self, groups: NDArray[np.int64], size: int) -> Estimates:
        """Sums of rows: row i goes to group `groups[i]` of `size`. All rows are of one cohort."""
        count = np.maximum(np.bincount(groups, minlength=size), 1)
        total = np.bincount(groups, self.slope, size)
        reports = np.zeros(size, dtype=np.int64)
        np.maximum.at(reports, groups, self.reports)
        return Estimates(
            value=np.bincount(groups, self.value, size).astype(np.float64),
            base=np.bincount(groups, self.base, size).astype(np.float64),
            slope=total / count,  # the same for all rows of one cohort
            reports=reports,
        )

    @staticmethod
    def stacked(parts: list[Estimates]) -> Estimates:
        """The rows of several cohorts, one after the other."""
        return Estimates(
            value=np.concatenate([part.value for part in parts]),
            base=np.concatenate([part.base for part in parts]),
            slope=np.concatenate([part.slope for part in parts]),
            reports=np.concatenate([part.reports for part in parts]),
        )


def estimate(
    randomizer: OneHotRandomizer, sums: ArrayLike, reports: int, noise_trials: int = 0
) -> Estimates:
    """Estimates from the sums of `reports` reports, noise of both aggregators included."""
    value = np.atleast_1d(randomizer.debias(sums, reports, noise_trials))
    base = float(randomizer.variance(reports, 0.0, noise_trials))
    size = len(value)
    return Estimates(
        value=value,
        base=np.full(size, base),
        slope=np.full(size, _slope(randomizer)),
        reports=np.full(size, reports, dtype=np.int64),
    )


def _slope(randomizer: OneHotRandomizer) -> float:
    """What one holder adds to its bin's variance: own and other bits differ in theirs."""
    if randomizer.mechanism is Mechanism.SYMMETRIC:
        return 0.0
    h, q = randomizer.h, randomizer.q
    return (h * (1.0 - h) - q * (1.0 - q)) / math.pow(h - q, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCheck:
    """Whether the sum of all bins is what honest reports give, whatever the data."""

    total: int  # seen
    expected: float
    std: float
    p_value: float  # two-sided
    marked: bool  # p below 2e-9
    least_hostile: int | None  # reports that explain it; None: the noise itself is off

    def explain(self) -> str:
        """The outcome in a sentence."""
        away = (self.total - self.expected) / self.std if self.std else 0.0
        seen = f"The bits of all reports add up to {self.total:,}, {away:+.1f} standard deviations"
        if not self.marked:
            return f"{seen} from what honest reports give: nothing unusual."
        if self.least_hostile is None:
            return (
                f"{seen} from what honest reports give, and no number of hostile reports explains "
                "it: an aggregator's noise is wrong. Do not use this result."
            )
        plural = "s" if self.least_hostile != 1 else ""
        return (
            f"{seen} from what honest reports give: at least {self.least_hostile:,} hostile "
            f"report{plural} took part. Treat this result with care."
        )


def check_weight(
    randomizer: OneHotRandomizer,
    sums: ArrayLike,
    reports: int,
    noise_trials: int = 0,
    *,
    bounded: bool = True,
) -> WeightCheck:
    """Compare the total weight with its law, which does not depend on anybody's data."""
    law = randomizer.total_weight(reports, noise_trials, bounded=bounded)
    total = int(np.asarray(sums, dtype=np.uint64).sum(dtype=np.uint64))
    marked = law.is_marked(total)
    return WeightCheck(
        total=total,
        expected=law.mean,
        std=law.std,
        p_value=law.p_value(total),
        marked=marked,
        least_hostile=law.least_hostile(total) if marked else 0,
    )
