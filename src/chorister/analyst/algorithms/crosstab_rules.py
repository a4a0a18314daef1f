"""Two-way tables: which buckets to cross, and how to fit one table to all rounds.

Everything is in shares of the devices. An axis has fine cells 0 .. m-1, and every bucket is a run
of neighbouring cells. Buckets partition the axis, so that totals are known and rounds can be
combined. A measured share p has the variance `base + slope p`: noise, and who happened to be in the
cohort (`Precision`).

- **smooth** keeps the details of a fine 1-D histogram as far as noise does not explain them, scale
  by scale (empirical Bayes; real spikes stay).
- **bucket_starts** makes about `g` buckets of equal mass; a cell heavier than 1/g is alone.
- **bucket_count** chooses g as HDG does for 2-D grids (Yang et al. 2020): g = sqrt(4 a / sigma)
  with a = 0.08 (theirs: 0.03). More cells mean less bias within each and more noise overall.
  There are more where both margins have spikes.
- **full_table_pays** says where one question about all fine cells replaces the rounds.
- **refined_margin** smooths a noisy margin further, together with its sums in the table.
- **fit_table** combines cells and both margins by precision, pulls cells towards independence as
  far as noise explains the difference (coarse blocks first), makes everything non-negative, keeps
  the margins, and gives the inside of each bucket the margins' shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms.density import Cells, fit_density
from chorister.analyst.consistency import norm_sub, shrink
from chorister.errors import InvalidInput

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_NON_UNIFORMITY: Final = 0.08  # alpha_2, for which HDG has 0.03
_MORE_BUCKETS: Final = 7.0
_MOST_NOISE: Final = 2.0  # of all buckets together
_FULL_TABLE_NOISE: Final = 0.1  # of all cells together
_LEAST_NOISE: Final = 0.05  # of a smoothed margin, as a part of the noise before
_STRONG: Final = 0.5  # of all cells together
_BLUR: Final = (1.0 / 16.0, 4.0 / 16.0, 6.0 / 16.0, 4.0 / 16.0, 1.0 / 16.0)
_DETAIL_NOISE: Final = (0.7235, 0.2854, 0.1779, 0.1222, 0.0858, 0.0606, 0.0428)  # of white noise
_RAKES: Final = 50
_NOISY_MARGIN: Final = 0.08  # of all fine cells together
_SPIKY_MARGIN: Final = 0.15
_SHIFTS: Final = (0.0, 1 / 3, 2 / 3)  # of blocks
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
    """Smooth the fine shares of one feature, which add up to 1.

    Scale by scale (the "à trous" wavelet transform): details are kept as far as noise does not
    explain them, and what is far beyond the noise is a spike, whatever the other cells say.
    """
    if len(shares) < 3 or not ordered:
        return norm_sub(shares, 1.0)
    rest, kept = shares, np.zeros(len(shares))
    for scale, factor in enumerate(_DETAIL_NOISE):
        if 4 * 2**scale >= len(shares):
            break
        coarser = _blurred(rest, 2**scale)
        detail, variance = rest - coarser, factor**2 * precision.variance(coarser)
        alone = np.abs(detail) > 4.0 * np.sqrt(variance)
        others = ~alone if not alone.all() else alone
        signal = max(float((detail**2 - variance)[others].mean()), 0.0)
        part = np.divide(
            signal, signal + variance, out=np.ones_like(variance), where=variance > 0.0
        )
        kept = kept + np.where(alone, detail, part * detail)
        rest = coarser
    return norm_sub(rest + kept, 1.0)


def _blurred(values: Floats, step: int) -> Floats:
    """Average with neighbours at one and two steps, mirrored at both ends."""
    padded = np.pad(values, 2 * step, mode="symmetric")
    size, found = len(values), np.zeros(len(values))
    for shift, weight in enumerate(_BLUR):
        found += weight * padded[shift * step : shift * step + size]
    return found


def spikiness(shares: Floats) -> float:
    """How much of a margin stands above its neighbours: 0 if smooth, 1 if in single cells."""
    kernel = [1.0, 2.0, 0.0, 2.0, 1.0]
    if len(shares) < len(kernel):
        return 0.0
    weights = np.convolve(np.ones(len(shares)), kernel, mode="same")
    near = np.convolve(shares, kernel, mode="same") / weights
    return float(np.maximum(shares - near, 0.0).sum())


def bucket_count(sigma: float, *, most: int, spikes: float = 0.0) -> int:
    """How many buckets each axis gets, if a cell has the standard error `sigma`.

    `spikes` is the spikiness of the smoother axis. Where both have spikes, what they have in common
    is in single cells, which wide buckets would hide: so there are more, as far as noise allows.
    """
    if not sigma > 0.0:
        raise InvalidInput(f"sigma must be above 0, not {sigma}")
    usual = math.sqrt(4.0 * _NON_UNIFORMITY / sigma)
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
    pulled = _pulled(cells, expected, precision)
    kept = norm_sub(pulled.ravel(), 1.0).reshape(table.shape)
    raked = _rake(kept + _TINY * expected, rows, columns)
    return _spread(raked, row_starts, column_starts, row_shares, column_shares)


def refined_margin(
    fitted: Floats,
    seen: Floats,
    precision: Precision,
    own: Floats,
    own_variance: Floats,
    starts: Ints,
    *,
    fixed: int = 0,
) -> Floats:
    """Fit a noisy margin without spikes again, together with its sums in the table (`own`).

    `fitted` and `seen` are its fine shares with and without the first fit; the first `fixed` cells
    (OOV) stay as they are. Weak signals need a prior that knows how smooth margins are: a Gaussian
    process, as for distributions.
    """
    inside = fitted[fixed:]
    if (
        len(inside) < 8
        or len(inside) * math.sqrt(precision.base) < _NOISY_MARGIN
        or spikiness(inside) > _SPIKY_MARGIN
        or (mass := float(inside.sum())) < 0.1
    ):
        return fitted
    edges = np.append(starts[fixed:] - fixed, len(inside))
    parts = [
        Cells.between(
            np.arange(len(inside) + 1), seen[fixed:] / mass, precision.variance(inside) / mass**2
        ),
        Cells.between(edges, own[fixed:] / mass, own_variance[fixed:] / mass**2),
    ]
    return np.concatenate([fitted[:fixed], mass * fit_density(parts, len(inside)).density])


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
    fitted = expected
    largest = max(max(cells.shape) - 1, 0).bit_length() - 1
    for step in (2**level for level in range(largest, -1, -1)):
        blocks = [(np.arange(size) + int(shift * 2**largest)) // step for size in cells.shape]
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
