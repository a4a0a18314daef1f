"""What has ended is deleted, in two steps.

At `ends` nothing about the task is answered any more: sealed reports, jobs, sums and results go. At
`bucket_end`, which is not earlier, the rest goes, report ids included: no report of the task can be
valid then, and the task itself is unknown. Only its id stays for a while, so that a wrong clock
can't make an ended task new again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, delete, select, update

from chorister.aggregator.batches import lock, set_state
from chorister.aggregator.database import Database
from chorister.aggregator.schema import (
    BatchState,
    accumulators,
    aggregate_shares,
    aggregation_jobs,
    batches,
    collections,
    counters,
    helper_jobs,
    report_blobs,
    report_ids,
    segments,
    swept_tasks,
    tasks,
)

__all__ = ["Swept", "sweep"]

_AT_THE_END: Final = (
    aggregation_jobs,
    helper_jobs,
    accumulators,
    collections,
    aggregate_shares,
)
_AFTERWARDS: Final = (counters, batches, tasks)
_REMEMBERED: Final = 366 * 86_400
_SWEEPS: Final = 1440  # a day of them, one a minute
_SEGMENTS_AT_ONCE: Final = 200
_IDS_AT_ONCE: Final = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """What one sweep did."""

    emptied: int  # tasks whose reports, sums and results were deleted
    removed: int  # tasks that are gone altogether


def sweep(database: Database, now: int) -> Swept:
    """Delete what has ended by `now`, in short transactions, so that others are not held up.

    The state goes first: whatever the clock does next, a task that is being emptied stays refused.
    """
    ended = _tasks(database, tasks.c.ends <= now, batches.c.state < BatchState.ENDED)
    for task_id in ended:
        _empty(database, task_id)
    over = _tasks(database, tasks.c.bucket_end <= now, batches.c.state == BatchState.ENDED)
    for task_id, bucket_end in over.items():
        _remove(database, task_id, bucket_end)
    _forget(database, swept_tasks.c.bucket_end < now - _REMEMBERED)
    if ended or over:
        database.give_back()
    return Swept(emptied=len(ended), removed=len(over))


def _forget(database: Database, due: ColumnElement[bool]) -> None:
    """Drop ids that many sweeps found due: a clock that is far ahead for hours drops none."""
    with database.write(durable=False) as connection:
        connection.execute(delete(swept_tasks).where(due, swept_tasks.c.sweeps >= _SWEEPS))
        connection.execute(update(swept_tasks).where(due).values(sweeps=swept_tasks.c.sweeps + 1))


def _tasks(database: Database, *conditions: ColumnElement[bool]) -> dict[bytes, int]:
    with database.read() as connection:
        rows = connection.execute(
            select(tasks.c.task_id, tasks.c.bucket_end)
            .join(batches, batches.c.task_id == tasks.c.task_id)
            .where(*conditions)
        )
        return {bytes(task_id): bucket_end for task_id, bucket_end in rows}


def _empty(database: Database, task_id: bytes) -> None:
    with database.write(durable=False) as connection:
        lock(connection, task_id, alone=True)
        set_state(connection, task_id, BatchState.ENDING)
    some = select(segments.c.segment_id).where(segments.c.task_id == task_id)
    while True:
        with database.write(durable=False) as connection:
            chunk = connection.execute(some.limit(_SEGMENTS_AT_ONCE)).scalars().all()
            for table in (report_blobs, segments):
                chosen = (table.c.task_id == task_id) & table.c.segment_id.in_(chunk)
                connection.execute(delete(table).where(chosen))
        if len(chunk) < _SEGMENTS_AT_ONCE:
            break
    with database.write(durable=False) as connection:
        for table in _AT_THE_END:
            connection.execute(delete(table).where(table.c.task_id == task_id))
        set_state(connection, task_id, BatchState.ENDED)


def _remove(database: Database, task_id: bytes, bucket_end: int) -> None:
    own = report_ids.c.task_id == task_id
    some = select(report_ids.c.report_id).where(own).limit(_IDS_AT_ONCE)
    while True:
        with database.write(durable=False) as connection:
            deleted = connection.execute(
                delete(report_ids).where(own, report_ids.c.report_id.in_(some))
            ).rowcount
        if deleted < _IDS_AT_ONCE:
            break
    with database.write(durable=False) as connection:
        row = {"task_id": task_id, "bucket_end": bucket_end}
        database.insert_new(connection, swept_tasks, [row])
        for table in _AFTERWARDS:
            connection.execute(delete(table).where(table.c.task_id == task_id))
