"""Staircases: found where a histogram has level steps, and only there."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.analyst.algorithms.crosstab_margins import (
    Margin,
    Precision,
    fit_margin,
    refined_margin,
)
from chorister.analyst.algorithms.crosstab_rules import (
    bucket_count,
    bucket_starts,
    fit_table,
    steps_of_both,
)
from chorister.analyst.algorithms.staircase import Floats, staircase

STARTS = np.array([0, 9, 31, 40])
LEVELS = np.repeat([3.0, 1.0, 5.0, 2.0], np.diff(np.append(STARTS, 60)))
LEVELS /= LEVELS.sum()
FLEET = 10**9


def seen(truth: Floats, noise: float, seed: int) -> Floats:
    return truth + np.random.default_rng(seed).normal(0.0, noise, len(truth))


def test_steps_are_found_with_their_levels() -> None:
    # Neighbours differ by 15 standard errors of a cell. A cell beside a border that errs by more
    # than two of them may be a step of its own.
    for seed in range(10):
        measured = seen(LEVELS, 0.001, seed)
        found = staircase(measured, np.full(60, 0.001**2))
        assert found is not None
        assert set(STARTS.tolist()) <= set(found.starts.tolist())
        assert np.abs(found.starts[:, None] - STARTS).min(axis=1).max() <= 1
        assert np.abs(found.shares - LEVELS).sum() < 0.5 * np.abs(measured - LEVELS).sum()


def test_a_border_that_noise_hides_is_kept_open() -> None:
    """A cell that may belong to either step is a step of its own."""
    truth = LEVELS.copy()
    truth[31] = (LEVELS[30] + LEVELS[31]) / 2.0
    found = staircase(truth, np.full(60, 0.002**2))
    assert found is not None
    assert {31, 32} <= set(found.starts.tolist())


def curves() -> dict[str, Floats]:
    at = np.arange(60.0)
    spikes = np.full(60, 0.2)
    spikes[[4, 11, 12, 25, 33, 47, 58]] = 8.0
    return {
        "hill": np.exp(-(((at - 20.0) / 9.0) ** 2)),
        "tail": np.exp(-at / 12.0),
        "slope": at + 5.0,
        "wave": 1.5 + np.sin(at / 6.0),
        "spikes": spikes,
    }


@pytest.mark.parametrize("name", sorted(curves()))
@pytest.mark.parametrize("noise", [1e-4, 1e-3])
def test_other_curves_are_no_staircases(name: str, noise: float) -> None:
    truth = curves()[name] / curves()[name].sum()
    for seed in range(5):
        assert staircase(seen(truth, noise, seed), np.full(60, noise**2)) is None


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=30),
    st.floats(1e-9, 1.0),
    st.integers(1, 10**9),
)
def test_whatever_was_measured_a_margin_is_fitted(
    shares: list[float], noise: float, devices: int
) -> None:
    found = fit_margin(np.array(shares), Precision(noise**2), devices)
    assert np.all(np.isfinite(found.shares))
    assert found.shares.min() >= 0.0
    assert found.shares.sum() == pytest.approx(1.0)
    if found.steps is not None:
        assert found.steps[0] == 0
        assert np.all(np.diff(found.steps) > 0)


def test_long_axes_take_no_time() -> None:
    """A matrix of all pairs of 10,000 cells would not fit into memory."""
    assert fit_margin(np.full(10_000, 1e-4), Precision(1e-12), FLEET).steps is None


@given(st.integers(2, 80), st.sampled_from([0, 1]))
def test_no_bucket_lies_in_two_steps(count: int, fixed: int) -> None:
    masses = np.concatenate([np.full(fixed, 0.1), LEVELS])
    steps = np.unique(np.append(0, STARTS + fixed))
    starts = bucket_starts(masses, count, fixed=fixed, steps=steps)
    assert set(steps.tolist()) <= set(starts.tolist())
    assert np.all(np.diff(starts) > 0)
    assert len(starts) <= max(count + len(steps), 2 * len(steps))


def test_a_table_of_tiles_is_found_though_nobody_knew_its_borders() -> None:
    """Against the same question without steps: half of the error at most, in every seed."""
    rng = np.random.default_rng(5)
    weights = rng.dirichlet(np.ones(16)).reshape(4, 4)
    sizes = np.diff(np.append(STARTS, 60))
    truth = np.repeat(np.repeat(weights / np.outer(sizes, sizes), sizes, 0), sizes, 1)
    fine, coarse = Precision(3e-4**2), Precision(2e-4**2)
    for seed in range(3):
        noise = np.random.default_rng([seed, 1])
        measured = [truth.sum(axis=a) + noise.normal(0.0, 3e-4, 60) for a in (1, 0)]
        margins = [fit_margin(each, fine, FLEET) for each in measured]
        plain = [Margin(each.shares) for each in margins]
        errors = []
        for used in (margins, plain):
            both = all(each.steps is not None for each in used)
            count = bucket_count(2e-4, most=10_000, both_stepped=both)
            starts = [bucket_starts(each.shares, count, steps=each.steps) for each in used]
            table = np.add.reduceat(np.add.reduceat(truth, starts[0], axis=0), starts[1], axis=1)
            table = table + noise.normal(0.0, 2e-4, table.shape)
            rows, columns = (
                refined_margin(
                    margin, each, fine, table.sum(axis=axis),
                    coarse.variance(np.add.reduceat(margin.shares, at), table.shape[axis]), at,
                )
                for axis, margin, each, at in zip((1, 0), used, measured, starts, strict=True)
            )  # fmt: skip
            found = fit_table(
                table, coarse, starts[0], starts[1], rows, columns, row_precision=fine,
                column_precision=fine, steps=steps_of_both(used, starts),
            )  # fmt: skip
            assert found.sum() == pytest.approx(1.0)
            errors.append(float(np.abs(found - truth).sum()))
        assert errors[0] < 0.5 * errors[1]


def test_the_sums_of_steps_are_combined_by_precision() -> None:
    margin = Margin(LEVELS, STARTS)
    starts = np.sort(np.append(STARTS, [4, 20, 50]))
    own = np.add.reduceat(LEVELS, starts)
    own[starts < 9] *= 1.1
    exact = refined_margin(margin, LEVELS, Precision(1.0), own, np.full(7, 1e-12), starts)
    assert np.add.reduceat(exact, STARTS)[0] > 1.05 * LEVELS[:9].sum()
    useless = refined_margin(margin, LEVELS, Precision(1e-12), own, np.full(7, 1.0), starts)
    assert useless == pytest.approx(LEVELS, abs=1e-6)
    for found in (exact, useless):
        assert math.isclose(found.sum(), 1.0)


def test_steps_that_no_bucket_respects_are_not_used() -> None:
    margins = [Margin(LEVELS, STARTS), Margin(LEVELS, STARTS)]
    assert steps_of_both(margins, [np.arange(60), np.arange(0, 60, 7)]) is None
    assert steps_of_both([margins[0], Margin(LEVELS)], [np.arange(60)] * 2) is None
    found = steps_of_both(margins, [np.arange(60), STARTS])
    assert found is not None
    assert [each.tolist() for each in found] == [STARTS.tolist(), [0, 1, 2, 3]]
