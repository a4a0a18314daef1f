"""Time: a `Clock` is always passed in, so that no logic asks the operating system.

Times are integer POSIX seconds everywhere in Chorister, as in DAP. The one exception is the
schedule of a device's requests, in microseconds: a request sent in the fraction of a second in
which some work ended would reveal how long the work took.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import Final, Protocol

SECOND: Final = 1_000_000
"""In microseconds."""


class Clock(Protocol):
    """Tells the time, and waits."""

    def now(self) -> int:
        """Return the time in whole seconds."""
        ...

    def microseconds(self) -> int:
        """Return the time in microseconds."""
        ...

    def uptime(self) -> float:
        """Return seconds that nobody can set, from some moment in the past."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The operating system's clock."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000_000

    def microseconds(self) -> int:
        return time.time_ns() // 1000

    def uptime(self) -> float:
        return uptime()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SettableClock:
    """A clock that stands still until it is moved, for tests, rehearsals and demos."""

    def __init__(self, now: float) -> None:
        self._now = round(now * SECOND)
        self._uptime = 0

    def now(self) -> int:
        return self._now // SECOND

    def microseconds(self) -> int:
        return self._now

    def uptime(self) -> float:
        return self._uptime / SECOND

    def sleep(self, seconds: float) -> None:
        """Advance at once."""
        self.advance(seconds)

    def set(self, now: float) -> None:
        """Let the time pass until `now`, or set the clock back, as happens to a system clock."""
        before, self._now = self._now, round(now * SECOND)
        self._uptime += max(0, self._now - before)

    def jump(self, seconds: float) -> None:
        """Set the clock without any time passing, as somebody may set a system clock."""
        self._now += round(seconds * SECOND)

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"advance() only goes forward, not by {seconds} s: use set()")
        self._now += round(seconds * SECOND)
        self._uptime += round(seconds * SECOND)


def uptime() -> float:
    """Return the seconds of a clock that never goes back, and counts while the system sleeps.

    Where there is no such clock (on macOS, for example) it stops during a suspend.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def utc_text(seconds: int) -> str:
    """Write a time for people: "2026-11-16 08:42:10 UTC"."""
    return _written(seconds, "%Y-%m-%d %H:%M:%S UTC")


def utc_minute(seconds: int) -> str:
    """Write a time for people, to the minute: "2026-11-16 08:42 UTC"."""
    return _written(seconds, "%Y-%m-%d %H:%M UTC")


def _written(seconds: int, form: str) -> str:
    try:
        moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s after 1970"
    return moment.strftime(form)
