"""Which intervals to ask about next, by what was seen so far. Pure functions over arrays.

The noise of a cell does not depend on its width, and a range of many cells adds up their noise: the
weaker the signal, and the smoother the density, the fewer cells. `noise` below is the standard
error of a light cell as a share of the devices that are asked.

No number of equal cells suits all data: 5 are best for a flat density and ten times worse than 33
for one in a corner of the range. So a pilot comes first where it can see anything at all. Its fit
weighs smooth models against rough ones, and says what error to expect of each question that could
follow: the one with the least is asked. In the last round, a question with fine cells around the
usual quantiles is preferred where it costs little (`density_edges.py`): it makes their intervals
narrower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.density import Cells, Floats, expected_errors, fit_density
from chorister.analyst.algorithms.density_edges import asked_quantiles, interval_mass
from chorister.errors import InvalidInput

Integers: TypeAlias = NDArray[np.int64]

_MOST_CELLS: Final = 64
_MORE_CELLS: Final = (1.0, 1.4, 1.8, 2.6, 3.8, 5.4, 7.8, 11.0)  # times the fewest: what is weighed
_FEWEST_CELLS: Final = 5
_NEXT_TO_NOTHING: Final = 1.3  # times the least expected squared error
_WEAK_SIGNAL: Final = 0.003  # noise at which intervals are wide whatever is asked
_COSTS_LITTLE: Final = 1.1  # the same for the one round that follows
_BLIND_PILOT: Final = 0.3  # a cell's noise at which a pilot does not even see a spike


@dataclass(frozen=True, kw_only=True)
class DensityRules:
    """A whole plan: shares of the rounds and how many cells each has, later ones at least.

    The first round has equal cells. Later ones have as many as promise the least error, equal ones
    or between quantiles of the fit; each of several is shifted by a part of a cell.
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
                f"Several rounds pay off: a first one of {self.cells[0]} equal cells finds where "
                "the values are, and decides how many cells follow and where."
            )
        return f"Everyone is asked once, about {self.cells[0]} equal cells:"

    def edges(
        self, number: int, parts: Sequence[Cells], size: int, *, noise: float, most: int = 0
    ) -> Integers:
        """The edges of round `number` (from 1), given the rounds before and the noise of this one.

        `most` is how many cells a question may have, if there is a limit.
        """
        fewest, limit = self.cells[number - 1], most or size
        if not parts or number == 1:
            return equal_edges(min(fewest, limit), size)
        shift = (number - 2) / (len(self.shares) - 1)
        fit = fit_density(parts, size)
        limit = min(limit, max(fewest, _MOST_CELLS), size)
        counts = sorted({min(_odd(fewest * more), limit) for more in _MORE_CELLS})
        # One round that follows has to be right at once, where several correct each other.
        power, everywhere = (1.0, 0.3) if len(self.shares) == 2 else (0.5, 0.2)
        questions = [equal_edges(count, size) for count in counts]
        for count in counts:
            inner = max(1, count - (shift > 0.0))  # shifted cells are one more
            edges = staggered_edges(fit.density, inner, shift, power=power, everywhere=everywhere)
            questions.append(edges)
        # Later rounds will measure the same again.
        still = sum(self.shares[number - 1 :])
        combined = noise * math.sqrt(self.shares[number - 1] / still)
        errors = expected_errors(fit, questions, combined)
        best = questions[int(np.argmin(errors))]
        if number < len(self.shares) or noise > _WEAK_SIGNAL:
            return best
        finer = [
            edges
            for edges in asked_quantiles(fit, (best, questions[len(counts)]), noise)
            if len(edges) - 1 <= (most or size)
        ]
        allowed = (_COSTS_LITTLE if len(self.shares) == 2 else _NEXT_TO_NOTHING) * errors.min()
        errors = np.concatenate([errors, expected_errors(fit, finer, combined)])
        good = [
            edges for edges, error in zip(questions + finer, errors, strict=True)
            if error <= allowed
        ]  # fmt: skip
        return min(good, key=lambda edges: interval_mass(fit, edges, noise))


def asked_once(noise: float) -> DensityRules:
    """One question to everyone: a compromise between flat densities and skewed ones."""
    if not noise > 0.0:
        raise InvalidInput(f"noise is above 0, not {noise}")
    return DensityRules(shares=(1.0,), cells=(_odd(min(max(0.5 / math.sqrt(noise), 7.0), 33.0)),))


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
    return DensityRules(shares=shares, cells=(first,) + (_FEWEST_CELLS,) * (len(shares) - 1))


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
