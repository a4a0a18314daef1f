"""Texts, numbers and lists that are expensive to encode, only where a person is 33 years old.

Encoding is where a query's answer meets the recipe's lists: whatever it costs, a run of the device
ends by its deadlines, the report leaves at the time drawn before, and the host app runs on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chorister.device import Timing
from chorister.device.sandbox import confinement
from chorister.policy import Policy
from tests.device.home import at_home
from tests.device.world import NOW, a_generous_policy, a_recipe
from tests.keyboard import ANALYSIS

TIMING = Timing(query=2, slack=8, spread=600, poll=600)
LATE = 20.0  # seconds that a loaded machine may add to a run; the attacks take far longer
MARKS = "replace(printf('%.*c', 32000, 'x'), 'x', char(768, 790))"
CLASS_0 = "replace(printf('%.*c', 32000, 'x'), 'x', char(3955, 768))"
SHORT_WORDS = "replace(printf('%.*c', 32000, 'x'), 'x', 'a ')"
QUERY = "SELECT user.age AS age, CASE WHEN user.age = 33 THEN {} ELSE 'hi' END AS ngram FROM {}"
ROWS = "user, keyboard AS a, keyboard AS b"
DENY = [
    {"column": "ngram", "phrases": [f"{'a ' * length}b{number}" for length in range(1, 16)]}
    for number in range(8)
]
ATTACKS: dict[str, dict[str, Any]] = {
    "disordered marks": {"query": QUERY.format(MARKS, "user")},
    "disordered marks in many rows": {"query": QUERY.format(MARKS, ROWS)},
    "marks of class 0": {"query": QUERY.format(CLASS_0, "user")},
    "nearly denied": {"query": QUERY.format(SHORT_WORDS, "user, keyboard"), "deny": DENY},
}


def careless_policy() -> Policy:
    functions = ["char", "length", "lower", "ngrams", "printf", "replace"]
    return a_generous_policy({f"analyses/{ANALYSIS}/functions": functions})


@contextmanager
def an_app() -> Iterator[list[float]]:
    """A thread of the host app that does a little every few milliseconds: its longest pauses."""
    over, pauses = threading.Event(), [0.0]

    def work() -> None:
        last = time.monotonic()
        while not over.wait(0.005):
            now = time.monotonic()
            pauses[0] = max(pauses[0], now - last)
            last = now

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield pauses
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("age", [33, 34])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_expensive_encoding_delays_nothing(name: str, age: int, tmp_path: Path) -> None:
    delays_nothing(name, age, tmp_path)


@pytest.mark.parametrize("age", [33, 34])
def test_nor_where_nothing_can_be_forked(
    age: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "FACILITIES", frozenset())
    delays_nothing("disordered marks in many rows", age, tmp_path)


def delays_nothing(name: str, age: int, folder: Path) -> None:
    with at_home(folder, careless_policy()) as home:
        home.donate()
        home.device.set_profile("user", {"age": age, "locale": "de_DE"})
        events = [{"ngram": f"word {i}", "perplexity": 1.0} for i in range(9)]
        home.device.donate_many("keyboard", events)
        home.restart(timing=TIMING)
        with an_app() as pauses:
            start = time.monotonic()
            assert home.ask(a_recipe("hostile", ATTACKS[name])).answered == ("hostile",)
            taken = time.monotonic() - start
        assert taken < TIMING.query + LATE
        assert pauses[0] < LATE
        (waiting,) = home.device.status().outbox
        assert waiting.next_try >= NOW + TIMING.query + TIMING.slack
