"""Two-way tables: which buckets to cross, and how to fit one table to all rounds.

Everything is in shares of the devices. An axis has fine cells 0 .. m-1, and every bucket is a run
of neighbouring cells. Buckets partition the axis, so that totals are known and rounds can be
combined. A measured share p has the variance `base + slope p`: noise, and who happened to be in the
cohort (`Precision`).

- **smooth** pulls the cells of a fine 1-D histogram towards the mean of their neighbours, as far as
  noise explains the difference (empirical Bayes; real spikes stay).
- **bucket_starts** makes about `g` buckets of equal mass; a cell heavier than 1/g is alone. -
**bucket_count** chooses g as HDG does for 2-D grids (Yang et al. 2020): g = sqrt(4 a / sigma) with
  a = 0.03. More cells mean less bias within each and more noise overall.
- **fit_table** combines cells and both margins by precision, pulls cells towards independence as
far
  as noise explains the difference, makes everything non-negative, keeps the margins, and gives the
  inside of each bucket the margins' shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.consistency import norm_sub, shrink
from chorister.errors import InvalidInput

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_NON_UNIFORMITY: Final = 0.03  # HDG's alpha_2
_RAKES: Final = 50
_TINY: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Precision:
    """The variance of a measured share p is `base + slope p`."""

    base: float
    slope: float = 0.0

    def variance(self, shares: Floats, cells: Floats | float = 1.0) -> Floats:
        """The variance of sums of `cells` cells that add up to `shares`."""
        found: Floats = self.base * cells + self.slope * np.maximum(shares, 0.0)
        return found


def smooth(shares: Floats, precision: Precision, *, ordered: bool = True) -> Floats:
    """Smooth the fine shares of one feature, which add up to 1."""
    if len(shares) < 3 or not ordered:
        return norm_sub(shares, 1.0)
    # The mean of two neighbours on each side, without the cell itself.
    kernel = np.array([1.0, 2.0, 0.0, 2.0, 1.0])
    weights = np.convolve(np.ones(len(shares)), kernel, mode="same")
    near = np.convolve(shares, kernel, mode="same") / weights
    spread = np.convolve(np.ones(len(shares)), kernel**2, mode="same") / weights**2
    variance = precision.variance(near) * (1.0 + spread)  # of the difference
    difference = shares - near
    # A spike is far beyond the noise, whatever the other cells say.
    alone = np.abs(difference) > 4.0 * np.sqrt(variance)
    signal = max(float((difference**2 - variance).mean()), 0.0)
    kept = np.divide(signal, signal + variance, out=np.ones_like(variance), where=variance > 0.0)
    return norm_sub(np.where(alone, shares, near + kept * difference), 1.0)


def bucket_count(sigma: float, *, most: int) -> int:
    """How many buckets each axis gets, if a cell has the standard error `sigma`."""
    if not sigma > 0.0:
        raise InvalidInput(f"sigma must be above 0, not {sigma}")
    return int(np.clip(round(math.sqrt(4.0 * _NON_UNIFORMITY / sigma)), 2, max(most, 2)))


def bucket_starts(masses: Floats, count: int, *, fixed: int = 0) -> Ints:
    """Return where buckets begin: about `count` of equal mass, with heavy cells alone.

    Each of the first `fixed` cells (OOV) is a separate bucket.
    """
    size = len(masses)
    if count >= size:
        return np.arange(size)
    total = float(masses[fixed:].sum())
    heavy = masses > total / count
    heavy[:fixed] = False
    starts = set(range(fixed + 1)) if fixed < size else set(range(size))
    for cell in np.flatnonzero(heavy).tolist():
        starts.update({cell, cell + 1})
    # Cut the rest at equal masses into the remaining number of buckets.
    light = np.where(heavy, 0.0, masses)
    light[:fixed] = 0.0
    left = max(count - int(heavy.sum()), 1)
    cumulated = np.cumsum(light)
    levels = cumulated[-1] * np.arange(1, left) / left
    starts.update((np.searchsorted(cumulated, levels, side="left") + 1).tolist())
    return np.array(sorted(start for start in starts if start < size), dtype=np.int64)


def _sums(fine: Floats, starts: Ints) -> Floats:
    return np.add.reduceat(fine, starts)


def fit_table(
    table: Floats,
    precision: Precision,
    row_starts: Ints,
    column_starts: Ints,
    row_shares: Floats,
    column_shares: Floats,
    *,
    row_precision: Precision | None = None,
    column_precision: Precision | None = None,
) -> Floats:
    """Fit the shares of all fine cells to a table of buckets and a fine histogram per margin.

    `table` and `precision` belong to the buckets; `row_shares` and `column_shares` are the fitted
    fine margins, `row_precision` and `column_precision` those of a fine cell before that fit. They
    are None if no margin was measured; then only the margins' shapes inside the buckets are used.
    """
    if table.shape != (len(row_starts), len(column_starts)):
        raise InvalidInput("the table needs one row and one column per bucket")
    rows = _margin(table, 1, precision, row_starts, row_shares, row_precision)
    columns = _margin(table, 0, precision, column_starts, column_shares, column_precision)
    cells = _with_margins(table, rows, columns)
    expected = np.outer(rows, columns)
    # Cells with small expectations deviate little from them: use strata by expectation.
    strata = np.floor(0.5 * np.log2(np.maximum(expected, _TINY))).astype(np.int64)
    scale = np.sqrt(np.maximum(expected, _TINY))
    noise = precision.variance(expected)
    pulled = shrink(cells, noise, expected, strata=strata, scales=scale)
    kept = norm_sub(pulled.ravel(), 1.0).reshape(table.shape)
    raked = _rake(kept + _TINY * expected, rows, columns)
    return _spread(raked, row_starts, column_starts, row_shares, column_shares)


def _margin(
    table: Floats,
    axis: int,
    precision: Precision,
    starts: Ints,
    shares: Floats,
    fine: Precision | None,
) -> Floats:
    """Combine the sums of the table and of the fine histogram by precision."""
    own = table.sum(axis=axis)
    if fine is None:
        return norm_sub(own, 1.0)
    other = _sums(shares, starts)
    sizes = np.diff(np.append(starts, len(shares)))
    own_variance = precision.variance(other, table.shape[axis])
    other_variance = fine.variance(other, sizes)
    weight = other_variance / (other_variance + own_variance)
    return norm_sub(weight * own + (1.0 - weight) * other, 1.0)


def _with_margins(table: Floats, rows: Floats, columns: Floats) -> Floats:
    """Find the nearest table with these margins, whose totals agree."""
    high, wide = table.shape
    row_gap, column_gap = rows - table.sum(axis=1), columns - table.sum(axis=0)
    gap = float(rows.sum() - table.sum())
    fitted: Floats = (
        table + row_gap[:, None] / wide + column_gap[None, :] / high - gap / (high * wide)
    )
    return fitted


def _rake(table: Floats, rows: Floats, columns: Floats) -> Floats:
    """Scale rows and columns to their margins in turn."""
    for _ in range(_RAKES):
        table = table * (rows / np.maximum(table.sum(axis=1), _TINY))[:, None]
        table = table * (columns / np.maximum(table.sum(axis=0), _TINY))[None, :]
    return table


def _spread(
    table: Floats, row_starts: Ints, column_starts: Ints, row_shares: Floats, column_shares: Floats
) -> Floats:
    """Spread the share of every bucket over its fine cells, in the shape of the margins."""
    row_of, row_shape = _shape(row_starts, row_shares)
    column_of, column_shape = _shape(column_starts, column_shares)
    spread: Floats = table[np.ix_(row_of, column_of)] * np.outer(row_shape, column_shape)
    return spread


def _shape(starts: Ints, shares: Floats) -> tuple[Ints, Floats]:
    """Return the bucket of every fine cell, and its part of it (equal parts of an empty one)."""
    sizes = np.diff(np.append(starts, len(shares)))
    bucket = np.repeat(np.arange(len(starts)), sizes)
    totals = _sums(shares, starts)[bucket]
    equal = 1.0 / sizes[bucket]
    return bucket, np.where(totals > 0.0, shares / np.maximum(totals, _TINY), equal)
