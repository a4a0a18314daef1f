"""The device's time: it never decreases, and where it matters, cosigners vouch for it.

There are two times, both stored in the ledger's database:

- **now**: the system's clock, but never before the time at which this device last accepted a
  checkpoint. So an old checkpoint does not look fresh because the clock was set back. That time is
  at most the policy's `checkpoint_max_age` ahead of the cosigners' time: a clock that runs far
  ahead silences a device only for as long as it does.
- **decision time**: the time of the newest cosigned checkpoint, which decides about renewal and
  age. A clock that is set forward, or jumps a period, renews nothing: both aggregators would have
  to sign that time. Nor do both aggregators renew anything by themselves: a checkpoint that is
  further ahead of the system's clock than `checkpoint_max_age` is not accepted.
"""

from __future__ import annotations

from typing import Final

import apsw

from chorister.canonical import MAX_INT
from chorister.clock import Clock, uptime
from chorister.device.database import upgrade
from chorister.errors import InvalidInput, LedgerError, LedgerTampered

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
    """The system's clock, with two times stored in the ledger's database."""

    def __init__(self, connection: apsw.Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        upgrade(connection, "device_time", _SCHEMA)

    def now(self) -> int:
        """Return the time in whole seconds."""
        marks = self._marks()
        return self._clock.now() if marks is None else max(marks[0], self._clock.now())

    def microseconds(self) -> int:
        """Return the system's time, for the schedule. It may be set back."""
        return self._clock.microseconds()

    def uptime(self) -> float:
        # A host app's clock may be older than this method.
        return getattr(self._clock, "uptime", uptime)()

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    def accept_checkpoint(self, time: int) -> None:
        """Store the time of a checkpoint, inside the caller's transaction.

        Call it only after its signatures, and that it is fresh by `now()`, were verified.
        """
        if not 0 <= time <= MAX_INT:
            raise InvalidInput(f"a checkpoint's time must be between 0 and 2^53 - 1, not {time}")
        marks = self._marks()
        if marks is not None and time < marks[1]:
            raise InvalidInput(
                f"a checkpoint of {time} after one of {marks[1]}: the log was rewound"
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
        """Return the time that decides when budgets renew and how old the ledger is."""
        marks = self._marks()
        if marks is None:
            raise LedgerError(
                "no cosigned checkpoint was accepted yet, so nobody vouches for the time: "
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
