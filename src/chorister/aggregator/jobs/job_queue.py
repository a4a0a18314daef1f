"""The queue of jobs for `chorister worker`, on PostgreSQL, through Procrastinate's own API.

A job is enqueued in the transaction that makes it due, so neither ever exists without the other:

    gather     reports were stored: create aggregation jobs for them, after a short delay
    aggregate  an aggregation job was created: step it
    collect    a collection was requested, or a job of a task with a pending collection ended

`gather` and `collect` are enqueued every time, without checking for one that is already waiting:
that check would happen before the commit, and the waiting one might run before it. Instead, a job
that starts deletes its waiting duplicates (`claim`): those were committed earlier, so everything
they announce is already visible.

Nothing here knows Procrastinate's tables or SQL functions, which change between its versions.
`check_schema` compares the database with what the installed version expects.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import procrastinate
from procrastinate.exceptions import ConnectorException
from procrastinate.jobs import Job, Status
from procrastinate.manager import JobManager
from procrastinate.sql import queries
from procrastinate.types import JSONDict
from psycopg_pool import ConnectionPool

from chorister.aggregator.storage.batches import CollectionRef, pending_collections
from chorister.aggregator.storage.database import (
    Database,
    Transaction,
    database_time,
    missing_objects,
)
from chorister.aggregator.storage.reports import JobRef, has_waiting_reports, unfinished_jobs
from chorister.errors import InternalError, ServiceError

QUEUE: Final = "chorister"
PERIODIC_QUEUE: Final = "chorister-periodic"
_PRIORITIES: Final = {"collect": 2, "gather": 1, "aggregate": 0}
"""A collector never waits behind another task's reports."""
_CLAIM_LIMIT: Final = 1000
_AT_ONCE: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""In the past by any clock: the job is due immediately."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadJob:
    """A job that workers gave up on after many attempts."""

    number: int
    kind: str
    task_id: bytes | None
    attempts: int
    since: int  # POSIX seconds: when its last attempt was due; 0 if that is unknown


class _Pool:
    """The database's connections, in the form in which Procrastinate takes a psycopg pool."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = threading.local()

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Lend a connection for one statement, in the open transaction or in its own."""
        tx: Transaction | None = getattr(self._thread, "transaction", None)
        if tx is not None:
            yield tx.connection.dbapi_connection
            return
        with self._database.write(durable=False) as tx:
            yield tx.connection.dbapi_connection

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Run this thread's statements in one transaction."""
        with self._database.write(durable=durable) as tx:
            self._thread.transaction = tx
            try:
                yield
            finally:
                self._thread.transaction = None


class JobQueue:
    """The queue that workers fetch from. Threads share it."""

    def __init__(self, database: Database, *, batch_delay: float = 0.0) -> None:
        """`batch_delay`: seconds for which reports wait for others before a job is created."""
        self._database = database
        self._batch_delay = batch_delay
        connector = procrastinate.SyncPsycopgConnector()
        self._pool = _Pool(database)
        connector.open(cast(ConnectionPool, self._pool))
        self._app = procrastinate.App(connector=connector)
        self._jobs: JobManager = self._app.job_manager

    # --- within the caller's transaction --------------------------------------------------------

    def reports_stored(self, tx: Transaction) -> None:
        due = None
        if self._batch_delay:  # by the database's clock, which also decides what is due
            due = database_time(tx) + timedelta(seconds=self._batch_delay)
        self._enqueue(tx, "gather", [{}], due)

    def jobs_created(self, tx: Transaction, refs: Sequence[JobRef]) -> None:
        """Enqueue one `aggregate` per job."""
        self._enqueue(tx, "aggregate", [job_arguments(ref) for ref in refs])

    def job_ended(self, tx: Transaction, task_id: bytes) -> None:
        """Enqueue `collect` for every pending collection of the task.

        The caller has locked the task's batch, as has a request that creates a collection: none is
        missed.
        """
        refs = pending_collections(tx, task_id=task_id)
        self._enqueue(tx, "collect", [job_arguments(ref) for ref in refs])

    def collection_created(self, tx: Transaction, ref: CollectionRef) -> None:
        self._enqueue(tx, "collect", [job_arguments(ref)])

    def _enqueue(
        self,
        tx: Transaction,
        name: str,
        jobs: Sequence[Mapping[str, str]],
        due: datetime | None = None,
    ) -> None:
        if not jobs:
            return
        with _as_service_error():
            self._app.configure_task(
                name,
                queue=QUEUE,
                priority=_PRIORITIES[name],
                schedule_at=due,
                connection=tx.connection.dbapi_connection,
            ).batch_defer(*[JSONDict(job) for job in jobs])

    # --- for workers ----------------------------------------------------------------------------

    def claim(self, name: str, args: Mapping[str, str]) -> None:
        """Delete waiting duplicates of a job that starts; call it before looking at anything."""
        with _as_service_error(), self._pool.transaction():
            waiting = [job.id for job in self._listed(name, Status.TODO) if job.task_kwargs == args]
            for number in waiting[:_CLAIM_LIMIT]:
                self._jobs.cancel_job_by_id(_known(number), delete_job=True)

    def enqueue_collections(self, refs: Sequence[CollectionRef]) -> None:
        """Enqueue `collect` for collections that may wait for a change made elsewhere."""
        with self._database.write(durable=False) as tx:
            self._enqueue(tx, "collect", [job_arguments(ref) for ref in refs])

    def enqueue_missing(self) -> int:
        """Enqueue work that has no job in the queue. Returns the number of aggregation jobs.

        A server's own loop may have created it, before there were workers. A job that ends
        meanwhile is enqueued for nothing, which does no harm.
        """
        with self._database.read() as tx:
            created = [job_arguments(ref) for ref in unfinished_jobs(tx)]
            waiting = has_waiting_reports(tx)
        with _as_service_error():
            queued = [job.task_kwargs for job in self._listed("aggregate")] if created else []
            gathers = not waiting or any(
                self._listed("gather", status) for status in (Status.TODO, Status.DOING)
            )
        known = {(args.get("task"), args.get("job")) for args in queued}
        missing = [args for args in created if (args["task"], args["job"]) not in known]
        if missing or not gathers:
            with self._database.write(durable=False) as tx:
                self._enqueue(tx, "aggregate", missing)
                self._enqueue(tx, "gather", [] if gathers else [{}])
        return len(missing)

    def _listed(self, name: str | None = None, status: Status | None = None) -> list[Job]:
        wanted = None if status is None else status.value
        return self._jobs.list_jobs(queue=QUEUE, task=name, status=wanted)

    # --- for operators --------------------------------------------------------------------------

    def dead_jobs(self) -> list[DeadJob]:
        """List the jobs that no worker tries any more."""
        with _as_service_error():
            return [_dead(job) for job in self._listed(status=Status.FAILED)]

    def revive(self, numbers: Sequence[int] | None = None) -> int:
        """Let workers try dead jobs again, all or some. Returns how many."""
        with _as_service_error(), self._pool.transaction(durable=True):
            dead = [job.number for job in self.dead_jobs()]
            chosen = [number for number in dead if numbers is None or number in numbers]
            for number in chosen:
                self._jobs.retry_job_by_id(number, retry_at=datetime.now(UTC))
        return len(chosen)


def job_arguments(ref: JobRef | CollectionRef) -> dict[str, str]:
    """Return a job's arguments as they are stored in the queue."""
    return {"task": ref[0].hex(), "job": ref[1].hex()}


def _dead(job: Job) -> DeadJob:
    task = job.task_kwargs.get("task")
    return DeadJob(
        number=_known(job.id),
        kind=job.task_name,
        task_id=bytes.fromhex(task) if isinstance(task, str) else None,
        attempts=job.attempts,
        since=0 if job.scheduled_at is None else int(job.scheduled_at.timestamp()),
    )


def _known(number: int | None) -> int:
    if number is None:
        raise InternalError("a stored job has no number")
    return number


@contextmanager
def _as_service_error() -> Iterator[None]:
    try:
        yield
    except ConnectorException as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ServiceError(f"the job queue does not answer: {reason}; try again") from error


# --- dead workers -------------------------------------------------------------------------------


async def requeue_stalled(
    jobs: JobManager,
    *,
    heartbeat: float,
    longest: float,
    seen: dict[tuple[int, int], float],
    now: float,
) -> int:
    """Enqueue again what dead workers held. Returns the number of jobs.

    `heartbeat`: seconds of silence after which a worker is dead. `longest`: seconds after which a
    job is taken from a living worker, too; `seen` remembers when each run was first seen. A job
    whose worker was alive after all runs twice at the same time, which does no harm.
    """
    await jobs.prune_stalled_workers(heartbeat)
    stalled = [
        job
        for queue in (QUEUE, PERIODIC_QUEUE)
        for job in await jobs.get_stalled_jobs(queue=queue, seconds_since_heartbeat=heartbeat)
    ]
    running = await jobs.list_jobs_async(queue=QUEUE, status=Status.DOING.value)
    runs = {(_known(job.id), job.attempts): job for job in running}
    for key in [key for key in seen if key not in runs]:
        del seen[key]
    stalled += [job for key, job in runs.items() if now - seen.setdefault(key, now) > longest]
    requeued = 0
    for number, queue in {_known(job.id): job.queue for job in stalled}.items():
        try:
            if queue == PERIODIC_QUEUE:  # the next one comes on schedule
                await jobs.finish_job_by_id_async(number, Status.FAILED, delete_job=True)
            else:
                await jobs.retry_job_by_id_async(number, retry_at=_AT_ONCE)
                requeued += 1
        except ConnectorException:
            continue  # it ended, or another worker was faster
    await jobs.delete_old_jobs(nb_hours=0, queue=PERIODIC_QUEUE, include_failed=True)
    return requeued


# --- the schema ---------------------------------------------------------------------------------

_OBJECT_NAME: Final = re.compile(r"\b(procrastinate_\w+)\b")


def check_schema(database: Database) -> None:
    """Raise `ServiceError` unless the database has all that the installed Procrastinate uses."""
    needed = {name for query in queries.values() for name in _OBJECT_NAME.findall(query)}
    with database.read() as tx:
        missing = missing_objects(tx, sorted(needed))
    if missing:
        raise ServiceError(
            f"the database's job queue does not match the installed procrastinate "
            f"{procrastinate.__version__}, which needs {', '.join(missing)}: install the version "
            f"that requirements.lock names, or apply that version's own migrations"
        )
