"""Series and periods: the windows of a recipe, what a policy permits, and one task per window."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations, pairwise
from math import comb, log, sqrt
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.dap.task import task_configuration, task_configurations
from chorister.device.ledger.budget import Charge, Limit
from chorister.errors import InvalidInput, QueryRefused, RecipeError
from chorister.policy import Policy
from chorister.policy.values import number_text
from chorister.recipe import Recipe, check, refusal, verify_size
from chorister.recipe.in_words import describe
from chorister.recipe.model import json_schema
from chorister.recipe.template import template
from tests.keyboard import (
    ANALYSIS,
    POLICY,
    RECIPE,
    analysis_at,
    changed,
    policy_at,
    recipe_at,
    recipe_tree,
)

DAY = 86_400
OPENS = RECIPE.window.opens
WINDOW = {"opens": OPENS, "closes": OPENS + 2 * DAY, "ends": OPENS + 4 * DAY}
SERIES = {"windows": 26, "every": 7 * DAY, "answers": 2}
LIMITS = {"windows": 26, "longest": "177d", "answers": 2, "cells": 26 * 4}


def series_at(changes: dict[str, Any]) -> Recipe:
    return recipe_at({"window": WINDOW, "series": dict(SERIES), **changes})


def policy_with(**limits: Any) -> Policy:
    return analysis_at({"series": {**LIMITS, **limits}, "window/shortest": "1d"})


WEEKLY = series_at({})
LONGER = policy_with(longest="178d", cells=26 * 5)


# --- the model ------------------------------------------------------------------------------------


def test_a_single_question_is_a_series_of_one_window() -> None:
    assert RECIPE.window_count == RECIPE.answers == 1
    assert RECIPE.window_at(0) is RECIPE.window
    assert RECIPE.closes == RECIPE.window.closes
    assert RECIPE.answer_id(0) == RECIPE.digest
    assert RECIPE.draw_windows() == (0,)
    assert RECIPE.events(0) == {}
    assert b'"series"' not in RECIPE.canonical()
    assert b'"periods"' not in RECIPE.canonical()
    with pytest.raises(InvalidInput, match="0 to 0"):
        RECIPE.window_at(1)


def test_windows_follow_each_other() -> None:
    assert Recipe.parse(WEEKLY.canonical()) == WEEKLY
    last = WEEKLY.window_at(25)
    assert (last.opens, last.closes, last.ends) == tuple(
        time + 25 * 7 * DAY for time in WINDOW.values()
    )
    assert WEEKLY.closes == last.closes
    assert len({WEEKLY.answer_id(number) for number in range(26)}) == 26
    assert all(len(WEEKLY.answer_id(number)) == 36 for number in range(26))
    for number in (-1, 26):
        with pytest.raises(InvalidInput, match="0 to 25"):
            WEEKLY.window_at(number)


@given(
    length=st.integers(1, 50),
    gap=st.integers(0, 50),
    windows=st.integers(2, 8),
    now=st.integers(-100, 1000),
)
def test_at_most_one_window_is_open(length: int, gap: int, windows: int, now: int) -> None:
    recipe = recipe_at(
        {
            "window": {"opens": 1000, "closes": 1000 + length, "ends": 1000 + 3 * length},
            "series": {"windows": windows, "every": length + gap, "answers": 1},
        }
    )
    now += 1000
    every = [recipe.window_at(number) for number in range(windows)]
    opened = [number for number, each in enumerate(every) if each.opens <= now < each.closes]
    assert len(opened) <= 1
    assert recipe.window_open(now) == (opened[0] if opened else None)
    coming = [each.opens for each in every if each.opens > now]
    assert recipe.next_opening(now) == (coming[0] if coming else None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"series/windows": 1}, "series.windows"),
        ({"series/windows": 1001}, "series.windows"),
        ({"series/windows": 10**15}, "series.windows"),
        ({"series/every": 2 * DAY - 1}, "series.every"),
        ({"series/every": 1}, "series.every"),
        ({"series/every": 0}, "series.every"),
        ({"series/every": -DAY}, "series.every"),
        ({"series/every": 10**12}, "series.every"),
        ({"series/every": 7.5}, "series.every"),
        ({"series/answers": 0}, "series.answers"),
        ({"series/answers": 27}, "series.answers"),
        ({"series/answers": 1001}, "series.answers"),
        ({"series/surprise": 1}, "series.surprise"),
        ({"series": None}, None),
        ({"series": {}}, "series.windows"),
        ({"series/every": 366 * DAY}, "series.windows"),  # 26 years
        (
            {"window": {"opens": 2**40 - 3, "closes": 2**40 - 2, "ends": 2**40}},
            "series.windows",
        ),
        ({"periods": {}}, "periods"),
        ({"periods": {"keyboard": 0}}, "periods.keyboard"),
        ({"periods": {"keyboard": -1}}, "periods.keyboard"),
        ({"periods": {"keyboard": 2**60}}, "periods.keyboard"),
        ({"periods": {"typing": DAY}}, "periods.typing"),
        ({"periods": {"keyboard; DROP": DAY}}, None),
    ],
)
def test_refused_with_the_field_named(changes: dict[str, Any], field: str | None) -> None:
    tree = changed(recipe_tree(), {"window": WINDOW, "series": dict(SERIES)})
    with pytest.raises(RecipeError) as caught:
        Recipe.draft(json.dumps(changed(tree, changes)).encode())
    if field is not None:
        assert caught.value.field == field


NUMBERS = st.one_of(
    st.integers(-2, 30),
    st.integers(-(2**60), 2**60),
    st.sampled_from([DAY, 7 * DAY, 2**40]),
    st.none(),
    st.booleans(),
    st.text(max_size=3),
)
_VALUES = st.one_of(NUMBERS, st.dictionaries(st.sampled_from(["windows", "every"]), NUMBERS))


@settings(max_examples=300, deadline=None)
@given(
    opens=st.one_of(st.integers(0, 10), st.integers(2**40 - 10, 2**40)),
    length=st.integers(1, 10 * DAY),
    series=st.one_of(
        _VALUES,
        st.fixed_dictionaries({"windows": NUMBERS, "every": NUMBERS, "answers": NUMBERS}),
    ),
    periods=st.one_of(_VALUES, st.dictionaries(st.sampled_from(["keyboard", "user"]), NUMBERS)),
)
def test_whatever_parses_has_all_its_windows(
    opens: int, length: int, series: Any, periods: Any
) -> None:
    """Anything else is an error of ours: what is logged must be derivable by everybody."""
    window = {"opens": opens, "closes": opens + length, "ends": opens + 2 * length}
    tree = changed(recipe_tree(), {"window": window, "series": series, "periods": periods})
    try:
        recipe = Recipe.draft(json.dumps(tree).encode())
    except RecipeError:
        return
    numbers = range(recipe.window_count)
    windows = [recipe.window_at(number) for number in numbers]
    assert all(one.closes <= other.opens for one, other in pairwise(windows))
    for number, each in zip(numbers, windows, strict=True):
        assert each.bucket.start <= each.opens < each.ends <= each.bucket.end
        assert recipe.window_open(each.opens) == recipe.window_open(each.closes - 1) == number
    assert Recipe.parse(recipe.canonical()) == recipe
    recipe.events(numbers[-1])


def test_the_schema_knows_both() -> None:
    tree = json.loads(series_at({"periods": {"keyboard": 7 * DAY}}).canonical())
    jsonschema.validate(tree, json_schema())
    for wrong in ({"series/windows": 1}, {"series/more": 1}, {"periods": {"keyboard": "7d"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed(tree, wrong), json_schema())


def test_a_period_ends_where_its_window_opens() -> None:
    recipe = series_at({"periods": {"keyboard": 7 * DAY}})
    for number in (0, 25):
        opens = recipe.window_at(number).opens
        assert recipe.events(number) == {"keyboard": range(opens - 7 * DAY, opens)}
    # Since the previous window: every event counts in exactly one.
    parts = [recipe.events(number)["keyboard"] for number in range(26)]
    assert all(one.stop == other.start for one, other in pairwise(parts))
    single = recipe_at({"periods": {"keyboard": 7 * DAY}})
    assert single.events(0) == {"keyboard": range(OPENS - 7 * DAY, OPENS)}


def test_every_subset_of_windows_is_equally_likely() -> None:
    """A chi-square test at a false-alarm rate of 1e-6, by Laurent and Massart's bound."""
    recipe = series_at({"series": {"windows": 5, "every": 7 * DAY, "answers": 2}})
    draws = 5000
    drawn = Counter(recipe.draw_windows() for _ in range(draws))
    subsets = list(combinations(range(5), 2))
    assert set(drawn) == set(subsets)
    expected = draws / comb(5, 2)
    chi2 = sum((drawn[each] - expected) ** 2 / expected for each in subsets)
    freedom, x = len(subsets) - 1, log(1e6)
    assert chi2 < freedom + 2 * sqrt(freedom * x) + 2 * x
    whole = series_at({"series": {"windows": 5, "every": 7 * DAY, "answers": 5}})
    assert whole.draw_windows() == (0, 1, 2, 3, 4)


# --- what a policy permits ------------------------------------------------------------------------


def failed(recipe: Recipe, policy: Policy) -> dict[str, str]:
    found = check(recipe, policy)
    return {each.name: each.why for each in found if not each.passed}


def test_no_analysis_permits_a_series_unless_it_says_so() -> None:
    found = refusal(WEEKLY, analysis_at({"window/shortest": "1d"}))
    assert found is not None
    assert (found.name, found.field) == ("series", "series")
    assert "series" not in [each.name for each in check(RECIPE, POLICY)]


def test_limits_of_a_series() -> None:
    assert failed(WEEKLY, LONGER) == {}
    for limits in ({"windows": 25}, {"longest": "176d"}, {"answers": 1}, {"cells": 26}):
        policy = policy_with(**{"longest": "178d", "cells": 26 * 5, **limits})
        assert list(failed(WEEKLY, policy)) == ["series"], limits
        with pytest.raises(QueryRefused) as caught:
            verify_size(WEEKLY, policy)
        assert caught.value.check == "series"


def test_limits_are_met_exactly() -> None:
    parts = LONGER.cells(WEEKLY.group_by, 0)
    assert failed(WEEKLY, policy_with(longest="177d", cells=26 * parts)) == {}
    assert list(failed(WEEKLY, policy_with(longest="177d", cells=26 * parts - 1))) == ["series"]


def test_other_rules_see_each_window() -> None:
    shorter = series_at({"window": {**WINDOW, "closes": OPENS + 3600}})
    assert list(failed(shorter, LONGER)) == ["window"]


def test_when_a_series_is_open() -> None:
    def said(now: int) -> tuple[bool, str]:
        found = {each.name: each for each in check(WEEKLY, LONGER, now=now)}["open"]
        return found.passed, found.why

    assert said(OPENS - DAY) == (False, "opens in 1 day")
    assert said(OPENS) == (True, "window 1 of 26 is open for another 2 days")
    assert said(OPENS + 2 * DAY) == (False, "opens in 5 days")
    assert said(OPENS + 7 * DAY) == (True, "window 2 of 26 is open for another 2 days")
    assert said(WEEKLY.closes - 1) == (True, "window 26 of 26 is open for another 1 second")
    assert said(WEEKLY.closes) == (False, "its answer period is over")


def test_only_streams_have_periods() -> None:
    words = {
        each.name: each.why for each in check(recipe_at({"periods": {"keyboard": DAY}}), POLICY)
    }
    assert words["periods"] == "events of keyboard count for 1 day before the window opens"
    found = refusal(recipe_at({"periods": {"user": DAY}}), POLICY)
    assert found is not None
    assert (found.name, found.field) == ("periods", "periods.user")
    kept = POLICY.streams["keyboard"].retention
    longer = check(recipe_at({"periods": {"keyboard": kept + 1}}), POLICY)
    (periods,) = (each for each in longer if each.name == "periods")
    assert periods.passed
    assert "of which devices keep" in periods.why


@pytest.mark.parametrize(("every", "windows"), [(7 * DAY, 24), (30 * DAY, 6), (177 * DAY, 2)])
def test_templates_of_series_are_allowed(every: int, windows: int) -> None:
    policy = policy_with(longest="191d")
    recipe = template(policy, None, now=OPENS, columns=lambda *_: ["value"], every=every)
    assert [each.name for each in check(recipe, policy, now=OPENS) if not each.passed] == []
    assert recipe.window_count >= min(windows, 26)
    assert recipe.periods == {"keyboard": every}


@pytest.mark.parametrize("every", [60, 1000 * DAY])
def test_no_template_where_no_series_fits(every: int) -> None:
    for policy in (LONGER, POLICY):
        with pytest.raises(InvalidInput, match=r"series|windows"):
            template(policy, None, now=OPENS, columns=lambda *_: ["value"], every=every)


# --- tasks ----------------------------------------------------------------------------------------


def test_each_window_has_its_own_tasks() -> None:
    tasks = list(task_configurations(LONGER, WEEKLY))
    parts = LONGER.cells(WEEKLY.group_by, 0)
    assert len(tasks) == len({task.task_id for task in tasks}) == 26 * parts
    assert [task.number for task in tasks] == [n for n in range(26) for _ in range(parts)]
    for task in tasks:
        bucket = WEEKLY.window_at(task.number).bucket
        assert task.configuration.time_precision == bucket.length
        assert task.configuration.task_interval == (bucket.number, 1)
        assert task.configuration.task_info[33:37] == task.number.to_bytes(4)
        again = task_configuration(
            LONGER, WEEKLY, dict(task.group.values), task.group.arm, task.number
        )
        assert again == task
    some = list(task_configurations(LONGER, WEEKLY, [3]))
    assert some == tasks[3 * parts : 4 * parts]
    with pytest.raises(InvalidInput):
        task_configuration(LONGER, WEEKLY, dict(tasks[0].group.values), None, 26)


def test_nobody_enumerates_more_than_the_policy_permits() -> None:
    """Refused before the first task: an absurd number of windows costs an aggregator nothing."""
    absurd = series_at({"series": {"windows": 1000, "every": 2 * DAY, "answers": 1000}})
    for policy in (POLICY, LONGER, policy_with(windows=1000, longest="5000d", answers=1000)):
        with pytest.raises(QueryRefused, match="window"):
            task_configurations(policy, absurd)


# --- in words -------------------------------------------------------------------------------------


def told(recipe: Recipe, policy: Policy) -> str:
    return "\n".join(line for section in describe(recipe, policy) for line in section.lines)


def test_what_the_whole_series_can_cost_is_said() -> None:
    text = told(series_at({"periods": {"keyboard": 7 * DAY}}), LONGER)
    for words in (
        "in 2 of 26 windows, which each device draws at random",
        "the first window is open from 2026-11-16 00:00 UTC to 2026-11-18 00:00 UTC",
        "a window opens every 7 days, the last one at 2027-05-10 00:00 UTC",
        "only events of keyboard count that were donated in the 7 days before a window opens",
        "each of up to 2 answers is checked and charged when it is given",
        "the whole series costs at most epsilon 0.4, delta 2e-6: 40% of the epsilon 1",
        "133% of the epsilon 0.3 that user.age may cost in each period of 180 days, "
        "and 200% of its delta 1e-6, which runs out first; what exceeds it is refused",
    ):
        assert words in text
    single = told(RECIPE, POLICY)
    assert "series" not in single
    assert (
        "20% of the epsilon 1 that everything together may cost in each period of 180 days"
        in single
    )


@pytest.mark.parametrize("composition", ["basic", {"renyi": [32, 64]}])
def test_the_sum_is_the_ledgers(composition: Any) -> None:
    policy = policy_at(
        {
            "device/composition": composition,
            f"analyses/{ANALYSIS}/series": LIMITS | {"longest": "178d", "cells": 500},
        }
    )
    limit = Limit(
        path="device",
        budget=policy.device,
        compositions=(policy.device.composition,),
        charges=tuple(Charge.of(WEEKLY, number) for number in (4, 7)),
        renews=None,
    )
    spent = limit.standing().spent
    words = f"epsilon {number_text(spent.epsilon)}, delta {number_text(spent.delta)}: "
    assert words in told(WEEKLY, policy)
