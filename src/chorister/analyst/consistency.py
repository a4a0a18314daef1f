"""Post-processing that uses what must be true: parts add up, and counts are not negative.

Pure functions over arrays; none of them looks at data again, so none of them costs privacy. Each is
an explicit step, and each says what its variances mean afterwards:

- :func:`least_squares`: precision-weighted least squares on a tree, bottom-up then top-down.
  Linear and unbiased; its variances are exact where the measured ones are.
- :func:`known_sum`: the same for a flat list whose sum is known.
- :func:`norm_sub`, :func:`nonnegative`: Norm-Sub, as a whole or *within each parent*. The result is
  biased where it cuts, so variances stay those of the unbiased estimates and
  :meth:`Consistent.interval` cuts the unbiased interval instead of centring a new one: a true count
  is never negative, so cutting at 0 loses no coverage.
- :func:`shrink`: empirical Bayes. Values come without errors: what is estimated of a stratum's
  spread says how far to pull, not how far each cell is from the truth. The textbook interval
  (weight times noise) around a shrunk value does not cover, neither cell by cell nor on average
  over a small stratum, so none is given; use those of what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chorister.analyst.estimate import Floats, quantile
from chorister.errors import InvalidInput

Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Tree:
    """A forest over nodes 0, 1, ...: `parents[i] < i`, or -1 where node i is a root."""

    parents: Integers

    def __post_init__(self) -> None:
        parents = np.asarray(self.parents, dtype=np.int64)
        if parents.ndim != 1 or not parents.size:
            raise InvalidInput("a tree needs a list of parents with at least one node")
        if np.any(parents >= np.arange(parents.size)) or np.any(parents < -1):
            raise InvalidInput("every parent must come before its children; a root's parent is -1")
        object.__setattr__(self, "parents", parents)

    @classmethod
    def flat(cls, cells: int) -> Tree:
        """Return a root, node 0, with this many children."""
        return cls(np.concatenate([[-1], np.zeros(cells, dtype=np.int64)]))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> Integers:
        """0 for roots, 1 for their children, ..."""
        depths = np.zeros(len(self), dtype=np.int64)
        above = self.parents.copy()
        while np.any(inside := above >= 0):
            depths[inside] += 1
            above[inside] = self.parents[above[inside]]
        return depths

    @cached_property
    def leaves(self) -> NDArray[np.bool_]:
        """Which nodes have no children."""
        leaves = np.ones(len(self), dtype=np.bool_)
        leaves[self.parents[self.parents >= 0]] = False
        return leaves

    @cached_property
    def levels(self) -> tuple[Integers, ...]:
        """The nodes of each depth, from the roots down."""
        order = np.argsort(self.depths, kind="stable")
        ends = np.cumsum(np.bincount(self.depths))
        return tuple(np.split(order, ends[:-1]))

    def sums(self, values: Floats) -> Floats:
        """Sum the values of each node's children; 0 for a leaf."""
        inside = self.parents >= 0
        return _totals(self.parents[inside], values[inside], len(self))


def _totals(groups: Integers, weights: NDArray[Any], size: int) -> Floats:
    """Sum the weights in each group."""
    return np.bincount(groups, weights=weights, minlength=size).astype(np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Consistent:
    """Estimates after post-processing, with what is needed for honest intervals."""

    values: Floats  # what to report
    unbiased: Floats  # before any step that biases: what intervals are built around
    variances: Floats  # of `unbiased`
    floor: float = -np.inf  # no true value lies below: intervals are cut there

    def interval(self, confidence: float = 0.95) -> tuple[Floats, Floats]:
        """Return both ends, widened where a projection moved the reported value out of them."""
        half = quantile(confidence) * np.sqrt(self.variances)
        low = np.maximum(self.unbiased - half, self.floor)
        high = np.maximum(self.unbiased + half, self.floor)
        return np.minimum(low, self.values), np.maximum(high, self.values)


def _measured(tree: Tree, values: ArrayLike, variances: ArrayLike) -> tuple[Floats, Floats]:
    seen = np.array(values, dtype=np.float64)
    spread = np.array(np.broadcast_to(np.asarray(variances, dtype=np.float64), seen.shape))
    if seen.shape != (len(tree),):
        raise InvalidInput(f"a tree of {len(tree)} nodes needs as many values, not {seen.shape}")
    if np.any(np.isnan(spread)) or np.any(spread < 0.0):
        raise InvalidInput("variances must be 0 (known), positive, or infinite (not measured)")
    unknown = np.isinf(spread)
    seen[unknown] = 0.0
    if not np.all(np.isfinite(seen)):
        raise InvalidInput("a value that is not finite needs an infinite variance")
    return seen, spread


def least_squares(tree: Tree, values: ArrayLike, variances: ArrayLike) -> Consistent:
    """The most precise unbiased estimates for which every parent is the sum of its children.

    A node that nobody measured has an infinite variance (its value is ignored); one that is known
    has variance 0. Where the data leave several siblings open, what is left of their parent is
    shared equally among them and their variance stays infinite.

    Measurements must be independent; then this equals the dense generalised least squares solution,
    in two passes over the levels.
    """
    own, spread = _measured(tree, values, variances)
    up, up_spread = own.copy(), spread.copy()
    for nodes in reversed(tree.levels[:-1]):
        parents = nodes[~tree.leaves[nodes]]
        below, below_spread = _child_sums(tree, up, up_spread, parents)
        up[parents], up_spread[parents] = _combine(
            own[parents], spread[parents], below, below_spread
        )
    down, down_spread = up.copy(), up_spread.copy()
    for nodes in tree.levels[1:]:
        _share_out(tree, nodes, up, up_spread, down, down_spread)
    return Consistent(values=down, unbiased=down, variances=down_spread)


def _child_sums(
    tree: Tree, values: Floats, spread: Floats, parents: Integers
) -> tuple[Floats, Floats]:
    """Sum and variance over the children of each of `parents`, which share a depth."""
    children = tree.levels[int(tree.depths[parents[0]]) + 1] if parents.size else parents
    above = tree.parents[children]
    size = len(tree)
    return (
        _totals(above, values[children], size)[parents],
        _totals(above, spread[children], size)[parents],
    )


def _combine(a: Floats, va: Floats, b: Floats, vb: Floats) -> tuple[Floats, Floats]:
    """Combine two independent measurements of the same values, weighted by precision."""
    share = np.where(np.isinf(va), 0.0, np.where(np.isinf(vb), 1.0, 0.5))  # the weight of a
    both = np.isfinite(va) & np.isfinite(vb) & (va + vb > 0.0)
    share[both] = vb[both] / (va[both] + vb[both])
    value = share * a + (1.0 - share) * b
    spread = np.where(np.isinf(va), vb, np.where(np.isinf(vb), va, 0.0))
    spread[both] = va[both] * vb[both] / (va[both] + vb[both])
    return value, spread


def _share_out(
    tree: Tree,
    nodes: Integers,
    up: Floats,
    up_spread: Floats,
    down: Floats,
    down_spread: Floats,
) -> None:
    """Pass what a parent knows beyond its children on to them, in proportion to their variances."""
    size = len(tree)
    above = tree.parents[nodes]
    open_ = np.isinf(up_spread[nodes])
    finite = np.where(open_, 0.0, up_spread[nodes])
    total = _totals(above, up[nodes], size)[above]
    variance = _totals(above, finite, size)[above]
    opens = _totals(above, open_, size)[above]
    count = np.bincount(above, minlength=size)[above]
    gain = np.divide(finite, variance, out=1.0 / count, where=variance > 0.0)
    gain = np.where(opens > 0, open_ / np.maximum(opens, 1), gain)
    # A parent that was not measured adds nothing: its value is its children's sum.
    residual = np.where(np.isinf(down_spread[above]) & (opens == 0), 0.0, down[above] - total)
    down[nodes] = up[nodes] + gain * residual
    from_parent = np.where(np.isinf(down_spread[above]), variance, down_spread[above])
    spread = finite - gain * finite + gain * gain * from_parent
    spread = np.where(opens > 0, finite, np.maximum(spread, 0.0))
    alone = open_ & (opens == 1)
    spread = np.where(alone, down_spread[above] + variance, spread)
    down_spread[nodes] = np.where(open_ & ~alone, np.inf, spread)


def known_sum(values: ArrayLike, variances: ArrayLike, total: float) -> Consistent:
    """Estimate the parts of a total that is known."""
    parts = np.asarray(values, dtype=np.float64)
    spread = np.broadcast_to(np.asarray(variances, dtype=np.float64), parts.shape)
    fit = least_squares(
        Tree.flat(parts.size),
        np.concatenate([[total], parts]),
        np.concatenate([[0.0], spread]),
    )
    return Consistent(values=fit.values[1:], unbiased=fit.unbiased[1:], variances=fit.variances[1:])


def norm_sub(
    values: ArrayLike, totals: ArrayLike, groups: ArrayLike | None = None, weights: ArrayLike = 1.0
) -> Floats:
    """The nearest non-negative values whose sum in each group is that group's total (Norm-Sub).

    `max(v - t w, 0)` with one `t` per group: the projection onto a simplex in the metric of the
    weights `w` (1: Euclidean; variances: as least squares would). `groups[i]` indexes `totals`;
    without it all values form one group. A total of 0 or less makes its group 0.
    """
    seen = np.asarray(values, dtype=np.float64)
    wanted = np.maximum(np.atleast_1d(np.asarray(totals, dtype=np.float64)), 0.0)
    group = (
        np.zeros(seen.size, dtype=np.int64)
        if groups is None
        else np.asarray(groups, dtype=np.int64)
    )
    if seen.ndim != 1 or group.shape != seen.shape:
        raise InvalidInput("values and groups must be lists of the same length")
    if not np.all(np.isfinite(seen)) or not np.all(np.isfinite(wanted)):
        raise InvalidInput("values and totals must be finite")
    if seen.size and not 0 <= int(group.min()) <= int(group.max()) < wanted.size:
        raise InvalidInput(f"groups must lie between 0 and {wanted.size - 1}")
    weight = np.broadcast_to(np.asarray(weights, dtype=np.float64), seen.shape)
    if not np.all(weight > 0.0) or not np.all(np.isfinite(weight)):
        raise InvalidInput("weights must be positive and finite")
    if not seen.size:
        return seen.copy()
    ratio = seen / weight
    order = np.lexsort((-ratio, group))
    ordered = group[order]
    first = np.searchsorted(ordered, np.arange(wanted.size))
    value_sum = _running(seen[order], ordered, first)
    weight_sum = _running(weight[order], ordered, first)
    shift = (value_sum - wanted[ordered]) / weight_sum
    # Kept are the largest ratios, as many as stay above the shift that they themselves imply.
    kept = (ratio[order] > shift) | (np.arange(seen.size) == first[ordered])
    last = np.zeros(wanted.size, dtype=np.int64)
    np.maximum.at(last, ordered[kept], np.flatnonzero(kept))
    result = np.maximum(seen - shift[last][group] * weight, 0.0)
    return np.where(wanted[group] > 0.0, result, 0.0)


def _running(values: Floats, groups: Integers, first: Integers) -> Floats:
    """Sums so far within each group of consecutive entries."""
    sums: Floats = np.cumsum(values)
    before: Floats = np.concatenate([[0.0], sums])[first]
    running: Floats = sums - before[groups]
    return running


def nonnegative(tree: Tree, fit: Consistent, *, weighted: bool = False) -> Consistent:
    """Norm-Sub within each parent, from the roots down: sums still hold, nothing is negative.

    On a flat list of many cells Norm-Sub harms sums over ranges (every small cell loses the same);
    within each parent it moves little and only where it must. `weighted` moves in proportion to the
    variances.
    """
    values = np.array(fit.values, dtype=np.float64)
    if values.shape != (len(tree),):
        raise InvalidInput(f"a tree of {len(tree)} nodes needs as many values, not {values.shape}")
    roots = tree.levels[0]
    values[roots] = np.maximum(values[roots], 0.0)
    for nodes in tree.levels[1:]:
        weights: ArrayLike = 1.0
        if weighted:
            finite = np.where(np.isinf(fit.variances[nodes]), 0.0, fit.variances[nodes])
            # More extreme weights would lose the digits of what is moved.
            weights = np.maximum(finite, max(float(finite.max()), 1.0) * 1e-6)
        above, groups = np.unique(tree.parents[nodes], return_inverse=True)
        values[nodes] = norm_sub(values[nodes], values[above], groups, weights)
    return replace(fit, values=values, floor=max(fit.floor, 0.0))


def shrink(
    values: ArrayLike,
    variances: ArrayLike,
    means: ArrayLike,
    strata: ArrayLike | None = None,
    scales: ArrayLike = 1.0,
) -> Floats:
    """Pull each value towards its prior mean, as far as its stratum says that the noise explains.

    Model: truth = mean + spread * scale * (something of variance 1), spread^2 common to a stratum
    and estimated by moments (observed squares less noise, weighted by precision, not below 0).
    """
    seen = np.asarray(values, dtype=np.float64)
    noise = np.broadcast_to(np.asarray(variances, dtype=np.float64), seen.shape)
    centre = np.broadcast_to(np.asarray(means, dtype=np.float64), seen.shape)
    scale = np.broadcast_to(np.asarray(scales, dtype=np.float64), seen.shape) ** 2
    if not np.all(noise >= 0.0) or not np.all(np.isfinite(noise)):
        raise InvalidInput("shrinkage needs finite variances")
    group = (
        np.zeros(seen.shape, dtype=np.int64)
        if strata is None
        else np.unique(np.asarray(strata), return_inverse=True)[1].reshape(seen.shape)
    )
    flat = group.ravel()
    # Excess of squares over noise, in units of scale; cells with less noise weigh more.
    weight = np.divide(scale, noise + scale, out=np.zeros_like(scale), where=noise + scale > 0) ** 2
    ratio = np.divide(
        (seen - centre) ** 2 - noise, scale, out=np.zeros(seen.shape), where=scale > 0.0
    )
    top = np.bincount(flat, weights=(weight * ratio).ravel())
    bottom = np.bincount(flat, weights=weight.ravel())
    spread = np.maximum(np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0.0), 0.0)
    prior = spread[group] * scale
    total = prior + noise
    kept = np.divide(prior, total, out=np.ones(seen.shape), where=total > 0.0)
    found: Floats = centre + kept * (seen - centre)
    return found
