"""Clocks."""

from __future__ import annotations

import re
import time

import pytest

from chorister.clock import Clock, SettableClock, SystemClock, utc_minute, utc_text
from tests.conftest import REPOSITORY


def test_system_clock() -> None:
    clock: Clock = SystemClock()
    before = time.time_ns() // 10**9
    now = clock.now()
    assert before <= now <= time.time_ns() // 10**9


def test_settable_clock() -> None:
    clock = SettableClock(100)
    assert clock.now() == 100
    clock.advance(5)
    assert clock.now() == 105
    clock.set(7)
    assert clock.now() == 7
    with pytest.raises(ValueError, match="set\\(\\)"):
        clock.advance(-1)


def test_a_time_for_people() -> None:
    assert utc_text(1_794_818_530) == "2026-11-16 08:42:10 UTC"
    assert utc_minute(1_794_818_530) == "2026-11-16 08:42 UTC"
    assert utc_text(10**18) == utc_minute(10**18) == "1000000000000000000 s after 1970"


def test_times_are_written_in_one_place() -> None:
    """Whoever formats a time elsewhere gives people a second spelling to get used to."""
    written = re.compile(r"\.(strftime|isoformat|ctime)\(|\.fromtimestamp\(")
    source = REPOSITORY / "src" / "chorister"
    found = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if written.search(path.read_text())
    ]
    assert found == ["clock.py"]
