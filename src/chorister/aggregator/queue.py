"""The queue of jobs for `chorister worker`, on PostgreSQL: Procrastinate's, written by our own SQL.

A job is enqueued in the transaction that makes it due, so neither is ever without the other:

    gather     reports were stored: make aggregation jobs of them, after they waited for company
    aggregate  an aggregation job was made: step it
    collect    a collection was asked for, or a job of a task with a waiting collection has ended

`gather` and `collect` are enqueued every time, without asking whether one waits already: such a
question would be answered before the commit, and the one that waits may run before it. Instead
whoever runs one deletes the others that wait (`claim`): those were committed before, so all that
they announced is there to be seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from sqlalchemy import Connection, TextClause, select, text

from chorister.aggregator.database import Database
from chorister.aggregator.schema import collections

__all__ = [
    "QUEUE",
    "DeadJob",
    "JobQueue",
    "NoQueue",
    "WorkersQueue",
    "claim",
    "dead_jobs",
    "enqueue_collections",
    "identity",
    "recover",
    "revive",
]

QUEUE: Final = "chorister"
_PERIODIC: Final = ("recover", "sweep")
_PRIORITIES: Final = {"collect": 2, "gather": 1, "aggregate": 0}
"""Whoever waits for a result waits for no other task's reports."""

Ref: TypeAlias = tuple[bytes, bytes]
"""A task's id and a job's."""


class JobQueue(Protocol):
    """What is told when a job becomes due, within the transaction that makes it so."""

    def reports_stored(self, connection: Connection) -> None:
        """Reports wait for a job."""
        ...

    def jobs_made(self, connection: Connection, refs: Sequence[Ref]) -> None:
        """Aggregation jobs were made."""
        ...

    def job_ended(self, connection: Connection, task_id: bytes) -> None:
        """An aggregation job of a task has ended: a collection may have become possible."""
        ...

    def collection_asked(self, connection: Connection, ref: Ref) -> None:
        """A collection was asked for."""
        ...


class NoQueue:
    """The embedded loop looks for itself."""

    def reports_stored(self, connection: Connection) -> None:
        """Nothing to write."""

    def jobs_made(self, connection: Connection, refs: Sequence[Ref]) -> None:
        """Nothing to write."""

    def job_ended(self, connection: Connection, task_id: bytes) -> None:
        """Nothing to write."""

    def collection_asked(self, connection: Connection, ref: Ref) -> None:
        """Nothing to write."""


class WorkersQueue:
    """The queue that workers fetch from."""

    def __init__(self, *, linger: float) -> None:
        """`linger`: how many seconds reports wait for others before a job is made of them."""
        self._linger = linger

    def reports_stored(self, connection: Connection) -> None:
        """Enqueue `gather`."""
        _enqueue(connection, "gather", [{}], delay=self._linger)

    def jobs_made(self, connection: Connection, refs: Sequence[Ref]) -> None:
        """Enqueue one `aggregate` a job."""
        _enqueue(connection, "aggregate", [identity(ref) for ref in refs])

    def job_ended(self, connection: Connection, task_id: bytes) -> None:
        """Enqueue `collect` for whoever waits for this task.

        The task's batch is locked by now, and by whoever creates a collection: none is overlooked.
        """
        waiting = connection.execute(
            select(collections.c.collection_id).where(
                collections.c.task_id == task_id,
                collections.c.response.is_(None),
                collections.c.problem.is_(None),
            )
        ).scalars()
        refs = [(task_id, bytes(each)) for each in waiting]
        _enqueue(connection, "collect", [identity(ref) for ref in refs])

    def collection_asked(self, connection: Connection, ref: Ref) -> None:
        """Enqueue `collect`."""
        _enqueue(connection, "collect", [identity(ref)])


def identity(ref: Ref) -> dict[str, str]:
    """A job's arguments."""
    return {"task": ref[0].hex(), "job": ref[1].hex()}


# The delay is added to the database's clock, which is also the one that fetches.
_ENQUEUE: Final = text(
    """
    SELECT procrastinate_defer_jobs_v1(array_agg(
        ROW(:queue, :name, :priority, NULL, NULL, each.value,
            CASE WHEN CAST(:delay AS float) > 0
                 THEN now() + CAST(:delay AS float) * interval '1 second' END
        )::procrastinate_job_to_defer_v1))
    FROM jsonb_array_elements(CAST(:jobs AS jsonb)) AS each
    """.replace("::", r"\:\:")
)


def _enqueue(
    connection: Connection, name: str, jobs: Sequence[Mapping[str, str]], *, delay: float = 0
) -> None:
    if jobs:
        connection.execute(
            _ENQUEUE,
            {
                "queue": QUEUE,
                "name": name,
                "priority": _PRIORITIES[name],
                "delay": delay,
                "jobs": json.dumps(list(jobs)),
            },
        )


_CLAIM: Final = text(
    """
    DELETE FROM procrastinate_jobs WHERE id IN (
        SELECT id FROM procrastinate_jobs
        WHERE task_name = :name AND status = 'todo' AND args = CAST(:args AS jsonb)
        FOR UPDATE SKIP LOCKED)
    """
)


def claim(database: Database, name: str, args: Mapping[str, str]) -> None:
    """Take the place of all that wait to do the same; called before anything is looked at."""
    with database.write(durable=False) as connection:
        connection.execute(_CLAIM, {"name": name, "args": json.dumps(dict(args))})


# --- what went wrong ----------------------------------------------------------------------------

_PRUNE: Final = text("SELECT count(*) FROM procrastinate_prune_stalled_workers_v1(:seconds)")
_FORGET_PERIODIC: Final = text(
    """
    DELETE FROM procrastinate_jobs
    WHERE task_name = ANY(:periodic) AND (status = 'failed'
          OR status = 'doing' AND worker_id IS NULL)
    """
)
_TAKE_BACK: Final = text(
    """
    SELECT procrastinate_retry_job_v2(id, NULL, NULL, NULL, NULL) FROM (
        SELECT id FROM procrastinate_jobs
        WHERE status = 'doing' AND worker_id IS NULL FOR UPDATE SKIP LOCKED
    ) AS nobodys
    """
)
_TOO_LONG: Final = text(
    """
    UPDATE procrastinate_jobs AS jobs SET worker_id = NULL
    WHERE status = 'doing' AND worker_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM procrastinate_events AS events
        WHERE events.job_id = jobs.id AND events.type = 'started'
          AND events.at > now() - CAST(:seconds AS float) * interval '1 second')
    """
)
_FORGOTTEN: Final = text(
    """
    SELECT task_id, job_id FROM aggregation_jobs AS made WHERE NOT EXISTS (
        SELECT FROM procrastinate_jobs AS queued
        WHERE queued.task_name = 'aggregate'
          AND queued.args->>'job' = encode(made.job_id, 'hex')
          AND queued.args->>'task' = encode(made.task_id, 'hex'))
    """
)
_WAITING: Final = text(
    """
    SELECT EXISTS (SELECT FROM segments WHERE job_id IS NULL) AND NOT EXISTS (
        SELECT FROM procrastinate_jobs WHERE task_name = 'gather' AND status IN ('todo', 'doing'))
    """
)
_RECOVERY_LOCK: Final = text("SELECT pg_try_advisory_xact_lock(:key)")
_RECOVERY_KEY: Final = 0x63686F72_01


def recover(database: Database, *, heartbeat: float, longest: float) -> int:
    """Enqueue again what a dead worker held, and what has no place in the queue; how many.

    `heartbeat`: seconds of silence after which a worker is dead; `longest`: seconds after which a
    job is taken from a living one, too. Neither can do harm: a job may run twice at once.
    """
    with database.write(durable=False) as connection:
        if not connection.scalar(_RECOVERY_LOCK, {"key": _RECOVERY_KEY}):
            return 0  # somebody else is at it
        connection.execute(_PRUNE, {"seconds": heartbeat})
        connection.execute(_TOO_LONG, {"seconds": longest})
        connection.execute(_FORGET_PERIODIC, {"periodic": list(_PERIODIC)})
        taken = len(connection.execute(_TAKE_BACK).all())
        # Made by a server's own loop, or before the queue was; never by the two above.
        forgotten = [(bytes(task), bytes(job)) for task, job in connection.execute(_FORGOTTEN)]
        _enqueue(connection, "aggregate", [identity(ref) for ref in forgotten])
        if connection.scalar(_WAITING):
            _enqueue(connection, "gather", [{}])
        return taken + len(forgotten)


def enqueue_collections(database: Database, refs: Sequence[Ref]) -> None:
    """Enqueue `collect` for collections that may wait for something that changed elsewhere."""
    with database.write(durable=False) as connection:
        _enqueue(connection, "collect", [identity(ref) for ref in refs])


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadJob:
    """A job that was given up after many attempts."""

    number: int
    kind: str
    task_id: bytes | None
    attempts: int
    since: int  # POSIX seconds


_DEAD: Final = """
    FROM procrastinate_jobs AS jobs WHERE queue_name = :queue AND status = 'failed'
    """
_LIST_DEAD: Final = text(
    f"""
    SELECT id, task_name, args->>'task' AS task, attempts,
        (SELECT COALESCE(max(extract(epoch FROM at)), 0) FROM procrastinate_events AS events
         WHERE events.job_id = jobs.id) AS since
    {_DEAD} ORDER BY id
    """  # noqa: S608 (a constant)
)
_REVIVE: Final = f"SELECT procrastinate_retry_job_v2(id, NULL, NULL, NULL, NULL) {_DEAD}"


def dead_jobs(database: Database) -> list[DeadJob]:
    """Jobs that nobody tries any more."""
    with database.read() as connection:
        return [
            DeadJob(
                number=row.id,
                kind=row.task_name,
                task_id=bytes.fromhex(row.task) if row.task else None,
                attempts=row.attempts,
                since=int(row.since),
            )
            for row in connection.execute(_LIST_DEAD, {"queue": QUEUE})
        ]


def revive(database: Database, numbers: Sequence[int] | None = None) -> int:
    """Let workers try dead jobs again, all or some; how many."""
    statement: TextClause = text(_REVIVE)
    values: dict[str, Any] = {"queue": QUEUE}
    if numbers is not None:
        statement = text(_REVIVE + " AND id = ANY(:numbers)")
        values["numbers"] = list(numbers)
    with database.write() as connection:
        return len(connection.execute(statement, values).all())
