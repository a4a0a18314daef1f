"""Clocks."""

from __future__ import annotations

import time

import pytest

from chorister.clock import Clock, SettableClock, SystemClock
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
