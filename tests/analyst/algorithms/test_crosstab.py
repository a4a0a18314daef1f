"""Two-way tables: the rules on known tables, and the whole over a rehearsed fleet."""

from __future__ import annotations

import math
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chorister as ch
from chorister.analyst.algorithms.algorithm_run import AlgorithmRun
from chorister.analyst.algorithms.crosstab import Crosstab, _crossed, crosstab
from chorister.analyst.algorithms.crosstab_margins import (
    Margin,
    Precision,
    refined_margin,
    smooth,
    spikiness,
)
from chorister.analyst.algorithms.crosstab_rules import (
    bucket_count,
    bucket_starts,
    fit_table,
    full_table_pays,
    round_shares,
    steps_of_both,
)
from chorister.analyst.algorithms.crosstab_slices import (
    Slices,
    fit_slices,
    slice_counts,
    slice_starts,
)
from chorister.analyst.study import Study
from chorister.errors import DecodeError, InvalidInput
from chorister.policy import Policy
from tests.keyboard import ANALYSIS, policy_at

# --- Rules ------------------------------------------------------------------------------------


def test_a_spike_stays_and_noise_goes() -> None:
    rng = np.random.default_rng(1)
    truth = np.full(60, 0.5 / 59)
    truth[30] = 0.5
    seen = truth + rng.normal(0.0, 0.004, 60)
    found = smooth(seen, Precision(0.004**2))
    assert found[30] == pytest.approx(0.5, abs=0.02)
    assert found.sum() == pytest.approx(1.0)
    assert found.min() >= 0.0


def test_a_smooth_margin_errs_less_than_what_was_seen() -> None:
    rng = np.random.default_rng(2)
    truth = np.exp(-(((np.arange(80) - 30.0) / 15.0) ** 2))
    truth /= truth.sum()
    seen = truth + rng.normal(0.0, 0.004, 80)
    found = smooth(seen, Precision(0.004**2))
    assert np.sum((found - truth) ** 2) < 0.6 * np.sum((seen - truth) ** 2)


def test_without_noise_nothing_changes() -> None:
    truth = np.array([0.1, 0.5, 0.05, 0.3, 0.05])
    assert smooth(truth, Precision(0.0)) == pytest.approx(truth)
    assert smooth(truth, Precision(1.0), ordered=False) == pytest.approx(truth)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=3, max_size=60).filter(lambda m: sum(m) > 0.1),
    st.integers(2, 20),
)
def test_buckets_partition_and_heavy_cells_are_alone(masses: list[float], count: int) -> None:
    shares = np.array(masses) / sum(masses)
    starts = bucket_starts(shares, count)
    assert starts[0] == 0
    assert np.all(np.diff(starts) > 0)
    assert starts[-1] < len(shares)
    assert len(starts) <= 2 * count + 1
    if count < len(shares):
        ends = np.append(starts[1:], len(shares))
        widths = dict(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
        for cell in np.flatnonzero(shares > 1.0 / count).tolist():
            assert widths[cell] == 1


def test_more_precision_means_more_buckets() -> None:
    counts = [bucket_count(sigma, most=100) for sigma in (1e-1, 1e-2, 1e-3, 1e-4, 1e-9)]
    assert counts == sorted(counts)
    assert counts[0] == 2
    assert counts[-1] == 100
    with pytest.raises(InvalidInput):
        bucket_count(0.0, most=10)


def test_what_many_cells_have_in_common_is_kept_though_each_is_lost_in_noise() -> None:
    """Two quadrants hold three times as much as the others, about as much a cell as its noise."""
    rng = np.random.default_rng(12)
    side, noise = 40, 1.0 / 1600
    half = np.arange(side) < 20
    truth = np.where(half[:, None] == half[None, :], 1.5, 0.5) / side**2
    seen = truth + rng.normal(0.0, noise, truth.shape)
    every = np.arange(side)
    found = fit_table(seen, Precision(noise**2), every, every, np.ones(side), np.ones(side))
    assert found[:20, :20].sum() == pytest.approx(truth[:20, :20].sum(), abs=5 * 20 * noise)
    independent = np.abs(1.0 / side**2 - truth).sum()
    assert np.abs(found - truth).sum() < 0.5 * independent < np.abs(seen - truth).sum()


def test_a_noisy_flat_margin_is_fitted_with_its_sums_in_the_table() -> None:
    rng = np.random.default_rng(13)
    truth, starts, precision = np.full(64, 1.0 / 64), np.arange(0, 64, 8), Precision(0.004**2)
    before = after = 0.0
    for _ in range(6):
        seen = truth + rng.normal(0.0, 0.004, 64)
        own = np.add.reduceat(truth, starts) + rng.normal(0.0, 0.005, 8)
        fitted = smooth(seen, precision)
        smoothed = Margin(fitted)
        args = (own, np.full(8, 0.005**2), starts)
        found = refined_margin(smoothed, seen, precision, *args)
        assert found.sum() == pytest.approx(1.0)
        before, after = (
            total + float(np.abs(np.cumsum(each - truth)).sum())
            for total, each in ((before, fitted), (after, found))
        )
    assert after < 0.7 * before
    assert refined_margin(smoothed, seen, Precision(1e-9), *args) is fitted  # strong signals stay
    outside = Margin(np.concatenate([[0.2], 0.8 * fitted]))
    again = refined_margin(
        outside, np.append(0.2, 0.8 * seen), precision, np.append(0.2, 0.8 * own),
        np.full(9, 0.005**2), np.append(0, starts + 1), fixed=1,
    )  # fmt: skip
    assert again[0] == 0.2
    assert again.sum() == pytest.approx(1.0)


def test_a_spiky_margin_keeps_its_spikes() -> None:
    spikes = np.zeros(64)
    spikes[[5, 20, 50]] = 1.0 / 3.0
    args = (spikes, Precision(0.004**2), np.ones(8) / 8, np.full(8, 1e-4), np.arange(0, 64, 8))
    assert refined_margin(Margin(spikes), *args) is spikes


def test_spikes_on_both_axes_need_more_buckets() -> None:
    smooth_margin = np.exp(-(((np.arange(80) - 40.0) / 20.0) ** 2))
    smooth_margin /= smooth_margin.sum()
    spikes = np.zeros(80)
    spikes[[3, 17, 30, 41, 66]] = 0.2
    assert spikiness(smooth_margin) < 0.05
    assert spikiness(spikes) > 0.9
    usual = bucket_count(1e-4, most=1000)
    assert bucket_count(1e-4, most=1000, spikes=0.5) > 2 * usual
    # All buckets together have a standard error of at most twice the devices.
    assert bucket_count(1e-2, most=1000, spikes=1.0) ** 2 * 1e-2 <= 2.2


def test_one_question_about_everything_where_noise_is_small() -> None:
    assert full_table_pays(1_000, 1e-5)
    assert not full_table_pays(1_000, 1e-3)
    assert round_shares(1_000, 1e-5)[2] > round_shares(1_000, 1e-2)[2]
    for sigma in (1e-5, 1e-2):
        assert sum(round_shares(1_000, sigma)) == pytest.approx(1.0)


def simulated(truth: np.ndarray[Any, Any], sigma: float, seed: int) -> float:
    """The error of three rounds with normal noise; `sigma` is that of one question."""
    rng = np.random.default_rng(seed)
    at = [sigma / share**0.5 for share in round_shares(truth.size, sigma)]
    high, wide = truth.shape
    counts = slice_counts((high, wide), at[0])
    slices = []
    for axis, (table, count) in enumerate(zip((truth, truth.T), counts, strict=True)):
        parts = np.add.reduceat(table, slice_starts(table.shape[1], count), axis=1)
        seen = parts + rng.normal(0.0, at[axis], parts.shape)
        slices.append(Slices(seen, Precision(at[axis] ** 2), 10**9))
    margins = [fit_slices(each) for each in slices]
    bends = [each.bends for each in margins if each.bends is not None]
    count = bucket_count(
        at[2],
        most=10_000,
        spikes=min(spikiness(each.shares) for each in margins),
        both_stepped=all(each.steps is not None for each in margins),
        bends=sum(bends) if bends else None,
    )
    starts = [bucket_starts(each.shares, count, steps=each.steps) for each in margins]
    table = np.add.reduceat(np.add.reduceat(truth, starts[0], axis=0), starts[1], axis=1)
    table = table + rng.normal(0.0, at[2], table.shape)
    found = fit_table(
        table, Precision(at[2] ** 2), starts[0], starts[1], margins[0].shares, margins[1].shares,
        row_precision=slices[0].margin_precision, column_precision=slices[1].margin_precision,
        steps=steps_of_both(margins, starts),
    )  # fmt: skip
    return float(np.abs(found - truth).sum())


LATIN_STARTS = np.array([0, 9, 24, 35, 49])


def latin() -> np.ndarray[Any, Any]:
    """Blocks whose weights are a Latin square: both margins are flat, and no equal grid fits."""
    number = np.add.outer(np.arange(5), 2 * np.arange(5)) % 5
    weights = np.array([0.45, 0.3, 0.15, 0.07, 0.03])[number]
    sizes = np.diff(np.append(LATIN_STARTS, 60))
    table = np.repeat(np.repeat(weights / np.outer(sizes, sizes), sizes, 0), sizes, 1)
    found: np.ndarray[Any, Any] = table / table.sum()
    return found


def shapes() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(9)
    at = np.arange(48)
    hill = np.exp(-(((at[:, None] - 20.0) / 8.0) ** 2) - ((at[None, :] - 30.0) / 10.0) ** 2)
    usual = np.full((48, 48), 1e-4)
    usual[rng.integers(0, 48, 40), rng.integers(0, 48, 40)] += rng.dirichlet(np.ones(40))
    band = np.exp(-(((at[:, None] - at[None, :]) / 2.0) ** 2))
    tiles = np.repeat(np.repeat(rng.dirichlet(np.ones(20)).reshape(5, 4), [5, 12, 9, 16, 6], 0),
                      [11, 7, 20, 10], 1)  # fmt: skip
    wrapped = np.exp(-((((at[:, None] - at[None, :]) % 48 - 20.0) / 2.0) ** 2))
    return {
        name: table / table.sum()
        for name, table in (
            ("hill", hill),
            ("schedule", usual),
            ("band", band),
            ("tiles", tiles),
            ("latin", latin()),
            ("wrapped", wrapped),
        )
    }


@pytest.mark.parametrize("name", ["hill", "schedule", "band", "tiles", "latin", "wrapped"])
def test_more_budget_is_never_worse_by_more_than_noise(name: str) -> None:
    # The difference over 12 seeds is t-distributed with 11 degrees of freedom if nothing was
    # gained: above 10 standard errors with a chance below 4e-7. Each step gains in truth.
    truth = shapes()[name]
    sigmas = [2e-2 / 2.0**step for step in range(12)]
    errors = np.array([[simulated(truth, sigma, seed) for seed in range(12)] for sigma in sigmas])
    for less, more in pairwise(errors):
        worse = more - less
        assert worse.mean() <= 10.0 * worse.std(ddof=1) / 12**0.5
    assert errors[-1].mean() < 0.2 * errors[0].mean()


def static(truth: np.ndarray[Any, Any], sigma: float, seed: int, cells: int) -> float:
    """The L1 error of one question about an equal grid, with the same fit."""
    rng = np.random.default_rng([seed, 1])
    at = [slice_starts(size, min(cells, size)) for size in truth.shape]
    table = np.add.reduceat(np.add.reduceat(truth, at[0], axis=0), at[1], axis=1)
    table = table + rng.normal(0.0, sigma, table.shape)
    flat = [np.ones(size) for size in truth.shape]
    found = fit_table(table, Precision(sigma**2), at[0], at[1], flat[0], flat[1])
    return float(np.abs(found - truth).sum())


@pytest.mark.parametrize("name", ["latin", "wrapped"])
def test_structure_across_the_table_is_found_though_no_margin_shows_it(name: str) -> None:
    """At most 1.1 times the error of the best grid, which nobody knows in advance."""
    truth = shapes()[name]
    for sigma in (1e-3, 1e-4):
        ours = np.mean([simulated(truth, sigma, seed) for seed in range(4)])
        best = min(
            np.mean([static(truth, sigma, seed, cells) for seed in range(4)])
            for cells in (5, 12, 20, 24, 32, 40, 60)
        )
        assert ours <= 1.1 * best


def test_slices_are_asked_about_where_noise_allows_them() -> None:
    assert slice_counts((60, 60), 1e-2) == (1, 1)
    assert slice_counts((60, 8), 1e-5) == (1, 1)
    rows, columns = slice_counts((60, 60), 1e-4)
    assert rows != columns
    assert min(rows, columns) > 1
    assert slice_starts(61, 4, fixed=1).tolist() == [0, 1, 16, 31, 46]


def test_lines_across_slices_bend_and_independent_axes_do_not() -> None:
    rng = np.random.default_rng(14)
    bends = {}
    for name, truth in (("wrapped", shapes()["wrapped"]), ("flat", np.full((48, 48), 48.0**-2))):
        parts = np.add.reduceat(truth, slice_starts(48, 4), axis=1)
        seen = parts + rng.normal(0.0, 3e-4, parts.shape)
        bends[name] = fit_slices(Slices(seen, Precision(3e-4**2), 10**9)).bends
    assert bends["wrapped"] is not None
    assert bends["flat"] is not None
    assert bends["wrapped"] > 5.0 * bends["flat"]
    alone = Slices(np.full((48, 1), 1.0 / 48), Precision(1e-9), 10**9)
    assert alone.bends is None
    count = bucket_count(1e-4, most=1000)
    assert bucket_count(1e-4, most=1000, bends=0.0) < count < bucket_count(1e-4, most=1000, bends=1)


def test_a_staircase_that_only_slices_show_is_found() -> None:
    truth = latin()
    parts = np.add.reduceat(truth, slice_starts(60, 4), axis=1)
    noise = np.random.default_rng(15).normal(0.0, 2e-4, parts.shape)
    found = fit_slices(Slices(parts + noise, Precision(2e-4**2), 10**9))
    assert found.steps is not None
    assert set(LATIN_STARTS.tolist()) <= set(found.steps.tolist())
    assert np.abs(found.shares - truth.sum(axis=1)).sum() < 0.03


def test_exact_measurements_give_the_exact_table() -> None:
    rng = np.random.default_rng(3)
    truth = rng.dirichlet(np.ones(30)).reshape(5, 6)
    every = np.arange(5), np.arange(6)
    found = fit_table(truth, Precision(1e-18), *every, truth.sum(axis=1), truth.sum(axis=0))
    assert found == pytest.approx(truth, abs=1e-6)


def test_margins_and_independence_help() -> None:
    rng = np.random.default_rng(4)
    rows, columns = rng.dirichlet(np.ones(12)), rng.dirichlet(np.ones(15))
    truth = np.outer(rows, columns)
    seen = truth + rng.normal(0.0, 0.005, truth.shape)
    found = fit_table(
        seen, Precision(0.005**2), np.arange(12), np.arange(15), rows, columns,
        row_precision=Precision(1e-8), column_precision=Precision(1e-8),
    )  # fmt: skip
    assert np.abs(found - truth).sum() < 0.3 * np.abs(np.maximum(seen, 0.0) - truth).sum()
    assert found.sum() == pytest.approx(1.0)
    assert found.min() >= 0.0
    assert found.sum(axis=1) == pytest.approx(rows, abs=0.01)


def test_a_table_needs_its_buckets() -> None:
    with pytest.raises(InvalidInput):
        fit_table(np.ones((2, 2)), Precision(1.0), np.arange(3), np.arange(2), np.ones(3),
                  np.ones(2))  # fmt: skip


# --- Over a study -----------------------------------------------------------------------------

AGES, HOURS = ch.intervals("age", range(20, 61)), ch.intervals("hours", range(1, 61))


def rules(reports: int = 3, **changes: Any) -> Policy:
    budget = {"local_epsilon": 8, "epsilon": 3, "delta": Decimal("1e-5"), "reports": reports}
    fields = {"user.age": budget, "user.hours": budget}
    analysis = f"analyses/{ANALYSIS}"
    return policy_at(
        {
            "profiles/user/fields": {"age": {"type": "integer"}, "hours": {"type": "integer"}},
            f"{analysis}/fields": fields,
            f"{analysis}/group_by": [],
            f"{analysis}/budget/epsilon": 3,
            f"{analysis}/budget/delta": Decimal("1e-5"),
            f"{analysis}/budget/reports": reports,
            f"{analysis}/cohort/smallest": 50,
            "device/epsilon": 3,
            "device/delta": Decimal("1e-5"),
        }
        | {f"{analysis}/{name}": value for name, value in changes.items()}
    )


def people() -> dict[str, Any]:
    """The young work 20 hours, all others 40; a few anything else."""
    ages, hours, count = [], [], []
    for age in range(20, 60):
        for worked, many in ((20 if age < 30 else 40, 800), (5 + age % 50, 40)):
            ages.append(age)
            hours.append(worked)
            count.append(many)
    return {"age": ages, "hours": hours, "count": count}


DEVICES = sum(people()["count"])


def study(reports: int = 3, **options: Any) -> Study:
    fleet = ch.rehearse(people(), rules(reports), **{"seed": 3, **options})
    found: Study = fleet.study("table", analysis=ANALYSIS)
    return found


def begin(where: Study, **options: Any) -> AlgorithmRun[Crosstab]:
    return crosstab(where, AGES, HOURS, **options)


@pytest.fixture(scope="module")
def table() -> Crosstab:
    return begin(study()).result


def truth() -> np.ndarray[Any, Any]:
    cells = np.zeros((AGES.size, HOURS.size))
    data = people()
    for age, hours, count in zip(data["age"], data["hours"], data["count"], strict=True):
        cells[age - 19, hours] += count / DEVICES
    return cells


def test_the_known_table_is_found(table: Crosstab) -> None:
    assert table.shares.shape == (AGES.size, HOURS.size)
    assert table.shares.sum() == pytest.approx(1.0)
    assert np.abs(table.shares - truth()).sum() < 0.35
    young, old = table.shares[1:11], table.shares[11:]
    assert young[:, 20].sum() > 0.8 * 8_000 / DEVICES
    assert old[:, 40].sum() > 0.8 * 24_000 / DEVICES


def test_estimates_and_intervals_are_of_the_last_round_alone(table: Crosstab) -> None:
    last = table.results[2]
    frame = table.to_polars()
    assert frame["estimate"].to_numpy() == pytest.approx(last.counts)
    exact = _coarse(truth(), table) * DEVICES
    inside = (frame["ci_low"].to_numpy() <= exact) & (exact <= frame["ci_high"].to_numpy())
    # Each covers in 95 of 100; of n cells fewer than 80% do with a chance below 1e-6.
    assert len(inside) > 60
    assert inside.mean() > 0.8
    assert frame["fitted_share"].sum() == pytest.approx(1.0)


def _coarse(cells: np.ndarray[Any, Any], table: Crosstab) -> np.ndarray[Any, Any]:
    for axis, feature in enumerate(table.results[2].features):
        first = (20, 1)[axis]
        starts = [0, *(int(edge) - first + 1 for edge in feature.edges[:-1])]  # type: ignore[union-attr]
        cells = np.add.reduceat(cells, starts, axis=axis)
    return cells.ravel()


def test_rounds_in_slices(tmp_path: Path) -> None:
    """Where noise allows it, the first two rounds cross an axis with slices of the other."""
    many = {**people(), "count": [20 * count for count in people()["count"]]}
    fleet = ch.rehearse(many, rules(), seed=3).study("slices", analysis=ANALYSIS)
    run = begin(fleet, cohorts="everyone")
    found = run.result
    assert [len(result.features) for result in found.results] == [2, 2, 2]
    assert found.axes == (AGES, HOURS)
    assert found.results[0].features[1].size < HOURS.size
    assert found.results[1].features[0].size < AGES.size
    assert all(step.picture.to_dict() for step in run)
    assert np.abs(found.shares - truth()).sum() < 0.1
    assert "slices" in found.explain()
    found.save(tmp_path / "slices.json")
    assert Crosstab.load(tmp_path / "slices.json").shares == pytest.approx(found.shares)


def test_disjoint_cohorts() -> None:
    run = begin(study(1))
    assert run.plan.cohorts == "disjoint"
    assert run.result.devices == DEVICES
    assert np.abs(run.result.shares - truth()).sum() < 0.6
    assert "one round each" in run.result.explain()


def test_the_plan_comes_first_and_is_kept() -> None:
    where = study()
    run = begin(where)
    assert where.rounds == []
    assert len(run.plan.rounds) == 3
    steps = list(run)
    assert [step.number for step in steps] == [1, 2, 3]
    for step, planned in zip(steps, run.plan.rounds, strict=True):
        assert step.result.epsilon == planned.epsilon
    assert all(step.picture.to_dict() for step in steps)


def test_everyone_is_asked_once_where_rounds_do_not_pay(tmp_path: Path) -> None:
    where = study()
    rows, columns = ch.intervals("age", [20, 30, 60]), ch.intervals("hours", [1, 30, 61])
    run = crosstab(where, rows, columns)
    assert "asked once" in run.plan.explain()
    found = run.result
    assert len(where.rounds) == len(run.plan.rounds) == 1
    assert found.axes == (rows, columns)
    assert found.shares[1, 1] == pytest.approx(8_000 / DEVICES, abs=0.02)
    assert found.devices == DEVICES
    assert "one question" in found.explain()
    assert found.plot().to_dict()["layer"]
    found.save(tmp_path / "once.json")
    assert Crosstab.load(tmp_path / "once.json").shares == pytest.approx(found.shares)
    # Whoever chooses the cohorts gets rounds.
    forced = crosstab(study(), rows, columns, cohorts="everyone")
    assert len(forced.plan.rounds) == 3
    assert "Several rounds pay off" in begin(study()).plan.explain()


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    first = study(folder=tmp_path)
    next(iter(begin(first)))
    again = study(folder=tmp_path)
    resumed = begin(again).result
    assert len(again.rounds) == 3
    assert resumed.to_polars().equals(begin(study()).result.to_polars())


def test_categories_are_never_merged() -> None:
    fleet = ch.rehearse(people(), rules(), seed=3).study("kinds", analysis=ANALYSIS)
    kinds = ch.categories("hours", [20, 40])
    found = crosstab(fleet, AGES, kinds, cohorts="everyone").result
    assert found.results[2].features[1] == kinds
    assert found.shares.shape == (AGES.size, 3)


def test_categories_that_do_not_fit_are_refused_before_anything_is_asked() -> None:
    where = ch.rehearse(people(), rules(max_bins=100), seed=3).study("few", analysis=ANALYSIS)
    kinds = ch.categories("age", list(range(20, 31))), ch.categories("hours", list(range(20)))
    with pytest.raises(InvalidInput, match="need 252 cells, more than 100"):
        crosstab(where, *kinds, cohorts="everyone")
    assert where.rounds == []


@pytest.mark.parametrize("stepped", [True, False])
def test_buckets_fit_into_what_the_policy_allows(*, stepped: bool) -> None:
    """Twelve steps on each axis, or one heavy cell, and room for fewer cells than they need."""
    axes = ch.intervals("a", range(61)), ch.intervals("b", range(61))
    shares = np.repeat([1.0, 2.0] * 6, 5) if stepped else np.append(np.full(59, 0.01), 1.0)
    shares = np.append(0.0, shares / shares.sum())
    steps = np.append(0, np.arange(1, 61, 5)) if stepped else None
    for most in (4, 9, 100):
        coarse = _crossed(axes, [Margin(shares, steps)] * 2, 1e-4, most)
        assert 4 <= math.prod(axis.size for axis in coarse) <= most


def test_saved_and_loaded(table: Crosstab, tmp_path: Path) -> None:
    table.save(tmp_path / "table.json")
    loaded = Crosstab.load(tmp_path / "table.json")
    assert loaded.to_json() == table.to_json()
    assert loaded.shares == pytest.approx(table.shares)
    with pytest.raises(InvalidInput, match="can't read"):
        Crosstab.load(tmp_path / "absent.json")


@given(st.binary(max_size=200) | st.just(b'{"format": "chorister-crosstab-1"}'))
@settings(max_examples=50)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        Crosstab.from_json(data)


def test_words_and_pictures(table: Crosstab) -> None:
    assert "age by hours" in table.explain()
    assert "Crosstab" in repr(table)
    assert "age" in table._repr_html_()
    for kind in ("heat", "mosaic"):
        assert table.plot(kind=kind).to_dict()["layer"]
    with pytest.raises(InvalidInput, match="heat or mosaic"):
        table.plot(kind="pie")


def test_bad_wishes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="two different"):
        crosstab(study(), AGES, AGES)
    with pytest.raises(InvalidInput, match="intervals or categories"):
        crosstab(study(), ch.grid(["age", "hours"], (0, 0, 1, 1), level=1), HOURS)  # type: ignore[arg-type]
    assert sum(round_shares(100, 1e-3)) == pytest.approx(1.0)
