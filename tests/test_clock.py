"""Clocks."""

from __future__ import annotations

import time

import pytest

from chorister.clock import Clock, SettableClock, SystemClock, utc_text
from chorister.errors import InvalidInput


def test_system_clock() -> None:
    clock: Clock = SystemClock()
    before = int(time.time())
    assert before <= clock.now() <= before + 2


def test_settable_clock() -> None:
    clock = SettableClock(100)
    assert clock.now() == 100
    clock.advance(5)
    assert clock.now() == 105
    clock.set(7)
    assert clock.now() == 7
    with pytest.raises(InvalidInput):
        clock.advance(-1)


def test_a_time_for_people() -> None:
    assert utc_text(1_794_818_530) == "2026-11-16 08:42:10 UTC"
    assert utc_text(10**18) == "1000000000000000000 s after 1970"
