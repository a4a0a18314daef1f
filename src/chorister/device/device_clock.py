"""The device's time: never decreasing, and no later than others vouch for where it matters.

Two times, both kept in the ledger's database:

- **now**: the system's clock, but never before a time at which this device decided something. A
  clock that is set back therefore makes no old checkpoint look fresh. The mark moves only with
  a checkpoint whose freshness was verified, so it is ahead of the cosigners' time by at most the
  policy's `checkpoint_max_age`: a clock that ran far ahead silences a device only while it does.
- **decision time**: the time of the newest cosigned checkpoint, on which renewal and age are
  decided. A clock that is set forward, or that jumps a period, renews nothing: both aggregators
  would have to sign that time.
"""

from __future__ import annotations

from typing import Final

import apsw

from chorister.canonical import MAX_INT
from chorister.clock import Clock
from chorister.device.database import upgrade
from chorister.errors import InvalidInput, LedgerError, LedgerTampered

__all__ = ["DeviceClock"]

_SCHEMA: Final = (
    """
    CREATE TABLE device_time (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        seen INTEGER NOT NULL,        -- the latest time at which a checkpoint was accepted
        checkpoint INTEGER NOT NULL   -- the time of the newest one
    ) STRICT;
    """,
)


class DeviceClock:
    """A `Clock` over the system's, with a memory in the ledger's database."""

    def __init__(self, connection: apsw.Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        upgrade(connection, "device_time", _SCHEMA)

    def now(self) -> int:
        """The time now, in whole seconds."""
        marks = self._marks()
        return self._clock.now() if marks is None else max(marks[0], self._clock.now())

    def microseconds(self) -> int:
        """The system's time, for the schedule: it may be set back, but it goes on from there."""
        return self._clock.microseconds()

    def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""
        self._clock.sleep(seconds)

    def accept_checkpoint(self, time: int) -> None:
        """Take over the time of a checkpoint, inside the caller's transaction.

        Only after the log's reader has verified its signatures and that it is fresh by `now()`.
        """
        if not 0 <= time <= MAX_INT:
            raise InvalidInput(f"a checkpoint's time lies between 0 and 2^53 - 1, not at {time}")
        marks = self._marks()
        if marks is not None and time < marks[1]:
            raise InvalidInput(
                f"a checkpoint of {time} after one of {marks[1]}: the log was rewound, refuse it"
            )
        if not self._connection.in_transaction:
            raise InvalidInput("accept_checkpoint() belongs inside transaction()")
        seen = max(self.now(), time)
        self._connection.execute(
            "INSERT INTO device_time VALUES (1, ?, ?) ON CONFLICT (only_row)"
            " DO UPDATE SET seen = excluded.seen, checkpoint = excluded.checkpoint",
            (seen, time),
        )

    def decision_time(self) -> int:
        """When budgets renew and how old the ledger is, is decided as of this time."""
        marks = self._marks()
        if marks is None:
            raise LedgerError(
                "no cosigned checkpoint was accepted yet, so the time is not vouched for: "
                "poll the registry first"
            )
        return marks[1]

    def _marks(self) -> tuple[int, int] | None:
        row = self._connection.execute("SELECT seen, checkpoint FROM device_time").fetchone()
        if row is None:
            return None
        seen, checkpoint = row
        if not (type(seen) is int and type(checkpoint) is int and 0 <= checkpoint <= seen):
            raise LedgerTampered("the device's time is impossible", sequence=0)
        return seen, checkpoint
