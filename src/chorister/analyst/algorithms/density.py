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
_SURPRISING: Final = _MODELS.index((0, 1.0, 0.0))  # waves that are too short for a first round
_SURPRISE: Final = 0.01  # their weight, whatever was seen
_DESIGN_RANGES: Final = 17  # whose error is to be small
_TOTAL_VARIANCE: Final = 1e-10  # shares add up to 1
_LEAST_VARIANCE: Final = 1e-13  # of a cell; with less, rounding makes covariances singular
_LARGE_CORNER: Final = 1e300  # above the square of any whitened residual
_LEAST_EVIDENCE: Final = 1e-3  # relative to the best; models below it are left out


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """What one round measured: cell i is grid steps low[i] .. high[i] - 1.

    The variance of a cell is `variances`, or `variances + slopes p` if it holds the share p.
    """

    low: Integers
    high: Integers
    values: Floats  # shares of all devices
    variances: Floats
    slopes: Floats | None = None

    @classmethod
    def between(
        cls, edges: Integers, values: Floats, variances: Floats, slopes: Floats | None = None
    ) -> Cells:
        """Neighbouring cells between edges."""
        return cls(
            low=edges[:-1], high=edges[1:], values=values, variances=variances, slopes=slopes
        )

    def variances_at(self, shares: Floats) -> Floats:
        """The variances of cells that hold these shares."""
        held = 0.0 if self.slopes is None else self.slopes * np.maximum(shares, 0.0)
        found: Floats = np.maximum(self.variances + held, _LEAST_VARIANCE)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class DensityFit:
    """A fitted density on a grid of equal steps: the likeliest, with no statement of its error."""

    density: Floats  # share of each step; not negative, adds up to 1
    known: Cells  # all rounds, and that shares add up to 1
    prior: _Prior
    evidence: Floats  # the log of each model's

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
    if not parts:
        raise InvalidInput("a density needs at least one round")
    low = np.concatenate([part.low for part in parts] + [np.array([0])])
    high = np.concatenate([part.high for part in parts] + [np.array([size])])
    values = np.concatenate([part.values for part in parts] + [np.array([1.0])])
    if low.min() < 0 or high.max() > size or np.any(high <= low):
        raise InvalidInput(f"cells lie inside a grid of {size} steps and are not empty")
    variances = [part.variances_at(part.values) for part in parts]
    # The noise of one cell, all rounds together; the less there is, the more the last fit counts.
    least = float(sum(1.0 / np.median(each) for each in variances)) ** -0.5
    floor = min(max(60.0 * least, 0.02), 0.5)
    passes = 3 if floor < 0.1 else 2
    base = density = np.full(size, 1.0 / size)
    for turn in range(passes):
        prior = _Prior(base)
        if turn > 0:
            # At what was measured, cells with few devices by chance would have most weight.
            curve = np.concatenate([[0.0], np.cumsum(density)])
            variances = [part.variances_at(curve[part.high] - curve[part.low]) for part in parts]
        noise = np.concatenate([*variances, np.array([_TOTAL_VARIANCE])])
        known = Cells(low=low, high=high, values=values, variances=noise)
        mean, evidence = _posterior_mean(prior, known)
        density = norm_sub(mean, 1.0)
        if turn < passes - 1:
            base = (1.0 - floor) * density + floor / size
    return DensityFit(density=density, known=known, prior=prior, evidence=evidence)


def smooth_evidence(cells: Cells, size: int) -> float:
    """The log of the evidence for a smooth density, averaged over the models."""
    prior = _Prior(np.full(size, 1.0 / size))
    evidence = _evidence(prior.measured(cells), cells.values - prior.shares(cells))
    highest = float(evidence.max())
    return highest + math.log(float(np.exp(evidence - highest).mean()))


def expected_errors(fit: DensityFit, questions: Sequence[Integers], noise: float) -> Floats:
    """What to expect of each question that could follow: the mean squared error of a fit with it.

    A question is the edges of its cells, `noise` the standard error of each of them. The error is
    that of shares of half the range. It is the posterior variance, averaged over the models by
    their evidence so far: where rough models are likely, wide cells leave much unknown. One model
    always has a little weight, because equal cells may see nothing of a wave: where noise is small,
    more cells than the evidence calls for cost next to nothing.
    """
    size = len(fit.density)
    starts = np.linspace(0, size - size // 2, _DESIGN_RANGES).astype(np.int64)
    ends = starts + size // 2
    return np.array(
        [_left_open(fit, edges, noise, starts, ends, _SURPRISE).mean() for edges in questions]
    )


def cumulative_errors(fit: DensityFit, places: Integers) -> Floats:
    """The standard error of the distribution function at each place, as far as the models know."""
    nothing = np.zeros(0, dtype=np.int64)
    found: Floats = np.sqrt(_left_open(fit, nothing, 1.0, np.zeros_like(places), places, 0.0))
    return found


def _left_open(
    fit: DensityFit,
    edges: Integers,
    noise: float,
    starts: Integers,
    ends: Integers,
    surprise: float,
) -> Floats:
    """The posterior variance of some ranges' shares after one more question."""
    known = fit.known
    weight = np.exp(fit.evidence - fit.evidence.max())
    likely = np.argsort(-weight)[:_DESIGN_MODELS]
    weight = np.append(weight[likely] / weight[likely].sum() * (1.0 - surprise), surprise)
    models = np.append(likely, _SURPRISING)
    first = np.concatenate([known.low, edges[:-1], starts])
    last = np.concatenate([known.high, edges[1:], ends])
    joint = fit.prior.covariances(first, last, models)
    asked = len(first) - len(starts)
    seen = joint[:, :asked, :asked]
    seen[:, np.arange(asked), np.arange(asked)] += np.concatenate(
        [known.variances, np.full(max(len(edges) - 1, 0), max(noise**2, _LEAST_VARIANCE))]
    )
    cross = joint[:, :asked, asked:]
    explained = np.sum(cross * np.linalg.solve(seen, cross), axis=1)
    left = np.diagonal(joint[:, asked:, asked:], axis1=1, axis2=2) - explained
    found: Floats = weight @ np.maximum(left, 0.0)
    return found


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
        # A step adds to the node before it and to the one after it.
        self.bounds = np.searchsorted(self.left, np.arange(nodes + 1))
        self.before = np.concatenate([[0.0], np.cumsum(base * (1.0 - self.part))])
        self.after = np.concatenate([[0.0], np.cumsum(base * self.part)])
        self.cumulative = np.concatenate([[0.0], np.cumsum(base)])
        self.squares = np.concatenate([[0.0], np.cumsum(base * base)]) * size

    def shares(self, cells: Cells) -> Floats:
        found: Floats = self.cumulative[cells.high] - self.cumulative[cells.low]
        return found

    def weights(self, low: Integers, high: Integers) -> Floats:
        """What each node adds to each cell."""
        first = np.clip(self.bounds[:, None], low, high)
        found = np.zeros(first.shape)
        found[:-1] = np.diff(self.before[first], axis=0)
        found[1:] += np.diff(self.after[first], axis=0)
        return found

    def covariances(self, low: Integers, high: Integers, models: Integers | None = None) -> Floats:
        """Of the cells with each other, by model."""
        chosen = _MODELS if models is None else [_MODELS[model] for model in models]
        lengths, index = np.unique([length for length, _, _ in chosen], return_inverse=True)
        weights = self.weights(low, high)
        smooth = weights.T @ (self.kernels[lengths] @ weights)
        first, last = np.maximum.outer(low, low), np.minimum.outer(high, high)
        rough = self.squares[np.maximum(first, last)] - self.squares[first]
        found: Floats = smooth[index]
        found *= np.array([a for _, a, _ in chosen])[:, None, None]
        found += np.array([r for _, _, r in chosen])[:, None, None] * rough
        return found

    def measured(self, cells: Cells) -> Floats:
        """The covariances of the cells with their noise, by model."""
        found = self.covariances(cells.low, cells.high)
        diagonal = np.arange(len(cells.values))
        found[:, diagonal, diagonal] += cells.variances
        return found

    def mean(self, curve: Floats, jumps: Floats) -> Floats:
        """The share of every step, by the process at the nodes and the roughness of the steps."""
        deviation = curve[self.left] * (1.0 - self.part) + curve[self.left + 1] * self.part
        found: Floats = self.base * (1.0 + deviation + jumps * self.base * len(self.base))
        return found


def _posterior_mean(prior: _Prior, cells: Cells) -> tuple[Floats, Floats]:
    """The mean of the share of every step, and the log of each model's evidence."""
    covariances = prior.measured(cells)
    residual = cells.values - prior.shares(cells)
    evidence = _evidence(covariances, residual)
    weight = np.exp(evidence - evidence.max())
    kept = np.flatnonzero(weight >= _LEAST_EVIDENCE)
    weight = weight[kept] / weight[kept].sum()
    answers = np.linalg.solve(covariances[kept], residual[:, None])[..., 0] * weight[:, None]
    smooth = np.zeros((len(_LENGTHS), len(residual)))
    by_roughness = np.zeros(len(residual))
    for model, answer in zip(kept, answers, strict=True):
        index, amplitude, roughness = _MODELS[model]
        smooth[index] += amplitude * answer
        by_roughness += roughness * answer
    weights = prior.weights(cells.low, cells.high)
    curve = np.einsum("lij,lj->i", prior.kernels, smooth @ weights.T)
    jumps = np.zeros(len(prior.base) + 1)
    np.add.at(jumps, cells.low, by_roughness)
    np.add.at(jumps, cells.high, -by_roughness)
    return prior.mean(curve, np.cumsum(jumps)[:-1]), evidence


def _evidence(covariances: Floats, residual: Floats) -> Floats:
    """The log likelihood of the residual under each covariance.

    The residual is one more row of the matrix: that row of the Cholesky factor is the residual,
    whitened, whatever stands in its corner.
    """
    count = len(residual)
    bordered = np.empty((len(covariances), count + 1, count + 1))
    bordered[:, :-1, :-1] = covariances
    bordered[:, -1, :-1] = bordered[:, :-1, -1] = residual
    bordered[:, -1, -1] = _LARGE_CORNER
    factors = np.linalg.cholesky(bordered)
    white = factors[:, -1, :-1]
    logs = np.log(np.diagonal(factors, axis1=1, axis2=2)[:, :-1]).sum(axis=1)
    found: Floats = -0.5 * np.sum(white * white, axis=1) - logs
    return found
