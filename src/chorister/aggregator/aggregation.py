"""The leader's aggregation jobs: made from waiting reports, verified with the helper, added up.

A job's reports and their order are fixed when it is made, and everything computed from them is
deterministic. So a job that was interrupted anywhere is simply begun anew: its request comes out
byte for byte the same, which the helper answers from memory, and its SHA-256, durable before the
first byte is sent, proves it. The transaction that finishes a job deletes it: whoever comes second,
in another process too, finds nothing to finish and adds nothing.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from sqlalchemy import Connection, Select, delete, insert, select, update

from chorister._native import Aggregated, LeaderJob
from chorister.aggregator import batches
from chorister.aggregator.counters import VERIFIED, count, rejections
from chorister.aggregator.database import BINARY_ROWS, Database
from chorister.aggregator.hpke_keys import KeyRing
from chorister.aggregator.queue import JobQueue
from chorister.aggregator.schema import (
    BatchState,
    aggregation_jobs,
    report_blobs,
    segments,
    tasks,
)
from chorister.aggregator.tasks import KnownTask, TaskRegister
from chorister.aggregator.uploads import job_capacity
from chorister.canonical import sha256
from chorister.clock import Clock
from chorister.dap.draft import VerifyRespType
from chorister.dap.messages import AggregationJobInitReq, AggregationJobResp
from chorister.dap.taskprov import verify_key
from chorister.errors import DecodeError, ProblemError, Unreachable

__all__ = ["AggregationJobs", "HelperClient", "JobRef", "Step"]

_JOB_ID_BYTES: Final = 16
MAX_FAILURE: Final = 300


class HelperClient(Protocol):
    """The leader's view of the helper. Raises `ProblemError` (refused) or `Unreachable`."""

    def create_aggregation_job(self, task: KnownTask, request: bytes) -> bytes:
        """An encoded `AggregationJobInitReq` -> an encoded `AggregationJobResp`."""
        ...

    def aggregate_share(self, task: KnownTask, request: bytes) -> bytes:
        """An encoded `AggregateShareReq` -> an encoded `AggregateShare`."""
        ...


class JobRef(NamedTuple):
    """One aggregation job of the leader."""

    task_id: bytes
    job_id: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What became of one step."""

    done: bool  # nothing is left to do for this job
    why: str | None = None  # if not done: what it waits for
    peer: bool = False  # the helper is away, or asks to be left alone for now: back off


class AggregationJobs:
    """Makes and steps the jobs of one leader."""

    def __init__(
        self,
        database: Database,
        register: TaskRegister,
        keys: KeyRing,
        clock: Clock,
        *,
        verify_key_init: bytes,
        helper: HelperClient,
        queue: JobQueue,
        threads: int = 0,
    ) -> None:
        self._database = database
        self._register = register
        self._keys = keys
        self._clock = clock
        self._verify_key_init = verify_key_init
        self._helper = helper
        self._queue = queue
        self._threads = threads
        self._last_task = b""

    def create(self, limit: int) -> list[JobRef]:
        """Make up to `limit` jobs of waiting reports, task by task in turn."""
        found = (self._register.find(task_id) for task_id in self._waiting(limit))
        waiting = [task for task in found if task is not None]
        made: list[JobRef] = []
        if not waiting:
            return made
        with self._database.write(durable=False) as connection:
            while waiting and len(made) < limit:
                task = waiting.pop(0)
                ref = self._create_one(connection, task)
                if ref is not None:
                    made.append(ref)
                    waiting.append(task)
            self._queue.jobs_made(connection, made)
        return made

    def _waiting(self, limit: int) -> list[bytes]:
        """Up to `limit` tasks with waiting reports, beginning after the last one of last time.

        From one task to the next by the index, however many reports each of them has.
        """
        query = (
            select(segments.c.task_id)
            .where(segments.c.job_id.is_(None))
            .order_by(segments.c.task_id)
            .limit(1)
        )
        found: list[bytes] = []
        start = last = self._last_task
        with self._database.read() as connection:
            while len(found) < limit:
                task_id = connection.scalar(query.where(segments.c.task_id > last))
                if task_id is None:
                    if not start:
                        break
                    last = start = b""  # once around
                    continue
                last = bytes(task_id)
                if last in found:
                    break
                found.append(last)
        self._last_task = last
        return found

    def _create_one(self, connection: Connection, task: KnownTask) -> JobRef | None:
        capacity = job_capacity(task)
        rows = connection.execute(
            select(segments.c.segment_id, segments.c.reports)
            .where(segments.c.task_id == task.task_id, segments.c.job_id.is_(None))
            .order_by(segments.c.segment_id)
            .limit(capacity)
            .with_for_update(skip_locked=True)
        )
        chosen: list[bytes] = []
        reports = 0
        for segment_id, size in rows:
            if chosen and reports + size > capacity:
                break
            chosen.append(bytes(segment_id))
            reports += size
        if not chosen:
            return None
        ref = JobRef(task.task_id, secrets.token_bytes(_JOB_ID_BYTES))
        connection.execute(
            update(segments)
            .where(segments.c.task_id == task.task_id, segments.c.segment_id.in_(chosen))
            .values(job_id=ref.job_id)
        )
        connection.execute(
            insert(aggregation_jobs).values(
                **ref._asdict(), created=self._clock.now(), reports=reports, attempts=0
            )
        )
        return ref

    def unfinished(self, limit: int = 1000) -> list[JobRef]:
        """The jobs to step: after a start, those of the process before.

        Those that failed least often come first, so that however many are stuck, none is hidden.
        """
        with self._database.read() as connection:
            rows = connection.execute(
                select(aggregation_jobs.c.task_id, aggregation_jobs.c.job_id)
                .join(tasks, tasks.c.task_id == aggregation_jobs.c.task_id)
                .where(tasks.c.ends > self._clock.now())
                .order_by(
                    aggregation_jobs.c.attempts,
                    aggregation_jobs.c.created,
                    aggregation_jobs.c.job_id,
                )
                .limit(limit)
            )
            return [JobRef(bytes(task_id), bytes(job_id)) for task_id, job_id in rows]

    def step(self, ref: JobRef) -> Step:
        """Verify a job's reports with the helper and add them up; harmless to do twice."""
        task = self._register.find(ref.task_id)
        if task is None or self._clock.now() >= task.ends:
            return Step(done=True)
        with self._database.read() as connection:
            row = connection.execute(
                select(aggregation_jobs.c.request_digest).filter_by(**ref._asdict())
            ).one_or_none()
            if row is None:
                return Step(done=True)
            reports = b"".join(connection.execute(_reports_of(ref)).scalars())
        try:
            return self._step(task, ref, reports, row.request_digest)
        except (DecodeError, ProblemError, Unreachable) as error:
            said = f"the helper: {error}"
            return self._failed(ref, said, peer=isinstance(error, Unreachable))

    def _step(self, task: KnownTask, ref: JobRef, reports: bytes, sent: bytes | None) -> Step:
        job = task.binding.leader_initialize(
            verify_key(self._verify_key_init, task.task_id),
            self._keys.keypairs(),
            reports,
            threads=self._threads,
        )
        verify_resps = b""
        if job.verify_inits:
            request = AggregationJobInitReq(verify_inits=job.verify_inits).encode()
            if not self._may_send(ref, sha256(request), sent):
                return self._failed(ref, "the request would not be the one that was sent before")
            verify_resps = self._helper.create_aggregation_job(task, request)
        finished = job.finish(verify_resps, threads=self._threads)
        return self._finish(task, ref, finished, _rejections(job, verify_resps, finished))

    def _may_send(self, ref: JobRef, digest: bytes, sent: bytes | None) -> bool:
        """Write down, durably, what is about to be sent, unless something was sent before."""
        if sent is None:
            key = aggregation_jobs.c.request_digest
            with self._database.write() as connection:
                connection.execute(
                    update(aggregation_jobs)
                    .filter_by(**ref._asdict())
                    .where(key.is_(None))
                    .values(request_digest=digest)
                )
                sent = connection.scalar(select(key).filter_by(**ref._asdict()))
        # None: another worker has finished the job, and the helper's answer will be the same.
        return sent is None or hmac.compare_digest(bytes(sent), digest)

    def _finish(
        self, task: KnownTask, ref: JobRef, added: Aggregated, rejected: dict[str, int]
    ) -> Step:
        names = {VERIFIED: added.count} | rejected
        with self._database.write(durable=False) as connection:
            state = batches.lock(connection, task.task_id, alone=False)
            if state is not BatchState.OPEN and state is not BatchState.FROZEN:
                return Step(done=True)  # the task has ended meanwhile
            if not connection.execute(delete(aggregation_jobs).filter_by(**ref._asdict())).rowcount:
                return Step(done=True)  # another worker was faster, and did the same
            _delete_reports(connection, ref)
            batches.accumulate(self._database, connection, task, added)
            count(self._database, connection, task.task_id, names)
            self._queue.job_ended(connection, task.task_id)
        return Step(done=True)

    def _failed(self, ref: JobRef, why: str, *, peer: bool = False) -> Step:
        why = why[:MAX_FAILURE]
        with self._database.write(durable=False) as connection:
            connection.execute(
                update(aggregation_jobs)
                .filter_by(**ref._asdict())
                .values(failure=why, attempts=aggregation_jobs.c.attempts + 1)
            )
        return Step(done=False, why=why, peer=peer)


def _rejections(job: LeaderJob, verify_resps: bytes, added: Aggregated) -> dict[str, int]:
    """Who refused: the leader before it asked, the helper, or the leader what the helper took."""
    counted = rejections("leader", job.errors)
    asked = [after for before, after in zip(job.errors, added.errors, strict=True) if not before]
    if any(asked):
        answers = AggregationJobResp(verify_resps).responses()
        told = [answer.kind is VerifyRespType.REJECT for answer in answers]
        by_helper = [code for code, refused in zip(asked, told, strict=True) if refused]
        disputed = [code for code, refused in zip(asked, told, strict=True) if not refused]
        counted |= rejections("helper", by_helper) | rejections("disputed", disputed)
    return counted


def _reports_of(ref: JobRef) -> Select[bytes]:
    return (
        select(report_blobs.c.reports)
        .join(
            segments,
            (segments.c.task_id == report_blobs.c.task_id)
            & (segments.c.segment_id == report_blobs.c.segment_id),
        )
        .where(segments.c.task_id == ref.task_id, segments.c.job_id == ref.job_id)
        .order_by(segments.c.segment_id)
        .execution_options(**BINARY_ROWS)
    )


def _delete_reports(connection: Connection, ref: JobRef) -> None:
    """Delete a job's sealed reports, in the transaction that finishes it."""
    own = (segments.c.task_id == ref.task_id) & (segments.c.job_id == ref.job_id)
    connection.execute(
        delete(report_blobs).where(
            report_blobs.c.task_id == ref.task_id,
            report_blobs.c.segment_id.in_(select(segments.c.segment_id).where(own)),
        )
    )
    connection.execute(delete(segments).where(own))
