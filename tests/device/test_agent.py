"""The agent, from recipe to report, with real databases, noise, shares and seals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorister.device.audit import Event
from chorister.device.ledger.ledger import Ledger
from chorister.device.ledger.ledger_entries import Entry
from chorister.device.outbox import Report, make_report
from chorister.device.records import AttemptState
from chorister.device.run import RunStep
from chorister.recipe import Recipe
from tests.device.home import Home, at_home
from tests.device.world import (
    DAY,
    REGISTRY,
    a_generous_policy,
    a_recipe,
    bits_of,
    ids,
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        yield home


def test_a_recipe_becomes_one_verified_report(home: Home) -> None:
    home.donate()
    recipe = a_recipe("one")
    home.ask(recipe)
    assert not home.network.posts
    home.deliver()
    (report,) = home.network.reports
    task, bits = bits_of(home.policy, recipe, report)
    assert dict(task.group.values) == {"user.locale": "de_DE"}
    assert sum(bits) <= recipe.randomizer.max_weight
    assert home.device.status().outbox == ()
    assert home.device.status().recipes == {AttemptState.SENT: 1}
    assert home.events()[-3:] == [Event.CHARGED, Event.REPORTED, Event.UPLOADED]
    reported = home.last(Event.REPORTED)
    assert reported.sent is not None
    assert list(reported.sent.ones) == [i for i, bit in enumerate(bits) if bit]
    assert reported.sent.report == ids(report).hex()
    home.device.audit.verify()


def test_nothing_is_asked_twice(home: Home) -> None:
    recipe = a_recipe("one")
    for _ in range(3):
        home.ask(recipe)
        home.deliver()
        home.restart()
    assert len(home.network.posts) == 1
    assert home.events().count(Event.CHARGED) == 1


def test_all_bodies_are_fetched_whether_answered_or_not_and_once_for_each_list(home: Home) -> None:
    recipes = [a_recipe("one"), a_recipe("two", {"privacy/min_cohort": 2})]
    for expected in (["list.tlog-proof", "list", *["body"] * 4], ["list.tlog-proof", "list"]):
        home.network.gets.clear()
        home.ask(*recipes)
        fetched = [url.removeprefix(REGISTRY).split("/")[0] for url in home.network.gets]
        assert fetched == expected


def test_a_device_without_data_reports_too(home: Home) -> None:
    recipe = a_recipe("one")
    home.ask(recipe)
    home.deliver()
    task, _ = bits_of(home.policy, recipe, home.network.reports[0])
    assert dict(task.group.values) == {"user.locale": "other"}


@pytest.mark.parametrize("how", ["opted in", "opted out", "paused", "no network"])
def test_every_poll_deletes_what_is_older_than_its_retention(home: Home, how: str) -> None:
    home.donate()
    if how == "opted out":
        home.device.opt_out(purge=False)
    if how == "paused":
        home.device.pause()
    home.network.down = how == "no network"
    for days, kept in ((1, True), (4000, False)):
        home.clock.advance(days * DAY)
        home.network.log.publish([], time=home.clock.now())
        home.run()
        connection = home.device._opened().store._connection
        rows = connection.execute("SELECT count(*) FROM stream_keyboard").fetchall()
        assert rows == [(int(kept),)]


def test_the_coin_is_flipped_once_and_remembered(home: Home) -> None:
    recipe = a_recipe("one", {"participation/probability": "0.000000000000000000000001"})
    for _ in range(3):
        home.ask(recipe)
        home.restart()
    assert home.events().count(Event.NOT_DRAWN) == 1
    assert home.device.status().recipes == {AttemptState.DECLINED: 1}
    assert not home.device.status().outbox


def test_a_jump_of_the_clock_flips_no_coin_again(home: Home, monkeypatch: Any) -> None:
    flips: list[object] = []

    def tails(probability: object, **_: object) -> bool:
        flips.append(probability)
        return False

    monkeypatch.setattr("chorister.device.agent.flip", tails)
    recipe = a_recipe("one", {"participation/probability": "0.5"})
    assert home.ask(recipe).declined == ("one",)
    now = home.clock.now()
    for jump in (400 * DAY, 7 * DAY, -400 * DAY):
        home.clock.set(now + jump)
        home.run()
        home.clock.set(now)
        home.run()
    assert len(flips) == 1
    # With its window closed by the cosigners' time as well, it is forgotten.
    home.clock.set(recipe.window.closes + 1)
    home.ask()
    assert home.device.status().recipes == {}


def test_of_two_reasons_to_refuse_that_of_the_query_counts(home: Home) -> None:
    """Though the device looks for the others while the query is compiled."""
    once = {"participation": {"probability": "1", "once_per_study": True}}
    assert home.ask(a_recipe("one", once)).answered == ("one",)
    wrong = {**once, "query": "SELECT age, nothing AS ngram FROM keyboard, user"}
    assert home.ask(a_recipe("two", once), a_recipe("three", wrong)).refused == ("two", "three")
    refused = [r.entry for r in home.device.audit.records() if r.entry.event is Event.REFUSED]
    assert {entry.check for entry in refused} == {"participation", "query"}


def test_no_coin_is_flipped_for_a_recipe_that_ends_too_soon(home: Home, monkeypatch: Any) -> None:
    monkeypatch.setattr("chorister.device.agent.flip", lambda *_, **__: pytest.fail("flipped"))
    recipe = a_recipe("one")
    home.clock.set(recipe.window.closes - 3)
    assert home.ask(recipe).refused == ("one",)
    assert home.last(Event.REFUSED).check == "time"


def test_the_arm_is_drawn_by_the_device_and_kept(home: Home) -> None:
    arms = [{"name": "a", "weight": 1}, {"name": "b", "weight": 1}]
    recipe = a_recipe("one", {"arms": arms, "group_by": []})
    home.ask(recipe)
    home.deliver()
    task, _ = bits_of(home.policy, recipe, home.network.reports[0])
    sent = home.last(Event.REPORTED).sent
    assert sent is not None
    assert task.group.arm == sent.arm
    assert sent.arm in ("a", "b")


def test_a_study_is_answered_once_where_it_says_so(tmp_path: Path) -> None:
    with at_home(tmp_path, a_generous_policy()) as home:
        once = {"participation/once_per_study": True}
        study = [a_recipe(name, once) for name in ("one", "two", "three")]
        home.ask(*study, a_recipe("other", {**once, "study": "other"}))
        assert home.events().count(Event.CHARGED) == 2
        refused = [r.entry for r in home.device.audit.records() if r.entry.event is Event.REFUSED]
        assert [entry.check for entry in refused] == ["participation"] * 2


def test_whether_a_study_was_answered_is_known_without_reading_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take longer with every charge that a device ever made."""

    def entries(_: Ledger) -> tuple[Entry, ...]:
        raise AssertionError("the whole ledger was read")

    with at_home(tmp_path, a_generous_policy()) as home:
        once = {"participation/once_per_study": True}
        monkeypatch.setattr(Ledger, "entries", entries)
        home.ask(a_recipe("one", once), a_recipe("two", once))
        assert home.events().count(Event.CHARGED) == 1
        assert home.last(Event.REFUSED).check == "participation"


@pytest.mark.parametrize("interrupted", [False, True], ids=["at once", "after a crash"])
def test_a_report_that_can_t_be_made_stops_no_other(
    tmp_path: Path, monkeypatch: Any, interrupted: bool
) -> None:
    def fail_for_one(recipe: Recipe, *rest: Any) -> Report:
        if recipe.id == "one":
            raise ValueError("an error of a kind that nobody thought of")
        return make_report(recipe, *rest)

    def hook(step: RunStep) -> None:
        if step is RunStep.QUERIED and interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr("chorister.device.agent.make_report", fail_for_one)
    with at_home(tmp_path, a_generous_policy()) as home:
        home.restart(hook=hook)
        with contextlib.suppress(KeyboardInterrupt):
            home.ask(a_recipe("one"), a_recipe("two"))
        home.restart()
        home.run()
        assert home.device.status().recipes == {AttemptState.DROPPED: 1, AttemptState.QUEUED: 1}
        assert "ValueError" in home.last(Event.DROPPED).why
