"""Periods: which events a query sees, by the device's own donation times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorister.clock import SettableClock
from chorister.device.audit import Event
from chorister.device.store import EventStore, Snapshot
from chorister.device.verifier import verify_query
from chorister.errors import QueryRefused
from chorister.recipe import Recipe
from tests.device.conftest import KEY
from tests.device.home import Home, at_home, the_sandbox
from tests.device.test_series import POLICY, WINDOW, a_series, live_through
from tests.device.test_store import rows
from tests.device.world import DAY, NOW, a_recipe
from tests.keyboard import POLICY as EXAMPLE

OPENS = WINDOW["opens"]
KEPT = EXAMPLE.streams["keyboard"].retention


def names(snapshot: Snapshot) -> list[str]:
    return sorted(str(row[0]) for row in rows(snapshot, "keyboard"))


def donate(store: EventStore | Home, clock: SettableClock, time: int, name: str) -> None:
    clock.set(time)
    taken = store.device if isinstance(store, Home) else store
    assert taken.donate("keyboard", {"ngram": name, "perplexity": 1.0})


def test_edges_belong_to_one_side(store: EventStore, clock: SettableClock) -> None:
    """The first second of a period counts, the second in which the window opens does not."""
    for name, time in {
        "before": OPENS - 7 * DAY - 1,
        "first": OPENS - 7 * DAY,
        "last": OPENS - 1,
        "opening": OPENS,
        "after": OPENS + 60,
    }.items():
        donate(store, clock, time, name)
    clock.set(OPENS + 3600)
    fields = {"keyboard": ["ngram"], "user": ["age"]}
    donated = {"keyboard": range(OPENS - 7 * DAY, OPENS)}
    assert names(store.snapshot(fields, donated=donated)) == ["first", "last"]
    assert len(names(store.snapshot(fields))) == 5
    assert names(store.snapshot(fields, donated={"keyboard": range(OPENS, OPENS)})) == []


def test_a_profile_is_not_limited(store: EventStore, clock: SettableClock) -> None:
    clock.set(OPENS + 60)
    store.set_profile("user", {"age": 33, "locale": "de_DE"})
    donated = {"keyboard": range(OPENS - DAY, OPENS)}
    snapshot = store.snapshot({"keyboard": ["ngram"], "user": ["age"]}, donated=donated)
    assert rows(snapshot, "user") == [(33,)]


def test_a_period_beyond_retention_shows_nothing_older(
    store: EventStore, clock: SettableClock
) -> None:
    now = OPENS + 3600
    donate(store, clock, now - KEPT, "expired")
    donate(store, clock, now - KEPT + 1, "kept")
    clock.set(now)
    donated = {"keyboard": range(OPENS - 10 * KEPT, OPENS)}
    assert names(store.snapshot({"keyboard": ["ngram"]}, donated=donated)) == ["kept"]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    times=st.lists(st.integers(0, 40), max_size=20),
    start=st.integers(-5, 40),
    length=st.integers(0, 40),
    now=st.integers(0, 60),
)
def test_what_counts_is_what_the_times_say(
    tmp_path_factory: pytest.TempPathFactory,
    times: list[int],
    start: int,
    length: int,
    now: int,
) -> None:
    """Donated in any order: the clock may be set back, and then ids and times disagree."""
    clock = SettableClock(NOW)
    path = tmp_path_factory.mktemp("store") / "events.db"
    with EventStore(path, KEY, EXAMPLE, clock) as store:
        store.opt_in()
        unit = KEPT // 50
        for place, time in enumerate(times):
            donate(store, clock, NOW + time * unit, f"event {place}")
        clock.set(NOW + now * unit)
        period = range(NOW + start * unit, NOW + (start + length) * unit)
        found = names(store.snapshot({"keyboard": ["ngram"]}, donated={"keyboard": period}))
        expected = sorted(
            f"event {place}"
            for place, time in enumerate(times)
            if NOW + time * unit in period and NOW + time * unit > NOW + now * unit - KEPT
        )
        assert found == expected


# --- on a device ----------------------------------------------------------------------------------


class Spy:
    """The real sandbox; it remembers what each query was given."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def choose(self, query: str, data: Snapshot, **options: Any) -> Any:
        self.seen.append(data)
        return the_sandbox().choose(query, data, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(the_sandbox(), name)


@pytest.fixture
def spy() -> Spy:
    return Spy()


@pytest.fixture
def home(tmp_path: Path, spy: Spy) -> Iterator[Home]:
    with at_home(tmp_path, POLICY) as home:
        home.restart(sandbox=spy)
        home.device.set_profile("user", {"age": 33, "locale": "de_DE"})
        yield home


def test_a_single_question_about_the_last_days(home: Home, spy: Spy) -> None:
    recipe = a_recipe("recent", {"window": WINDOW, "periods": {"keyboard": 7 * DAY}})
    for name, time in {"old": OPENS - 8 * DAY, "recent": OPENS - DAY, "new": NOW}.items():
        donate(home, home.clock, time, name)
    assert home.ask(recipe).answered == ("recent",)
    assert [names(each) for each in spy.seen] == [["recent"]]
    assert "donated" not in str(spy.seen[0].tables)


def test_since_the_previous_window(home: Home, spy: Spy) -> None:
    """Each event counts in one window, and a weekly trend is of the week."""
    recipe = a_series(windows=3, answers=3, periods={"keyboard": 2 * DAY})
    for number in range(3):
        opens = recipe.window_at(number).opens
        donate(home, home.clock, max(home.clock.now(), opens - 60), f"before {number}")
        home.clock.set(opens + 60)
        donate(home, home.clock, home.clock.now(), f"in {number}")
        home.ask(recipe)
    assert [names(each) for each in spy.seen] == [
        [],  # the device's clock was already in the window when it donated
        ["before 0", "before 1", "in 0"],
        ["before 2", "in 1"],
    ]


def test_no_event_in_a_period_is_oov_like_any_failure(home: Home) -> None:
    donate(home, home.clock, NOW, "hello world you")
    recipe = a_recipe("none", {"window": WINDOW, "periods": {"keyboard": 60}})
    run = home.ask(recipe)
    assert run.answered == ("none",)
    home.deliver()
    assert len(home.network.reports) == 1
    assert home.last(Event.REPORTED).why.startswith("the query ran")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT donated AS ngram, user.age AS age FROM keyboard, user",
        "SELECT keyboard.donated AS ngram, user.age AS age FROM keyboard, user",
        "SELECT strftime('%s') AS ngram, user.age AS age FROM keyboard, user",
        "SELECT unixepoch() AS ngram, user.age AS age FROM keyboard, user",
        "SELECT CURRENT_TIMESTAMP AS ngram, user.age AS age FROM keyboard, user",
        "SELECT ngram, age FROM keyboard, user ORDER BY keyboard.id",
    ],
)
def test_a_query_reads_no_time(query: str) -> None:
    recipe = a_recipe("spy", {"query": query, "periods": {"keyboard": DAY}})
    with pytest.raises(QueryRefused):
        verify_query(POLICY, recipe, the_sandbox())


def test_rows_come_in_no_order_of_time(home: Home, spy: Spy) -> None:
    """Ten events in ten windows: the chance that all come in the order of donation is (1/10!)^10.

    That is below 1e-60. A rowid would be the order itself.
    """
    recipe = a_series(windows=10, answers=10, periods={"keyboard": 30 * DAY})
    for place in range(10):
        donate(home, home.clock, OPENS - DAY + place, f"event {place}")
    home.clock.set(NOW)
    live_through(home, recipe)
    orders = [[row[0] for row in rows(each, "keyboard")] for each in spy.seen]
    assert len(orders) == 10
    assert any(order != sorted(order) for order in orders)


def test_a_query_is_not_told_apart_by_its_period(home: Home) -> None:
    """What is sent, and when it may be sent, is the same with and without events that count."""
    with_events: Recipe = a_recipe("a", {"window": WINDOW, "periods": {"keyboard": 30 * DAY}})
    without: Recipe = a_recipe("b", {"window": WINDOW, "periods": {"keyboard": 1}})
    donate(home, home.clock, OPENS - DAY, "hello world you")
    home.clock.set(NOW)
    home.ask(with_events, without)
    home.deliver()
    home.deliver()
    bodies = [body for _, _, body in home.network.posts]
    assert len(bodies) == 2
    assert len({len(body) for body in bodies}) == 1
