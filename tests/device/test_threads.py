"""Threads that share one device: nobody waits for a run, and nothing happens twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest

from chorister.device import Run
from chorister.device.audit import Event
from tests.device.home import Home, at_home
from tests.device.world import a_generous_policy, a_recipe

WAIT = 20


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path, a_generous_policy()) as home:
        home.donate()
        yield home


class Stalled:
    """A run in a thread of its own, held at its first request."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._arrived, self._go_on = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Stalled:
        self._home.network.requested = self._stall
        self._home.network.log.publish([a_recipe("one")], time=self._home.clock.now())
        self._run = self._pool.submit(self._home.device.run_once)
        assert self._arrived.wait(WAIT)
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._pool.shutdown()

    def _stall(self) -> None:
        self._arrived.set()
        assert self._go_on.wait(WAIT)

    def finish(self) -> Run:
        self._go_on.set()
        return self._run.result(WAIT)


def test_donations_do_not_wait_for_a_run(home: Home) -> None:
    with Stalled(home) as stalled, ThreadPoolExecutor(1) as app:
        event = {"ngram": "while it runs", "perplexity": 1.0}
        assert app.submit(home.device.donate, "keyboard", event).result(WAIT)
        assert app.submit(home.device.next_upload).result(WAIT) is None
        assert stalled.finish().answered == ("one",)


@pytest.mark.parametrize("act", ["opt_out", "pause"])
def test_a_run_in_another_thread_heeds_the_person(act: str, home: Home) -> None:
    with Stalled(home) as stalled, ThreadPoolExecutor(1) as app:
        done = app.submit(getattr(home.device, act))
        seen = home.device._opened().store
        # Until it shows, or is done: a pause may begin and end between two looks.
        while not done.done():
            if home.device._pausing.is_set() if act == "pause" else not seen.consent.opted_in:
                break
        assert stalled.finish().answered == ()
        done.result(WAIT)
    assert home.charges() == 0
    assert home.events()[-1] in {Event.OPTED_OUT, Event.PAUSED}
    if act == "pause":
        home.device.resume()
        home.network.requested = lambda: None
        assert home.run().answered == ("one",)


def test_many_threads_do_everything_at_once(home: Home) -> None:
    recipes = [a_recipe(f"r{i}", {"study": f"s{i}"}) for i in range(6)]
    home.network.log.publish(recipes, time=home.clock.now())
    device = home.device
    event = {"ngram": "hello world you", "perplexity": 1.0}
    jobs: list[Callable[[], object]] = [
        *[device.run_once] * 4,
        *[lambda: device.donate_many("keyboard", [event] * 20)] * 8,
        *[device.status] * 4,
        *[lambda: device.explain(recipes[0])] * 4,
        *[lambda: list(device.audit.records())] * 4,
        *[device.verify] * 2,
        *[device.opt_in] * 2,
    ]
    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result(60)
    assert home.charges() == 6
    assert home.events().count(Event.REPORTED) == 6
    count = device._opened().store._connection.execute("SELECT count(*) FROM stream_keyboard").get
    assert count == 8 * 20 + 1
    device.verify()


def test_a_page_of_the_audit_log_that_is_half_read_keeps_no_run_from_writing(home: Home) -> None:
    """An app shows the first entries, and reads on when the person scrolls."""
    shown = home.device.audit.records()
    next(shown)
    home.device.donate("keyboard", {"ngram": "hello", "perplexity": 1.0})
    with ThreadPoolExecutor(1) as app:  # another connection writes meanwhile
        with home.device._mutex:
            app.submit(home.device.pause).result(WAIT)
        home.device.resume()
    assert home.ask(a_recipe("one")).answered == ("one",)
    assert len(list(shown)) > 3  # with what was written meanwhile


def test_a_statement_that_returns_one_row_does_not_stay_open(home: Home) -> None:
    """Else a run can't write if another connection has written since: SQLite does not wait."""
    connection = home.device._opened().connection
    rows = connection.execute("SELECT 1 UNION ALL SELECT sequence FROM audit")
    assert rows.fetchone() == (1,)
    assert connection.txn_state("main") == apsw.SQLITE_TXN_NONE


def test_neither_consent_nor_a_snapshot_waits_for_an_app_that_donates(home: Home) -> None:
    """How long an app writes depends on what it writes; nothing that a device sends may wait."""
    store = home.device._opened().store
    writing, done = threading.Event(), threading.Event()

    def donate() -> None:
        with store._writing():
            writing.set()
            assert done.wait(WAIT)

    with ThreadPoolExecutor(2) as app:
        donating = app.submit(donate)
        try:
            assert writing.wait(WAIT)
            assert app.submit(lambda: store.consent.opted_in).result(WAIT)
            assert app.submit(store.profile, "user.age").result(WAIT) == 33
            assert app.submit(store.snapshot, {"keyboard": ["ngram"]}).result(WAIT).image
        finally:
            done.set()
        donating.result(WAIT)


def test_an_app_that_donates_does_not_wait_for_a_snapshot(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = home.device._opened().store
    copying, done = threading.Event(), threading.Event()

    def stall(*_: object) -> int:
        copying.set()
        assert done.wait(WAIT)
        return 0

    monkeypatch.setattr(store, "_copy", stall)
    with ThreadPoolExecutor(2) as app:
        reading = app.submit(store.snapshot, {"keyboard": ["ngram"]})
        try:
            assert copying.wait(WAIT)
            event = {"ngram": "hello", "perplexity": 1.0}
            assert app.submit(home.device.donate, "keyboard", event).result(WAIT)
            assert app.submit(store.opt_out, purge=False).result(WAIT) is None
        finally:
            done.set()
        reading.result(WAIT)
