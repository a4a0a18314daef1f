"""A device that runs on: requests at the times drawn, whatever fails in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chorister.clock import SECOND, SettableClock
from chorister.device import Timing
from chorister.device.loop import keep_running
from chorister.device.store import EventStore
from chorister.errors import DeviceBusy, StoreError
from tests.device.home import Home, at_home
from tests.device.world import NOW, a_recipe

TIMING = Timing(query=5, slack=5, housekeeping=1, settle=2, spread=600, poll=3600)


class LoopClock(SettableClock):
    """Sleeping moves it, in pieces of at most a minute, and shows what is published meanwhile."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.slept: list[float] = []
        self.woken: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 60
        self.slept.append(seconds)
        super().sleep(seconds)
        self.woken()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        clock = LoopClock(NOW)
        home.clock = clock
        clock.woken = lambda: home.network.log.publish([a_recipe("one")], time=clock.now())
        clock.woken()
        home.restart(timing=TIMING)
        yield home


def test_polls_and_uploads_happen_at_the_times_drawn(home: Home) -> None:
    requests: list[int] = []
    home.network.requested = lambda: requests.append(home.clock.microseconds())
    opened = home.device._opened()
    planned = [opened.schedule.next_poll]
    for run in keep_running(home.device):
        plan = home.device.plan()
        planned += [plan.poll_at, plan.upload_at or 0]
        if run.uploaded or home.clock.now() > NOW + 20_000:
            break
    assert len(home.network.posts) == 1
    # The first one had passed: it was drawn again, from a minute that begins within the next one.
    assert (NOW + 2) * SECOND <= requests[0] < (NOW + 122) * SECOND
    assert set(requests) <= {requests[0], *planned}


def test_a_device_that_never_polled_does_so_after_its_databases_are_open(tmp_path: Path) -> None:
    with at_home(tmp_path) as home:
        home.device._opened().connection.execute("UPDATE schedule SET next_poll = 0")
        home.network.log.publish([], time=home.clock.now())
        home.clock = LoopClock(NOW)
        home.restart(timing=TIMING)
        first: list[int] = []
        home.network.requested = lambda: first.append(home.clock.microseconds())
        next(iter(keep_running(home.device)))
        assert NOW + 2 <= first[0] / SECOND < NOW + 3


def test_a_restarted_loop_keeps_the_time_of_its_next_poll(home: Home) -> None:
    next(iter(keep_running(home.device)))
    plan = home.device.plan()
    home.restart(timing=TIMING)
    assert home.device.plan() == plan
    home.network.gets.clear()
    requests: list[int] = []
    home.network.requested = lambda: requests.append(home.clock.microseconds())
    for _ in itertools.takewhile(lambda _: not requests, keep_running(home.device)):
        pass
    assert requests[0] in {plan.poll_at, plan.upload_at}


def test_a_paused_device_keeps_running_without_spinning(home: Home) -> None:
    home.device.pause()
    clock = home.clock
    assert isinstance(clock, LoopClock)
    for run in keep_running(home.device):
        assert run.silent == "paused"
        if home.clock.now() > NOW + 4 * 7200:
            break
    assert len(clock.slept) >= 100
    assert not home.network.posts


@pytest.mark.parametrize("error", [StoreError("the disk is full"), DeviceBusy("busy"), OSError(5)])
def test_an_error_ends_no_loop_and_makes_no_device_poll_more_often(
    error: Exception, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("chorister.device.agent.Agent._poll", fail)
        loop = keep_running(home.device)
        failed = [(next(loop).silent, home.clock.now()) for _ in range(5)]
    assert all(silent for silent, _ in failed)
    assert all(b - a >= TIMING.poll // 2 for (_, a), (_, b) in itertools.pairwise(failed))
    assert next(loop).silent is None


@pytest.mark.parametrize("error", [StoreError("the disk is full"), MemoryError()])
def test_an_error_while_deleting_stops_nothing(
    error: Exception, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or another writer, where something has expired: polls and uploads go on."""

    def fail(*_: object) -> Any:
        raise error

    monkeypatch.setattr(EventStore, "expire", fail)
    for run in keep_running(home.device):
        assert run.silent is None
        if run.uploaded:
            break
        assert any("could not be deleted" in problem for problem in run.problems)
    assert len(home.network.posts) == 1


def test_what_has_expired_is_deleted_whatever_fails_before(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[float] = []
    monkeypatch.setattr(EventStore, "expire", lambda _, seconds: deleted.append(seconds))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("of a kind that nobody expected")

    monkeypatch.setattr("chorister.device.agent.poll", fail)
    home.network.log.publish([], time=home.clock.now())
    with pytest.raises(RuntimeError):
        home.device.run_once()
    assert deleted
