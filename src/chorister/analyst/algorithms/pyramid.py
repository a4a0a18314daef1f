"""A map at every resolution: what rounds measured, and the smooth map that fits it best.

Level l is an image of 2^l by 2^l cells (rows from low to high y). The fit has two passes, as on any
tree (:mod:`chorister.analyst.consistency`):

1. bottom-up, weighted by precision: what a cell and everything inside it say about its mass;
2. top-down: the four children of a cell start from a smooth map, are pulled towards what was
   measured as far as the noise allows (empirical Bayes, in strata of the parent's mass), and are
   made non-negative with the parent's sum (Norm-Sub within the parent).

A single static grid is a special case, so static results get the same fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.errors import InvalidInput

Image: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

_STRATA_PER_OCTAVE = 2
_STRATA = 64
_ROUGH = 0.1  # relative variance assumed while estimating the smoothness
_USUAL_ROUGHNESS = 1.0  # of a level that noise hides
_USUAL_WEIGHT = 3.0  # cells that this assumption is worth
_LEAST_SPREAD = 1e-4  # relative variance below which a stratum counts as smooth


def summed(image: Image) -> Image:
    """Sum blocks of two by two: one level up."""
    half = image.shape[0] // 2
    blocks: Image = image.reshape(half, 2, half, 2).sum(axis=(1, 3))
    return blocks


def _repeated(image: Image) -> Image:
    return np.repeat(np.repeat(image, 2, axis=0), 2, axis=1)


def spread_evenly(image: Image, level: int) -> Image:
    """Refine an image, sharing the mass of each cell equally."""
    while image.shape[0] < 2**level:
        image = _repeated(image) / 4.0
    return image


def quarters(image: Image) -> Image:
    """Interpolate one level down (bilinear); every parent keeps its mass."""
    padded = np.pad(image, 1, mode="edge")
    rows = np.empty((2 * image.shape[0], padded.shape[1]))
    rows[0::2] = 0.75 * padded[1:-1] + 0.25 * padded[:-2]
    rows[1::2] = 0.75 * padded[1:-1] + 0.25 * padded[2:]
    fine = np.empty((rows.shape[0], 2 * image.shape[1]))
    fine[:, 0::2] = 0.75 * rows[:, 1:-1] + 0.25 * rows[:, :-2]
    fine[:, 1::2] = 0.75 * rows[:, 1:-1] + 0.25 * rows[:, 2:]
    total = summed(fine)
    return fine * _repeated(np.divide(image, total, out=np.zeros_like(total), where=total > 0.0))


def _combined(a: Image, va: Image, b: Image, vb: Image) -> tuple[Image, Image]:
    """Combine by precision; an infinite variance has no weight."""
    pa, pb = 1.0 / va, 1.0 / vb
    precision = pa + pb
    known = precision > 0.0
    value = np.divide(pa * a + pb * b, precision, out=np.zeros_like(a), where=known)
    variance = np.divide(1.0, precision, out=np.full_like(a, np.inf), where=known)
    return value, variance


class Measured:
    """All measurements: values and variances of cells, level by level."""

    def __init__(self) -> None:
        self._levels: dict[int, tuple[Image, Image]] = {}

    def add(self, level: int, mask: Mask, values: Image, variances: Image) -> None:
        """Add measurements of the cells where `mask` is true, in row-major order."""
        if mask.shape != (2**level, 2**level):
            raise InvalidInput(f"level {level} has {2**level} by {2**level} cells")
        if not np.all(variances > 0.0):
            raise InvalidInput("the variance of a measurement must be above 0")
        if not mask.any():
            return
        image, spread = np.zeros(mask.shape), np.full(mask.shape, np.inf)
        image[mask], spread[mask] = values, variances
        if level in self._levels:
            image, spread = _combined(*self._levels[level], image, spread)
        self._levels[level] = (image, spread)

    @property
    def finest(self) -> int:
        """The finest level at which anything was measured."""
        if not self._levels:
            raise InvalidInput("nothing was measured yet")
        return max(self._levels)

    def from_below(self) -> tuple[list[Image], list[Image]]:
        """What each cell and its inside say about its mass: values and variances per level."""
        size = 2**self.finest
        values, variances = np.zeros((size, size)), np.full((size, size), np.inf)
        all_values: list[Image] = []
        all_variances: list[Image] = []
        for level in range(self.finest, -1, -1):
            if level < self.finest:
                values, variances = summed(values), summed(variances)
            if level in self._levels:
                values, variances = _combined(*self._levels[level], values, variances)
            all_values.insert(0, values)
            all_variances.insert(0, variances)
        return all_values, all_variances


@dataclass(frozen=True)
class Pyramid:
    """A fitted map: masses at every level; every cell is the sum of its four children.

    `peaks` says what a cell may hold: its mass where it was measured; below, what the heaviest part
    of its parent holds, which is the more the rougher the map is at the finest measured levels.
    """

    levels: tuple[Image, ...]
    peaks: tuple[Image, ...] = ()
    roughness: float = 1.0
    """How far four children deviate from a smooth map, relative to it: from 0 to the root of 3."""

    @property
    def depth(self) -> int:
        return len(self.levels) - 1

    def at(self, level: int) -> Image:
        """The masses at a level; below the finest, masses are shared equally."""
        if level <= self.depth:
            return self.levels[level]
        return spread_evenly(self.levels[-1], level)

    def peak(self, level: int) -> Image:
        """What each cell of a level may hold; its mass if nothing else is known."""
        if not self.peaks:
            return self.at(level)
        found = self.peaks[min(level, len(self.peaks) - 1)]
        while found.shape[0] < 2**level:
            found = _heaviest(found, self.roughness)
        return np.maximum(found, self.at(level))


def _heaviest(image: Image, roughness: float) -> Image:
    """One level down: what the heaviest of the four parts may hold, were it this one."""
    return _repeated(image) * (1.0 + roughness) / 4.0


def fit_map(measured: Measured, depth: int) -> Pyramid:
    """Fit a smooth, consistent, non-negative map to all measurements, down to `depth`."""
    if depth < measured.finest:
        raise InvalidInput(
            f"cells of level {measured.finest} were measured: fit at least that level"
        )
    values, variances = measured.from_below()
    levels = [np.maximum(values[0], 0.0)]
    peaks = [levels[0]]
    smoothness, roughness = 1.0, 1.0
    for level in range(depth):
        parents = levels[-1]
        even = _repeated(parents) / 4.0
        slope = quarters(parents) - even
        if level >= measured.finest:
            levels.append(np.maximum(even + smoothness * slope, 0.0))
            continue
        children, smoothness, roughness = _children(
            even, slope, values[level + 1], variances[level + 1]
        )
        levels.append(_with_sums(children, parents))
        seen = np.isfinite(variances[level + 1])
        peaks.append(np.where(seen, levels[-1], _heaviest(peaks[-1], roughness)))
    return Pyramid(tuple(levels), tuple(peaks), roughness)


def _children(
    even: Image, slope: Image, values: Image, variances: Image
) -> tuple[Image, float, float]:
    """The next level before its sums are restored, how real the slopes are, and how rough it is."""
    seen = np.isfinite(variances)
    share, lean, value, noise = even[seen], slope[seen], values[seen], variances[seen]
    weight = 1.0 / (noise + _ROUGH * share**2)
    slopes = float(np.sum(weight * lean**2))
    smoothness = float(np.sum(weight * lean * (value - share))) / slopes if slopes > 0.0 else 1.0
    smoothness = min(max(smoothness, 0.0), 1.5)
    smooth = np.maximum(even + smoothness * slope, 0.0)
    expected = np.maximum(smooth[seen], 1e-6)
    spread, rough = _relative_spread(4.0 * share, expected, value, noise)
    prior = spread * expected**2
    children = smooth
    children[seen] = expected + prior / (prior + noise) * (value - expected)
    return children, smoothness, rough


def _relative_spread(
    parents: Image, expected: Image, values: Image, noise: Image
) -> tuple[Image, float]:
    """The relative variance of the truth around the expectation, by the mass of the parents.

    Also its root over all cells, which starts from `_USUAL_ROUGHNESS` where noise hides everything.
    """
    octave = np.floor(_STRATA_PER_OCTAVE * np.log2(np.maximum(parents, 0.25))).astype(np.int64)
    stratum = np.clip(octave + 2 * _STRATA_PER_OCTAVE, 0, _STRATA - 1)
    square = expected**2
    weight = (square / (noise + 0.3 * square)) ** 2
    excess = weight * ((values - expected) ** 2 - noise) / square
    top = np.bincount(stratum, weights=excess, minlength=_STRATA)
    bottom = np.bincount(stratum, weights=weight, minlength=_STRATA)
    spread = np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0.0)
    by_cell: Image = np.maximum(spread, _LEAST_SPREAD)[stratum]
    whole = (float(top.sum()) + _USUAL_WEIGHT * _USUAL_ROUGHNESS**2) / (
        float(bottom.sum()) + _USUAL_WEIGHT
    )
    return by_cell, math.sqrt(min(max(whole, 0.0), 3.0))


def _with_sums(children: Image, parents: Image) -> Image:
    """Find the four nearest non-negative values with the sum of their parent (Norm-Sub)."""
    size = parents.shape[0]
    four = children.reshape(size, 2, size, 2).transpose(0, 2, 1, 3).reshape(size * size, 4)
    totals = parents.ravel()
    ordered = -np.sort(-four, axis=1)
    shifts = (np.cumsum(ordered, axis=1) - totals[:, None]) / np.arange(1, 5)
    kept = np.maximum((ordered > shifts).sum(axis=1), 1)
    shift = shifts[np.arange(totals.size), kept - 1]
    found = np.maximum(four - shift[:, None], 0.0)
    found[totals <= 0.0] = 0.0
    image: Image = found.reshape(size, size, 2, 2).transpose(0, 2, 1, 3).reshape(2 * size, 2 * size)
    return image
