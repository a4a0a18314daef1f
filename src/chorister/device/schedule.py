"""When a device may send: absolute times, drawn before data is touched, and stored.

**The principle.** Everything that others can observe happens at absolute times that were drawn from
fresh randomness before any data was touched. No process of the device sends anything earlier or
later because of work on data.

So two times are stored in the ledger's database, where the loop, `--once`, a second process and a
restarted one find them:

- **quiet until**: before a run touches data, it reserves the longest time that this may take, which
  depends on the number of queries alone. Until then nothing is sent, whether the work is done or
  not.
- **next poll**: drawn before the poll that it follows.

The time of each upload is stored with its attempt and its report. All are in microseconds.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import apsw

from chorister.clock import SECOND, Clock
from chorister.device.database import upgrade
from chorister.errors import InternalError, InvalidInput, QueryRefused
from chorister.recipe import Recipe

MAX_QUERY_SECONDS: Final = 3600
MAX_QUIET_SECONDS: Final = 24 * 3600
"""The longest time that a run may reserve."""
_MISSED_SPREAD: Final = 60 * SECOND


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A device's timings, in seconds. The host app may change them; recipes and servers can't.

    Times drawn from them are in microseconds, each with a fresh fraction of a second.
    """

    query: int = 20
    """The longest that one query and the encoding of its rows may take; then it has failed."""
    slack: int = 10
    """The longest that reading the events before it, and noise and sealing after it, may take."""
    housekeeping: int = 5
    """The longest that deleting expired events after a poll may take. Nothing is sent meanwhile."""
    settle: int = 2
    """Time for opening databases, reading consent and the like before a run's first request.

    How long such work takes can depend on data. 0 sends at once: only for simulated fleets.
    """
    spread: int = 3600
    """The time over which uploads are spread, so that they can't be matched with polls."""
    poll: int = 3600
    """The average time between two polls."""

    def __post_init__(self) -> None:
        if min(self.query, self.slack, self.housekeeping, self.spread, self.poll) < 1:
            raise InvalidInput("every time except `settle` must be at least one second")
        if self.settle < 0:
            raise InvalidInput("`settle` must not be negative")
        if self.query > MAX_QUERY_SECONDS or self.max_queries < 1:
            raise InvalidInput(
                f"a query may take at most {MAX_QUERY_SECONDS} s, and with slack and housekeeping "
                f"at most {MAX_QUIET_SECONDS} s"
            )

    @property
    def max_queries(self) -> int:
        """The most queries that one run makes; the rest waits for the next run."""
        return (MAX_QUIET_SECONDS - self.housekeeping) // (self.query + self.slack)

    def busy_until(self, now: int, queries: int) -> int:
        """Return when so many queries and the housekeeping, begun now, must be over."""
        return now + (queries * (self.query + self.slack) + self.housekeeping) * SECOND

    def draw_upload(
        self,
        recipe: Recipe,
        number: int = 0,
        *,
        busy_until: int,
        randbelow: Callable[[int], int] = secrets.randbelow,
    ) -> int:
        """Draw when the report of a window will be uploaded, before its query runs.

        It is after the deadlines of all queries of the same run, so it reveals nothing about how
        long any of them took.
        """
        closes = recipe.window_at(number).closes
        latest = min(busy_until + self.spread * SECOND, closes * SECOND - 1)
        if latest < busy_until:
            raise QueryRefused(check="time", why="its answer period ends too soon for an upload")
        return busy_until + randbelow(latest - busy_until + 1)

    def draw_late_upload(
        self, now: int, closes: int, *, randbelow: Callable[[int], int] = secrets.randbelow
    ) -> int:
        """Draw a new time for a report that was not ready because the machine was suspended."""
        return now + randbelow(max(1, min(self.spread * SECOND, closes * SECOND - now)))

    def draw_poll(self, after: int, *, randbelow: Callable[[int], int] = secrets.randbelow) -> int:
        """Draw when to poll next: half to one and a half times the interval later."""
        return after + self.poll * SECOND // 2 + 1 + randbelow(self.poll * SECOND)

    def draw_start(self, now: int, *, randbelow: Callable[[int], int] = secrets.randbelow) -> int:
        """Draw when a run that was requested now sends its first request."""
        return now + self.settle * SECOND + randbelow(SECOND) if self.settle else now

    def draw_missed(
        self, missed: int, now: int, *, randbelow: Callable[[int], int] = secrets.randbelow
    ) -> int:
        """Draw when a run that missed its moment sends: a minute or two after now.

        The reason for the delay may depend on data, so only its whole minutes count.
        """
        if not self.settle:
            return now
        minutes = max(0, now - missed) // _MISSED_SPREAD + 1
        start = missed + minutes * _MISSED_SPREAD
        return start + self.settle * SECOND + randbelow(_MISSED_SPREAD)


def flip(probability: Decimal, *, randbelow: Callable[[int], int] = secrets.randbelow) -> bool:
    """Return True with exactly this probability: a decimal is a fraction over a power of ten."""
    numerator, denominator = probability.as_integer_ratio()
    return randbelow(denominator) < numerator


_SCHEMA: Final = (
    """
    CREATE TABLE schedule (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        quiet_until INTEGER NOT NULL,     -- microseconds, like all times of the schedule
        next_poll INTEGER NOT NULL
    ) STRICT;
    INSERT INTO schedule VALUES (1, 0, 0);
    """,
)
_MAX_QUIET: Final = MAX_QUIET_SECONDS * SECOND
"""A time further ahead was written when the clock was wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendTimes:
    """When a device sends next, in microseconds."""

    poll_at: int  # 0 if it never polled
    upload_at: int | None


class Schedule:
    """The two stored times. All writes belong in the caller's transaction."""

    def __init__(
        self,
        connection: apsw.Connection,
        clock: Clock,
        timing: Timing,
        *,
        randbelow: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._timing = timing
        self._randbelow = randbelow
        self._quiet_uptime = 0.0  # the end of what this process reserved, if the clock is set
        upgrade(connection, "schedule", _SCHEMA)

    @property
    def quiet_until(self) -> int:
        """Before this time nothing is sent. It may have passed."""
        quiet_until, _ = self._read()
        now = self._clock.microseconds()
        left = round((self._quiet_uptime - self._clock.uptime()) * SECOND)
        stored = quiet_until if quiet_until <= now + _MAX_QUIET else 0
        return max(stored, now + left) if left > 0 else stored

    @property
    def next_poll(self) -> int:
        """When to poll next; 0 if this device never polled."""
        _, next_poll = self._read()
        longest = 2 * self._timing.poll * SECOND + _MAX_QUIET
        return next_poll if next_poll <= self._clock.microseconds() + longest else 0

    def draw_poll(self) -> int:
        """Draw the time of the poll after the one that begins now; `plan_poll` stores it."""
        now = self._clock.microseconds()
        return self._timing.draw_poll(now, randbelow=self._randbelow)

    def plan_poll(self, time: int) -> None:
        self._connection.execute("UPDATE schedule SET next_poll = ?", (time,))

    def reserve(self, queries: int) -> int:
        """Reserve the time that so many queries and the housekeeping may take; return its end.

        A poll that would fall before the end is drawn again.
        """
        if queries > self._timing.max_queries:
            raise InternalError(f"a run has at most {self._timing.max_queries} queries")
        now = self._clock.microseconds()
        until = self._timing.busy_until(now, queries)
        self._quiet_uptime = self._clock.uptime() + (until - now) / SECOND
        self._connection.execute("UPDATE schedule SET quiet_until = ?", (until,))
        if self.next_poll <= until:
            self.plan_poll(self._timing.draw_poll(until, randbelow=self._randbelow))
        return until

    def _read(self) -> tuple[int, int]:
        for quiet_until, next_poll in self._connection.execute(
            "SELECT quiet_until, next_poll FROM schedule"
        ):
            return quiet_until, next_poll
        return 0, 0
