"""Reports: made once from a bin, then kept as sealed bytes until the leader has them.

    bin -> noisy bits -> two shares, sealed -> outbox -> leader

Nothing here meets data: the sandbox chose the bin. If anything went wrong there the bin is 0, OOV
in every feature, and the report is like any other.

The outbox keeps the bytes that will be sent, and each attempt sends the same bytes: nothing leads
back from here to noise, shares or keys. Whatever the leader answers, a report ends in one of two
ways: the leader has it, or it is dropped. Then its bytes are deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

import apsw

from chorister.clock import SECOND
from chorister.dap.task import TaskConfiguration
from chorister.dap.upload_client import seal_report
from chorister.device.database import upgrade
from chorister.device.records import Attempt
from chorister.device.run import Hook, RunStep
from chorister.recipe import Recipe

OOV_BIN: Final = 0
"""OOV in every feature: what a device reports if it has no data, or if its query failed."""
FIRST_WAIT_SECONDS: Final = 60
MAX_WAIT_SECONDS: Final = 6 * 3600
_SCHEMA: Final = (
    """
    CREATE TABLE outbox (
        recipe BLOB PRIMARY KEY,          -- digest
        report_id BLOB NOT NULL,
        configuration BLOB NOT NULL,      -- the task's, as it is advertised
        report BLOB NOT NULL,             -- sealed; never changed
        closes INTEGER NOT NULL,          -- from then on no leader accepts it
        next_try INTEGER NOT NULL,        -- see the last step
        tries INTEGER NOT NULL DEFAULT 0
    ) STRICT, WITHOUT ROWID;
    """,
    # In microseconds, like all times at which something is sent.
    "UPDATE outbox SET next_try = next_try * 1000000",
    # Behind a report, the times are some encrypted pages away.
    "CREATE INDEX outbox_times ON outbox (closes, next_try)",
)


# --- Making a report ------------------------------------------------------------------------------


class QueryOutcome(StrEnum):
    """How a report's bin was found. Only the device's own audit log knows."""

    RAN = "ran"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A sealed report, and its bits for the audit log."""

    bits: bytes  # after the noise, one byte per bit
    sealed: bytes


def make_report(recipe: Recipe, attempt: Attempt, bin_: int, hook: Hook) -> Report:
    """Draw the noise, shard and seal, once for every charge."""
    bits = recipe.randomizer.randomize(bin_, bounded=recipe.privacy.report == "bounded")
    hook(RunStep.RANDOMIZED)
    sealed = seal_report(
        TaskConfiguration.decode(attempt.configuration),
        bits,
        report_id=attempt.report_id,
        leader_config=attempt.leader_config,
        helper_config=attempt.helper_config,
    )
    hook(RunStep.SEALED)
    return Report(bits=bits, sealed=sealed)


# --- The outbox ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedReport:
    """One report in the outbox: a row of its table."""

    recipe: bytes  # digest
    report_id: bytes
    configuration: bytes
    report: bytes
    closes: int  # seconds
    next_try: int  # microseconds; at first the time that was drawn before the query
    tries: int = 0


_COLUMNS: Final = tuple(column.name for column in fields(QueuedReport))
_SELECT: Final = (
    "SELECT {columns} FROM outbox"
    " WHERE recipe IN (SELECT recipe FROM outbox WHERE {times}) ORDER BY next_try"
)


def wait_after(
    tries: int, *, left: int, randbelow: Callable[[int], int] = secrets.randbelow
) -> int:
    """Return how long to wait after so many failed tries, with `left` seconds of the window to go.

    It doubles each time, and half of it is random, so that devices that failed together do not come
    back together. If it would exceed the window, it is a random part of what is left.
    """
    longest = min(FIRST_WAIT_SECONDS * 2 ** min(tries - 1, 20), MAX_WAIT_SECONDS)
    wait = longest // 2 + 1 + randbelow(longest // 2)
    return wait if wait < left else 1 + randbelow(max(left, 1))


class Outbox:
    """The queue of sealed reports. All writes belong in the caller's transaction."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        upgrade(connection, "outbox", _SCHEMA)

    def put(self, queued: QueuedReport) -> None:
        """Add a report; a second one for the same recipe would violate the primary key."""
        self._connection.execute(
            "INSERT INTO outbox (recipe, report_id, configuration, report, closes, next_try)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                *(queued.recipe, queued.report_id, queued.configuration, queued.report),
                *(queued.closes, queued.next_try),
            ),
        )

    def due(self, now: int, *, closing: int = 0) -> list[QueuedReport]:
        """Return what is to be sent now, or closes by `closing`, in the order of its time.

        All times given and returned are in microseconds, but `QueuedReport.closes`.
        """
        return self._select(
            "(next_try <= ? OR closes <= ?) AND closes > ?",
            (now, closing // SECOND, now // SECOND),
        )

    def expired(self, now: int) -> list[QueuedReport]:
        """Return what no leader accepts any more."""
        return self._select("closes <= ?", (now // SECOND,))

    def all(self) -> list[QueuedReport]:
        return self._select("true", ())

    def recipes(self) -> list[bytes]:
        """Return what all reports answer, without reading the reports."""
        return [recipe for (recipe,) in self._connection.execute("SELECT recipe FROM outbox")]

    def next_time(self) -> int | None:
        """Return when the next report is to be sent."""
        found = self._connection.execute("SELECT min(next_try) FROM outbox").fetchone()
        return None if found is None else found[0]

    def postpone(self, queued: QueuedReport, *, until: int) -> None:
        """Send it again later, after a failed try."""
        self._connection.execute(
            "UPDATE outbox SET next_try = ?, tries = tries + 1 WHERE recipe = ?",
            (until, queued.recipe),
        )

    def delay(self, queued: QueuedReport, *, until: int) -> None:
        """Send it later, without counting a try."""
        self._connection.execute(
            "UPDATE outbox SET next_try = ? WHERE recipe = ?", (until, queued.recipe)
        )

    def remove(self, recipe: bytes) -> None:
        """Delete a report: the leader has it, or it is dropped."""
        self._connection.execute("DELETE FROM outbox WHERE recipe = ?", (recipe,))

    def _select(self, times: str, values: tuple[int, ...]) -> list[QueuedReport]:
        query = _SELECT.format(columns=", ".join(_COLUMNS), times=times)
        rows = self._connection.execute(query, values)
        return [QueuedReport(**dict(zip(_COLUMNS, row, strict=True))) for row in rows]
