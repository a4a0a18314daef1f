"""One axis of a two-way table: fit its fine shares, as a smooth curve with spikes or as steps.

Everything is in shares of the devices. A measured share p has the variance `base + slope p`: noise,
and who happened to be in the cohort (`Precision`).

- **smooth** keeps the details of a fine histogram as far as noise does not explain them, scale by
  scale (empirical Bayes; real spikes stay).
- **fit_margin** does this, unless the histogram is a staircase: then it keeps its level steps.
- **refined_margin** fits a noisy margin or a staircase again, with its sums in the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.density import Cells, fit_density
from chorister.analyst.algorithms.staircase import staircase
from chorister.analyst.consistency import norm_sub

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_BLUR: Final = (1.0 / 16.0, 4.0 / 16.0, 6.0 / 16.0, 4.0 / 16.0, 1.0 / 16.0)
_DETAIL_NOISE: Final = (0.7235, 0.2854, 0.1779, 0.1222, 0.0858, 0.0606, 0.0428)  # of white noise
_NOISY_MARGIN: Final = 0.08  # of all fine cells together
_SPIKY_MARGIN: Final = 0.15
_TINY: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Precision:
    """The variance of a measured share p is `base + slope p`."""

    base: float
    slope: float = 0.0

    def variance(self, shares: Floats, cells: Floats | float = 1.0) -> Floats:
        """The variance of sums of `cells` cells that add up to `shares`."""
        found: Floats = self.base * cells + self.slope * np.maximum(shares, 0.0)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Margin:
    """The fitted shares of an axis' fine cells, and with which of them its steps begin, if any.

    `bends` says how much of the table wide buckets would blur, if it was measured in slices.
    """

    shares: Floats
    steps: Ints | None = None
    bends: float | None = None


def fit_margin(seen: Floats, precision: Precision, devices: int) -> Margin:
    """Fit the fine shares of one ordered feature of so many devices, which add up to 1."""
    smoothed = smooth(seen, precision)
    # Even a flat law gives each cell of a finite fleet its own share.
    found = staircase(seen, precision.variance(smoothed) + smoothed / devices)
    if found is None or len(found.starts) < 2:
        return Margin(smoothed)
    return Margin(norm_sub(found.shares, 1.0), found.starts)


def smooth(shares: Floats, precision: Precision, *, ordered: bool = True) -> Floats:
    """Smooth the fine shares of one feature, which add up to 1.

    Scale by scale (the "à trous" wavelet transform): details are kept as far as noise does not
    explain them, and what is far beyond the noise is a spike, whatever the other cells say.
    """
    if len(shares) < 3 or not ordered:
        return norm_sub(shares, 1.0)
    rest, kept = shares, np.zeros(len(shares))
    for scale, factor in enumerate(_DETAIL_NOISE):
        if 4 * 2**scale >= len(shares):
            break
        coarser = _blurred(rest, 2**scale)
        detail, variance = rest - coarser, factor**2 * precision.variance(coarser)
        alone = np.abs(detail) > 4.0 * np.sqrt(variance)
        others = ~alone if not alone.all() else alone
        signal = max(float((detail**2 - variance)[others].mean()), 0.0)
        part = np.divide(
            signal, signal + variance, out=np.ones_like(variance), where=variance > 0.0
        )
        kept = kept + np.where(alone, detail, part * detail)
        rest = coarser
    return norm_sub(rest + kept, 1.0)


def _blurred(values: Floats, step: int) -> Floats:
    """Average with neighbours at one and two steps, mirrored at both ends."""
    padded = np.pad(values, 2 * step, mode="symmetric")
    size, found = len(values), np.zeros(len(values))
    for shift, weight in enumerate(_BLUR):
        found += weight * padded[shift * step : shift * step + size]
    return found


def spikiness(shares: Floats) -> float:
    """How much of a margin stands above its neighbours: 0 if smooth, 1 if in single cells."""
    kernel = [1.0, 2.0, 0.0, 2.0, 1.0]
    if len(shares) < len(kernel):
        return 0.0
    weights = np.convolve(np.ones(len(shares)), kernel, mode="same")
    near = np.convolve(shares, kernel, mode="same") / weights
    return float(np.maximum(shares - near, 0.0).sum())


def refined_margin(
    margin: Margin,
    seen: Floats,
    precision: Precision,
    own: Floats,
    own_variance: Floats,
    starts: Ints,
    *,
    fixed: int = 0,
) -> Floats:
    """Fit a noisy margin without spikes again, together with its sums in the table (`own`).

    `margin` and `seen` are its fine shares with and without the first fit; the first `fixed` cells
    (OOV) stay as they are. Weak signals need a prior that knows how smooth margins are: a Gaussian
    process, as for distributions. The steps of a staircase get the sums that both say they have.
    """
    fitted = margin.shares
    if margin.steps is not None and np.isin(margin.steps, starts).all():
        return _refined_steps(fitted, margin.steps, precision, own, own_variance, starts)
    inside = fitted[fixed:]
    if (
        len(inside) < 8
        or len(inside) * math.sqrt(precision.base) < _NOISY_MARGIN
        or spikiness(inside) > _SPIKY_MARGIN
        or (mass := float(inside.sum())) < 0.1
    ):
        return fitted
    edges = np.append(starts[fixed:] - fixed, len(inside))
    parts = [
        Cells.between(
            np.arange(len(inside) + 1), seen[fixed:] / mass, precision.variance(inside) / mass**2
        ),
        Cells.between(edges, own[fixed:] / mass, own_variance[fixed:] / mass**2),
    ]
    return np.concatenate([fitted[:fixed], mass * fit_density(parts, len(inside)).density])


def _refined_steps(
    fitted: Floats,
    steps: Ints,
    precision: Precision,
    own: Floats,
    own_variance: Floats,
    starts: Ints,
) -> Floats:
    """Combine the sums of whole steps by precision."""
    at = np.searchsorted(starts, steps)
    other, sizes = np.add.reduceat(fitted, steps), np.diff(np.append(steps, len(fitted)))
    variance = precision.variance(other, sizes)
    weight = variance / (variance + np.add.reduceat(own_variance, at))
    sums = norm_sub(weight * np.add.reduceat(own, at) + (1.0 - weight) * other, float(fitted.sum()))
    refined: Floats = fitted * np.repeat(sums / np.maximum(other, _TINY), sizes)
    return refined
