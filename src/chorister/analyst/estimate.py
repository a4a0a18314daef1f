"""From released sums to estimates with intervals, and the check of their total weight.

Given everybody's data, the bits of one report are independent, and so are the reports and the
aggregators' noise. The estimate `x` of a bin that f devices hold therefore has mean f and variance
`base + slope f`, independent of all other bins. For sums of bins, both add up exactly.

**What the intervals cover.** The noise that protects people, and nothing else: they are about the
devices that answered, not about those that might have. They stay valid for bins that were chosen
because of *earlier* rounds, if other devices answer now or their noise is fresh. Pooling the round
that chose a bin into its estimate would bias it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from chorister.errors import InvalidInput
from chorister.privacy import OneHotRandomizer
from chorister.recipe import Recipe

Floats: TypeAlias = NDArray[np.float64]
IntervalMethod: TypeAlias = Literal["score", "normal"]


def quantile(confidence: float, candidates: int = 1) -> float:
    """The normal quantile of a two-sided interval, simultaneous for `candidates` (Bonferroni)."""
    if not isinstance(confidence, Real) or not 0.0 < confidence < 1.0:
        raise InvalidInput(f"confidence must lie strictly between 0 and 1, not {confidence!r}")
    if candidates < 1:
        raise InvalidInput(f"candidates must be at least 1, not {candidates}")
    return -float(ndtri((1.0 - confidence) / (2.0 * candidates)))


class ConfidenceInterval(NamedTuple):
    """The two ends of a confidence interval, one entry per bin."""

    low: Floats
    high: Floats


@dataclass(frozen=True, eq=False, slots=True)
class Estimates:
    """Unbiased estimates, one per row, with the distribution of their noise."""

    value: Floats  # estimated number of devices
    base: Floats  # variance of a row that nobody holds
    slope: Floats  # variance that one holder adds
    reports: NDArray[np.int64]  # in the cohort of the row

    def __len__(self) -> int:
        return len(self.value)

    @property
    def variance(self) -> Floats:
        """At the estimate, clipped to what is possible: 0 to the number of reports."""
        held = np.clip(self.value, 0.0, self.reports.astype(np.float64))
        return self.base + self.slope * held

    @property
    def std_error(self) -> Floats:
        return np.sqrt(self.variance)

    def interval(
        self,
        confidence: float = 0.95,
        *,
        step: float,
        candidates: int = 1,
        method: IntervalMethod = "score",
    ) -> ConfidenceInterval:
        """Intervals of the noise around each estimate.

        *score*: all true counts f with `|x - f| <= z sqrt(base + slope f) + step / 2`. This is also
        right for weak signals, where the variance at the estimate is not the variance at the truth.
        `step` is the change of an estimate by one bit; 0 if the noise is continuous. Half of it is
        the usual correction for discrete values: without it, intervals of small cohorts cover as
        little as 79%.
        *normal*: the estimate plus or minus z standard errors. Neither is clipped at 0, so that
        averages of intervals stay valid. With `candidates`, they hold for that many rows at once
        (Bonferroni).

        That far out, a sum of rare bits reaches much higher than a normal variable: its third
        cumulant is up to its variance times `step`. So the lower ends over many candidates are
        lower by the first term of Cornish and Fisher; with symmetric noise, where a holder's bit is
        missing just as rarely, the upper ends are higher.
        """
        z = quantile(confidence, candidates)
        if method == "normal":
            half = z * self.std_error
            return ConfidenceInterval(low=self.value - half, high=self.value + half)
        if method != "score":
            raise InvalidInput(f"method must be score or normal, not {method!r}")
        if candidates > 1 and step <= 0.0:
            raise InvalidInput(
                "score intervals over many candidates need `step`, the change by one bit"
            )
        shift = z * z * self.slope / 2.0
        skew = max(0.0, step * (z * z - 1.0) / 6.0) if candidates > 1 else 0.0
        least = self.value - skew - step / 2.0
        most = self.value + np.where(self.slope == 0.0, skew, 0.0) + step / 2.0
        below, above = (
            np.sqrt(np.maximum(shift * shift + z * z * (self.base + self.slope * seen), 0.0))
            for seen in (least, most)
        )
        # Far below 0 the quadratic has no solution; a lower end never exceeds the estimate.
        return ConfidenceInterval(
            low=np.minimum(least + shift - below, least), high=most + shift + above
        )

    def take(self, rows: NDArray[np.int64]) -> Estimates:
        return Estimates(self.value[rows], self.base[rows], self.slope[rows], self.reports[rows])

    def summed(self, groups: NDArray[np.int64], size: int) -> Estimates:
        """Sum rows of one cohort: row i goes to group `groups[i]` of `size`."""
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
        """Stack the rows of several cohorts."""
        return Estimates(
            value=np.concatenate([part.value for part in parts]),
            base=np.concatenate([part.base for part in parts]),
            slope=np.concatenate([part.slope for part in parts]),
            reports=np.concatenate([part.reports for part in parts]),
        )


def estimate(
    randomizer: OneHotRandomizer, sums: ArrayLike, reports: int, noise_trials: int = 0
) -> Estimates:
    """Estimate from the sums of `reports` reports, including the noise of both aggregators."""
    value = np.atleast_1d(randomizer.debias(sums, reports, noise_trials))
    base = float(randomizer.variance(reports, 0.0, noise_trials))
    size = len(value)
    return Estimates(
        value=value,
        base=np.full(size, base),
        slope=np.full(size, randomizer.variance_slope),
        reports=np.full(size, reports, dtype=np.int64),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCheck:
    """Whether the sum of all bins fits honest reports, which does not depend on the data."""

    total: int  # observed
    expected: float
    std: float
    p_value: float  # two-sided
    marked: bool  # p below 2e-9
    least_hostile: int | None  # reports that would explain it; None: the noise is wrong

    def explain(self) -> str:
        away = (self.total - self.expected) / self.std if self.std else 0.0
        seen = f"The bits of all reports add up to {self.total:,}, {away:+.1f} standard deviations"
        if not self.marked:
            return f"{seen} from what honest reports give, which is nothing unusual."
        if self.least_hostile is None:
            return (
                f"{seen} from what honest reports give, and no number of hostile reports explains "
                "that: an aggregator's noise is wrong. Do not use this result."
            )
        plural = "s" if self.least_hostile != 1 else ""
        return (
            f"{seen} from what honest reports give: there were at least {self.least_hostile:,} "
            f"hostile report{plural}. Treat this result with care."
        )


def check_weight(
    randomizer: OneHotRandomizer,
    sums: ArrayLike,
    reports: int,
    noise_trials: int = 0,
    *,
    bounded: bool = True,
) -> WeightCheck:
    """Compare the total weight with its distribution, which does not depend on anybody's data."""
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


Labels: TypeAlias = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Part:
    """The released sums of one group and arm, or of the whole cohort if there are neither."""

    group: tuple[str, ...]  # its values, in the order of the recipe's group_by, then its arm
    reports: int  # verified
    sums: NDArray[np.uint64]  # one per bin, including noise


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ResultView:
    """Rows that differ from the released bins: filtered, summed or post-processed."""

    labels: Labels
    rows: Estimates
    bounds: tuple[Floats, Floats] | None = None  # the possible range, if a step knows it
    shown: Floats | None = None  # estimates after post-processing, if they became biased


def part_columns(recipe: Recipe) -> int:
    """How many label columns identify a part: its groups and its arm."""
    return len(recipe.group_by) + bool(recipe.arms)


def column_names(recipe: Recipe) -> list[str]:
    """Name the label columns: groups, the arm, then features; all different."""
    names: list[str] = []
    wanted = [ref.rpartition(".")[2] for ref in recipe.group_by]
    wanted += ["arm"] if recipe.arms else []
    wanted += ["_".join(feature.columns_read) for feature in recipe.features]
    reserved = {"estimate", "std_error", "ci_low", "ci_high"}
    if recipe.series is not None:  # the other columns of `Trend` and of what it returns
        reserved |= {"window", "opens", "reports", "before", "after", "change", "certain"}
        reserved.add("statistic")
    for name in wanted:
        unique, number = name, 1
        while unique in names or unique in reserved:
            number += 1
            unique = f"{name}_{number}"
        names.append(unique)
    return names
