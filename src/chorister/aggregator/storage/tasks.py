"""Tasks in the database: those of logged recipes, until they have ended and are deleted.

Opting in is a lookup. `TaskStore.accept` receives every recipe before its checkpoint is cosigned
and stores the tasks that this aggregator serves. A task that is not stored does not exist: requests
for it are refused and leave no row behind.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, delete, select, update

from chorister.aggregator.known_tasks import KnownTask, Noise, served_tasks
from chorister.aggregator.storage.database import Database, Transaction, in_queries
from chorister.aggregator.storage.schema import (
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
from chorister.clock import Clock
from chorister.dap.draft import Role
from chorister.dap.task import TaskConfiguration
from chorister.policy import Policy
from chorister.recipe import SignedRecipe

_CACHED_TASKS: Final = 1024


class TaskStore:
    """The tasks that one aggregator serves. Threads share it."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        url: str,
        role: Role,
        policies: Sequence[Policy],
    ) -> None:
        """`url` is this aggregator's own, as recipes and policies spell it."""
        self._database = database
        self._clock = clock
        self._url = url
        self._role = role
        self._policies = tuple(policies)
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, KnownTask] = OrderedDict()

    def accept(self, recipes: Sequence[SignedRecipe]) -> None:
        """Store the tasks of logged recipes that this aggregator serves. Idempotent.

        Called before the checkpoint is cosigned, so that a device that sees the recipe on a
        cosigned list finds both aggregators ready for it.
        """
        found: dict[bytes, KnownTask] = {}
        for signed in recipes:
            served = served_tasks(signed, url=self._url, role=self._role, policies=self._policies)
            for task in served:
                found.setdefault(task.task_id, task)
        if not found:
            return
        now = self._clock.now()
        with self._database.write() as tx:
            # A clock that went back must not revive a deleted task: replays would count again.
            gone = _deleted(tx, list(found))
            rows = [
                _row(task)
                for task_id, task in sorted(found.items())
                if task.bucket_end > now and task_id not in gone
            ]
            if rows:
                tx.execute(self._database.insert(tasks).on_conflict_do_nothing(), rows)
                states = [{"task_id": row["task_id"], "state": BatchState.OPEN} for row in rows]
                tx.execute(self._database.insert(batches).on_conflict_do_nothing(), states)

    def find(self, task_id: bytes) -> KnownTask | None:
        """Return the task with this id, or None if this aggregator does not serve it."""
        with self._lock:
            known = self._cache.get(task_id)
            if known is not None:
                self._cache.move_to_end(task_id)
                return known
        with self._database.read() as tx:
            row = tx.execute(select(tasks).where(tasks.c.task_id == task_id)).one_or_none()
        if row is None:
            return None
        with self._lock:
            task = self._cache.setdefault(task_id, _known(row))
            self._cache.move_to_end(task_id)
            while len(self._cache) > _CACHED_TASKS:
                self._cache.popitem(last=False)
        return task

    def of_recipe(self, recipe_digest: bytes) -> list[KnownTask]:
        query = (
            select(tasks)
            .where(tasks.c.recipe_digest == recipe_digest)
            .order_by(tasks.c.opens, tasks.c.group, tasks.c.task_id)
        )
        with self._database.read() as tx:
            return [_known(row) for row in tx.execute(query)]

    def all(self) -> list[KnownTask]:
        """Return every task, the last to end first."""
        query = select(tasks).order_by(tasks.c.ends.desc(), tasks.c.group, tasks.c.task_id)
        with self._database.read() as tx:
            return [_known(row) for row in tx.execute(query)]

    def clear_cache(self) -> None:
        """Drop cached tasks, because some were deleted."""
        with self._lock:
            self._cache.clear()


def _deleted(tx: Transaction, task_ids: Sequence[bytes]) -> set[bytes]:
    gone: set[bytes] = set()
    for some in in_queries(task_ids):
        query = select(swept_tasks.c.task_id).where(swept_tasks.c.task_id.in_(some))
        gone.update(map(bytes, tx.scalars(query)))
    return gone


def _row(task: KnownTask) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "configuration": task.configuration.encode(),
        "recipe_digest": task.recipe_digest,
        "policy_digest": task.policy_digest,
        "analysis": task.analysis,
        "group": task.group,
        "collector": task.collector,
        "noise_trials": task.noise.trials if task.noise else None,
        "noise_threshold": task.noise.threshold if task.noise else None,
        "opens": task.opens,
        "closes": task.closes,
        "ends": task.ends,
        "bucket_end": task.bucket_end,
    }


def _known(row: Row[Any]) -> KnownTask:
    noise = None
    if row.noise_trials is not None:
        noise = Noise(trials=row.noise_trials, threshold=row.noise_threshold)
    return KnownTask(
        task_id=bytes(row.task_id),
        configuration=TaskConfiguration.decode(bytes(row.configuration)),
        recipe_digest=bytes(row.recipe_digest),
        policy_digest=bytes(row.policy_digest),
        analysis=row.analysis,
        group=row.group,
        collector=bytes(row.collector),
        noise=noise,
        opens=row.opens,
        closes=row.closes,
        ends=row.ends,
        bucket_end=row.bucket_end,
    )


# --- deleting ended tasks, for the garbage collector --------------------------------------------

_DELETED_AT_END: Final = (
    aggregation_jobs,
    helper_jobs,
    accumulators,
    collections,
    aggregate_shares,
)
_DELETED_WITH_TASK: Final = (counters, batches, tasks)


def ended_tasks(tx: Transaction, now: int) -> list[bytes]:
    """Find tasks that have ended and still hold reports, sums or results."""
    return list(_selected(tx, tasks.c.ends <= now, batches.c.state < BatchState.ENDED))


def expired_tasks(tx: Transaction, now: int) -> dict[bytes, int]:
    """Find emptied tasks whose bucket is over, with the bucket's end."""
    return _selected(tx, tasks.c.bucket_end <= now, batches.c.state == BatchState.ENDED)


def _selected(tx: Transaction, *conditions: ColumnElement[bool]) -> dict[bytes, int]:
    rows = tx.execute(
        select(tasks.c.task_id, tasks.c.bucket_end)
        .join(batches, batches.c.task_id == tasks.c.task_id)
        .where(*conditions)
    )
    return {bytes(task_id): bucket_end for task_id, bucket_end in rows}


def delete_segments(tx: Transaction, task_id: bytes, limit: int) -> int:
    """Delete up to `limit` segments of sealed reports. Returns the number deleted."""
    chunk = (
        tx.execute(select(segments.c.segment_id).where(segments.c.task_id == task_id).limit(limit))
        .scalars()
        .all()
    )
    for table in (report_blobs, segments):
        chosen = (table.c.task_id == task_id) & table.c.segment_id.in_(chunk)
        tx.execute(delete(table).where(chosen))
    return len(chunk)


def delete_work(tx: Transaction, task_id: bytes) -> None:
    """Delete a task's jobs, sum and results."""
    for table in _DELETED_AT_END:
        tx.execute(delete(table).where(table.c.task_id == task_id))


def delete_report_ids(tx: Transaction, task_id: bytes, limit: int) -> int:
    """Delete up to `limit` report ids. Returns the number deleted."""
    own = report_ids.c.task_id == task_id
    some = select(report_ids.c.report_id).where(own).limit(limit)
    return tx.execute(delete(report_ids).where(own, report_ids.c.report_id.in_(some))).rowcount


def delete_task(database: Database, tx: Transaction, task_id: bytes, bucket_end: int) -> None:
    """Delete the task itself; its id stays for a while, so that it can't come back."""
    database.insert_new(tx, swept_tasks, [{"task_id": task_id, "bucket_end": bucket_end}])
    for table in _DELETED_WITH_TASK:
        tx.execute(delete(table).where(table.c.task_id == task_id))


def forget_deleted_tasks(tx: Transaction, *, ended_before: int, after_runs: int) -> None:
    """Drop the ids of deleted tasks once `after_runs` runs found them due.

    A clock that is far ahead for a few hours therefore drops none.
    """
    due = swept_tasks.c.bucket_end < ended_before
    tx.execute(delete(swept_tasks).where(due, swept_tasks.c.sweeps >= after_runs))
    tx.execute(update(swept_tasks).where(due).values(sweeps=swept_tasks.c.sweeps + 1))
