"""Does a noisy histogram consist of level steps, and where do they end?

A smooth curve and a staircase need different questions: buckets that end where the steps end see
all there is, while others blur every border. Both are models of the same measured cells, so their
evidence says which one they are. The staircase has a level per step (Gaussian around the mean) and
may end a step after every cell; sums over all staircases are exact, by recursion over the cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.density import Cells, smooth_evidence

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_SPREADS: Final = (0.1, 0.3, 1.0, 3.0)  # of the levels, relative to their mean
_CHANGE: Final = 0.05  # chance that a step ends after a cell
_CLEARLY: Final = 2.0  # log of the odds against a smooth curve
_BORDER: Final = 0.5  # chance that a step begins at a cell or at most two cells away ...
_POSSIBLE: Final = 0.1  # ... and at this one
_MOST_CELLS: Final = 200  # more would take seconds, and memory
_LEAST_MEAN: Final = 1e-3  # of a slice, relative to all: an empty one has no levels
_LEAST_NOISE: Final = 1e-4  # relative to the mean, for the sake of the digits
_SHORT: Final = 4  # cells; anything shorter is a spike rather than a step
_FEW: Final = (0.5, 0.2)  # short steps that chance explains, and for each step that is there


@dataclass(frozen=True, eq=False)
class Staircase:
    """Level steps: the fitted share of every cell, and the cells with which steps begin."""

    shares: Floats  # as measured: one column per slice, if there are several
    starts: Ints  # from 0 on


def staircase(shares: Floats, variances: Floats) -> Staircase | None:
    """The staircase that explains measured shares, or None where a smooth curve does as well.

    With two dimensions, every column is a histogram of its own, and all have the same borders.
    """
    size, slices = len(shares), shares.reshape(len(shares), -1)
    means = slices.mean(axis=0)
    if not 2 * _SHORT <= size <= _MOST_CELLS or not means.sum() > 0.0:
        return None
    means = np.maximum(means, _LEAST_MEAN * means.sum())
    noise = variances.reshape(slices.shape) + (_LEAST_NOISE * means) ** 2
    weights, moments = _between_edges(1.0 / noise), _between_edges((slices - means) / noise)
    found = [_steps(weights, moments, (spread * means) ** 2, size) for spread in _SPREADS]
    evidence = np.array([each.evidence for each in found])
    total = float(np.logaddexp.reduce(evidence))
    parts = np.exp(evidence - total)
    begins: Floats = parts @ np.array([each.begins for each in found])
    short = float(parts @ np.array([each.short for each in found]))
    if short > _FEW[0] + _FEW[1] * float(begins.sum()):
        return None
    flat = -0.5 * float(np.sum((slices - means) ** 2 / noise + np.log(noise)))
    smooth = sum(
        smooth_evidence(Cells.between(np.arange(size + 1), seen / mean, its_noise / mean**2), size)
        - size * math.log(mean)
        for seen, its_noise, mean in zip(slices.T, noise.T, size * means, strict=True)
    )
    if total - math.log(len(found)) + flat < smooth + _CLEARLY:
        return None
    levels: Floats = means + np.tensordot(parts, [each.deviations for each in found], axes=1)
    return Staircase(levels.reshape(shares.shape), np.concatenate([[0], _borders(begins)]))


def _between_edges(values: Floats) -> Floats:
    """The sums of every slice's cells from one edge to another."""
    edges = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)]).T
    found: Floats = edges[:, None, :] - edges[:, :, None]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Staircases:
    """All staircases whose levels vary by as much, each as likely as the cells say."""

    evidence: float  # log, relative to a flat histogram
    deviations: Floats  # from the means: what to expect of each cell, a column per slice
    begins: Floats  # the chance that a step begins with a cell, the first one left out
    short: float  # how many short steps to expect


def _steps(weights: Floats, moments: Floats, priors: Floats, size: int) -> _Staircases:
    """Sum over all staircases whose levels have these variances, one per slice.

    `weights` and `moments` are the precision and the weighted deviation of each slice's cells from
    one edge to another.
    """
    prior = priors[:, None, None]
    shrunk = 1.0 + prior * np.maximum(weights, 0.0)
    level = prior * moments / shrunk
    length = np.arange(size + 1)[None, :] - np.arange(size + 1)[:, None]
    step = (0.5 * moments * level - 0.5 * np.log(shrunk)).sum(axis=0)
    step = step + (length - 1) * math.log1p(-_CHANGE) + math.log(_CHANGE)
    step[:, size] -= math.log(_CHANGE)  # the last one ends anyway
    step[length < 1] = -np.inf
    before, after = np.full(size + 1, -np.inf), np.full(size + 1, -np.inf)
    before[0] = after[size] = 0.0
    for end in range(1, size + 1):
        before[end] = np.logaddexp.reduce(before[:end] + step[:end, end])
    for begin in range(size - 1, -1, -1):
        after[begin] = np.logaddexp.reduce(step[begin, begin + 1 :] + after[begin + 1 :])
    total = float(before[size])
    chance = np.exp(before[:, None] + step + after[None, :] - total)
    mass = chance * level
    changes = mass.sum(axis=2) - mass.sum(axis=1)
    return _Staircases(
        evidence=total,
        deviations=np.cumsum(changes, axis=1)[:, :size].T,
        begins=np.append(0.0, chance.sum(axis=0)[1:size]),
        short=float(chance[length < _SHORT].sum()),
    )


def _borders(begins: Floats) -> Ints:
    """Where a step may begin, by the chance that it begins at each cell.

    Where two neighbours are as likely, both are borders, and what is between them is by itself.
    """
    near = np.convolve(begins, np.ones(5), mode="same")
    at = (near > _BORDER) & (begins > _POSSIBLE)
    return np.flatnonzero(at)
