"""A device's schedule: whoever sees the times of its requests learns nothing about its data.

Work on data takes time on these clocks, as much as each world says, down to fractions of a second:
opening databases, reading events, the query, deleting what expired. Whatever it takes, requests
leave at the same moments.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from chorister.clock import SECOND, SettableClock, uptime
from chorister.device import Device, Run, Timing
from chorister.device.agent import Agent
from chorister.device.loop import keep_running
from chorister.device.retention import Retention
from chorister.device.run import RunStep
from chorister.device.store import EventStore
from chorister.policy import Policy
from chorister.recipe import Recipe
from tests.device.home import Home, at_home, the_sandbox
from tests.device.world import ANALYSIS, NOW, a_generous_policy, a_policy, a_recipe

TIMING = Timing(query=20, slack=10, housekeeping=5, settle=2, spread=600, poll=600)
RECIPES = [a_recipe(f"r{i}", {"study": f"s{i}"}) for i in range(6)]


@dataclass(frozen=True, kw_only=True)
class ScheduledWorld:
    """Seconds that work takes on a device with certain data."""

    opening: float = 0.0
    reading: float = 0.0
    query: float = 0.0
    deleting: float = 0.0


EMPTY = ScheduledWorld()
WORLDS = {
    "a query 0.2 s longer": ScheduledWorld(query=0.2),
    "a query at its deadline": ScheduledWorld(reading=3.9, query=19.99),
    "many events": ScheduledWorld(opening=0.31, reading=2.7, query=1.1),
    "much expired": ScheduledWorld(deleting=2.6),
    "all of it": ScheduledWorld(opening=1.3, reading=3.3, query=17.123456, deleting=2.5),
}


class WorkClock(SettableClock):
    """Keeps the newest checkpoint fresh while it sleeps."""

    publish: Callable[[], None] = staticmethod(lambda: None)
    _published = 0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.now() > self._published + 6 * 3600:
            self._published = self.now()
            self.publish()


class WorkingSandbox:
    """The shared one, whose queries take as long as the world says, on the test's clock."""

    def __init__(self, clock: SettableClock, world: ScheduledWorld) -> None:
        self._clock = clock
        self._world = world

    def choose(self, *arguments: Any, **options: Any) -> Any:
        self._clock.advance(self._world.query)
        return the_sandbox().choose(*arguments, **{**options, "until": uptime() + 20})

    def __getattr__(self, name: str) -> Any:
        return getattr(the_sandbox(), name)


@contextmanager
def at_work(
    world: ScheduledWorld, policy: Policy, *, seed: int | None, recipes: list[Any]
) -> Iterator[Home]:
    """A device in a world; with a seed, everything that is drawn is drawn from it."""
    with (
        tempfile.TemporaryDirectory(dir=_memory()) as folder,
        at_home(Path(folder), policy) as home,
        pytest.MonkeyPatch.context() as patch,
    ):
        home.donate()
        # Missed, and the same in every world: what is drawn next is counted from it.
        home.device._opened().schedule.plan_poll((NOW - 3000) * SECOND)
        clock = WorkClock(NOW)
        home.clock = clock
        clock.publish = lambda: home.network.log.publish(recipes, time=clock.now())
        clock.publish()
        _slow_down(patch, clock, world)
        if seed is not None:
            _draw_from(patch, random.Random(seed))
        home.restart(timing=TIMING, sandbox=WorkingSandbox(clock, world))
        yield home


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


def _slow_down(patch: pytest.MonkeyPatch, clock: SettableClock, world: ScheduledWorld) -> None:
    def slow(owner: type, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def slowed(*arguments: Any, **options: Any) -> Any:
            clock.advance(seconds)
            return real(*arguments, **options)

        patch.setattr(owner, name, slowed)

    slow(Device, "_open_all", world.opening)
    slow(EventStore, "snapshot", world.reading)
    slow(EventStore, "expire", world.deleting)
    patch.setattr("chorister.device.agent.uptime", lambda: clock.microseconds() / SECOND)


def _draw_from(patch: pytest.MonkeyPatch, source: random.Random) -> None:
    for name in ("draw_upload", "draw_late_upload", "draw_poll", "draw_start", "draw_missed"):
        real = getattr(Timing, name)

        def drawn(self: Timing, *args: Any, real: Any = real, **options: Any) -> int:
            moment: int = real(self, *args, **{**options, "randbelow": source.randrange})
            return moment

        patch.setattr(Timing, name, drawn)
    for name in ("_charge", "__init__"):
        real = getattr(Agent, name)

        def seeded(self: Agent, *args: Any, real: Any = real, **options: Any) -> Any:
            if real.__name__ == "__init__":
                options["randbelow"] = source.randrange
            return real(self, *args, **options)

        patch.setattr(Agent, name, seeded)


# --- How a device may be run ---


def in_a_loop(home: Home) -> Iterator[Run]:
    yield from keep_running(home.device)


def restarted(home: Home) -> Iterator[Run]:
    """A process that ends after every run."""
    while True:
        yield next(iter(keep_running(home.device)))
        home.device.close()


def once_in_a_while(home: Home) -> Iterator[Run]:
    """By the host app: a process of its own every five minutes, at times that the app chooses."""
    for turn in range(1_000_000):
        home.clock.set(NOW + 300 * turn)
        home.network.log.publish(RECIPES, time=home.clock.now())
        home.device.close()
        yield home.device.run_once()


PROCESSES = {each.__name__: each for each in (in_a_loop, restarted, once_in_a_while)}


def moments(
    world: ScheduledWorld,
    process: Callable[[Home], Iterator[Run]],
    recipes: list[Recipe] = RECIPES,
    policy: Policy | None = None,
) -> list[tuple[str, int]]:
    """What a device sends, and when, until all recipes are answered and some polls more."""
    answers = sum(recipe.answers for recipe in recipes)
    policy = policy or a_generous_policy()
    with at_work(world, policy, seed=815, recipes=recipes) as home:
        found: list[tuple[str, int]] = []
        network = home.network

        def requested() -> None:
            found.append((f"{len(network.gets)}.{len(network.posts)}", home.clock.microseconds()))

        network.requested = requested
        polls = 0
        for run in process(home):
            polls += not run.uploaded
            if len(network.posts) >= answers and polls > 4:
                break
        assert home.charges() == answers
        return found


@pytest.mark.parametrize("process", PROCESSES)
def test_every_request_leaves_at_the_same_microsecond_whatever_the_data(process: str) -> None:
    expected = moments(EMPTY, PROCESSES[process])
    assert len(expected) > 15
    for name, world in WORLDS.items():
        assert moments(world, PROCESSES[process]) == expected, name


@pytest.mark.parametrize("process", ["in_a_loop", "restarted"])
def test_nor_does_a_series_move_a_request(process: str) -> None:
    """Four windows without a gap, in three of which the device answers, about events of an hour."""
    limits = {"windows": 4, "longest": "1d", "answers": 3, "cells": 20}
    changes = {"window/shortest": "1h", "series": limits}
    policy = a_generous_policy({f"analyses/{ANALYSIS}/{key}": changes[key] for key in changes})
    window = {"opens": NOW - 60, "closes": NOW + 3540, "ends": NOW + 7200}
    series = {"windows": 4, "every": 3600, "answers": 3}
    changed = {"window": window, "series": series, "periods": {"keyboard": 3600}}
    recipes = [a_recipe("series", changed)]
    expected = moments(EMPTY, PROCESSES[process], recipes, policy)
    assert len(expected) > 10
    for name, world in WORLDS.items():
        assert moments(world, PROCESSES[process], recipes, policy) == expected, name


# --- The law of the moments ---

LEVEL = 1e-7
"""Of one comparison. With six of them the test fails by chance less than once in a million."""


def _gaps(
    world: ScheduledWorld, process: Callable[[Home], Iterator[Run]], runs: int
) -> NDArray[np.int64]:
    """The distances of so many polls, a minute on average."""
    with at_work(world, a_policy(), seed=None, recipes=[]) as home:
        home.restart(timing=replace(TIMING, poll=60))
        first: list[int] = []
        seen = 0

        def requested() -> None:
            nonlocal seen
            if seen == len(first):
                first.append(home.clock.microseconds())

        home.network.requested = requested
        each = process(home)
        while seen < runs:
            next(each)
            seen = len(first)
        return np.diff(np.array(first))


@pytest.mark.parametrize(("process", "runs"), [("in_a_loop", 5_000), ("restarted", 500)])
def test_the_law_of_polls_is_the_same_whatever_the_data(process: str, runs: int) -> None:
    """Ten thousand polls: their distances, and where in a second they fall."""
    without = _gaps(EMPTY, PROCESSES[process], runs)
    with_data = _gaps(ScheduledWorld(opening=0.4, deleting=1.7), PROCESSES[process], runs)
    assert stats.ks_2samp(without, with_data).pvalue > LEVEL
    phases = np.cumsum(without) % SECOND, np.cumsum(with_data) % SECOND
    assert stats.ks_2samp(*phases).pvalue > LEVEL
    # Where polls fall in a second says nothing about where the last one did.
    assert stats.kstest((with_data % SECOND) / SECOND, "uniform").pvalue > LEVEL


# --- Other processes, crashes, suspended machines ---


@pytest.fixture
def home() -> Iterator[Home]:
    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES[:2]) as home:
        yield home


def test_no_process_sends_while_data_may_be_touched(home: Home) -> None:
    """Whether the query still runs, has ended or was killed: none of it shows."""
    other = home.build(timing=TIMING)
    said: list[str | None] = []

    def hook(step: RunStep) -> None:
        if step is RunStep.QUERIED:
            requests = len(home.network.gets)
            said.extend([other.run_once().silent, other.upload_due().silent])
            assert len(home.network.gets) == requests

    home.restart(timing=TIMING, hook=hook, sandbox=WorkingSandbox(home.clock, EMPTY))
    busy_until = home.device.run_once(hold=False).busy_until
    said += [home.device.run_once().silent, other.run_once().silent]
    home.restart(timing=TIMING)
    said.append(home.device.run_once().silent)
    assert len(said) == 7
    assert home.device.run_once().waiting
    assert all(why is not None and "data may be touched" in why for why in said)
    assert busy_until is not None
    home.clock.advance(home.device.quiet_seconds() - 1 / SECOND)
    assert home.device.run_once().silent
    assert home.clock.now() == busy_until - 1
    home.clock.advance(1 / SECOND)
    assert home.device.run_once().silent is None
    other.close()


def test_a_crash_in_a_query_moves_neither_polls_nor_its_report(home: Home) -> None:
    def hook(step: RunStep) -> None:
        if step is RunStep.QUERIED:
            raise KeyboardInterrupt

    # Polls are rare: no report has to make way for one.
    timing = replace(TIMING, poll=50_000)
    home.restart(timing=timing, hook=hook, sandbox=WorkingSandbox(home.clock, EMPTY))
    with pytest.raises(KeyboardInterrupt):
        home.run()
    home.restart(timing=timing)
    plan = home.device.plan()
    charged = home.device._opened().attempts.unfinished()
    assert plan.upload_at == min(attempt.upload_at for attempt in charged)
    sent: list[int] = []
    home.network.requested = lambda: sent.append(home.clock.microseconds())
    runs = keep_running(home.device)
    while len(home.network.posts) < 2:
        next(runs)
    assert {attempt.upload_at for attempt in charged} <= set(sent)
    assert min(sent) == min(plan.poll_at, plan.upload_at)


@pytest.mark.parametrize("standstill", [700, 7200])
def test_a_report_that_missed_its_time_does_not_leave_when_its_query_ends(standstill: int) -> None:
    """After a suspended machine wakes up, for example."""
    ends: list[int] = []

    class Suspended(WorkingSandbox):
        def choose(self, *arguments: Any, **options: Any) -> Any:
            self._clock.advance(standstill)
            ends.append(self._clock.microseconds())
            return super().choose(*arguments, **options)

    with at_work(EMPTY, a_generous_policy(), seed=None, recipes=RECIPES) as home:
        home.restart(timing=TIMING, sandbox=Suspended(home.clock, EMPTY))
        home.run()
        moments = [queued.next_try for queued in home.device._opened().outbox.all()]
    assert len(moments) == len(ends) == len(RECIPES)
    # Each is drawn from the ten minutes after its query: all six within a second of its end once
    # in 600^6 runs.
    assert all(moment >= end for moment, end in zip(moments, ends, strict=True))
    assert any(moment > end + SECOND for moment, end in zip(moments, ends, strict=True))


@pytest.mark.parametrize("jump", [3600, -3 * 86_400])
def test_setting_the_clock_during_a_query_does_not_reveal_when_it_ends(jump: int) -> None:
    """Forward, the reserved time would be over; far back, it would look like a mistake."""

    class JumpingSandbox(WorkingSandbox):
        def choose(self, *arguments: Any, **options: Any) -> Any:
            self._clock.jump(jump)
            return super().choose(*arguments, **options)

    def sent(query: float) -> list[int]:
        world = ScheduledWorld(query=query)
        with at_work(world, a_generous_policy(), seed=7, recipes=RECIPES[:1]) as home:
            home.restart(timing=TIMING, sandbox=JumpingSandbox(home.clock, world))
            found: list[int] = []
            home.network.requested = lambda: found.append(home.clock.microseconds())
            answered = False
            for run, _ in zip(in_a_loop(home), range(40), strict=False):
                answered = answered or bool(run.answered)
                if answered and len(found) > 12:
                    return found
        raise AssertionError

    assert sent(0.2) == sent(7.5) == sent(19.9)


def test_deadlines_count_while_a_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("this system has no clock that counts while it is suspended")
    monkeypatch.setattr("time.clock_gettime", lambda clock: {time.CLOCK_BOOTTIME: 12345.0}[clock])
    assert uptime() == 12345.0


# --- Deleting ---


def test_deleting_stops_in_time_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bytes as well as by rows: no transaction deletes much more than a megabyte."""
    with at_home(tmp_path) as home:
        event = {"ngram": "x" * 60_000, "perplexity": 1.0}
        home.device.donate_many("keyboard", [event] * 100)
        store = home.device._opened().store
        counts: list[int] = []
        real = Retention._delete_some

        def counted(*arguments: Any) -> tuple[int, bool]:
            found = real(*arguments)
            counts.append(found[0])
            return found

        monkeypatch.setattr(Retention, "_delete_some", counted)
        home.clock.advance(4000 * 86_400)
        assert store.expire(0.0) == 0
        assert store.expire(60.0) == 100
        assert max(counts) * 60_000 <= 2**20
        assert store.expire(60.0) == 0
