"""A task's one batch: its state, the ids in it, and the sum so far.

The row in `batches` is where everything meets. Whoever adds to a batch (an upload, a job) holds it
shared, whoever changes its state holds it alone, both until they commit. So no report slips into a
batch that is being frozen or collected, and once the state has changed, all that was added before
can be seen. On SQLite there is only one writer, and nothing to lock.

Locks are taken in one order (batch, ids in ascending order, sum, counters), so nobody waits in a
circle.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select, update

from chorister._native import Aggregated
from chorister.aggregator.database import Database
from chorister.aggregator.schema import BatchState, accumulators, batches, report_ids
from chorister.aggregator.tasks import KnownTask
from chorister.dap.draft import CHECKSUM_BYTES, REPORT_ID_BYTES
from chorister.errors import InternalError

__all__ = [
    "Total",
    "accumulate",
    "add_ids",
    "drop_total",
    "lock",
    "set_state",
    "state_of",
    "total",
]


# Uploads are stored by the hundred, and a parameter for each id is what would take the time: so
# SQLite gets them in one piece and cuts it up.
_ADD_JOINED_IDS: Final = """
WITH RECURSIVE place(first) AS (
    SELECT 1
    UNION ALL
    SELECT first + 16 FROM place WHERE first + 16 < length(?1)
)
INSERT INTO report_ids (task_id, report_id)
SELECT ?2, substr(?1, first, 16) FROM place WHERE true
ON CONFLICT DO NOTHING
RETURNING report_id
"""


# Made once: to put a statement together takes longer than to execute it.
_STATE: Final = select(batches.c.state).where(batches.c.task_id == bindparam("task"))
_LOCK_ALONE: Final = _STATE.with_for_update()
_LOCK_SHARED: Final = _STATE.with_for_update(read=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """What one aggregator added up. `share` is secret: it never prints."""

    reports: int
    checksum: bytes
    share: bytes

    def __repr__(self) -> str:
        return f"Total(reports={self.reports}, checksum={self.checksum.hex()})"


def lock(connection: Connection, task_id: bytes, *, alone: bool) -> BatchState | None:
    """The state of the batch, which stays so until this transaction ends; None once swept."""
    state = connection.scalar(_LOCK_ALONE if alone else _LOCK_SHARED, {"task": task_id})
    return None if state is None else BatchState(state)


def state_of(connection: Connection, task_id: bytes) -> BatchState | None:
    """The state of the batch at this moment."""
    state = connection.scalar(_STATE, {"task": task_id})
    return None if state is None else BatchState(state)


def set_state(connection: Connection, task_id: bytes, state: BatchState) -> None:
    """For whoever holds the lock alone."""
    connection.execute(update(batches).where(batches.c.task_id == task_id).values(state=state))


def add_ids(
    database: Database, connection: Connection, task_id: bytes, ids: Iterable[bytes]
) -> set[bytes]:
    """Add report ids; those that were new. Of two transactions with one id, one gets it."""
    ascending = sorted(ids)
    if not ascending:
        return set()
    if database.is_sqlite:
        joined = b"".join(ascending)
        if len(joined) != REPORT_ID_BYTES * len(ascending):
            raise InternalError(f"a report id has {REPORT_ID_BYTES} bytes")
        return set(connection.exec_driver_sql(_ADD_JOINED_IDS, (joined, task_id)).scalars().all())
    rows = [{"task_id": task_id, "report_id": report_id} for report_id in ascending]
    insert = database.insert(report_ids).on_conflict_do_nothing().returning(report_ids.c.report_id)
    return {bytes(report_id) for report_id in connection.execute(insert, rows).scalars()}


def accumulate(
    database: Database, connection: Connection, task: KnownTask, job: Aggregated
) -> None:
    """Add a job's verified reports to the sum."""
    if not job.count:
        return
    shard = secrets.randbelow(database.shards)
    place = ("accumulators", task.task_id, bytes([shard]))
    key = {"task_id": task.task_id, "shard": shard}
    current = select(accumulators).filter_by(**key).with_for_update()
    row = connection.execute(current).one_or_none()
    if row is None:
        sealed = database.sealer.seal(job.share, *place)
        first = key | {"reports": job.count, "checksum": job.checksum, "share": sealed}
        if database.insert_new(connection, accumulators, [first]):
            return
        # Another transaction made the row in between, and has committed.
        row = connection.execute(current).one()
    merged = task.vdaf.merge([database.sealer.open(bytes(row.share), *place), job.share])
    connection.execute(
        update(accumulators)
        .filter_by(**key)
        .values(
            reports=row.reports + job.count,
            checksum=_xor(bytes(row.checksum), job.checksum),
            share=database.sealer.seal(merged, *place),
        )
    )


def total(database: Database, connection: Connection, task: KnownTask) -> Total:
    """The sum over all shards."""
    reports, checksum, shares = 0, bytes(CHECKSUM_BYTES), [task.vdaf.zero()]
    rows = connection.execute(
        select(accumulators)
        .where(accumulators.c.task_id == task.task_id)
        .order_by(accumulators.c.shard)
    )
    for row in rows:
        place = ("accumulators", task.task_id, bytes([row.shard]))
        reports += row.reports
        checksum = _xor(checksum, bytes(row.checksum))
        shares.append(database.sealer.open(bytes(row.share), *place))
    return Total(reports=reports, checksum=checksum, share=task.vdaf.merge(shares))


def drop_total(connection: Connection, task_id: bytes) -> None:
    """Delete the sum: it was collected, or the task has ended."""
    connection.execute(delete(accumulators).where(accumulators.c.task_id == task_id))


def _xor(left: bytes, right: bytes) -> bytes:
    number = int.from_bytes(left, "big") ^ int.from_bytes(right, "big")
    return number.to_bytes(CHECKSUM_BYTES, "big")
