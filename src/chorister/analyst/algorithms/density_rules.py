"""Which intervals to ask about next, by what was seen so far. Pure functions over arrays.

The noise of a cell does not depend on its width, and a range of many cells adds up their noise: the
weaker the signal, and the flatter the density, the fewer cells. `noise` below is the standard error
of a light cell as a share of the devices, if all of them answered at once: what a plan states
before the first question.

No number of equal cells suits all data: 5 are best for a flat density and ten times worse than 33
for one in a corner of the range. So a pilot always comes first where it can see anything at all,
and its fit decides how many cells follow and where.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.density import Floats
from chorister.errors import InvalidInput

__all__ = [
    "DensityRules",
    "asked_once",
    "effective_width",
    "equal_edges",
    "regime",
    "staggered_edges",
]

Integers: TypeAlias = NDArray[np.int64]

_MOST_CELLS: Final = 49
_MOST_MORE: Final = 3.0  # times as many cells as suit a flat density
_FLAT: Final = 0.93  # a density as wide as this has nothing to adapt to
_BLIND_PILOT: Final = 0.3  # a cell's noise at which a pilot does not even see a spike


@dataclass(frozen=True, kw_only=True)
class DensityRules:
    """A whole plan: shares of the rounds and how many cells each has if the density is flat.

    The first round has equal cells. Later ones have more of them the more concentrated the fitted
    density is, between its quantiles; each of several is shifted by a part of a cell.
    """

    shares: tuple[float, ...]
    cells: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.cells) or min(self.cells) < 2:
            raise InvalidInput("every round has a share and at least two cells")

    @property
    def note(self) -> str:
        """Whether rounds pay, for the plan that is shown before the first question."""
        if len(self.shares) > 1:
            return (
                f"Rounds pay: a first one of {self.cells[0]} equal cells finds where the values "
                "are, and decides how many cells follow and where."
            )
        return f"Everyone is asked once, about {self.cells[0]} equal cells:"

    def edges(
        self, number: int, density: Floats | None, size: int, most: int | None = None
    ) -> Integers:
        """The edges of round `number` (from 1), given the density fitted to the rounds before.

        `most` is how many cells a question may have.
        """
        count = self.cells[number - 1]
        limit = size if most is None else most
        if density is None or number == 1:
            return equal_edges(min(count, limit), size)
        spread = effective_width(density)
        # One round that follows has to be right at once; several correct each other, and gain more
        # from cells between the places that the fit is sure of.
        bold = len(self.shares) == 2
        more = min(1.0 / (spread if bold else math.sqrt(spread)), _MOST_MORE)
        count = _odd(min(count * more, _MOST_CELLS))
        shift = (number - 2) / (len(self.shares) - 1)
        if spread > _FLAT and shift == 0.0:
            return equal_edges(min(count, limit), size)
        count = min(count, limit - (shift > 0.0))
        if bold:
            return staggered_edges(density, count, shift, power=1.0, everywhere=0.3)
        return staggered_edges(density, count, shift)


def asked_once(noise: float) -> DensityRules:
    """One question to everyone: a compromise between flat densities and skewed ones."""
    if not noise > 0.0:
        raise InvalidInput(f"noise is above 0, not {noise}")
    return DensityRules(shares=(1.0,), cells=(_odd(_flat_cells(noise) * 1.5),))


def regime(noise: float, *, splitting_costs: bool, answers: int = 3) -> DensityRules:
    """The rules for a signal of this strength, where a device may answer so many rounds.

    Where splitting costs, a cohort's relative noise is 1/share (disjoint cohorts that are bound by
    the aggregate epsilon), so the pilot is small, has few cells, and everyone else answers one
    round. Where it is 1/sqrt(share) (everyone answers every round, or the local epsilon binds) no
    information is lost, and two staggered rounds follow a larger pilot (one, where a device may
    answer two). Where even one cell that holds everybody would not stand out in a pilot, everyone
    is asked once.
    """
    alone = asked_once(noise)
    shares = (0.15, 0.85) if splitting_costs else (0.2, 0.4, 0.4)
    if answers == 2 and not splitting_costs:
        shares = (0.25, 0.75)
    pilot = noise / (shares[0] if splitting_costs else math.sqrt(shares[0]))
    if pilot > _BLIND_PILOT:
        return alone
    first = round(min(max(0.5 / math.sqrt(pilot), 6.0), 16.0))
    count = _odd(_flat_cells(noise))
    return DensityRules(shares=shares, cells=(first,) + (count,) * (len(shares) - 1))


def _flat_cells(noise: float) -> float:
    """How many cells suit a flat density."""
    return min(max(0.3 / math.sqrt(noise), 5.0), _MOST_CELLS / 1.5)


def effective_width(density: Floats) -> float:
    """The part of the range that a density fills: 1 if it is flat, near 0 for a spike."""
    root = np.sqrt(np.maximum(density, 0.0))
    return max(float(root.sum()) ** 2 / (len(density) * max(float(np.sum(root**2)), 1e-300)), 1e-3)


def equal_edges(count: int, size: int) -> Integers:
    """`count` cells of equal width."""
    return np.unique(np.round(np.linspace(0, size, count + 1)).astype(np.int64))


def staggered_edges(
    density: Floats, count: int, shift: float, *, power: float = 0.5, everywhere: float = 0.2
) -> Integers:
    """Cells between quantiles of a power of the density and a little of everywhere."""
    size = len(density)
    raised = np.maximum(density, 0.0) ** power
    mixed = (1.0 - everywhere) * raised / max(float(raised.sum()), 1e-300) + everywhere / size
    cumulative = np.concatenate([[0.0], np.cumsum(mixed)])
    wanted = (np.arange(count + 1) + shift) / count
    wanted = wanted[(wanted > 0.0) & (wanted < 1.0)]
    inner = np.round(np.interp(wanted * cumulative[-1], cumulative, np.arange(size + 1)))
    return np.unique(np.concatenate([[0], inner.astype(np.int64), [size]]))


def _odd(count: float) -> int:
    """The nearest odd number: then the errors at both ends of half the range are not the same."""
    return 2 * round((count - 1.0) / 2.0) + 1
