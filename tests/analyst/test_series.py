"""Series: planned, asked once, collected as windows close, through crashes and other processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chorister as ch
from chorister.analyst.fleet import ReleasedSums
from chorister.analyst.rehearsal.simulation import draw_windows
from chorister.analyst.rounds import Round, RoundState
from chorister.analyst.series import Track, TrackPlan, WindowState
from chorister.analyst.spending import LedgerModel, expected_ledgers
from chorister.analyst.study import Study
from chorister.analyst.study_status import OnProgress
from chorister.clock import SettableClock
from chorister.device.ledger.budget import Charge
from chorister.errors import (
    BudgetExceeded,
    InvalidInput,
    QueryRefused,
    ResultPending,
    StudyError,
    WindowOver,
)
from tests.analyst.fleets import DEVICES, decades, fleet, generous
from tests.analyst.test_trend import SERIES, WEEK, people
from tests.keyboard import ANALYSIS

NOW = 1_700_000_000


def policy(reports: int = 6, **changes: Any) -> ch.Policy:
    return generous(reports, **{f"analyses/{ANALYSIS}/series": SERIES, **changes})


def a_study(**options: Any) -> Study:
    return fleet(options.pop("policy", policy()), **options).study("weeks", analysis=ANALYSIS)


def a_plan(study: Study, **options: Any) -> TrackPlan:
    settings: dict[str, Any] = {"every": "1w", "windows": 4, "epsilon": "0.2"}
    return study.track(decades(), **(settings | options))


def test_a_series_is_asked_once_and_collected_once(tmp_path: Path) -> None:
    study = a_study(folder=tmp_path)
    track = a_plan(study).ask()
    assert len(track.collect(up_to=2).results) == 2
    files = sorted(path.name for path in (tmp_path / "weeks").glob("*-0*.json"))
    assert files == ["round-0001.json", "window-0001-0000.json", "window-0001-0001.json"]
    stored = [(tmp_path / "weeks" / name).read_bytes() for name in files]
    again = a_plan(a_study(folder=tmp_path)).ask()
    assert len(again.study.rounds) == 1
    assert again.collect(up_to=2).columns()["estimate"].tolist() == (
        track.trend.columns()["estimate"].tolist()
    )
    assert [(tmp_path / "weeks" / name).read_bytes() for name in files] == stored
    assert not again.finished
    whole = again.collect()
    assert whole.windows == (0, 1, 2, 3)
    assert again.finished
    assert again.next_collection is None
    assert again.round.state is RoundState.COLLECTED
    (only,) = a_study(folder=tmp_path).tracks()
    assert only.trend.columns()["estimate"].tolist() == whole.columns()["estimate"].tolist()
    assert sum(result.n_reports for result in whole.results.values()) == DEVICES
    assert "a series of 4 windows" in study.history().columns()["outcome"][0]
    with pytest.raises(InvalidInput, match="series"):
        study.wait(again.round)
    with pytest.raises(InvalidInput, match="not a series"):
        Track(study, 2)


def test_a_crash_between_windows_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = a_plan(a_study(seed=5)).run().columns()["estimate"].tolist()
    study = a_study(seed=5, folder=tmp_path)
    collect = study.fleet.collect

    def dies(round_: Round, on_progress: OnProgress, save: Callable[[Round], None]) -> ReleasedSums:
        if round_.number_in_series == 2:
            raise KeyboardInterrupt
        return collect(round_, on_progress, save)

    monkeypatch.setattr(study.fleet, "collect", dies)
    track = a_plan(study).ask()
    with pytest.raises(KeyboardInterrupt):
        track.collect()
    assert [each.state for each in track.windows] == [
        WindowState.COLLECTED, WindowState.COLLECTED, WindowState.OPEN, WindowState.TO_COME,
    ] or track.trend.windows == (0, 1)  # fmt: skip
    later = a_plan(a_study(seed=5, folder=tmp_path)).ask()
    assert later.collect().columns()["estimate"].tolist() == whole


def test_only_what_is_over_is_collected() -> None:
    clock = SettableClock(NOW)
    track = a_plan(a_study(clock=clock)).ask()
    assert [each.state for each in track.windows] == ["open"] + ["to come"] * 3
    assert not track.collect().results
    assert track.next_collection == NOW + WEEK
    clock.advance(WEEK)
    assert track.collect().windows == (0,)
    assert [each.state for each in track.windows] == ["collected", "open", "to come", "to come"]
    clock.advance(2 * WEEK)
    assert [each.state for each in track.windows][1:3] == ["closed", "closed"]
    track.end()
    assert track.round.state is RoundState.WITHDRAWN
    clock.advance(WEEK)
    assert track.collect().windows == (0, 1, 2)  # those were over before
    assert [each.state for each in track.windows][3] == "ended"
    assert track.finished
    track.end()  # again
    assert "3 of 4" in repr(track)
    assert track.columns()["state"] == ["collected"] * 3 + ["ended"]
    assert "<table" in track._repr_html_()


def test_cancelling_a_series_keeps_the_windows_that_are_over() -> None:
    clock = SettableClock(NOW)
    track = a_plan(a_study(clock=clock)).ask()
    clock.advance(2 * WEEK)
    track.study.cancel()
    clock.advance(2 * WEEK)
    assert [each.state for each in track.windows] == ["closed", "closed", "ended", "ended"]
    assert track.collect().windows == (0, 1)


def test_a_window_that_is_too_small_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    study = a_study()
    track = a_plan(study).ask()
    collect = study.fleet.collect

    def short(
        round_: Round, on_progress: OnProgress, save: Callable[[Round], None]
    ) -> ReleasedSums:
        if round_.number_in_series == 1:
            raise ch.errors.CohortTooSmall("too few", reports=3, needed=50)
        if round_.number_in_series == 2:
            raise WindowOver("too late")
        return collect(round_, on_progress, save)

    monkeypatch.setattr(study.fleet, "collect", short)
    found = track.collect()
    assert found.windows == (0, 3)
    assert found.failed == {1: "too few", 2: "too late"}
    assert track.finished
    assert [each.why for each in track.windows] == ["", "too few", "too late", ""]


def test_a_window_that_is_not_released_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    study = a_study()
    track = a_plan(study).ask()
    collect = study.fleet.collect
    tries: list[Round] = []

    def late(round_: Round, on_progress: OnProgress, save: Callable[[Round], None]) -> ReleasedSums:
        if round_.number_in_series == 1 and len(tries) < 2:
            tries.append(round_)
            raise ResultPending("the helper is down")
        return collect(round_, on_progress, save)

    monkeypatch.setattr(study.fleet, "collect", late)
    monkeypatch.setattr(study.fleet, "pause", lambda _: None)
    with pytest.raises(ResultPending, match="helper"):
        track.collect()
    assert track.trend.windows == (0, 2, 3)
    assert not track.trend.failed
    assert not track.finished
    assert track.wait().windows == (0, 1, 2, 3)
    assert len(tries) == 2


def test_one_process_collects_at_a_time(tmp_path: Path) -> None:
    track = a_plan(a_study(folder=tmp_path)).ask()
    other = a_plan(a_study(folder=tmp_path)).ask()
    with (
        track.study.fleet.archive.waiting("weeks", 1),
        pytest.raises(StudyError, match="another process"),
    ):
        other.collect()


def test_waiting_goes_on_while_another_process_collects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    track = a_plan(a_study(folder=tmp_path)).ask()
    other = a_plan(a_study(folder=tmp_path)).ask()
    held = ExitStack()
    held.enter_context(other.study.fleet.archive.waiting("weeks", 1))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            held.close()
            other.collect()

    monkeypatch.setattr(track.study.fleet, "pause", pause)
    with held:
        found = track.wait()
    assert len(pauses) == 2
    assert found.columns()["estimate"].tolist() == other.trend.columns()["estimate"].tolist()


def test_a_round_of_a_window_is_read_as_it_was_written(tmp_path: Path) -> None:
    study = a_study(folder=tmp_path)
    a_plan(study).ask().collect(up_to=1)
    (stored,) = study.fleet.archive.windows("weeks", 1).values()
    again = Round.from_json(stored.to_json())
    assert again.number_in_series == 0
    assert again.window == study.rounds[0].recipe.window
    plain = replace(stored, number_in_series=None)
    assert "window" not in json.loads(plain.to_json())
    assert Round.from_json(plain.to_json()).number_in_series is None


def test_the_cost_says_what_a_device_and_a_window_get() -> None:
    plan = a_plan(a_study(), answers_per_device=2)
    cost = plan.cost()
    assert (cost.windows, cost.answers) == (4, 2)
    assert cost.expected == DEVICES // 2
    assert cost.epsilon == Decimal("0.2")
    assert cost.whole_epsilon == Decimal("0.4")
    assert cost.allowed
    assert cost.change_error == pytest.approx(cost.level_error * 2**0.5)
    assert cost.shift is not None
    assert cost.lasting_shift is not None
    assert cost.shift > cost.lasting_shift > 3 * cost.level_error
    words = cost.explain()
    assert "answers 2 of them" in words
    assert "all 2 together at most epsilon 0.4" in words
    assert "is found with a chance of 80%" in words
    smaller = plan.cost(reports=2 * (cost.expected or 0))
    assert (smaller.shift or 1.0) < cost.shift
    plan.ask()
    assert plan.cost().asked == 1
    assert "asked already" in plan.cost().explain()
    assert plan.again().cost().asked is None
    assert "<p>" in plan._repr_html_()
    with pytest.raises(InvalidInput, match="level"):
        plan.cost(level=1.0)
    with pytest.raises(InvalidInput, match="plan a series"):
        replace(plan, question=replace(plan.question, series=None)).cost()


def test_the_power_that_was_promised_is_found() -> None:
    """150 series with the stated shift; the promise less 6 sigma is 1e-9 away."""
    shape = people(0.9, 0.1, devices=80_000)
    drawn = ch.rehearse(shape, policy(), seed=1).study("p", analysis=ANALYSIS)
    options: dict[str, Any] = {"every": WEEK, "windows": 6, "epsilon": "0.2"}
    feature = ch.intervals("age", [10, 20, 30])
    shift = drawn.track(feature, **options).cost(level=0.1, chance=0.8).shift
    assert shift is not None
    moved = people(0.9 - shift, 0.1 + shift, devices=80_000)
    found = 0
    for seed in range(150):
        study = ch.rehearse(shape, policy(), later=[shape] * 2 + [moved], seed=seed).study(
            "p", analysis=ANALYSIS
        )
        rows = study.track(feature, **options).run().changes().rows
        found += any(row.low > 0.0 for row in rows if (row.before, row.after, row.bin) == (2, 3, 2))
    assert abs(found / 150 - 0.8) < 6 * (0.16 / 150) ** 0.5 + 0.02


# --- What it costs ------------------------------------------------------------------------------


def test_a_series_counts_as_all_that_it_can_cost() -> None:
    study = a_study(policy=policy(3))
    with pytest.raises(BudgetExceeded):
        a_plan(study, answers_per_device=4).ask()
    assert not study.rounds
    assert a_plan(study, answers_per_device=4).cost().exhausted is not None
    a_plan(study, answers_per_device=3).ask().collect(up_to=1)
    # All three are spent, although only one window was collected.
    with pytest.raises(BudgetExceeded):
        study.histogram(decades(), epsilon="0.2").run()
    (ledger,) = expected_ledgers(study.fleet).ledgers
    assert len(ledger.charges) == 3


def test_the_expected_spending_is_what_the_rehearsed_ledgers_say() -> None:
    study = a_study(reach=0.5, seed=2)
    track = a_plan(study, answers_per_device=2).ask()
    found = track.collect()
    ledgers = study.fleet._ledgers  # type: ignore[attr-defined]
    often = {len(ledger.charges): int(weight.sum()) for ledger, weight in ledgers.classes.values()}
    answered = sum(count * devices for count, devices in often.items())
    assert answered == sum(result.n_reports for result in found.results.values())
    assert max(often) == 2
    # Of two drawn windows, a device is online in each with a chance of a half.
    for times, chance in ((0, 0.25), (1, 0.5), (2, 0.25)):
        assert abs(often[times] / DEVICES - chance) < 6 * (chance * (1 - chance) / DEVICES) ** 0.5


def test_budgets_that_renew_pay_for_long_series() -> None:
    changes = {f"analyses/{ANALYSIS}/budget/period": "7d", "device/period": "7d"}
    weekly = policy(1, **changes)
    study = a_study(policy=weekly)
    plan = a_plan(study, answers_per_device=4, epsilon="0.5")
    assert plan.cost().exhausted is None
    recipe = plan.question.recipe(number=1, opens=NOW)
    empty = LedgerModel.empty(weekly)
    assert empty.payable(recipe) == (4, None)
    assert len(empty.after_answers(recipe, 4).charges) == 1
    daily = a_plan(study, every="1d", answers_per_device=4, epsilon="0.5")
    dense = daily.question.recipe(number=1, opens=NOW)
    paid, why = empty.payable(dense)
    assert paid == 1
    assert isinstance(why, BudgetExceeded)
    spent = empty.after(Charge.of(recipe))
    assert spent.payable(recipe)[0] == 0


def test_the_policy_limits_series() -> None:
    with pytest.raises(QueryRefused, match="answers_per_device"):
        a_plan(a_study(), windows=61).ask()
    none = a_study(policy=generous(6))
    with pytest.raises(QueryRefused, match="series"):
        a_plan(none).ask()
    for wrong in ({"windows": 1}, {"answers_per_device": 5}, {"answers_per_device": 0}):
        with pytest.raises(InvalidInput):
            a_plan(a_study(), **wrong)
    with pytest.raises(InvalidInput, match="once per study"):
        a_plan(a_study(), answers_per_device=2, participation="0.5")


def test_periods_are_those_since_the_previous_window() -> None:
    study = a_study()
    words = ch.categories("ngram", ["good morning"])
    plan = study.track(words, every="1w", windows=4, query="SELECT ngram FROM keyboard")
    recipe = plan.question.recipe(number=1, opens=NOW)
    assert recipe.periods == {"keyboard": WEEK}
    assert a_plan(study).question.recipe(number=1, opens=NOW).periods is None  # a profile has none
    asked = study.histogram(words, query="SELECT ngram FROM keyboard", period={"keyboard": "7d"})
    assert asked.recipe(number=1, opens=NOW).periods == {"keyboard": WEEK}
    plain = study.histogram(words, query="SELECT ngram FROM keyboard")
    assert plain.digest != asked.digest
    with pytest.raises(InvalidInput, match="not a stream"):
        study.histogram(words, query="SELECT ngram FROM keyboard", period={"user": "7d"})


def test_events_that_expire_before_a_late_answer_are_remarked_on() -> None:
    study = a_study()
    kept = study.fleet.policy.streams["keyboard"].retention // 86_400
    words = ch.categories("ngram", ["good morning"])

    def remarks(period: int, window: int) -> str:
        plan = study.track(
            words, every="4w", windows=4, query="SELECT ngram FROM keyboard",
            period=f"{period}d", window=f"{window}d",
        )  # fmt: skip
        return " ".join(plan.cost().remarks)

    assert "Events of keyboard" not in remarks(kept - 7, 7)
    assert "has only 23 days of them left" in remarks(24, 7)


# --- The rehearsal ------------------------------------------------------------------------------


def test_devices_draw_subsets_of_the_windows() -> None:
    """Against drawing every device by itself: counts, and how two windows go together."""
    study = a_study()
    recipe = a_plan(study, windows=5, answers_per_device=2).question.recipe(number=1, opens=NOW)
    rng = np.random.default_rng(1)
    devices = np.array([40_000, 7])
    found, often = draw_windows(recipe, devices, 2, 1.0, rng)
    assert (found.sum(axis=0) == 2 * devices).all()
    assert (often[2] == devices).all()
    spread = 6 * (40_000 * 0.4 * 0.6) ** 0.5
    assert (np.abs(found[:, 0] - 16_000) < spread).all()
    runs = np.stack(
        [draw_windows(recipe, np.array([100]), 2, 1.0, rng)[0][:, 0] for _ in range(2000)]
    )
    # Two indicators of a subset of 2 of 5 have the covariance 2/5 1/4 - (2/5)^2 = -0.06.
    assert abs(np.cov(runs.T)[0, 1] / 100 + 0.06) < 6 * 0.24 / 2000**0.5
    limited, often = draw_windows(recipe, devices, 1, 1.0, rng)
    assert (limited.sum(axis=0) == devices).all()
    assert (often[1] == devices).all()


def test_people_who_drift_are_the_same_devices() -> None:
    first = {"age": [15, 25], "count": [600, 400]}
    fleet = ch.rehearse(first, policy(), later=[{"age": [15, 25, 35], "count": [500, 400, 100]}])
    assert fleet.people.weights.tolist() == [500, 100, 300, 100]
    question = fleet.study("d", analysis=ANALYSIS).track(
        ch.intervals("age", [10, 20, 30, 40]), windows=3, local_epsilon="0.1", min_cohort=50
    ).question  # fmt: skip
    assert fleet.truth(question).tolist() == [0, 600, 400, 0]
    assert fleet.truth(question, window=1).tolist() == [0, 500, 400, 100]
    assert fleet.truth(question, window=9).tolist() == [0, 500, 400, 100]
    with pytest.raises(InvalidInput, match="as many devices as the first"):
        ch.rehearse(first, policy(), later=[{"age": [15], "count": [999]}])


def test_a_rehearsed_series_draws_the_same_after_a_restart(tmp_path: Path) -> None:
    one = a_plan(a_study(seed=11)).run()
    track = a_plan(a_study(seed=11, folder=tmp_path)).ask()
    track.collect(up_to=1)
    other = a_plan(a_study(seed=11, folder=tmp_path)).ask().collect()
    assert one.columns()["estimate"].tolist() == other.columns()["estimate"].tolist()
