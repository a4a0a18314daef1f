"""Time, always passed in: logic asks a `Clock` and never the operating system.

Times are integer POSIX seconds everywhere in Chorister, as in DAP.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import Protocol

from chorister.errors import InvalidInput

__all__ = ["Clock", "SettableClock", "SystemClock", "utc_text"]


class Clock(Protocol):
    """Whatever can tell the time in whole POSIX seconds."""

    def now(self) -> int:
        """The time now."""
        ...


class SystemClock:
    """The operating system's clock, rounded down to whole seconds."""

    def now(self) -> int:
        """The time now."""
        return time.time_ns() // 1_000_000_000


class SettableClock:
    """A clock that stands still until told otherwise, for tests, rehearsals and demos."""

    def __init__(self, now: int) -> None:
        self._now = now

    def now(self) -> int:
        """The time this clock was last set to."""
        return self._now

    def set(self, now: int) -> None:
        """Move to `now`, which may lie in the past (as a wrong system clock may)."""
        self._now = now

    def advance(self, seconds: int) -> None:
        """Move forward by `seconds`."""
        if seconds < 0:
            raise InvalidInput(f"advance() goes forward only, not by {seconds} s; use set()")
        self._now += seconds


def utc_text(seconds: int, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """A time for people to read: "2026-11-16 08:42:10 UTC"."""
    try:
        moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s after 1970"
    return moment.strftime(form)
