"""People who change: one population per window of a series, of the same devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.rehearsal.columns import Ints
from chorister.analyst.rehearsal.population import GroupCounts, Population
from chorister.errors import InvalidInput
from chorister.recipe import Recipe


class DriftingPopulation:
    """What devices hold in each window; after the last population given, nothing changes.

    A device keeps its place in the order of the tables. So a class of devices here is one that is
    in the same class of every population.
    """

    def __init__(self, populations: Sequence[Population]) -> None:
        sizes = {population.size for population in populations}
        if len(sizes) > 1:
            raise InvalidInput(
                f"later populations must have as many devices as the first, not {sizes}: "
                "add devices without data with `devices`"
            )
        self.first = populations[0]
        self._populations = tuple(populations)
        ends = [np.cumsum(population.weights) for population in populations]
        every = ends[0] if len(ends) == 1 else np.unique(np.concatenate([[0], *ends]))[1:]
        self.weights: Ints = (
            self.first.weights if len(ends) == 1 else np.diff(every, prepend=0).astype(np.int64)
        )
        """Devices per class."""
        self._class_of = [np.searchsorted(each, every, side="left") for each in ends]

    def answers(
        self, recipe: Recipe, answering: Ints, rng: np.random.Generator, number: int
    ) -> GroupCounts:
        """Count what devices report in a window: `answering` of each class."""
        at = min(number, len(self._populations) - 1)
        population = self._populations[at]
        if len(self._populations) > 1:
            size = len(population.weights)
            answering = np.bincount(self._class_of[at], answering, size).astype(np.int64)
        return population.answers(recipe, answering, rng)

    def groups_of(self, refs: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], Ints]:
        """Return all groups, and the group of each class at first."""
        names, group_of = self.first.groups_of(refs)
        return names, group_of if len(self._populations) == 1 else group_of[self._class_of[0]]

    def truth(self, recipe: Recipe, seed: int, number: int) -> NDArray[np.float64]:
        """The true counts of a window if every device answered."""
        return self._populations[min(number, len(self._populations) - 1)].truth(recipe, seed)
