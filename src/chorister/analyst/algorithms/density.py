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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.consistency import norm_sub
from chorister.errors import InvalidInput

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

_NODES: Final = 128
_LENGTHS: Final = (3 / 128, 3 / 64, 3 / 32, 3 / 16, 3 / 8, 3 / 4)  # shares of the whole range
# From all but none (data as flat as the base) to spikes that stand out from a flat base.
_AMPLITUDES: Final = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0)
_ROUGHNESS: Final = (0.0, 0.4 / 1024, 4.0 / 1024, 40.0 / 1024)
_MODELS: Final = [(i, a, r) for i in range(len(_LENGTHS)) for a in _AMPLITUDES for r in _ROUGHNESS]
_DESIGN_MODELS: Final = 12  # the likeliest, when a question is chosen
_DESIGN_RANGES: Final = 17  # whose error is to be small
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


def fit_density(parts: Sequence[Cells], size: int = 1024) -> DensityFit:
    """The density that explains all cells best, on a grid of `size` steps."""
    return DensityFit(density=_fitted(parts, size)[0])


def expected_errors(
    parts: Sequence[Cells], questions: Sequence[Integers], noise: float, size: int = 1024
) -> Floats:
    """What to expect of each question that could follow: the mean squared error of a fit with it.

    A question is the edges of its cells, `noise` the standard error of each of them. The error is
    that of shares of half the range. It is the posterior variance, averaged over the models by
    their evidence so far: where rough models are likely, wide cells leave much unknown.
    """
    _, base, known = _fitted(parts, size)
    prior = _Prior(base)
    low, high, values, variances = known
    covariances = prior.covariances(low, high)
    diagonal = np.arange(len(values))
    covariances[:, diagonal, diagonal] += variances
    evidence = _evidence(covariances, values - prior.shares(low, high))
    weight = np.exp(evidence - evidence.max())
    likely = np.argsort(-weight)[:_DESIGN_MODELS]
    weight = weight[likely] / weight[likely].sum()
    starts = np.linspace(0, size - size // 2, _DESIGN_RANGES).astype(np.int64)
    found = []
    for edges in questions:
        first = np.concatenate([low, edges[:-1], starts])
        last = np.concatenate([high, edges[1:], starts + size // 2])
        joint = prior.covariances(first, last, likely)
        asked = len(first) - len(starts)
        seen = joint[:, :asked, :asked]
        seen[:, np.arange(asked), np.arange(asked)] += np.concatenate(
            [variances, np.full(len(edges) - 1, noise**2)]
        )
        cross = joint[:, :asked, asked:]
        explained = np.sum(cross * np.linalg.solve(seen, cross), axis=1)
        left = np.diagonal(joint[:, asked:, asked:], axis1=1, axis2=2) - explained
        found.append(float(weight @ np.maximum(left, 0.0).mean(axis=1)))
    return np.array(found)


def _fitted(
    parts: Sequence[Cells], size: int
) -> tuple[Floats, Floats, tuple[Integers, Integers, Floats, Floats]]:
    """The density, what its deviations are from, and all cells."""
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
    return density, base, (low, high, values, noise)


class _Prior:
    """Covariances of shares of cells, given the density that deviations are from.

    The process is drawn at equally spaced nodes and interpolated between them: a prior in its own
    right, and much faster than one place per step.
    """

    def __init__(self, base: Floats) -> None:
        size, nodes = len(base), min(_NODES, len(base))
        self.base, self.kernels = base, _kernels(nodes)
        place = (np.arange(size) + 0.5) / size * nodes
        self.left = np.minimum(place.astype(np.int64), nodes - 1)
        self.part = place - self.left
        # What each node adds to the share of all steps up to one.
        self.added = np.zeros((size + 1, nodes + 1))
        self.added[np.arange(1, size + 1), self.left] = base * (1.0 - self.part)
        self.added[np.arange(1, size + 1), self.left + 1] = base * self.part
        np.cumsum(self.added, axis=0, out=self.added)
        self.cumulative = np.concatenate([[0.0], np.cumsum(base)])
        self.squares = np.concatenate([[0.0], np.cumsum(base * base)]) * size

    def shares(self, low: Integers, high: Integers) -> Floats:
        found: Floats = self.cumulative[high] - self.cumulative[low]
        return found

    def weights(self, low: Integers, high: Integers) -> Floats:
        """What each node adds to each cell."""
        found: Floats = (self.added[high] - self.added[low]).T
        return found

    def covariances(self, low: Integers, high: Integers, models: Integers | None = None) -> Floats:
        """Of the cells with each other, by model."""
        weights = self.weights(low, high)
        smooth = weights.T @ (self.kernels @ weights)
        first, last = np.maximum.outer(low, low), np.minimum.outer(high, high)
        rough = self.squares[np.maximum(first, last)] - self.squares[first]
        chosen = _MODELS if models is None else [_MODELS[model] for model in models]
        return np.stack([a * smooth[i] + r * rough for i, a, r in chosen])

    def mean(self, curve: Floats, jumps: Floats) -> Floats:
        """The share of every step, by the process at the nodes and the roughness of the steps."""
        deviation = curve[self.left] * (1.0 - self.part) + curve[self.left + 1] * self.part
        found: Floats = self.base * (1.0 + deviation + jumps * self.base * len(self.base))
        return found


def _posterior_mean(
    base: Floats, low: Integers, high: Integers, values: Floats, noise: Floats
) -> Floats:
    """Of the share of every step, given the density that deviations are from."""
    prior = _Prior(base)
    covariances = prior.covariances(low, high)
    diagonal = np.arange(len(values))
    covariances[:, diagonal, diagonal] += noise
    residual = values - prior.shares(low, high)
    evidence = _evidence(covariances, residual)
    weight = np.exp(evidence - evidence.max())
    kept = np.flatnonzero(weight >= _LEAST_EVIDENCE)
    weight = weight[kept] / weight[kept].sum()
    answers = np.linalg.solve(covariances[kept], residual[:, None])[..., 0] * weight[:, None]
    smooth = np.zeros((len(_LENGTHS), len(values)))
    by_roughness = np.zeros(len(values))
    for model, answer in zip(kept, answers, strict=True):
        index, amplitude, roughness = _MODELS[model]
        smooth[index] += amplitude * answer
        by_roughness += roughness * answer
    weights = prior.weights(low, high)
    curve = np.einsum("lij,lj->i", prior.kernels, smooth @ weights.T)
    jumps = np.zeros(len(base) + 1)
    np.add.at(jumps, low, by_roughness)
    np.add.at(jumps, high, -by_roughness)
    return prior.mean(curve, np.cumsum(jumps)[:-1])


def _evidence(covariances: Floats, residual: Floats) -> Floats:
    """The log likelihood of the residual under each covariance."""
    factors = np.linalg.cholesky(covariances)
    column = np.broadcast_to(residual[:, None], (len(covariances), len(residual), 1))
    white = np.linalg.solve(factors, column)[..., 0]
    logs = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
    found: Floats = -0.5 * np.sum(white * white, axis=1) - logs
    return found
