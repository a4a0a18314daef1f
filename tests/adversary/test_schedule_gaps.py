"""Ways in which private data moves a request, ends a run or stops a device, each as a test."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from chorister.cli import device as commands
from chorister.clock import SECOND
from chorister.device import Timing
from chorister.device.database import forget
from chorister.device.databases import Databases
from chorister.device.device import Device
from chorister.device.files import run_lock
from chorister.device.loop import keep_running
from chorister.device.outbox import make_report
from chorister.device.run import Hook, RunStep
from chorister.device.sandbox import Sandbox
from chorister.device.schedule import Schedule
from chorister.device.store import EventStore
from chorister.errors import InternalError, InvalidInput, SandboxUnavailable
from tests.adversary.test_schedule import (
    EMPTY,
    RECIPES,
    TIMING,
    ScheduledWorld,
    WorkingSandbox,
    at_work,
)
from tests.device.home import Home, at_home, the_sandbox
from tests.device.test_processes import zygote_of
from tests.device.world import NOW, a_generous_policy, a_recipe


def _note(moments: list[int], home: Home) -> None:
    moments.append(home.clock.microseconds())


def _first_requests(world: ScheduledWorld, runs: int, sleep: int) -> list[int]:
    """The app's own loop: run, then sleep, as docs/howto/embed-a-device.md suggests."""
    with at_work(world, a_generous_policy(), seed=4711, recipes=RECIPES[:1]) as home:
        found: list[int] = []
        for _ in range(runs):
            first: list[int] = []
            home.network.requested = partial(_note, first, home)
            home.device.run_once()
            found += first[:1]
            home.clock.sleep(sleep)
        return found


def test_an_app_that_sleeps_between_two_runs_polls_at_the_same_times() -> None:
    assert _first_requests(ScheduledWorld(query=15.0), 3, 600) == _first_requests(EMPTY, 3, 600)


def test_once_draws_its_moment_before_it_opens_the_databases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def moment(opening: float) -> int:
        with at_work(
            ScheduledWorld(opening=opening), a_generous_policy(), seed=1, recipes=[]
        ) as home:
            home.device.close()
            sent: list[int] = []
            home.network.requested = lambda: sent.append(home.clock.microseconds())

            @contextmanager
            def opened(_: object) -> Iterator[Device]:
                yield home.device

            monkeypatch.setattr(commands, "open_device", opened)
            monkeypatch.setattr("chorister.cli.device.time.sleep", home.clock.sleep)
            commands.run(Path("x"), once=True, json_=True)
            return sent[0]

    assert moment(0.4) == moment(0.0)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_moment_that_was_missed_is_drawn_again_whatever_made_it_late(in_a_loop: bool) -> None:
    """Opening a database after a change of the policy, say, or while an app writes much to it."""

    def moment(opening: float) -> int:
        with at_work(
            ScheduledWorld(opening=opening), a_generous_policy(), seed=1, recipes=[]
        ) as home:
            home.device.close()
            sent: list[int] = []
            home.network.requested = partial(_note, sent, home)
            if in_a_loop:
                next(keep_running(home.device))
            else:
                home.device.run_once()
            return sent[0]

    assert moment(3.5) == moment(17.25) == moment(40.0)


def test_nothing_reads_events_between_the_moment_and_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Consent is asked after the wait: 15 us, or 10 ms where an event came and many were read."""

    def moment(reading: float) -> int:
        with at_work(EMPTY, a_generous_policy(), seed=1, recipes=[]) as home:
            real = EventStore._reading

            @contextmanager
            def slow(self: EventStore) -> Iterator[None]:
                home.clock.advance(reading)
                with real(self):
                    yield

            sent: list[int] = []
            home.network.requested = lambda: sent.append(home.clock.microseconds())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(EventStore, "_reading", slow)
                home.device.run_once()
            return sent[0]

    assert moment(0.01) == moment(0.0)


def test_a_checkpoint_of_the_log_that_fails_does_not_move_the_next_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only where something was deleted is the events' log emptied; a full disk may refuse it."""

    def fail(_: object) -> bool:
        raise apsw.FullError("disk is full")

    def times(*, expired: bool) -> list[int]:
        with at_work(EMPTY, a_generous_policy(), seed=3, recipes=[]) as home:
            home.device.plan()
            monkeypatch.setattr("chorister.device.store.forget", fail)
            if expired:
                home.device._opened().store._connection.execute(
                    "UPDATE stream_keyboard SET donated = 1"
                )
            sent: list[int] = []
            home.network.requested = lambda: sent.append(home.clock.microseconds())
            runs = keep_running(home.device)
            while len(sent) < 12:
                next(runs)
            monkeypatch.undo()
            return sent

    assert times(expired=True) == times(expired=False)


def test_a_process_that_the_app_forks_does_not_keep_the_lock(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with run_lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_pause_before_the_moment_holds() -> None:
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=[]) as home:
        other = home.build(timing=TIMING)
        sleep = home.clock.sleep

        def pausing(seconds: float) -> None:
            other.pause()
            sleep(seconds)

        home.clock.sleep = pausing  # type: ignore[method-assign]
        before = len(home.network.gets)
        home.device.run_once()
        other.close()
        assert len(home.network.gets) == before


def test_a_run_that_was_overtaken_before_the_lock_keeps_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asked whether others touch data, then one did and ended: how soon depends on the data."""
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES[:1]) as home:
        other = home.build(timing=TIMING)
        real = Databases.record_consent_events

        def overtaken(self: Databases, hook: Hook) -> None:
            if self is other._open:
                assert home.device.run_once(hold=False).answered
                home.network.requested = lambda: sent.append(home.clock.microseconds())
            real(self, hook)

        sent: list[int] = []
        monkeypatch.setattr(Databases, "record_consent_events", overtaken)
        other.run_once()
        until = home.device._opened().schedule.quiet_until
        other.close()
        assert all(moment >= until for moment in sent)


def test_a_slow_leader_does_not_lose_another_report(tmp_path: Path) -> None:
    """What closes during the reserved time is sent before; but that time begins later."""
    with at_home(tmp_path, a_generous_policy()) as home:
        now, day = home.clock.now(), 86_400
        soon = {"window": {"opens": now - 6 * day, "closes": now + 4000, "ends": now + day}}
        first, second = (a_recipe(f"q{i}", {"study": f"q{i}", **soon}) for i in range(2))
        assert len(home.ask(first, second).answered) == 2
        opened = home.device._opened()
        home.clock.set(now + 4000 - 60)
        queued_reports = opened.outbox.all()
        opened.outbox.delay(queued_reports[0], until=home.clock.microseconds())
        opened.outbox.delay(queued_reports[1], until=(now + 4000 - 2) * SECOND)
        slow = home.network.post

        def post(*arguments: Any, **options: Any) -> Any:
            home.clock.advance(52)
            return slow(*arguments, **options)

        home.network.post = post  # type: ignore[method-assign]
        run = home.ask(a_recipe("new", {"study": "new"}))
        assert (run.uploaded, run.dropped) == (2, 0)


def test_a_report_that_memory_does_not_suffice_for_is_not_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What reading events left in memory may be why: then the missing report tells of them."""
    calls = 0
    real = make_report

    def tight(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr("chorister.device.agent.make_report", tight)
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES[:1]) as home:
        home.device.run_once()
        assert not home.device._opened().outbox.all()
        home.clock.advance(home.device.quiet_seconds())
        run = home.device.run_once()
        assert run.answered == (RECIPES[0].id,)
        # It leaves in the same run if its time has come already.
        assert run.uploaded + len(home.device._opened().outbox.all()) == 1


def test_an_attempt_that_can_t_be_read_any_more_does_not_stop_the_device(home: Home) -> None:
    """After an upgrade, or under damage: one recipe is lost, not the device."""

    def hook(step: RunStep) -> None:
        if step is RunStep.QUERIED:
            raise KeyboardInterrupt

    home.restart(timing=TIMING, hook=hook, sandbox=WorkingSandbox(home.clock, EMPTY))
    with pytest.raises(KeyboardInterrupt):
        home.run()
    home.restart(timing=TIMING)
    home.device._opened().connection.execute("UPDATE attempts SET jws = x'00'")
    before = len(home.network.gets)
    runs = keep_running(home.device)
    for _ in range(4):
        next(runs)
    assert len(home.network.gets) > before


def test_a_long_reservation_counts() -> None:
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=[]) as home:
        opened = home.device._opened()
        timing = Timing(query=900)
        schedule = Schedule(opened.connection, opened.clock, timing)
        until = schedule.reserve(timing.max_queries)
        assert schedule.quiet_until == until
        with pytest.raises(InternalError, match="at most 94 queries"):
            schedule.reserve(100)  # as many as one author may have open


def test_a_run_has_no_more_queries_than_can_be_reserved() -> None:
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES) as home:
        timing = Timing(query=3600, slack=20_000, settle=0)
        assert timing.max_queries == 3
        home.restart(timing=timing, sandbox=WorkingSandbox(home.clock, EMPTY))
        assert len(home.run().answered) == 3
        assert len(home.run().answered) == 3
    with pytest.raises(InvalidInput, match="a query may take at most 3600 s"):
        Timing(query=3601)


def test_deleting_ends_in_its_time_though_another_process_reads(tmp_path: Path) -> None:
    with at_home(tmp_path) as home:
        other = home.build()
        reader = other._opened().store._reader
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM stream_keyboard").fetchall()
        left = 0
        for _ in range(3):  # the machine may stand still meanwhile, but not each time
            home.device.donate_many("keyboard", [{"ngram": "x" * 1000, "perplexity": 1.0}] * 500)
            home.clock.advance(4000 * 86_400)
            begun = time.monotonic()
            left += 500 - home.device._opened().store.expire(2.5)
            took = time.monotonic() - begun
            if left == 0 and took < Timing().housekeeping:
                break
        reader.execute("COMMIT")
        other.close()
        assert left == 0
        assert took < Timing().housekeeping


def test_deleting_ends_in_its_time_however_long_the_log_is(tmp_path: Path) -> None:
    """What an app writes while a snapshot is read can't be moved out of the log: that comes later.

    It came with the first transaction that deleted something, and took 15 s for 300 megabytes.
    """

    def ends_in_its_time(home: Home) -> bool:
        other = home.build()
        reader = other._opened().store._reader
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM stream_keyboard").fetchall()
        for _ in range(8):
            home.device.donate_many("keyboard", [{"ngram": "x" * 30_000, "perplexity": 1.0}] * 400)
        reader.execute("COMMIT")
        other.close()
        home.clock.advance(4000 * 86_400)
        store = home.device._opened().store
        begun = time.monotonic()
        deleted = store.expire(0.2)
        took = time.monotonic() - begun
        begun = time.monotonic()
        assert forget(store._connection)
        whole = time.monotonic() - begun
        return deleted > 0 and took < 0.2 + whole / 2

    with at_home(tmp_path) as home:
        # The machine may stand still meanwhile, but not each time.
        assert any(ends_in_its_time(home) for _ in range(3))


def test_a_lost_zygote_is_started_before_the_moment() -> None:
    """A query that fills the machine's memory gets it killed; the next poll must not show it."""
    sandbox = type(the_sandbox())()
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES[:1]) as home:
        home.restart(timing=replace(TIMING, settle=0), sandbox=sandbox)
        zygote_of(sandbox)._process.kill()
        zygote_of(sandbox)._process.wait()
        lost: list[bool] = []
        home.network.requested = lambda: lost.append(sandbox._zygote.is_lost())
        home.device.run_once()
        sandbox.close()
        assert not any(lost)


def test_a_new_sandbox_is_ready_before_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started again, perhaps because of data, must look like any other."""
    made: list[Sandbox] = []
    ready: list[bool] = []

    def start(**options: bool) -> Sandbox:
        made.append(Sandbox(**options))
        return made[0]

    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES[:1]) as home:
        home.restart(timing=replace(TIMING, settle=0), sandbox=None)
        home.network.requested = lambda: ready.append(not made[0]._untried)
        monkeypatch.setattr("chorister.device.device.Sandbox", start)
        assert home.device.run_once().answered
        home.device.close()
    assert len(made) == 1
    assert ready
    assert all(ready)


@pytest.mark.parametrize("seconds", [0.5, 40.0, 100.0])
def test_a_sandbox_that_takes_long_to_try_does_not_show_when_it_was_ready(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial is over before the drawn moment, or the moment is missed and drawn again."""
    timing = replace(TIMING, settle=2)
    tried: list[int] = []
    requests: list[int] = []
    trial = Sandbox._try

    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES[:1]) as home:
        home.restart(timing=timing, sandbox=None)
        home.network.requested = lambda: requests.append(home.clock.microseconds())

        def slow_trial(sandbox: Sandbox) -> None:
            trial(sandbox)
            home.clock.advance(seconds)
            tried.append(home.clock.microseconds())

        monkeypatch.setattr(Sandbox, "_try", slow_trial)
        begun = home.clock.microseconds()
        home.device.run_once(hold=False)
        home.device.close()
    assert len(tried) == 1
    assert tried[0] <= requests[0]
    waited = (requests[0] - begun) / SECOND
    # As `draw_start` and `draw_missed` say: whole minutes after the first moment.
    minutes = 0 if seconds < 2 else int((seconds - 3) // 60) + 1
    assert 2 + 60 * minutes <= waited <= 2 + 1 + 2 + 60 * (minutes + 2 if minutes else 0)
    assert waited - seconds > 0.9 or minutes == 0


def test_a_sandbox_that_does_not_start_stops_neither_polls_nor_uploads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process that was started again, for example, after data had filled the memory."""

    def fail(**_: object) -> None:
        raise SandboxUnavailable("out of memory")

    # Polls are rare: the report has to make way for none.
    timing = replace(TIMING, poll=50_000)
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES[:1]) as home:
        home.restart(timing=timing, sandbox=WorkingSandbox(home.clock, EMPTY))
        assert home.device.run_once().answered
        home.restart(timing=timing, sandbox=None)
        monkeypatch.setattr("chorister.device.device.Sandbox", fail)
        upload_at = home.device.plan().upload_at
        polls = len(home.network.gets)
        runs = keep_running(home.device)
        while not home.network.posts and home.clock.microseconds() < (upload_at or 0) + 9 * SECOND:
            next(runs)
        assert len(home.network.posts) == 1
        while len(home.network.gets) == polls and home.clock.now() < NOW + 86_400:
            next(runs)
        assert len(home.network.gets) > polls


def test_an_app_does_not_wait_for_a_query_to_see_the_status(home: Home) -> None:
    """Whoever sees the app freeze sees how long the query takes."""
    answered: list[float] = []

    def hook(step: RunStep) -> None:
        if step is RunStep.QUERIED:
            asker = threading.Thread(target=lambda: answered.append(home.device.status().paused))
            asker.start()
            asker.join(20.0)  # it would wait until this run is over
            during.append(len(answered))

    during: list[int] = []
    home.restart(timing=TIMING, hook=hook, sandbox=WorkingSandbox(home.clock, EMPTY))
    home.run()
    assert during[0] == 1


@pytest.fixture
def home() -> Iterator[Home]:
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES[:2]) as home:
        yield home


class NotingLock:
    """Tells when the thread "second" waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.wanted = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if blocking and threading.current_thread().name == "second":
            self.wanted.set()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize("how", ["run_once", "upload_due"])
def test_a_second_thread_learns_no_sooner_that_data_was_touched(how: str) -> None:
    """Neither does its call end when the query does, nor the call of the thread that it met."""

    def ends(query: float) -> list[int]:
        with at_work(
            ScheduledWorld(query=query), a_generous_policy(), seed=5, recipes=RECIPES[:1]
        ) as home:
            device, found = home.device, dict[str, int]()
            device.plan()  # its databases are open
            mutex = device._mutex = NotingLock()  # type: ignore[assignment]

            def call(name: str) -> None:
                getattr(device, name)()
                found.setdefault(threading.current_thread().name, home.clock.microseconds())

            def sleep(seconds: float) -> None:  # on two clocks that go on while the other sleeps
                until = home.clock.microseconds() + round(seconds * SECOND)
                found[threading.current_thread().name] = until

            second = threading.Thread(target=call, args=[how], name="second")
            real = device._wait_until

            def wait(moment: int) -> None:
                real(moment)
                # The first thread has the device, and no time is reserved yet.
                home.clock.sleep = sleep  # type: ignore[method-assign]
                second.start()
                assert mutex.wanted.wait(60)

            device._wait_until = wait  # type: ignore[method-assign]
            first = threading.Thread(target=call, args=["run_once"], name="first")
            first.start()
            first.join(60)
            second.join(60)
            return [found["first"], found["second"]]

    assert ends(15.0) == ends(0.0)
