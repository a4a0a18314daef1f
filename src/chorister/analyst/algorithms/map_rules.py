"""Where a map needs finer cells: rules that turn the map so far into the next partition.

Pure functions over arrays. The noise of a cell does not depend on its size, so splitting a cell
pays while its mass is several standard errors of the next round. Coarse levels are needed to find
anything, so their thresholds are low. At fine levels the data decide: on a smooth map the children
of a cell say little that their parent does not, but where people are at single places or on lines,
a cell hides all of it until it is split to the end. So fine levels compare what the heaviest part
of a cell may hold (`Pyramid.peak`), and with a lower threshold the rougher the map was so far.

Shares and thresholds were chosen on some families of data and are reported on others, by the errors
at the finest level, at 64 x 64, and of the hundred heaviest cells at 128 x 128: see
`benchmarks/accuracy_heatmap.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.pyramid import Mask, Pyramid
from chorister.errors import InvalidInput

Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """Cells that cover the box exactly once: for each level, a mask of its cells."""

    masks: tuple[Mask, ...]

    @classmethod
    def uniform(cls, level: int) -> Partition:
        masks = [np.zeros((2**above, 2**above), dtype=np.bool_) for above in range(level)]
        return cls((*masks, np.ones((2**level, 2**level), dtype=np.bool_)))

    @classmethod
    def splitting(cls, split: list[Mask]) -> Partition:
        """Split every cell marked in `split` (by level) whose parents are also split."""
        present = np.ones((1, 1), dtype=np.bool_)
        masks: list[Mask] = []
        for wanted in split:
            here = wanted & present
            masks.append(present & ~here)
            present = np.repeat(np.repeat(here, 2, axis=0), 2, axis=1)
            if not here.any():
                break
        else:
            masks.append(present)
        return cls(tuple(masks))

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(mask)) for mask in self.masks)

    def quadkeys(self) -> tuple[str, ...]:
        """Name the cells, level by level in row-major order, as measurements are ordered."""
        names: list[str] = []
        for level, mask in enumerate(self.masks):
            rows, columns = np.nonzero(mask)
            digits = [
                (((columns >> shift) & 1) + 2 * ((rows >> shift) & 1)).astype("U1")
                for shift in range(level - 1, -1, -1)
            ]
            if rows.size:
                names.extend(map("".join, zip(*digits, strict=True)) if digits else [""])
        return tuple(names)

    @classmethod
    def of_quadkeys(cls, keys: tuple[str, ...]) -> tuple[Partition, Integers]:
        """Return the partition of these cells, and the order of `keys` in it."""
        depth = max(map(len, keys))
        masks = [np.zeros((2**level, 2**level), dtype=np.bool_) for level in range(depth + 1)]
        places = np.empty((len(keys), 3), dtype=np.int64)
        for i, key in enumerate(keys):
            column = int("".join(str(int(digit) & 1) for digit in key) or "0", 2)
            row = int("".join(str(int(digit) >> 1) for digit in key) or "0", 2)
            masks[len(key)][row, column] = True
            places[i] = len(key), row, column
        return cls(tuple(masks)), np.lexsort((places[:, 2], places[:, 1], places[:, 0]))


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """How one round splits the cells so far."""

    thresholds: Mapping[int, float]
    """Per level: split a cell if its mass is above this many standard errors of the next round.
    Levels above the first one listed always split, other unlisted levels never do."""
    peaks_from: int | None = None
    """From this level on, compare what a cell may hold (`Pyramid.peak`) and divide the threshold by
    the roughness of the map (within a factor of two)."""
    hotspots: int = 0  # keep cells whole that may be the last of this many heaviest ...
    hotspot_level: int = 7  # ... of this level ...
    hotspot_margin: float = 0.0  # ... because they are within this many standard errors

    def partition(self, seen: Pyramid, sigma: float, *, depth: int, most_cells: int) -> Partition:
        """Choose the cells of the next round: at most `most_cells`, none finer than `depth`.

        If there would be too many, all thresholds rise together.
        """
        if most_cells < 4:
            raise InvalidInput("a map needs at least four cells: raise `max_bins` in the policy")
        found = self._partition(seen, sigma, depth)
        if len(found) <= most_cells:
            return found
        low, high = 1.0, 2.0
        while len(self._partition(seen, sigma * high, depth)) > most_cells:
            low, high = high, 2.0 * high
            if high > 1e12:
                raise InvalidInput(f"no partition of this map has at most {most_cells} cells")
        for _ in range(12):
            middle = (low * high) ** 0.5
            if len(self._partition(seen, sigma * middle, depth)) > most_cells:
                low = middle
            else:
                high = middle
        return self._partition(seen, sigma * high, depth)

    def _partition(self, seen: Pyramid, sigma: float, depth: int) -> Partition:
        first = min(self.thresholds, default=depth)
        split: list[Mask] = []
        for level in range(depth):
            masses = seen.at(level)
            if level < min(first, 1):
                split.append(np.ones(masses.shape, dtype=np.bool_))
            elif level in self.thresholds or level < first:
                factor = self.thresholds.get(level, self.thresholds.get(first, 0.0))
                if self.peaks_from is not None and level >= self.peaks_from:
                    factor /= min(max(seen.roughness, 0.5), 2.0)
                    split.append(seen.peak(level) > factor * sigma)
                else:
                    split.append(masses > factor * sigma)
            else:
                break
            # On a rough map, whole cells would hide where inside them people are.
            if level == self.hotspot_level and self.hotspots and seen.roughness <= 1.0:
                split[-1] &= ~self._undecided(masses, sigma)
        return Partition.splitting(split)

    def _undecided(self, masses: NDArray[np.float64], sigma: float) -> Mask:
        """Cells that the next round may move above or below the mass of the last hotspot."""
        if masses.size <= self.hotspots:
            return np.zeros(masses.shape, dtype=np.bool_)
        last = np.partition(masses.ravel(), -self.hotspots)[-self.hotspots]
        near: Mask = np.abs(masses - last) < self.hotspot_margin * sigma
        return near


@dataclass(frozen=True, kw_only=True)
class MapRules:
    """The level of the first round, the shares of all rounds, and how each later one splits.

    `shares` are of the devices if cohorts are disjoint, and of 1/sigma^2 if everyone answers every
    round.
    """

    shares: tuple[float, ...]
    first_level: int
    refinements: tuple[Refinement, ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.refinements) + 1:
            raise InvalidInput("every round after the first needs one refinement")
        if min(self.shares) <= 0.0 or abs(sum(self.shares) - 1.0) > 1e-9:
            raise InvalidInput("shares must be above 0 and add up to 1")


def _last_round(level_6: float) -> Refinement:
    fine = dict.fromkeys(range(7, 12), 8.0)
    return Refinement(
        thresholds={3: 1, 4: 1, 5: 1.5, 6: level_6, **fine},
        peaks_from=7,
        hotspots=100,
        hotspot_margin=2.0,
    )


EVERYONE_RULES = MapRules(
    shares=(0.05, 0.4, 0.55),
    first_level=4,
    refinements=(Refinement(thresholds={3: 1, 4: 1, 5: 1.5, 6: 4}), _last_round(2.8)),
)
"""For rounds that every device answers."""

DISJOINT_RULES = MapRules(
    shares=(0.03, 0.13, 0.84),
    first_level=4,
    refinements=(Refinement(thresholds={3: 1, 4: 1, 5: 1, 6: 1}), _last_round(2.0)),
)
"""For devices that answer one round. Relative noise is 1/share, so the first two cohorts are small
and only explore: where people are, and how rough the map is."""

SMALL_FLEET_RULES = MapRules(shares=(0.07, 0.93), first_level=4, refinements=(_last_round(2.0),))
"""The same for fleets that are too small for three cohorts."""

_LEAST_LAST_SHARE = 0.7  # of the devices; below, small fleets spend too much on exploring
_STRONG = 4.0  # standard errors
_SPARSE = 0.28  # standard errors


def rounds_pay(devices: int, sigma: float, *, depth: int, most_cells: int) -> bool:
    """Say whether asking in rounds can gain anything over asking about all finest cells at once.

    It can't where even an average one stands out from the noise `sigma` of one question: then
    nearly all cells would be split to the end.
    """
    finest: int = 4**depth
    return finest > most_cells or devices < _STRONG * sigma * finest


def enough_left(last_reports: int, devices: int) -> bool:
    """Say whether disjoint cohorts leave enough devices for the last round."""
    return last_reports >= _LEAST_LAST_SHARE * devices


def asked_once(devices: int, sigma: float, *, depth: int, most_cells: int) -> MapRules:
    """One uniform grid for everybody.

    The fit finds coarse structure in fine cells, so an average cell may hold less than its noise.
    """
    if most_cells < 4:
        raise InvalidInput("a map needs at least four cells: raise `max_bins` in the policy")
    level = round(math.log(max(devices / (_SPARSE * sigma), 4.0), 4.0))
    level = min(level, depth, int(math.log2(most_cells) / 2.0))
    return MapRules(shares=(1.0,), first_level=level)
