"""Two-way tables: which buckets to cross, and how to fit one table to all rounds.

Everything is in shares of the devices. An axis has fine cells 0 .. m-1, and every bucket is a run
of neighbouring cells. Buckets partition the axis, so that totals are known and rounds can be
combined. `crosstab_margins.py` fits each axis.

- **bucket_starts** makes about `g` buckets of equal mass; a cell heavier than 1/g is alone, and no
  bucket lies in two steps of a staircase.
- **bucket_count** chooses g as HDG does for 2-D grids (Yang et al. 2020): g = sqrt(4 a / sigma)
  with a = 0.08 (theirs: 0.03). More cells mean less bias within each and more noise overall.
  How uneven the table is inside wide buckets is measured where the first rounds have slices, and
  g follows from it. There are more where both margins have spikes, and fewer where both are
  staircases: then there is little inside the steps to see.
- **full_table_pays** says where one question about all fine cells replaces the rounds.
- **fit_table** combines cells and both margins by precision, pulls cells towards independence as
  far as noise explains the difference (coarse blocks first: those of the steps, if both margins
  are staircases), makes everything non-negative, keeps
  the margins, and gives the inside of each bucket the margins' shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.crosstab_margins import Margin, Precision
from chorister.analyst.consistency import norm_sub, shrink
from chorister.errors import InvalidInput

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_NON_UNIFORMITY: Final = 0.08  # alpha_2, for which HDG has 0.03
_NON_UNIFORMITY_OF_STEPS: Final = 0.04
_USUAL_BENDS: Final = 0.4  # of a table, where HDG's rule holds as it is
_BENDS_POWER: Final = 0.6
_LEAST_AND_MOST: Final = (0.5, 1.6)  # times the usual number of buckets
_MORE_BUCKETS: Final = 7.0
_MOST_NOISE: Final = 2.0  # of all buckets together
_FULL_TABLE_NOISE: Final = 0.1  # of all cells together
_LEAST_NOISE: Final = 0.05  # of a smoothed margin, as a part of the noise before
_STRONG: Final = 0.5  # of all cells together
_RAKES: Final = 50
_SHIFTS: Final = (0.0, 1 / 3, 2 / 3)  # of blocks
_TINY: Final = 1e-12


def bucket_count(
    sigma: float,
    *,
    most: int,
    spikes: float = 0.0,
    both_stepped: bool = False,
    bends: float | None = None,
) -> int:
    """How many buckets each axis gets, if a cell has the standard error `sigma`.

    `spikes` is the spikiness of the smoother axis. Where both have spikes, what they have in common
    is in single cells, which wide buckets would hide: so there are more, as far as noise allows.
    Where both are staircases there is less to see inside the steps, so there are fewer. `bends` is
    how much of the table wide buckets blur, of both axes together, if it was measured: the more,
    the more buckets.
    """
    if not sigma > 0.0:
        raise InvalidInput(f"sigma must be above 0, not {sigma}")
    uneven = 1.0
    if bends is not None:
        uneven = float(np.clip((bends / _USUAL_BENDS) ** _BENDS_POWER, *_LEAST_AND_MOST))
    alpha = _NON_UNIFORMITY_OF_STEPS if both_stepped else _NON_UNIFORMITY
    usual = uneven * math.sqrt(4.0 * alpha / sigma)
    if both_stepped:
        return int(np.clip(round(usual), 2, max(most, 2)))
    more = min(usual * (1.0 + _MORE_BUCKETS * spikes), max(usual, math.sqrt(_MOST_NOISE / sigma)))
    return int(np.clip(round(more), 2, max(most, 2)))


def round_shares(cells: int, sigma: float) -> tuple[float, float, float]:
    """Shares of rows, columns and grid: of the devices, or of 1/sigma^2 if everyone answers.

    `sigma` is the standard error, as a share of the devices, of each of all fine cells if everyone
    answers once. If it is small, the margins are known well enough from fewer devices.
    """
    return (0.08, 0.08, 0.84) if cells * sigma <= _STRONG else (0.15, 0.15, 0.7)


def full_table_pays(cells: int, sigma: float) -> bool:
    """Say whether to ask everyone once about all fine cells instead of asking in rounds.

    `sigma` is the standard error of a cell as a share of the devices. All cells together err by
    less than their number times sigma, while buckets never see what is inside them: a table whose
    cells deviate from its margins, such as a schedule with a few usual pairs, loses more than that.
    """
    return cells * sigma <= _FULL_TABLE_NOISE


def bucket_starts(masses: Floats, count: int, *, fixed: int = 0, steps: Ints | None = None) -> Ints:
    """Return where buckets begin: about `count` of equal mass, with heavy cells alone.

    Each of the first `fixed` cells (OOV) is a separate bucket. With `steps`, the cells with which
    the steps of a staircase begin, a bucket begins with each of these.
    """
    if steps is not None:
        return _starts_within(masses, count, steps, fixed)
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


def _starts_within(masses: Floats, count: int, steps: Ints, fixed: int) -> Ints:
    """Give each step a part of the buckets that is proportional to its mass, but at least one."""
    total = max(float(masses[fixed:].sum()), _TINY)
    found = [np.arange(fixed)]
    for begin, end in pairwise([*steps[steps >= fixed].tolist(), len(masses)]):
        inside = masses[begin:end] + _TINY
        part = min(max(round(count * float(inside.sum()) / total), 1), end - begin)
        found.append(begin + bucket_starts(inside, part))
    return np.concatenate(found)


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
    steps: tuple[Ints, Ints] | None = None,
) -> Floats:
    """Fit the shares of all fine cells to a table of buckets and a fine histogram per margin.

    `table` and `precision` belong to the buckets; `row_shares` and `column_shares` are the fitted
    fine margins, `row_precision` and `column_precision` those of a fine cell before that fit. They
    are None if no margin was measured; then only the margins' shapes inside the buckets are used.
    `steps` are the buckets with which the steps of both axes begin, if both are staircases.
    """
    if table.shape != (len(row_starts), len(column_starts)):
        raise InvalidInput("the table needs one row and one column per bucket")
    rows = _margin(table, 1, precision, row_starts, row_shares, row_precision)
    columns = _margin(table, 0, precision, column_starts, column_shares, column_precision)
    cells = _with_margins(table, rows, columns)
    expected = np.outer(rows, columns)
    if steps is None:
        pulled = _pulled(cells, expected, precision)
    else:
        levels = [[_numbered(*pair) for pair in zip(steps, cells.shape, strict=True)]]
        levels.append([np.arange(size) for size in cells.shape])
        pulled = _pulled_in_turn(cells, expected, precision, levels)
    kept = norm_sub(pulled.ravel(), 1.0).reshape(table.shape)
    raked = _rake(kept + _TINY * expected, rows, columns)
    return _spread(raked, row_starts, column_starts, row_shares, column_shares)


def steps_of_both(margins: Sequence[Margin], starts: Sequence[Ints]) -> tuple[Ints, Ints] | None:
    """The buckets with which the steps of two staircases begin; None if one is none."""
    found = []
    for margin, begins in zip(margins, starts, strict=True):
        if margin.steps is None or not np.isin(margin.steps, begins).all():
            return None
        found.append(np.searchsorted(begins, margin.steps))
    rows, columns = found
    return rows, columns


def _numbered(starts: Ints, size: int) -> Ints:
    """The number of the block that each cell is in, by the cells with which blocks begin."""
    numbers: Ints = np.searchsorted(starts, np.arange(size), side="right") - 1
    return numbers


def _pulled(cells: Floats, expected: Floats, precision: Precision) -> Floats:
    """Pull cells towards independence, from the coarsest blocks to the finest.

    Many cells may deviate together, each by less than its noise. Their sums show it, so blocks of
    cells are pulled first, and what is inside them only towards what the block around it says.
    Where blocks begin is arbitrary: the result is the mean over several places.
    """
    found = np.zeros(cells.shape)
    for shift in _SHIFTS:
        found += _pulled_by_blocks(cells, expected, precision, shift) / len(_SHIFTS)
    return found


def _pulled_by_blocks(
    cells: Floats, expected: Floats, precision: Precision, shift: float
) -> Floats:
    """The same for blocks that begin at one place, as a part of the largest block's size."""
    largest = max(max(cells.shape) - 1, 0).bit_length() - 1
    levels = [
        [(np.arange(size) + int(shift * 2**largest)) // 2**level for size in cells.shape]
        for level in range(largest, -1, -1)
    ]
    return _pulled_in_turn(cells, expected, precision, levels)


def _pulled_in_turn(
    cells: Floats, expected: Floats, precision: Precision, levels: Sequence[Sequence[Ints]]
) -> Floats:
    """Pull the blocks of every level, which say for both axes in which block each cell is."""
    fitted = expected
    for blocks in levels:
        rows, columns = (np.flatnonzero(np.diff(each, prepend=-1)) for each in blocks)
        seen, prior, count = (
            np.add.reduceat(np.add.reduceat(each, rows, axis=0), columns, axis=1)
            for each in (cells, fitted, np.ones(cells.shape))
        )
        # Cells with small expectations deviate little from them: use strata by expectation.
        prior = np.maximum(prior, _TINY)
        strata = np.floor(0.5 * np.log2(prior)).astype(np.int64)
        found = shrink(
            seen, precision.variance(prior, count), prior, strata=strata, scales=np.sqrt(prior)
        )
        inside = np.ix_(*(each - each[0] for each in blocks))
        fitted = fitted * np.maximum(found / prior, 0.0)[inside]
    return fitted


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
    # Smoothing made the fine histogram better than its noise; its distance from the table's own
    # sums, whose noise is known and independent, says by how much.
    excess = float(((own - other) ** 2 - own_variance).sum())
    total = float(other_variance.sum())
    if total > 0.0:
        other_variance = other_variance * min(max(excess / total, _LEAST_NOISE), 1.0)
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
