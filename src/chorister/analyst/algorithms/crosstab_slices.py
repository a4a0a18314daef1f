"""The first two rounds of a table: each axis at full resolution, in a few slices of the other.

A margin alone says nothing about structure that lies across the table: a diagonal, a Latin square
or a ring may have flat margins. So, where noise allows it, each of the first two rounds crosses
the fine cells of one axis with a few wide slices of the other. Their sums are the margin, with the
noise of all slices, and the differences between slices show how the axes depend on each other:

- **slice_counts** says how many slices each of the two rounds has: one where noise would hide them.
- **fit_slices** fits the margin. It is a staircase if all slices are, with the same borders: then
  buckets end where the steps end, even if the margin itself is flat.
- **Slices.bends** measures how much of the table lies where buckets of a known size would blur it.
  Tables with lines have much of it, smooth ones little, and `bucket_count` follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.crosstab_margins import Margin, Precision, fit_margin, smooth
from chorister.analyst.algorithms.crosstab_rules import bucket_starts
from chorister.analyst.algorithms.staircase import staircase
from chorister.analyst.consistency import norm_sub

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_SLICES: Final = (4, 5)  # different numbers, so that no pattern repeats with both
_MOST_NOISE: Final = 0.25  # of all cells of a margin with four slices, added up
_FEWEST_CELLS: Final = 16  # of an axis that is cut into slices
_WIDE_BUCKETS: Final = (6, 8, 11)  # no pattern repeats with all of them
_TINY: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """What a round measured: fine cells of one axis, a column per slice of the other."""

    seen: Floats
    precision: Precision  # of one cell of it
    devices: int

    @property
    def margin(self) -> Floats:
        found: Floats = self.seen.sum(axis=1)
        return found

    @property
    def margin_precision(self) -> Precision:
        return Precision(self.precision.base * self.seen.shape[1], self.precision.slope)

    @property
    def bends(self) -> float | None:
        """The share of the table that wide buckets would put in wrong halves.

        Each bucket is halved, and the halves of each slice are compared with what the margin says.
        Of the sum of all absolute differences, what noise explains is taken out. The mean over
        several numbers of buckets, or None if there is only one slice.
        """
        if self.seen.shape[1] == 1:
            return None
        return sum(self._bends(count) for count in _WIDE_BUCKETS) / len(_WIDE_BUCKETS)

    def _bends(self, count: int) -> float:
        """The same for buckets of one size."""
        margin = np.maximum(self.margin, 0.0) + _TINY
        margin /= margin.sum()
        halves = bucket_starts(margin, 2 * count)
        masses = np.add.reduceat(margin, halves)
        wide = bucket_starts(masses, count)
        inside = np.searchsorted(wide, np.arange(len(halves)), side="right") - 1
        part = (masses / np.add.reduceat(masses, wide)[inside])[:, None]
        measured = np.add.reduceat(self.seen, halves, axis=0)
        expected = part * np.add.reduceat(measured, wide, axis=0)[inside]
        cells = np.diff(np.append(halves, len(margin)))[:, None]
        sampled = Precision(self.precision.base, self.precision.slope + 1.0 / self.devices)
        variance = sampled.variance(expected, cells) * (1.0 - part)
        found = measured - expected
        explained = float(variance.sum()) / max(float((found**2).sum()), 1e-300)
        return float(np.abs(found).sum()) * math.sqrt(max(1.0 - explained, 0.0))


def slice_counts(sizes: tuple[int, int], sigma: float) -> tuple[int, int]:
    """In how many slices the first round cuts the columns, and the second one the rows.

    `sigma` is the standard error of a cell of these rounds, as a share of the devices. With slices,
    a margin has the noise of all of them: they must be worth it.
    """
    noise = max(sizes) * sigma * math.sqrt(_SLICES[0])
    return (1, 1) if min(sizes) < _FEWEST_CELLS or noise > _MOST_NOISE else _SLICES


def slice_starts(size: int, count: int, *, fixed: int = 0) -> Ints:
    """The cells with which `count` equally wide slices begin; the first `fixed` are separate."""
    inner = fixed + np.floor(np.arange(count) * (size - fixed) / count).astype(np.int64)
    return np.concatenate([np.arange(fixed), inner])


def fit_slices(slices: Slices) -> Margin:
    """Fit the margin of one ordered axis, whose shares add up to 1."""
    if slices.seen.shape[1] == 1:
        return fit_margin(slices.margin, slices.precision, slices.devices)
    smoothed = smooth(slices.margin, slices.margin_precision)
    expected = np.stack([_smooth_part(each, slices.precision) for each in slices.seen.T], axis=1)
    sampled = Precision(slices.precision.base, slices.precision.slope + 1.0 / slices.devices)
    found = staircase(slices.seen, sampled.variance(expected))
    if found is None or len(found.starts) < 2:
        return Margin(smoothed, bends=slices.bends)
    return Margin(norm_sub(found.shares.sum(axis=1), 1.0), found.starts, slices.bends)


def _smooth_part(seen: Floats, precision: Precision) -> Floats:
    """Smooth one slice, which holds a part of the devices."""
    total = max(float(seen.sum()), _TINY)
    within = Precision(precision.base / total**2, precision.slope / total)
    return total * smooth(seen / total, within)
