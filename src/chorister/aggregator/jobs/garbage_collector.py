"""Deletes the data of ended tasks, in two steps.

At `ends`, requests for the task are refused: sealed reports, jobs, sums and results are deleted. At
`bucket_end`, which is not earlier, the rest follows, report ids included: no report of the task can
be valid then, and the task itself is unknown. Only its id stays for a while, so that a wrong clock
can't make an ended task new again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chorister.aggregator.storage import tasks
from chorister.aggregator.storage.batches import lock_batch, set_batch_state
from chorister.aggregator.storage.database import Database
from chorister.aggregator.storage.hpke_keys import KeyRing
from chorister.aggregator.storage.schema import BatchState
from chorister.aggregator.storage.tasks import TaskStore
from chorister.clock import Clock

KEEP_IDS_SECONDS: Final = 366 * 86_400
"""For how long the ids of deleted tasks are kept."""
_KEEP_IDS_RUNS: Final = 1440  # a day of them, one per minute
_SEGMENTS_PER_TRANSACTION: Final = 200
_IDS_PER_TRANSACTION: Final = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
    """What one run deleted."""

    emptied: int  # tasks whose reports, sums and results were deleted
    removed: int  # tasks that were deleted altogether


class GarbageCollector:
    """Deletes what one aggregator no longer needs: ended tasks, and unused HPKE keys."""

    def __init__(self, database: Database, tasks: TaskStore, keys: KeyRing, clock: Clock) -> None:
        self._database = database
        self._tasks = tasks
        self._keys = keys
        self._clock = clock

    def run(self) -> Deleted:
        """Delete in short transactions, so that others are not held up."""
        now = self._clock.now()
        with self._database.read() as tx:
            ended = tasks.ended_tasks(tx, now)
        for task_id in ended:
            self._empty(task_id)
        with self._database.read() as tx:
            expired = tasks.expired_tasks(tx, now)
        for task_id, bucket_end in expired.items():
            self._remove(task_id, bucket_end)
        with self._database.write(durable=False) as tx:
            tasks.forget_deleted_tasks(
                tx, ended_before=now - KEEP_IDS_SECONDS, after_runs=_KEEP_IDS_RUNS
            )
        if expired:
            self._tasks.clear_cache()
        self._keys.destroy_due()
        if ended or expired or self._database.log_holds_deleted:
            self._database.free_disk_space()
        return Deleted(emptied=len(ended), removed=len(expired))

    def _empty(self, task_id: bytes) -> None:
        # The state first: whatever the clock does next, the task stays refused.
        with self._database.write(durable=False) as tx:
            lock_batch(tx, task_id, exclusive=True)
            set_batch_state(tx, task_id, BatchState.ENDING)
        deleted = _SEGMENTS_PER_TRANSACTION
        while deleted == _SEGMENTS_PER_TRANSACTION:
            with self._database.write(durable=False) as tx:
                deleted = tasks.delete_segments(tx, task_id, _SEGMENTS_PER_TRANSACTION)
        with self._database.write(durable=False) as tx:
            tasks.delete_work(tx, task_id)
            set_batch_state(tx, task_id, BatchState.ENDED)

    def _remove(self, task_id: bytes, bucket_end: int) -> None:
        deleted = _IDS_PER_TRANSACTION
        while deleted == _IDS_PER_TRANSACTION:
            with self._database.write(durable=False) as tx:
                deleted = tasks.delete_report_ids(tx, task_id, _IDS_PER_TRANSACTION)
        with self._database.write(durable=False) as tx:
            tasks.delete_task(self._database, tx, task_id, bucket_end)
