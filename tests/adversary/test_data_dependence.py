"""Queries whose failure, duration, memory or result depends on the data.

A report is sent all the same, at the time that was drawn before the query ran: nobody outside can
tell a device with data from one without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorister.clock import SECOND
from chorister.device import Timing
from chorister.device.audit import Event
from chorister.device.run import RunStep
from tests.device.home import Home, at_home, the_sandbox
from tests.device.world import NOW, a_generous_policy, a_recipe, bits_of

TIMING = Timing(query=1, slack=5, housekeeping=1, settle=0, spread=600, poll=600)
LATEST = 30.0  # seconds that a run takes on a busy machine; to their ends queries take hours
MANY = "keyboard AS a, keyboard AS b, keyboard AS c, keyboard AS d, keyboard AS e"
WIDE = "a.ngram || b.ngram || c.ngram || d.ngram || e.ngram"
COLUMNS = "SELECT user.age AS age, keyboard.ngram AS ngram FROM keyboard, user"
QUERIES = {
    "duration: a cross join of a billion rows": f"{COLUMNS}, {MANY} WHERE {WIDE} = 'never'",
    "memory: rows without end": f"{COLUMNS}, {MANY}",
    "failure: only where the person typed something": f"{COLUMNS}, {MANY} WHERE a.ngram <> b.ngram",
    "nothing: a query that finds no row": f"{COLUMNS} WHERE user.age < 0",
    "no failure at all": COLUMNS,
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        yield home


@pytest.mark.parametrize("data", [False, True], ids=["without data", "with data"])
@pytest.mark.parametrize("name", QUERIES)
def test_a_report_leaves_at_the_time_drawn_before(name: str, data: bool, home: Home) -> None:
    if data:
        home.donate()
        events = [{"ngram": f"word {i} " * 20, "perplexity": float(i)} for i in range(200)]
        home.device.donate_many("keyboard", events)
    drawn = _note_the_draw(home, timing=TIMING)
    recipe = a_recipe("hostile", {"query": QUERIES[name]})
    before = time.monotonic()
    home.ask(recipe)
    assert time.monotonic() - before < LATEST
    (waiting,) = home.device.status().outbox
    assert [waiting.next_try] == drawn
    earliest = NOW + TIMING.query + TIMING.slack + TIMING.housekeeping
    assert earliest <= waiting.next_try <= earliest + TIMING.spread
    home.deliver()
    (report,) = home.network.reports
    bits_of(home.policy, recipe, report)
    assert home.last(Event.REPORTED).sent is not None
    if data and name.startswith(("duration", "memory", "failure")):
        assert "the query failed" in home.last(Event.REPORTED).why


def test_reports_of_devices_with_and_without_data_have_one_size(tmp_path: Path) -> None:
    sizes = set()
    recipe = a_recipe("one")
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        with at_home(tmp_path / name) as home:
            if name == "with":
                home.donate()
            home.device.set_profile("user", {"age": 33, "locale": "de_DE"})
            home.ask(recipe)
            home.deliver()
            (post,) = home.network.posts
            sizes.add((post[0], str(post[1]), len(post[2])))
    assert len(sizes) == 1


def test_the_network_is_asked_before_data_is_touched(home: Home) -> None:
    """A request after a query would leave later because the query took longer."""
    order: list[str] = []
    home.network.requested = lambda: order.append("request")
    home.restart(hook=lambda step: order.append(step) if step is RunStep.QUERIED else None)
    home.ask(a_recipe("one"))
    assert order[0] == "request"
    assert order[-1] == RunStep.QUERIED
    assert order.count(RunStep.QUERIED) == 1


class SlowSandbox:
    """The real one, on whose clock compiling and running take as long as the test says."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.seconds = 0  # to compile
        self.began: list[int] = []

    def compiling(self, *arguments: Any, **options: Any) -> Any:
        self.home.clock.advance(self.seconds)
        return the_sandbox().compiling(*arguments, **options)

    def choose(self, *arguments: Any, **options: Any) -> Any:
        self.began.append(self.home.clock.now())
        return the_sandbox().choose(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(the_sandbox(), name)


SLOW = Timing(query=20, slack=10, housekeeping=1, settle=0, spread=600, poll=60)


def test_upload_times_count_from_the_first_query_on(tmp_path: Path) -> None:
    """Recipes that are refused late, for their compilation takes long, take nothing from them."""
    with at_home(tmp_path, a_generous_policy()) as home:
        sandbox = SlowSandbox(home)
        sandbox.seconds = 9
        home.restart(sandbox=sandbox, timing=SLOW)
        bad = "SELECT nothing AS age, 1 AS ngram FROM keyboard LIMIT"
        refused = [a_recipe(f"bad{i}", {"query": f"{bad} {i}"}) for i in range(70)]
        run = home.ask(a_recipe("one"), *refused, a_recipe("two"))
        assert len(run.refused) == 70
        assert len(sandbox.began) == 2
        first = min(each.next_try for each in home.device.status().outbox)
        assert first >= sandbox.began[0] + 2 * (SLOW.query + SLOW.slack) + SLOW.housekeeping


@pytest.mark.parametrize(
    ("limit", "value"),
    [("MAX_SNAPSHOT_ROWS", 100), ("MAX_SNAPSHOT_BYTES", 40_960), ("SNAPSHOT_SECONDS", 0.0)],
)
def test_a_store_too_large_for_a_query_reports_at_the_time_drawn_before(
    limit: str, value: float, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = _note_the_draw(home)
    home.donate()
    events = [{"ngram": f"word {i} " * 20, "perplexity": float(i)} for i in range(2000)]
    home.device.donate_many("keyboard", events)
    monkeypatch.setattr(f"chorister.device.store.{limit}", value)
    home.ask(a_recipe("one"))
    (waiting,) = home.device.status().outbox
    assert [waiting.next_try] == drawn
    assert "the query failed" in home.last(Event.REPORTED).why


class DataCrash(BaseException):
    """The process ends, for the data made it."""


@pytest.mark.parametrize("where", ["store.EventStore.snapshot", "sandbox.Sandbox.choose"])
def test_a_device_that_crashes_on_its_data_reports_at_the_time_drawn_before(
    where: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise DataCrash

    home.donate()
    drawn = _note_the_draw(home)
    with monkeypatch.context() as patch:
        patch.setattr(f"chorister.device.{where}", crash)
        with pytest.raises(DataCrash):
            home.ask(a_recipe("one"))
    home.restart()
    home.clock.advance(1)
    home.ask(a_recipe("one"))
    (waiting,) = home.device.status().outbox
    assert [waiting.next_try] == drawn
    assert "interrupted" in home.last(Event.REPORTED).why
    home.deliver()
    assert len(home.network.posts) == 1


def _note_the_draw(home: Home, **changes: Any) -> list[int]:
    """What is drawn as the upload time of the next report, when it is charged."""
    drawn: list[int] = []

    def hook(step: RunStep) -> None:
        if step is RunStep.CHARGED:
            (attempt,) = home.device._opened().attempts.unfinished()
            drawn.append(-(-attempt.upload_at // SECOND))

    home.restart(hook=hook, **changes)
    return drawn


def test_rows_that_are_not_encoded_by_the_deadline_are_oov(home: Home) -> None:
    home.donate()
    home.restart(timing=TIMING)
    events = [{"ngram": f"hello world {i}", "perplexity": 1.0} for i in range(2000)]
    home.device.donate_many("keyboard", events)
    # Four million different texts.
    query = COLUMNS.replace("keyboard.ngram", "keyboard.ngram || other.ngram")
    before = time.monotonic()
    home.ask(a_recipe("one", {"query": f"{query}, keyboard AS other"}))
    assert time.monotonic() - before < LATEST
    assert "the query failed" in home.last(Event.REPORTED).why
