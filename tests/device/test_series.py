"""Series on a device: drawn once, each window answered and charged like a single question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest

from chorister.clock import SettableClock
from chorister.device.audit import Event
from chorister.device.audit_pages import as_text, totals
from chorister.device.database import transaction
from chorister.device.ledger import Ledger
from chorister.device.ledger.budget import Charge
from chorister.device.ledger.ledger_entries import Chain, Charged
from chorister.device.records import AttemptState
from chorister.errors import LedgerTampered, QueryRefused
from chorister.policy import Policy
from chorister.recipe import Recipe
from tests.device.home import TIMING, Home, at_home
from tests.device.world import ANALYSIS, DAY, NOW, a_generous_policy, a_recipe, bits_of
from tests.keyboard import REMOVE

EVERY = 2 * DAY
WINDOW = {"opens": NOW - 3600, "closes": NOW + DAY, "ends": NOW + 2 * DAY}


def a_policy(changes: dict[str, Any] | None = None) -> Policy:
    """Permits series. Its budgets never renew: a period could begin between two windows."""
    limits = {"windows": 1000, "longest": "1000d", "answers": 1000, "cells": 10_000}
    return a_generous_policy(
        {
            f"analyses/{ANALYSIS}/series": limits,
            f"analyses/{ANALYSIS}/window/shortest": "1h",
            "device/period": REMOVE,
            f"analyses/{ANALYSIS}/budget/period": REMOVE,
            **(changes or {}),
        }
    )


def a_series(windows: int = 4, answers: int = 4, every: int = EVERY, **changes: Any) -> Recipe:
    """A series that opened an hour ago."""
    series = {"windows": windows, "every": every, "answers": answers}
    return a_recipe("weekly", {"window": WINDOW, "series": series, **changes})


POLICY = a_policy()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path, POLICY) as home:
        home.donate()
        yield home


def windows_charged(home: Home) -> list[int | None]:
    entries = home.device._opened().ledger.entries()
    return [entry.charge.window for entry in entries if isinstance(entry, Charged)]


def live_through(home: Home, recipe: Recipe) -> list[tuple[str, ...]]:
    """Poll in each window, and send what is due; return what was answered in each."""
    answered = []
    for number in range(recipe.window_count):
        opens = recipe.window_at(number).opens
        home.clock.set(max(home.clock.now(), opens + 3600))
        answered.append(home.ask(recipe).answered)
        home.deliver()
    return answered


def test_every_window_is_answered_like_a_single_question(home: Home) -> None:
    recipe = a_series()
    assert live_through(home, recipe) == [("weekly",)] * 4
    assert windows_charged(home) == [0, 1, 2, 3]
    assert len(home.network.reports) == 4
    tasks = [bits_of(POLICY, recipe, report)[0] for report in home.network.reports]
    assert [task.number for task in tasks] == [0, 1, 2, 3]
    counted = Counter(home.events())
    assert counted[Event.DRAWN] == 1
    assert counted[Event.CHARGED] == counted[Event.REPORTED] == counted[Event.UPLOADED] == 4
    assert home.device.status().recipes == {AttemptState.SENT: 4}
    home.device.verify()
    # Afterwards nothing is left to answer.
    home.clock.set(recipe.closes)
    assert home.ask(recipe).answered == ()


def test_each_window_is_answered_once(home: Home) -> None:
    recipe = a_series()
    for _ in range(3):
        home.ask(recipe)
    assert windows_charged(home) == [0]


@pytest.mark.parametrize("answers", [1, 2, 3])
def test_a_device_answers_in_the_windows_it_drew(home: Home, answers: int) -> None:
    recipe = a_series(windows=6, answers=answers)
    live_through(home, recipe)
    draw = home.device._opened().attempts.draw(recipe)
    # Windows that were over at the draw may be among them; here none was.
    assert draw is not None
    assert windows_charged(home) == list(draw.windows)
    assert len(draw.windows) == answers


def test_an_explanation_knows_what_was_drawn(home: Home) -> None:
    recipe = a_series(windows=4, answers=1)
    assert "draw" not in {check.name for check in home.device.explain(recipe)}
    home.ask(recipe)
    draw = home.device._opened().attempts.draw(recipe)
    assert draw is not None
    for number in range(4):
        home.clock.set(max(home.clock.now(), recipe.window_at(number).opens))
        (outcome,) = (each for each in home.device.explain(recipe) if each.name == "draw")
        assert outcome.passed == (number in draw.windows)
        assert outcome.why == f"of 4 windows this device drew {draw.windows[0] + 1}"


def test_late_devices_answer_no_more_often(tmp_path: Path) -> None:
    """One that sees a series at its last window answers there with its share of 1 in 4.

    With 400 devices, 100 are expected; Hoeffding's bound at a false-alarm rate of 1e-6.
    """
    recipe, count = a_series(windows=4, answers=1), 400
    drawn = sum(3 in recipe.draw_windows() for _ in range(count))
    assert abs(drawn - count / 4) < sqrt(count * log(2e6) / 2)
    with at_home(tmp_path, POLICY) as home:
        home.donate()
        home.clock.set(recipe.window_at(3).opens + 60)
        home.ask(recipe)
        draw = home.device._opened().attempts.draw(recipe)
        assert draw is not None
        assert windows_charged(home) == ([3] if draw.windows == (3,) else [])


def test_one_coin_and_one_arm_for_the_whole_series(home: Home) -> None:
    never = a_series(participation={"probability": f"0.{'0' * 23}1", "once_per_study": False})
    assert live_through(home, never) == [()] * 4
    assert home.device.status().recipes == {AttemptState.DECLINED: 1}
    arms = [{"name": "control", "weight": 1}, {"name": "treated", "weight": 1}]
    later = {name: time + 30 * DAY for name, time in WINDOW.items()}
    live_through(home, a_series(arms=arms, group_by=[], window=later))
    sent = [r.entry.sent for r in home.device.audit.records() if r.entry.sent is not None]
    assert len(sent) == 4
    assert len({each.arm for each in sent}) == 1


def test_a_refusal_in_one_window_moves_no_other(tmp_path: Path) -> None:
    """The budget has two reports, three windows were drawn: the third is refused, not replaced."""
    policy = a_policy({f"analyses/{ANALYSIS}/budget/reports": 2})
    with at_home(tmp_path, policy) as home:
        home.donate()
        recipe = a_series(windows=3, answers=3)
        assert live_through(home, recipe) == [("weekly",), ("weekly",), ()]
        assert windows_charged(home) == [0, 1]
        refused = home.last(Event.REFUSED)
        assert refused.check == f"analyses.{ANALYSIS}.budget.reports"
        assert refused.question is not None
        assert refused.question.window == 2
    folder = tmp_path / "other"
    folder.mkdir()
    with at_home(folder, policy) as home:
        home.donate()
        recipe = a_series(windows=8, answers=4)
        live_through(home, recipe)
        draw = home.device._opened().attempts.draw(recipe)
        assert draw is not None
        assert windows_charged(home) == list(draw.windows[:2])


def test_the_policy_in_force_decides_in_each_window(home: Home) -> None:
    recipe = a_series()
    home.ask(recipe)
    home.policy = a_policy({f"analyses/{ANALYSIS}/series/answers": 3})
    home.restart()
    home.clock.set(recipe.window_at(1).opens)
    assert home.ask(recipe).refused == ("weekly",)
    assert home.last(Event.REFUSED).check == "series"
    home.policy = POLICY
    home.restart()
    assert home.ask(recipe).answered == ("weekly",)
    assert windows_charged(home) == [0, 1]


def test_a_series_that_ended_is_not_answered_again(home: Home) -> None:
    """An author ends a recipe, or its key is revoked: it is no longer on the list."""
    recipe = a_series()
    home.ask(recipe)
    for number in (1, 2, 3):
        home.clock.set(recipe.window_at(number).opens)
        assert home.ask().answered == ()
    assert windows_charged(home) == [0]


def test_between_two_windows_nothing_happens(home: Home) -> None:
    recipe = a_series()
    home.clock.set(recipe.window_at(0).closes)
    before = home.events()
    run = home.ask(recipe)
    assert (run.answered, run.refused, run.declined) == ((), (), ())
    assert home.events() == before


def test_once_per_study_counts_other_recipes_only(home: Home) -> None:
    once = {"probability": "1", "once_per_study": True}
    recipe = a_series(participation=once)
    assert live_through(home, recipe) == [("weekly",)] * 4
    other = a_series(participation=once, id="other")
    home.clock.set(other.window_at(3).opens + 7200)
    assert home.ask(other).refused == ("other",)
    assert home.last(Event.REFUSED).check == "participation"


def test_the_window_closes_while_the_query_runs(home: Home) -> None:
    """What can't be sent in time is dropped, stays charged, and leaves the next window alone."""
    recipe = a_series(windows=2, answers=2)
    home.clock.set(recipe.window_at(0).closes - TIMING.query - TIMING.slack - 2)
    home.ask(recipe)
    assert windows_charged(home) == [0]
    home.clock.set(recipe.window_at(0).closes)
    home.device.upload_due()
    assert Event.DROPPED in home.events()
    assert home.network.reports == []
    home.clock.set(recipe.window_at(1).opens)
    home.ask(recipe)
    home.deliver()
    assert len(home.network.reports) == 1


def test_a_window_that_closes_too_soon_is_not_charged(home: Home) -> None:
    recipe = a_series(windows=2, answers=1)
    home.clock.set(recipe.window_at(0).closes - 1)
    assert home.ask(recipe).refused == ("weekly",)
    assert home.last(Event.REFUSED).check == "time"
    # Nothing was drawn yet, either: what was refused must not decide about the draw.
    assert home.device._opened().attempts.draw(recipe) is None


def test_windows_without_a_gap_follow_each_other(home: Home) -> None:
    length = WINDOW["closes"] - WINDOW["opens"]
    recipe = a_series(windows=3, answers=3, every=length)
    assert live_through(home, recipe) == [("weekly",)] * 3
    assert windows_charged(home) == [0, 1, 2]


def test_a_clock_set_back_opens_no_window_twice(home: Home) -> None:
    recipe = a_series()
    home.clock.set(recipe.window_at(2).opens)
    home.ask(recipe)
    home.clock.set(recipe.window_at(0).opens)
    home.device.run_once()
    home.clock.set(recipe.window_at(2).opens + 7200)
    home.ask(recipe)
    assert windows_charged(home) == [2]


def test_lost_draws_and_attempts_do_not_count(home: Home) -> None:
    """The ledger alone says how often was answered, whatever became of the other tables."""
    recipe = a_series(windows=8, answers=2)
    for number in range(8):
        home.clock.set(recipe.window_at(number).opens + 60)
        for _ in range(3):
            connection = home.device._opened().connection
            for table in ("attempts", "draws", "outbox", "refusals"):
                connection.execute(f"DELETE FROM {table}")  # noqa: S608
            home.ask(recipe)
    charged = windows_charged(home)
    assert len(charged) <= 2
    assert len(set(charged)) == len(charged)


# --- the ledger -----------------------------------------------------------------------------------


def test_a_charge_names_its_window() -> None:
    single = a_recipe("one")
    assert b'"window"' not in Charge.of(single).canonical()
    recipe = a_series(windows=4, answers=2)
    charge = Charge.of(recipe, 3)
    assert (charge.window, charge.answers) == (3, 2)
    assert charge.privacy == recipe.privacy
    with pytest.raises(ValueError, match="window of a series"):
        Charge.model_validate(charge.model_dump() | {"answers": None})


def a_ledger(home: Home) -> tuple[Ledger, SettableClock]:
    return home.device._opened().ledger, home.clock


def test_the_ledger_counts_windows(home: Home) -> None:
    recipe = a_series(windows=4, answers=2)
    home.ask()
    ledger, clock = a_ledger(home)
    connection = home.device._opened().connection
    for number in (2, 0):
        with transaction(connection):
            ledger.append(Charge.of(recipe, number), clock.now())
    with pytest.raises(QueryRefused, match="window 3 of this series was charged before"):
        ledger.check(Charge.of(recipe, 2), clock.now())
    with pytest.raises(QueryRefused, match="2 windows of this series were charged"):
        ledger.check(Charge.of(recipe, 1), clock.now())
    assert ledger.charged(recipe.digest)


def test_a_chain_with_a_window_too_many_is_not_believed(home: Home) -> None:
    """Entries that would follow the chain, written by somebody with the database's key."""
    recipe = a_series(windows=4, answers=1)
    home.ask()
    ledger, clock = a_ledger(home)
    with transaction(home.device._opened().connection):
        ledger.append(Charge.of(recipe, 0), clock.now())
    rows = [entry.canonical() for entry in ledger.entries()]
    for number in (0, 1):
        chain = Chain()
        for sequence, data in enumerate(rows):
            chain.extend(sequence, data)
        entry = Charged(**chain.place(clock.now()), charge=Charge.of(recipe, number))
        with pytest.raises(LedgerTampered, match="of this series"):
            chain.extend(len(rows), entry.canonical())


def test_the_whole_series_costs_what_the_ledger_says(home: Home) -> None:
    before = home.device._opened().ledger.remaining(home.clock.now())
    recipe = a_series(windows=6, answers=3)
    live_through(home, recipe)
    opened = home.device._opened()
    after = opened.ledger.remaining(opened.clock.decision_time())
    for one, other in zip(before, after, strict=True):
        if other.reports:
            assert other.reports - one.reports == 3
            assert other.spent.epsilon - one.spent.epsilon == 3 * recipe.privacy.epsilon
            assert other.spent.delta - one.spent.delta == 3 * recipe.privacy.delta


def test_the_status_tells_what_is_to_come(home: Home) -> None:
    recipe = a_series(windows=4, answers=4)
    assert home.device.status().series == ()
    home.ask(recipe)
    (coming,) = home.device.status().series
    assert coming.recipe == "weekly"
    assert coming.opens == tuple(recipe.window_at(number).opens for number in (1, 2, 3))
    home.clock.set(recipe.closes)
    assert home.device.status().series == ()
    # What can no longer be answered is forgotten, by the cosigners' time.
    home.clock.advance(60)
    home.ask()
    assert home.device._opened().attempts.draw(recipe) is None


# --- in words -------------------------------------------------------------------------------------


def test_the_audit_log_tells_of_a_series(home: Home) -> None:
    recipe = a_series(windows=4, answers=2, periods={"keyboard": 7 * DAY})
    live_through(home, recipe)
    text = as_text(home.device.audit.records())
    assert "of 4 windows this device drew 2, at random and only once; still to open: 20" in text
    charged = windows_charged(home)
    for number in charged:
        assert f"in 4 windows, this is number {(number or 0) + 1}" in text
    assert "events of keyboard from 7 days before the window opens" in text
    said = totals(home.device.audit.records())
    assert "1 question was put to this device. It took part in 1 and refused 0" in said[0]
    assert "2 reports left it" in said[0]
    total = 2 * recipe.privacy.epsilon
    assert f"at most epsilon {total}" in said[1]
