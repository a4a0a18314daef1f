"""The device's time: never decreasing, and vouched for where it matters."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.clock import SECOND, SettableClock, uptime
from chorister.device.database import transaction
from chorister.device.device_clock import DeviceClock
from chorister.errors import InvalidInput, LedgerError, LedgerTampered
from tests.device.ledgers import DAY, START, Place


@pytest.fixture
def connection(tmp_path: Path) -> apsw.Connection:
    return Place.make(tmp_path).connect()


def accept(connection: apsw.Connection, clock: DeviceClock, time: int) -> None:
    with transaction(connection):
        clock.accept_checkpoint(time)


def test_before_the_first_checkpoint_nothing_is_decided(connection: apsw.Connection) -> None:
    clock = DeviceClock(connection, SettableClock(START))
    assert clock.now() == START
    with pytest.raises(LedgerError, match="poll the registry"):
        clock.decision_time()


def test_a_clock_set_back_is_not_followed(connection: apsw.Connection) -> None:
    system = SettableClock(START)
    clock = DeviceClock(connection, system)
    accept(connection, clock, START - 60)
    system.set(START - 30 * DAY)
    assert clock.now() == START
    again = DeviceClock(connection, system)
    assert again.now() == START
    assert again.decision_time() == START - 60


def test_a_clock_that_ran_ahead_heals(connection: apsw.Connection) -> None:
    """It decided nothing meanwhile: no checkpoint was fresh by it."""
    system = SettableClock(START)
    clock = DeviceClock(connection, system)
    accept(connection, clock, START)
    system.set(START + 3650 * DAY)
    assert clock.now() == START + 3650 * DAY
    assert clock.decision_time() == START
    system.set(START + 60)
    assert clock.now() == START + 60


def test_a_checkpoint_ahead_of_the_clock_moves_it(connection: apsw.Connection) -> None:
    clock = DeviceClock(connection, SettableClock(START))
    accept(connection, clock, START + 120)
    assert clock.now() == clock.decision_time() == START + 120


def test_a_rewound_checkpoint(connection: apsw.Connection) -> None:
    clock = DeviceClock(connection, SettableClock(START))
    accept(connection, clock, START)
    accept(connection, clock, START)
    with pytest.raises(InvalidInput, match="rewound"):
        accept(connection, clock, START - 1)
    for time in (-1, 2**53):
        with pytest.raises(InvalidInput, match="between"):
            accept(connection, clock, time)


def test_it_is_written_with_whatever_depends_on_it(connection: apsw.Connection) -> None:
    clock = DeviceClock(connection, SettableClock(START))
    with pytest.raises(InvalidInput, match="inside transaction"):
        clock.accept_checkpoint(START)
    connection.execute("BEGIN IMMEDIATE")
    clock.accept_checkpoint(START)
    connection.execute("ROLLBACK")
    with pytest.raises(LedgerError):
        clock.decision_time()


def test_impossible_marks_are_noticed(connection: apsw.Connection) -> None:
    clock = DeviceClock(connection, SettableClock(START))
    accept(connection, clock, START)
    for seen, checkpoint in ((5, 6), (5, -1)):
        connection.execute("UPDATE device_time SET seen = ?, checkpoint = ?", (seen, checkpoint))
        with pytest.raises(LedgerTampered):
            clock.now()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(-DAY, DAY)), max_size=12))
def test_decided_times_never_decrease(moves: list[tuple[int, int]]) -> None:
    connection = apsw.Connection(":memory:")
    system = SettableClock(START)
    clock = DeviceClock(connection, system)
    last = (0, 0)
    for wall, lag in moves:
        system.set(wall)
        try:
            accept(connection, clock, max(0, wall + lag))
        except InvalidInput:
            continue
        times = (clock.now(), clock.decision_time())
        assert times[0] >= last[0]
        assert times[1] >= last[1]
        assert times[1] <= times[0]
        last = times


def test_an_apps_clock_without_an_uptime_has_the_systems(connection: apsw.Connection) -> None:
    class OldClock:
        now, microseconds, sleep = (lambda _: START), (lambda _: START * SECOND), (lambda *_: None)

    before = uptime()
    assert before <= DeviceClock(connection, OldClock()).uptime() <= uptime()  # type: ignore[arg-type]
