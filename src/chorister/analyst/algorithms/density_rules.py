"""Which intervals to ask about next, by what was seen so far. Pure functions over arrays.

The noise of a cell does not depend on its width, and a range of many cells adds up their noise: the
weaker the signal, the fewer cells. `noise` below is the standard error of a light cell as a share
of the devices, if all of them answered at once: what a plan states before the first question.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.density import Floats
from chorister.errors import InvalidInput

__all__ = ["DensityRules", "equal_edges", "regime", "staggered_edges"]

Integers: TypeAlias = NDArray[np.int64]

_WEAK_CELLS: Final = 8  # with fewer cells than that, staggered partitions say more
_MOST_CELLS: Final = 64


@dataclass(frozen=True, kw_only=True)
class DensityRules:
    """A whole plan: shares of the rounds and how many cells each has.

    The first round has equal cells, later ones shifted cells between quantiles of what is known.
    """

    shares: tuple[float, ...]
    cells: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.cells) or min(self.cells) < 2:
            raise InvalidInput("every round has a share and at least two cells")

    def edges(self, number: int, density: Floats | None, size: int) -> Integers:
        """The edges of round `number` (from 1), given the density fitted to the rounds before."""
        count = self.cells[number - 1]
        if density is None or number == 1:
            return equal_edges(count, size)
        return staggered_edges(density, count, (number - 2) / (len(self.shares) - 1))


def regime(noise: float, *, splitting_costs: bool) -> DensityRules:
    """The rules for a signal of this strength.

    Rounds must pay for themselves. Where splitting costs, one question to everybody in equal cells
    says most: with disjoint cohorts that are bound by the aggregate epsilon a cohort's relative
    noise is 1/share, where it is 1/sqrt(share) if the local epsilon binds or if everyone answers
    every round. Otherwise, weak: a pilot of a few equal cells, then two rounds of a few. Strong: a
    small pilot finds where the values are, then one round of many cells. Twice as many as suit a
    smooth density: they cost it little, a skewed one gains much, and a quantile is known no better
    than to the cell that it lies in.
    """
    if not noise > 0.0:
        raise InvalidInput(f"noise is above 0, not {noise}")
    count = int(min(max(round(0.25 / math.sqrt(noise)), 4), _MOST_CELLS))
    if splitting_costs:
        # Odd: then the errors at both ends of half the range are not the same.
        alone = max(5, count + 1 - count % 2)
        return DensityRules(shares=(1.0,), cells=(alone,))
    if count < _WEAK_CELLS:
        count = max(5, count)
        return DensityRules(shares=(0.2, 0.4, 0.4), cells=(4, count, count))
    return DensityRules(shares=(0.15, 0.85), cells=(8, min(2 * count, _MOST_CELLS)))


def equal_edges(count: int, size: int) -> Integers:
    """`count` cells of equal width."""
    return np.unique(np.round(np.linspace(0, size, count + 1)).astype(np.int64))


def staggered_edges(density: Floats, count: int, shift: float) -> Integers:
    """Cells between quantiles of the root of the density and a little of everywhere."""
    size = len(density)
    root = np.sqrt(np.maximum(density, 0.0))
    mixed = 0.8 * root / max(float(root.sum()), 1e-300) + 0.2 / size
    cumulative = np.concatenate([[0.0], np.cumsum(mixed)])
    wanted = (np.arange(count + 1) + shift) / count
    wanted = wanted[(wanted > 0.0) & (wanted < 1.0)]
    inner = np.round(np.interp(wanted * cumulative[-1], cumulative, np.arange(size + 1)))
    return np.unique(np.concatenate([[0], inner.astype(np.int64), [size]]))
