"""Post-processing: sums hold, projections are projections, least squares is least squares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chorister.analyst.consistency import (
    Consistent,
    Tree,
    known_sum,
    least_squares,
    nonnegative,
    norm_sub,
    shrink,
)
from chorister.errors import InvalidInput


@st.composite
def trees(draw: st.DrawFn, most: int = 14) -> Tree:
    size = draw(st.integers(2, most))
    parents = [-1] + [draw(st.integers(-1 if i > 8 else 0, i - 1)) for i in range(1, size)]
    return Tree(np.array(parents))


@st.composite
def measured(draw: st.DrawFn) -> tuple[Tree, NDArray[np.float64], NDArray[np.float64]]:
    tree = draw(trees())
    number = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3))
    values = np.array([draw(number) for _ in range(len(tree))])
    variance = st.sampled_from([0.1, 1.0, 4.0, 50.0, np.inf])
    return tree, values, np.array([draw(variance) for _ in range(len(tree))])


def dense(
    tree: Tree, values: NDArray[np.float64], variances: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same by brute force: generalised least squares over the leaves."""
    leaves = np.flatnonzero(tree.leaves)
    design = np.zeros((len(tree), leaves.size))
    for column, leaf in enumerate(leaves):
        node = leaf
        while node >= 0:
            design[node, column] = 1.0
            node = tree.parents[node]
    seen = np.isfinite(variances)
    information = design[seen].T @ np.diag(1.0 / variances[seen]) @ design[seen]
    right = design[seen].T @ (values[seen] / variances[seen])
    inverse = np.linalg.pinv(information, rcond=1e-11)
    fitted = design @ inverse @ right
    spread = np.einsum("ij,jk,ik->i", design, inverse, design)
    # Not estimable where a direction of no information moves the node.
    eigenvalues, vectors = np.linalg.eigh(information)
    open_ = np.abs(design @ vectors[:, eigenvalues < 1e-9 * max(1.0, eigenvalues[-1])])
    return fitted, np.where(open_.sum(axis=1) > 1e-6, np.inf, spread)


@given(measured())
@settings(max_examples=300, deadline=None)
def test_least_squares_equals_a_dense_solve(
    case: tuple[Tree, NDArray[np.float64], NDArray[np.float64]],
) -> None:
    tree, values, variances = case
    if not np.any(np.isfinite(variances)):
        return
    fit = least_squares(tree, values, variances)
    wanted, spread = dense(tree, values, variances)
    known = np.isfinite(spread)
    np.testing.assert_array_equal(np.isfinite(fit.variances), known)
    np.testing.assert_allclose(fit.values[known], wanted[known], atol=1e-6)
    np.testing.assert_allclose(fit.variances[known], spread[known], rtol=1e-6, atol=1e-8)


@given(measured())
@settings(max_examples=200, deadline=None)
def test_after_least_squares_sums_hold_and_nothing_changes_again(
    case: tuple[Tree, NDArray[np.float64], NDArray[np.float64]],
) -> None:
    tree, values, variances = case
    fit = least_squares(tree, values, variances)
    inner = ~tree.leaves
    np.testing.assert_allclose(tree.sums(fit.values)[inner], fit.values[inner], atol=1e-8)
    again = least_squares(tree, fit.values, variances)
    known = np.isfinite(fit.variances)
    np.testing.assert_allclose(again.values[known], fit.values[known], atol=1e-7)


@given(measured(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_nonnegative_keeps_sums_and_is_idempotent(
    case: tuple[Tree, NDArray[np.float64], NDArray[np.float64]], weighted: bool
) -> None:
    tree, values, variances = case
    fit = nonnegative(tree, least_squares(tree, values, variances), weighted=weighted)
    inner = ~tree.leaves
    assert fit.values.min() >= 0.0
    np.testing.assert_allclose(tree.sums(fit.values)[inner], fit.values[inner], atol=1e-8)
    again = nonnegative(tree, fit, weighted=weighted)
    np.testing.assert_allclose(again.values, fit.values, atol=1e-8)
    low, high = fit.interval()
    assert np.all(low >= 0.0)
    assert np.all((low <= fit.values) & (fit.values <= high))


@given(
    st.lists(st.floats(-50, 50).map(lambda x: round(x, 4)), min_size=1, max_size=12),
    st.floats(0, 60),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_norm_sub_is_the_nearest_point(values: list[float], total: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.2, 5.0, len(values))
    found = norm_sub(values, total, weights=weights)
    assert found.min() >= 0.0
    np.testing.assert_allclose(found.sum(), total, atol=1e-8)
    # No other point of the simplex is nearer in the metric of the weights.
    others = rng.dirichlet(np.ones(len(values)), 50) * total
    distance = (((others - values) ** 2) / weights).sum(axis=1)
    assert np.all(distance >= ((found - values) ** 2 / weights).sum() - 1e-7)


def test_norm_sub_in_groups_equals_each_group_alone() -> None:
    rng = np.random.default_rng(1)
    values, groups = rng.normal(size=200), rng.integers(0, 9, 200)
    totals = np.append(rng.uniform(0.0, 5.0, 8), -1.0)
    found = norm_sub(values, totals, groups)
    for group in range(9):
        alone = norm_sub(values[groups == group], totals[group])
        np.testing.assert_allclose(found[groups == group], alone, atol=1e-12)
    assert found[groups == 8].max() == 0.0


def test_a_known_total_is_met_and_lowers_the_variances() -> None:
    fit = known_sum([4.0, 5.0, 6.0], [1.0, 1.0, 2.0], 11.0)
    np.testing.assert_allclose(fit.values, [3.0, 4.0, 4.0])
    np.testing.assert_allclose(fit.variances, [0.75, 0.75, 1.0])


def test_intervals_cover_after_least_squares_and_after_cutting() -> None:
    # 2,000 runs x 21 nodes at 95%; nodes of one run depend on each other, so the limit is for
    # 2,000 independent trials: 5 standard errors are a false alarm of 6e-7 a node.
    rng = np.random.default_rng(2)
    tree = Tree(np.array([-1] + [0] * 4 + [1 + i // 4 for i in range(16)]))
    truth = np.concatenate([[0.0], [0.0] * 4, rng.integers(0, 6, 16).astype(float)])
    for node in range(len(tree) - 1, 0, -1):
        truth[tree.parents[node]] += truth[node]
    variances = np.where(tree.depths == 1, 2.0, 5.0)
    variances[0] = np.inf
    runs, hits = 2000, np.zeros(len(tree))
    for _ in range(runs):
        noise = rng.normal(size=len(tree)) * np.sqrt(np.where(np.isinf(variances), 0, variances))
        fit = nonnegative(tree, least_squares(tree, truth + noise, variances))
        low, high = fit.interval()
        hits += (low <= truth) & (truth <= high)
    assert np.all(hits / runs > 0.95 - 5.0 * np.sqrt(0.95 * 0.05 / runs))


def test_shrinkage_finds_the_spread() -> None:
    rng = np.random.default_rng(3)
    strata = np.repeat([0, 1], 20_000)
    spread = np.where(strata == 0, 2.0, 0.0)
    noise = rng.uniform(0.5, 4.0, strata.size)
    truth = 10.0 + spread * rng.normal(size=strata.size)
    found = shrink(truth + rng.normal(size=strata.size) * np.sqrt(noise), noise, 10.0, strata)
    for stratum in (0, 1):
        here = strata == stratum
        error = np.mean((found - truth)[here] ** 2)
        least = np.mean((spread**2 * noise / (spread**2 + noise))[here])
        assert error == pytest.approx(least, rel=0.05, abs=0.05)
        assert error < 0.7 * noise[here].mean()


def test_shrunk_values_come_without_errors() -> None:
    """What a stratum's spread says of the error (weight x noise) does not cover, nor on average."""
    rng = np.random.default_rng(4)
    strata = np.repeat(np.arange(2_000), 10)
    truth = 0.3 * rng.normal(size=strata.size)
    seen = truth + rng.normal(size=strata.size)
    found = shrink(seen, 1.0, 0.0, strata)
    assert isinstance(found, np.ndarray)  # and nothing that looks like a variance beside it
    half = 1.96 * np.sqrt(found / seen)
    # .50 here; the standard error over 2,000 strata is below .01, so .7 is never seen by chance.
    assert np.mean(np.abs(found - truth) <= half) < 0.7


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidInput, match="before its children"):
        Tree(np.array([-1, 2, 0]))
    tree = Tree.flat(2)
    with pytest.raises(InvalidInput, match="as many values"):
        least_squares(tree, [1.0, 2.0], 1.0)
    with pytest.raises(InvalidInput, match="variances"):
        least_squares(tree, [1.0, 2.0, 3.0], -1.0)
    with pytest.raises(InvalidInput, match="finite"):
        least_squares(tree, [1.0, np.nan, 3.0], 1.0)
    with pytest.raises(InvalidInput, match="weights"):
        norm_sub([1.0, 2.0], 1.0, weights=0.0)
    with pytest.raises(InvalidInput, match="groups"):
        norm_sub([1.0, 2.0], 1.0, groups=[0, 1])
    with pytest.raises(InvalidInput, match="finite"):
        shrink([1.0], np.inf, 0.0)
    ones = np.ones(3)
    with pytest.raises(InvalidInput, match="confidence"):
        Consistent(values=ones, unbiased=ones, variances=ones).interval(1.0)
