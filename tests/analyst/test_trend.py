"""Trends: what a whole series states at once holds, for people that no rule was made for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

import chorister as ch
from chorister.analyst import trend_changes
from chorister.analyst.series import TrackPlan
from chorister.analyst.trend import Trend
from chorister.errors import InvalidInput
from tests.analyst.fleets import generous
from tests.keyboard import ANALYSIS

WEEK = 7 * 86_400
SERIES: dict[str, Any] = {"windows": 60, "longest": "500d", "answers": 30, "cells": 1000}


def policy(**changes: Any) -> ch.Policy:
    return generous(30, **{f"analyses/{ANALYSIS}/series": SERIES, **changes})


def people(*shares: float, devices: int = 60_000) -> dict[str, Any]:
    counts = np.rint(np.array(shares) * devices).astype(int)
    counts[0] += devices - counts.sum()
    return {"age": [15 + 10 * i for i in range(len(shares))], "count": counts.tolist()}


def plan(
    first: dict[str, Any], later: Any = (), *, seed: int = 1, windows: int = 8, **options: Any
) -> TrackPlan:
    fleet = ch.rehearse(first, policy(), later=later, seed=seed)
    study = fleet.study("weeks", analysis=ANALYSIS)
    settings: dict[str, Any] = {"every": WEEK, "windows": windows, "epsilon": "0.1"}
    return study.track(ch.intervals("age", [10, 20, 30, 40]), **(settings | options))


def trend(*args: Any, **options: Any) -> Trend:
    return plan(*args, **options).ask().collect()


def test_a_trend_has_a_row_for_every_window_and_bin() -> None:
    found = trend(people(0.5, 0.3, 0.2))
    columns = found.columns()
    assert list(columns) == ["window", "opens", "age", "reports", "estimate", "std_error",
                             "ci_low", "ci_high"]  # fmt: skip
    assert len(columns["window"]) == len(found) == 8 * 4
    assert found.candidates == 8 * 4
    assert columns["age"][:4] == ["OOV", "[10, 20)", "[20, 30)", "[30, 40)"]
    assert (
        np.diff(columns["opens"][::4]).astype("timedelta64[s]").astype(int).tolist() == [WEEK] * 7
    )
    assert abs(columns["reports"][::4].sum() - 60_000) == 0
    truth = np.tile([0.0, 0.5, 0.3, 0.2], 8)
    assert (np.abs(columns["estimate"] - truth) < 7 * columns["std_error"]).all()
    assert found.to_polars().height == 32
    assert json.loads(found.to_json())["columns"]["opens"][0].endswith("UTC")
    assert "8 of 8 windows" in found.explain()
    assert "<svg" in str(found.to_html())


@pytest.mark.parametrize("name", ["reports", "opens", "after", "certain"])
def test_a_feature_named_like_a_column_of_the_trend_keeps_its_own(name: str) -> None:
    fleet = ch.rehearse(people(0.5, 0.3, 0.2), policy(), seed=3)
    study = fleet.study("weeks", analysis=ANALYSIS)
    question = {"query": f"SELECT age AS {name} FROM user", "reads": {"user": ["age"]}}  # noqa: S608 (a list of four)
    feature = ch.intervals(name, [10, 20, 30, 40])
    options: dict[str, Any] = {"every": WEEK, "windows": 2, "epsilon": "0.1", **question}
    found = study.track(feature, **options).ask().collect()
    for columns in (found.columns(), found.changes().columns()):
        assert columns[f"{name}_2"][:2] == ["OOV", "[10, 20)"]


def test_what_is_certain_is_where_people_changed() -> None:
    first, then = people(0.5, 0.3, 0.2), people(0.35, 0.3, 0.35)
    found = trend(first, [first] * 3 + [then], seed=2)
    steps = found.changes("steps").certain()
    moved = {steps.name(row) for row in steps.rows}
    assert moved == {"[10, 20)", "[30, 40)"}
    assert "[10, 20): -" in steps.explain()
    assert "false alarm" in steps.explain()
    pairs = found.changes().certain()
    assert len(pairs) > 0
    assert all(row.before < 4 <= row.after for row in pairs.rows)
    for row in pairs.rows:
        assert row.low <= (0.15 if row.bin == 3 else -0.15) <= row.high
    frame = pairs.to_polars()
    assert frame.columns == ["before", "after", "age", "change", "ci_low", "ci_high", "certain"]
    previous = found.changes("previous").certain()
    assert {(row.before, row.after) for row in previous.rows} == {(3, 4)}
    assert all(row.before == 0 for row in found.changes("first").rows)
    assert found.changes("previous").candidates == 7 * 4
    assert found.changes("steps").candidates == found.changes().candidates == 28 * 4
    with pytest.raises(InvalidInput, match="compare is one of"):
        found.changes("weekly")  # type: ignore[arg-type]


def test_comparing_with_one_window_needs_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of 1,000 windows would need gigabytes."""
    found = trend(people(0.5, 0.3, 0.2))
    pairs = {(row.before, row.after, row.bin): row for row in found.changes().rows}

    def refuse(_: int) -> None:
        raise AssertionError("all pairs were built")

    monkeypatch.setattr(trend_changes, "pair_weights", refuse)
    wanted = {"previous": [(k - 1, k) for k in range(1, 8)], "first": [(0, k) for k in range(1, 8)]}
    for compare in ("previous", "first"):
        rows = found.changes(compare).rows
        assert [(row.before, row.after) for row in rows[::4]] == wanted[compare]
        for row in rows:
            assert row.change == pytest.approx(pairs[row.before, row.after, row.bin].change)


def test_only_narrows_what_was_chosen_before() -> None:
    found = trend(people(0.5, 0.3, 0.2))
    one = found.only("[10, 20)")
    assert one.candidates == 8
    whole = found.columns()
    at = [i for i, name in enumerate(whole["age"]) if name == "[10, 20)"]
    columns = one.columns()
    assert columns["estimate"].tolist() == whole["estimate"][at].tolist()
    assert (columns["ci_high"] < whole["ci_high"][at]).all()
    assert one.changes().candidates == 28
    assert found.only("[30, 40)", "OOV").only("OOV").names == ["OOV"]
    with pytest.raises(InvalidInput, match="no bin"):
        found.only("[40, 50)")
    with pytest.raises(InvalidInput, match="all its bins"):
        one.statistics()


def test_statistics_hold_the_truth_in_every_window() -> None:
    fleet = ch.rehearse(people(0.5, 0.3, 0.2), policy(), later=[people(0.2, 0.3, 0.5)], seed=4)
    tracked = fleet.study("weeks", analysis=ANALYSIS).track(
        ch.intervals("age", range(10, 45, 5)), every=WEEK, windows=4, epsilon="0.2"
    )
    found = tracked.run().statistics((0.25, 0.5))
    columns = found.columns()
    assert columns["statistic"][:3] == ["mean", "0.25", "0.5"]
    # Ages are 15, 25 and 35: the truth of window 0, and of all later ones.
    truth = [22.0, 15.0, 15.0] + [28.0, 25.0, 25.0] * 3
    assert (columns["ci_low"] <= truth).all()
    assert (truth <= columns["ci_high"]).all()
    assert (columns["ci_low"] <= columns["estimate"]).all()
    assert (columns["estimate"] <= columns["ci_high"]).all()
    assert found.plot().to_dict()["title"]["text"] == "age over time"
    assert "<table" in found._repr_html_()
    short = trend(people(1.0))
    with pytest.raises(InvalidInput, match="strictly between"):
        short.statistics((0.0,))
    for wrong in (0.5, ["half"]):
        with pytest.raises(InvalidInput, match="shares"):
            short.statistics(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="false alarms"):
        short.changes(false_alarms="few")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="up_to"):
        tracked.ask().collect(up_to="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("answers", [1, 3, 8])
def test_all_intervals_of_a_series_hold_at_once(answers: int) -> None:
    """60 series of 8 windows each: with coverage 0.95, more than 15 misses have a chance of 1e-7.

    People change sides in every window, which makes shared devices as harmful as they can be.
    """
    assert binom.sf(15, 60, 0.05) < 1e-6
    first = {"age": [15, 25, 35, 15, 25, 35], "count": [500] * 6}
    other = {"age": [25, 35, 15, 35, 15, 25], "count": [500] * 6}
    truth = np.array([0.0, 1 / 3, 1 / 3, 1 / 3])
    missed, alarms = {"levels": 0, "pairs": 0, "steps": 0}, 0
    for seed in range(60):
        found = trend(
            first, [other, first] * 4, seed=seed, answers_per_device=answers, epsilon="0.3"
        )
        columns = found.columns()
        level = np.tile(truth, 8)
        missed["levels"] += bool(((columns["ci_low"] > level) | (level > columns["ci_high"])).any())
        for compare in ("pairs", "steps"):
            certain = found.changes(compare).certain()
            missed[compare] += len(certain) > 0  # nothing changes, so any is a false alarm
        alarms += len(found.changes("previous", false_alarms=0.2).certain()) > 0
    assert max(missed.values()) <= 15
    assert alarms <= 30  # 1e-6 of Bin(60, 0.2)


def test_looking_early_does_not_change_what_is_stated() -> None:
    tracked = plan(people(0.5, 0.3, 0.2)).ask()
    early = tracked.collect(up_to=3)
    late = tracked.collect()
    some, every = early.columns(), late.columns()
    assert some["ci_low"].tolist() == every["ci_low"][:12].tolist()
    known = {(r.before, r.after, r.bin): r for r in late.changes().rows}
    for row in early.changes().rows:
        assert row == known[row.before, row.after, row.bin]


def test_words_compare_the_same_way_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = plan(people(0.5, 0.3, 0.2)).ask()
    early = tracked.collect(up_to=3)
    late = tracked.collect()
    for most, rule in ((8 * 8 * 4, "with every earlier one"), (8 * 8 * 4 - 1, "from each one on")):
        monkeypatch.setattr(trend_changes, "_MAX_ROWS", most)
        assert rule in early.explain()
        assert rule in late.explain()


def test_a_window_that_may_still_come_is_not_passed_over() -> None:
    found = trend(people(0.5, 0.3, 0.2))
    gap = Trend(recipe=found.recipe, results={k: r for k, r in found.results.items() if k != 3})
    assert all(row.after != 4 for row in gap.changes("previous").rows)
    failed = Trend(recipe=found.recipe, results=gap.results, failed={3: "too small"})
    assert any((row.before, row.after) == (2, 4) for row in failed.changes("previous").rows)
    assert "Window 3 has no result: too small." in failed.explain()
    nothing = Trend(recipe=found.recipe, results={})
    assert len(nothing.changes()) == len(nothing.changes("steps")) == len(nothing) == 0
    assert "0 of 8 windows" in nothing.explain()
    assert nothing._repr_html_()


def test_groups_and_arms_have_trends_of_their_own() -> None:
    found = trend(people(0.5, 0.3, 0.2), arms=("a", "b"), windows=3)
    columns = found.columns()
    assert columns["arm"][:8] == ["a"] * 4 + ["b"] * 4
    assert found.candidates == 3 * 2 * 4
    assert {row.group for row in found.changes().rows} == {("a",), ("b",)}
    assert "a · OOV" in {found.changes().name(row) for row in found.changes().rows}
    assert found.levels(("a",))[0] == [0, 1, 2]
    with pytest.raises(InvalidInput, match="nothing was released"):
        found.levels(("c",))


def test_pictures_follow_the_number_of_lines() -> None:
    found = trend(people(0.5, 0.3, 0.2))
    assert "facet" in found.plot().to_dict()
    assert "layer" in found.only("OOV").plot().to_dict()
    fleet = ch.rehearse(people(0.5, 0.3, 0.2), policy(), seed=1)
    many = fleet.study("many", analysis=ANALYSIS).track(
        ch.intervals("age", range(0, 40, 2)), every=WEEK, windows=4, epsilon="0.2"
    )
    drawn = many.run().plot().to_dict()
    assert drawn["mark"]["type"] == "rect"
