"""Bounds of sums and shares over a histogram's bins, for any data. Pure functions over arrays.

Every device is in exactly one bin, and the estimate `x_i` of a bin that `f_i` devices hold is
unbiased with the known variance `base + slope f_i`, independent of all other bins. So `sum w_i x_i`
estimates `sum w_i f_i`; and because the f_i add up to the reports, a constant k may be subtracted
from all weights and `k n` added: the mean of the weights makes the variance (nearly) least.

A share or a mean is a ratio `sum a_i f_i / sum b_i f_i`. Its interval holds every m for which
`sum (a_i - m b_i) x_i` is not too far from 0 (Fieller's): one test at the true ratio decides, so
the interval also holds where the denominator is small, and is then the whole range. Tails are
normal with the first term of Cornish and Fisher for the skew of rare bits; a tenth of alpha is
kept for what that leaves out (variances are taken at the estimate).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from chorister.analyst.algorithms.density_bands import third_cumulants
from chorister.analyst.consistency import norm_sub
from chorister.analyst.estimate import Floats, quantile
from chorister.analyst.result import Result

_SPARE: Final = 0.1  # of alpha, for what the tails leave out
_HALVINGS: Final = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """An estimate with its standard error and interval."""

    estimate: float
    std_error: float
    low: float
    high: float

    def scaled(self, factor: float, offset: float = 0.0, slack: float = 0.0) -> Bounds:
        """In other units, with an interval that is wider by `slack` on either side."""
        return Bounds(
            estimate=offset + factor * self.estimate,
            std_error=factor * self.std_error,
            low=offset + factor * self.low - slack,
            high=offset + factor * self.high + slack,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BinCounts:
    """The bins of one cohort with the law of their noise."""

    value: Floats
    held: Floats  # the same, none negative, adding up to the reports
    base: float
    slope: float
    skew: float
    skew_slope: float
    reports: int

    @classmethod
    def of(cls, result: Result) -> BinCounts:
        """The bins of a result with one part."""
        rows, n = result.rows, result.n_reports
        skew, skew_slope = third_cumulants(result)
        return cls(
            value=rows.value, held=norm_sub(rows.value, n), base=float(rows.base[0]),
            slope=float(rows.slope[0]), skew=skew, skew_slope=skew_slope, reports=n,
        )  # fmt: skip

    def _sum(self, weights: Floats, sampled: float, z: float) -> tuple[float, float, float, float]:
        """The estimated sum, its standard error, and how far it may lie above and below."""
        common = float(weights.mean())
        left = weights - common
        value = float(left @ self.value) + common * self.reports
        second = float((left * left) @ (self.base + self.slope * self.held)) + sampled
        third = float((left**3) @ (self.skew + self.skew_slope * self.held))
        error = float(np.sqrt(second))
        skew = third / second * max(z * z - 1.0, 0.0) / 6.0 if second > 0.0 else 0.0
        return value, error, z * error + max(skew, 0.0), z * error + max(-skew, 0.0)

    def total(self, weights: Floats, confidence: float, sampled: float = 0.0) -> Bounds:
        """Bounds of `sum w_i f_i`; `sampled` is the variance that drawing the rows adds."""
        value, error, above, below = self._sum(weights, sampled, _z(confidence))
        return Bounds(estimate=value, std_error=error, low=value - above, high=value + below)

    def ratio(self, above: Floats, below: Floats, confidence: float, spread: float = 0.0) -> Bounds:
        """Bounds of a ratio m in [0, 1].

        Drawing rows adds a variance of at most `spread` per device, and of at most m (1 - m).
        """
        z = _z(confidence)
        inside = max(float(below @ self.held), 1.0)

        def tested(m: float) -> tuple[float, float, float, float]:
            drawn = min(spread * inside, inside * m * (1.0 - m) + 1.0)
            return self._sum(above - m * below, drawn, z)

        centre = min(max(float(above @ self.held) / inside, 0.0), 1.0)
        ends = []
        for end, sign in ((0.0, 1.0), (1.0, -1.0)):
            kept, lost = centre, end
            for _ in range(_HALVINGS):
                middle = (kept + lost) / 2.0
                value, _error, up, down = tested(middle)
                rejected = value > up if sign > 0.0 else value < -down
                kept, lost = (kept, middle) if rejected else (middle, lost)
            ends.append(lost)
        error = tested(centre)[1] / inside
        # At an end of [0, 1] unlucky noise rejects all but the end itself; never say so little.
        return Bounds(
            estimate=centre, std_error=error, low=max(min(ends[0], centre - error), 0.0),
            high=min(max(ends[1], centre + error), 1.0),
        )  # fmt: skip


def _z(confidence: float) -> float:
    quantile(confidence)  # raises if it is invalid
    return quantile(1.0 - (1.0 - _SPARE) * (1.0 - confidence))
