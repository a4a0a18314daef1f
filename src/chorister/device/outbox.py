"""Sealed reports that wait for their time, for the leader, or for a second try.

A report is put here as the bytes that will be sent, and those bytes are sent each time: there is
no way from here back to noise, shares or keys. Whatever the leader answers, a report ends in one
of two ways only: the leader has it, or it is dropped. Then its bytes are deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import apsw

from chorister.clock import SECOND
from chorister.device.database import upgrade

FIRST_WAIT: Final = 60
LONGEST_WAIT: Final = 6 * 3600
_SCHEMA: Final = (
    """
    CREATE TABLE outbox (
        recipe BLOB PRIMARY KEY,          -- digest
        report_id BLOB NOT NULL,
        configuration BLOB NOT NULL,      -- the task's, as it is advertised
        report BLOB NOT NULL,             -- sealed; never changed
        closes INTEGER NOT NULL,          -- from then on no leader takes it
        next_try INTEGER NOT NULL,        -- see the last step
        tries INTEGER NOT NULL DEFAULT 0
    ) STRICT, WITHOUT ROWID;
    """,
    # In microseconds, like all times at which something is sent.
    "UPDATE outbox SET next_try = next_try * 1000000",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedReport:
    """One report in the outbox."""

    recipe: bytes  # digest
    report_id: bytes
    configuration: bytes
    report: bytes
    closes: int  # seconds
    next_try: int  # microseconds; at first the time that was drawn before the query
    tries: int = 0


def wait_after(
    tries: int, *, left: int, randbelow: Callable[[int], int] = secrets.randbelow
) -> int:
    """How long to wait after so many failed tries, with `left` seconds of the window to go.

    It doubles each time, and half of it is random, so that devices that failed together do not
    come back together. When it would pass the window's end, a random part of what is left.
    """
    longest = min(FIRST_WAIT * 2 ** min(tries - 1, 20), LONGEST_WAIT)
    wait = longest // 2 + 1 + randbelow(longest // 2)
    return wait if wait < left else 1 + randbelow(max(left, 1))


class Outbox:
    """The queue. Whatever writes belongs into the caller's transaction."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        upgrade(connection, "outbox", _SCHEMA)

    def put(self, queued: QueuedReport) -> None:
        """Take in a report; a second one for the same recipe breaks the primary key."""
        self._connection.execute(
            "INSERT INTO outbox (recipe, report_id, configuration, report, closes, next_try)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                *(queued.recipe, queued.report_id, queued.configuration, queued.report),
                *(queued.closes, queued.next_try),
            ),
        )

    def due(self, now: int, *, closing: int = 0) -> list[QueuedReport]:
        """What is to be sent now, in the order of its time, and what closes by `closing`.

        All times given and returned are in microseconds, but `QueuedReport.closes`.
        """
        return self._select(
            "WHERE (next_try <= ? OR closes <= ?) AND closes > ? ORDER BY next_try",
            (now, closing // SECOND, now // SECOND),
        )

    def expired(self, now: int) -> list[QueuedReport]:
        """What no leader takes any more."""
        return self._select("WHERE closes <= ? ORDER BY closes", (now // SECOND,))

    def all(self) -> list[QueuedReport]:
        """Everything that waits."""
        return self._select("ORDER BY next_try", ())

    def next_time(self) -> int | None:
        """When the next report is to be sent."""
        found = self._connection.execute("SELECT min(next_try) FROM outbox").fetchone()
        return None if found is None else found[0]

    def postpone(self, queued: QueuedReport, *, until: int) -> None:
        """Try again later, with the same bytes."""
        self._connection.execute(
            "UPDATE outbox SET next_try = ?, tries = tries + 1 WHERE recipe = ?",
            (until, queued.recipe),
        )

    def delay(self, queued: QueuedReport, *, until: int) -> None:
        """Send it later; it was not tried."""
        self._connection.execute(
            "UPDATE outbox SET next_try = ? WHERE recipe = ?", (until, queued.recipe)
        )

    def remove(self, recipe: bytes) -> None:
        """The leader has it, or it is dropped."""
        self._connection.execute("DELETE FROM outbox WHERE recipe = ?", (recipe,))

    def _select(self, clause: str, values: tuple[int, ...]) -> list[QueuedReport]:
        rows = self._connection.execute(
            "SELECT recipe, report_id, configuration, report, closes, next_try, tries"  # noqa: S608
            f" FROM outbox {clause}",
            values,
        )
        return [
            QueuedReport(
                recipe=recipe,
                report_id=report_id,
                configuration=configuration,
                report=report,
                closes=closes,
                next_try=next_try,
                tries=tries,
            )
            for recipe, report_id, configuration, report, closes, next_try, tries in rows
        ]
