"""Queries whose failure, duration, memory or result depends on the data.

A report is sent all the same, at the time that was drawn before the query ran: nobody outside can
tell a device with data from one without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorister.device import Timing
from chorister.device.audit import Event
from chorister.device.steps import Step
from tests.device.home import Home, at_home
from tests.device.world import NOW, a_recipe, bits_of

TIMING = Timing(query=1, slack=5, spread=600, poll=600)
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
    drawn: list[int] = []

    def hook(step: Step) -> None:
        if step is Step.CHARGED:
            (attempt,) = home.device._opened().attempts.unfinished()
            drawn.append(attempt.upload_at)

    if data:
        home.donate()
        events = [{"ngram": f"word {i} " * 20, "perplexity": float(i)} for i in range(200)]
        home.device.donate_many("keyboard", events)
    home.restart(hook=hook, timing=TIMING)
    recipe = a_recipe("hostile", {"query": QUERIES[name]})
    before = time.monotonic()
    home.ask(recipe)
    assert time.monotonic() - before < TIMING.query + TIMING.slack
    (waiting,) = home.device.status().outbox
    assert [waiting.next_try] == drawn
    earliest = NOW + TIMING.query + TIMING.slack
    assert earliest <= waiting.next_try <= earliest + TIMING.spread
    home.deliver()
    (report,) = home.network.reports
    bits_of(home.policy, recipe, report)
    assert home.last(Event.REPORTED).sent is not None
    if data and name.startswith(("duration", "memory", "failure")):
        assert "OOV" in home.last(Event.REPORTED).why


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
    home.restart(hook=lambda step: order.append(step) if step is Step.QUERIED else None)
    home.ask(a_recipe("one"))
    assert order[0] == "request"
    assert order[-1] == Step.QUERIED
    assert order.count(Step.QUERIED) == 1
