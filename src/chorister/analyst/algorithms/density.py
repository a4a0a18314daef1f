"""A density from noisy cells: a Gaussian process that knows which cells were measured.

Shares of cells (of any partitions, staggered or nested) are linear in the density, and their noise
is nearly Gaussian, so the posterior is a linear solve in the measured cells. The prior is
`p(x) = p0(x) (1 + g(x))`: g is a Matern-3/2 process plus white roughness (heaped values, such as
ages in years), p0 is the fit before, mixed with a uniform floor that is as large as the noise is.
Length, amplitude and roughness are averaged by their evidence, so weak signals stay smooth and
strong ones keep their detail: what separate methods would have to be chosen for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.consistency import norm_sub
from chorister.errors import InvalidInput

__all__ = ["Cells", "DensityFit", "fit_density"]

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

_NODES: Final = 128
_LENGTHS: Final = (3 / 128, 3 / 64, 3 / 32, 3 / 16, 3 / 8, 3 / 4)  # shares of the whole range
# From all but none (data as flat as the base) to spikes that stand out from a flat base.
_AMPLITUDES: Final = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0)
_ROUGHNESS: Final = (0.0, 0.4 / 1024, 4.0 / 1024, 40.0 / 1024)
_TOTAL_VARIANCE: Final = 1e-10  # shares add up to 1
_LEAST_EVIDENCE: Final = 1e-3  # relative to the best; models below it are left out


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """What one round measured: cell i is grid steps low[i] .. high[i] - 1."""

    low: Integers
    high: Integers
    values: Floats  # shares of all devices
    variances: Floats

    @classmethod
    def between(cls, edges: Integers, values: Floats, variances: Floats) -> Cells:
        """Neighbouring cells between edges."""
        return cls(low=edges[:-1], high=edges[1:], values=values, variances=variances)


@dataclass(frozen=True, kw_only=True, eq=False)
class DensityFit:
    """A fitted density on a grid of equal steps: the likeliest, with no statement of its error."""

    density: Floats  # share of each step; not negative, adds up to 1

    @property
    def cumulative(self) -> Floats:
        """The distribution function at the edges of the steps."""
        return np.concatenate([[0.0], np.cumsum(self.density)])


@lru_cache(maxsize=4)
def _kernels(nodes: int) -> Floats:
    """The Matern-3/2 kernel between equally spaced nodes, for every length."""
    places = np.linspace(0.0, 1.0, nodes + 1)
    distances = np.abs(places[:, None] - places[None, :])
    scaled = math.sqrt(3.0) * distances / np.array(_LENGTHS)[:, None, None]
    found: Floats = (1.0 + scaled) * np.exp(-scaled)
    found.setflags(write=False)
    return found


def fit_density(parts: list[Cells], size: int = 1024) -> DensityFit:
    """The density that explains all cells best, on a grid of `size` steps."""
    if not parts:
        raise InvalidInput("a density needs at least one round")
    low = np.concatenate([part.low for part in parts] + [np.array([0])])
    high = np.concatenate([part.high for part in parts] + [np.array([size])])
    values = np.concatenate([part.values for part in parts] + [np.array([1.0])])
    noise = np.concatenate([part.variances for part in parts] + [np.array([_TOTAL_VARIANCE])])
    if low.min() < 0 or high.max() > size or np.any(high <= low):
        raise InvalidInput(f"cells lie inside a grid of {size} steps and are not empty")
    # The noise of one cell, all rounds together; the less there is, the more the last fit counts.
    least = float(sum(1.0 / np.median(part.variances) for part in parts)) ** -0.5
    floor = min(max(60.0 * least, 0.02), 0.5)
    passes = 3 if floor < 0.1 else 2
    base = np.full(size, 1.0 / size)
    for turn in range(passes):
        density = norm_sub(_posterior_mean(base, low, high, values, noise), 1.0)
        if turn < passes - 1:
            base = (1.0 - floor) * density + floor / size
    return DensityFit(density=density)


def _posterior_mean(
    base: Floats, low: Integers, high: Integers, values: Floats, noise: Floats
) -> Floats:
    """Of the share of every step, given the density that deviations are from.

    The process is drawn at equally spaced nodes and interpolated between them: a prior in its own
    right, and much faster than one place per step.
    """
    size, nodes = len(base), min(_NODES, len(base))
    kernels = _kernels(nodes)
    place = (np.arange(size) + 0.5) / size * nodes
    left = np.minimum(place.astype(np.int64), nodes - 1)
    part = place - left
    # What each node adds to each cell's share.
    added = np.zeros((size + 1, nodes + 1))
    added[np.arange(1, size + 1), left] = base * (1.0 - part)
    added[np.arange(1, size + 1), left + 1] = base * part
    np.cumsum(added, axis=0, out=added)
    weights = (added[high] - added[low]).T
    smooth = kernels @ weights
    smooth_cells = weights.T @ smooth
    squares = np.concatenate([[0.0], np.cumsum(base * base)]) * size
    first, last = np.maximum.outer(low, low), np.minimum.outer(high, high)
    rough_cells = squares[np.maximum(first, last)] - squares[first]
    models = [(i, a, r) for i in range(len(_LENGTHS)) for a in _AMPLITUDES for r in _ROUGHNESS]
    covariances = np.stack([a * smooth_cells[i] + r * rough_cells for i, a, r in models])
    diagonal = np.arange(len(values))
    covariances[:, diagonal, diagonal] += noise
    cumulative = np.concatenate([[0.0], np.cumsum(base)])
    residual = values - (cumulative[high] - cumulative[low])
    evidence = _evidence(covariances, residual)
    weight = np.exp(evidence - evidence.max())
    kept = np.flatnonzero(weight >= _LEAST_EVIDENCE)
    weight = weight[kept] / weight[kept].sum()
    answers = np.linalg.solve(covariances[kept], residual[:, None])[..., 0] * weight[:, None]
    curve = np.zeros(nodes + 1)
    by_roughness = np.zeros(len(values))
    for model, answer in zip(kept, answers, strict=True):
        index, amplitude, roughness = models[model]
        curve += amplitude * (smooth[index] @ answer)
        by_roughness += roughness * answer
    jumps = np.zeros(size + 1)
    np.add.at(jumps, low, by_roughness)
    np.add.at(jumps, high, -by_roughness)
    deviation = curve[left] * (1.0 - part) + curve[left + 1] * part
    deviation += np.cumsum(jumps)[:-1] * base * size
    found: Floats = base * (1.0 + deviation)
    return found


def _evidence(covariances: Floats, residual: Floats) -> Floats:
    """The log likelihood of the residual under each covariance."""
    factors = np.linalg.cholesky(covariances)
    column = np.broadcast_to(residual[:, None], (len(covariances), len(residual), 1))
    white = np.linalg.solve(factors, column)[..., 0]
    logs = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
    found: Floats = -0.5 * np.sum(white * white, axis=1) - logs
    return found
