"""Sealed reports at the leader: their ids, the segments they wait in, and their aggregation jobs.

A row bound as one parameter is copied four times before it reaches the pages of a SQLite file:
joined, bound, turned into a record, cut into pages. For uploads that would be most of the work. So
on SQLite the row is created with room for its reports, which are then written in place.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sqlalchemy import Select, delete, insert, select, update
from sqlalchemy.exc import OperationalError

from chorister.aggregator.storage.database import BINARY_ROWS, Database, Transaction
from chorister.aggregator.storage.schema import (
    aggregation_jobs,
    report_blobs,
    segments,
    tasks,
)
from chorister.dap.draft import REPORT_ID_BYTES
from chorister.errors import InternalError

_JOB_ID_BYTES: Final = 16

# Ids are stored by the hundred, and binding one parameter per id would take most of the time. The
# database gets all of them in one piece and cuts it up itself.
_ADD_IDS_SQLITE: Final = """
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
_ADD_IDS_POSTGRESQL: Final = """
WITH given(ids, task_id) AS (VALUES (%b::bytea, %b::bytea))
INSERT INTO report_ids (task_id, report_id)
SELECT task_id, substring(ids FROM first FOR 16)
FROM given, generate_series(1, length(ids), 16) AS place(first)
ORDER BY first
ON CONFLICT DO NOTHING
RETURNING report_id
"""
_MAKE_ROOM: Final = (
    "INSERT INTO report_blobs (task_id, segment_id, reports) VALUES (?, ?, zeroblob(?))"
)
# Each write releases the interpreter, and a busy event loop takes its time to give it back: so
# not one write per report; but joined pieces should still fit the processor's cache.
_REPORTS_PER_WRITE: Final = 8
_ADD_SEGMENTS: Final = insert(segments)


class Segment(NamedTuple):
    """Some reports of one task."""

    segment_id: bytes
    reports: Sequence[bytes]


class JobRef(NamedTuple):
    """One aggregation job of the leader."""

    task_id: bytes
    job_id: bytes


class StoredJob(NamedTuple):
    """What the database holds for an unfinished job."""

    request_digest: bytes | None  # None until a request is about to be sent
    reports: list[bytes]  # in pieces: joining them would copy the whole job


# --- storing uploads ----------------------------------------------------------------------------


def add_report_ids(
    database: Database, tx: Transaction, task_id: bytes, ids: Iterable[bytes]
) -> set[bytes]:
    """Add report ids and return the new ones. Of two transactions with one id, one gets it."""
    ascending = sorted(ids)
    if not ascending:
        return set()
    joined = b"".join(ascending)
    if len(joined) != REPORT_ID_BYTES * len(ascending):
        raise InternalError(f"a report id has {REPORT_ID_BYTES} bytes")
    statement = _ADD_IDS_SQLITE if database.is_sqlite else _ADD_IDS_POSTGRESQL
    added = tx.exec_driver_sql(statement, (joined, task_id), execution_options=BINARY_ROWS)
    return set(added.scalars().all())


def add_segments(
    database: Database, tx: Transaction, task_id: bytes, added: Sequence[Segment]
) -> None:
    """Store reports, which wait for a job from then on."""
    if not added:
        return
    tx.execute(
        _ADD_SEGMENTS,
        [
            {"task_id": task_id, "segment_id": segment_id, "reports": len(reports)}
            for segment_id, reports in added
        ],
    )
    if database.is_sqlite:
        _write_in_place(tx, task_id, added)
        return
    tx.execute(
        insert(report_blobs),
        [
            {"task_id": task_id, "segment_id": segment_id, "reports": b"".join(reports)}
            for segment_id, reports in added
        ],
    )


def _write_in_place(tx: Transaction, task_id: bytes, added: Sequence[Segment]) -> None:
    raw = tx.connection.dbapi_connection
    if not isinstance(raw, sqlite3.Connection):
        raise InternalError("a SQLite connection without its driver")
    try:
        for segment_id, reports in added:
            room = (task_id, segment_id, sum(map(len, reports)))
            row = raw.execute(_MAKE_ROOM, room).lastrowid
            if row is None:
                raise InternalError("SQLite does not say where it put a row")
            with raw.blobopen("report_blobs", "reports", row) as blob:
                for start in range(0, len(reports), _REPORTS_PER_WRITE):
                    blob.write(b"".join(reports[start : start + _REPORTS_PER_WRITE]))
    except sqlite3.Error as error:  # make it look like any other failed statement
        raise OperationalError(_MAKE_ROOM, None, error) from error


# --- creating jobs ------------------------------------------------------------------------------


def has_waiting_reports(tx: Transaction) -> bool:
    """Whether any report waits for a job."""
    query = select(segments.c.segment_id).where(segments.c.job_id.is_(None)).limit(1)
    return tx.scalar(query) is not None


def has_unverified_reports(tx: Transaction, task_id: bytes) -> bool:
    """Whether a report of the task waits for a job, or for its job's end."""
    query = select(segments.c.segment_id).where(segments.c.task_id == task_id).limit(1)
    return tx.scalar(query) is not None


def tasks_with_waiting_reports(
    tx: Transaction, after: bytes, limit: int
) -> tuple[list[bytes], bytes]:
    """Find up to `limit` tasks with waiting reports, starting after the task `after`.

    Also returns where to start next time, so that all tasks get their turn. Jumps from task to
    task in the index, so the number of their reports does not matter.
    """
    query = (
        select(segments.c.task_id)
        .where(segments.c.job_id.is_(None))
        .order_by(segments.c.task_id)
        .limit(1)
    )
    found: list[bytes] = []
    start = last = after
    while len(found) < limit:
        task_id = tx.scalar(query.where(segments.c.task_id > last))
        if task_id is None:
            if not start:
                break
            last = start = b""  # wrap around once
            continue
        last = bytes(task_id)
        if last in found:
            break
        found.append(last)
    return found, last


def create_job(tx: Transaction, task_id: bytes, *, capacity: int, now: int) -> JobRef | None:
    """Create one job from a task's oldest waiting reports; None if none wait."""
    rows = tx.execute(
        select(segments.c.segment_id, segments.c.reports)
        .where(segments.c.task_id == task_id, segments.c.job_id.is_(None))
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
    ref = JobRef(task_id, secrets.token_bytes(_JOB_ID_BYTES))
    tx.execute(
        update(segments)
        .where(segments.c.task_id == task_id, segments.c.segment_id.in_(chosen))
        .values(job_id=ref.job_id)
    )
    tx.execute(
        insert(aggregation_jobs).values(**ref._asdict(), created=now, reports=reports, attempts=0)
    )
    return ref


# --- stepping jobs ------------------------------------------------------------------------------


def unfinished_jobs(
    tx: Transaction, *, live_at: int | None = None, limit: int | None = None
) -> list[JobRef]:
    """List jobs, those that failed least often first; `live_at` leaves out those of ended tasks."""
    jobs = aggregation_jobs.c
    query = select(jobs.task_id, jobs.job_id).order_by(jobs.attempts, jobs.created, jobs.job_id)
    if live_at is not None:
        query = query.join(tasks, (tasks.c.task_id == jobs.task_id) & (tasks.c.ends > live_at))
    rows = tx.execute(query.limit(limit))
    return [JobRef(bytes(task_id), bytes(job_id)) for task_id, job_id in rows]


def read_job(tx: Transaction, ref: JobRef) -> StoredJob | None:
    """Read a job and its reports; None once it is finished."""
    row = tx.execute(
        select(aggregation_jobs.c.request_digest).filter_by(**ref._asdict())
    ).one_or_none()
    if row is None:
        return None
    return StoredJob(row.request_digest, list(tx.execute(_reports_of(ref)).scalars()))


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


def record_request(tx: Transaction, ref: JobRef, digest: bytes) -> bytes | None:
    """Record the digest of a request unless one is recorded. Returns the recorded one.

    None means that the job is finished.
    """
    recorded = aggregation_jobs.c.request_digest
    tx.execute(
        update(aggregation_jobs)
        .filter_by(**ref._asdict())
        .where(recorded.is_(None))
        .values(request_digest=digest)
    )
    return tx.scalar(select(recorded).filter_by(**ref._asdict()))


def record_job_failure(tx: Transaction, ref: JobRef, reason: str) -> None:
    """Count a failed attempt and remember why it failed."""
    tx.execute(
        update(aggregation_jobs)
        .filter_by(**ref._asdict())
        .values(failure=reason, attempts=aggregation_jobs.c.attempts + 1)
    )


def delete_job(tx: Transaction, ref: JobRef) -> bool:
    """Delete a finished job with its sealed reports; False if it was already gone."""
    if not tx.execute(delete(aggregation_jobs).filter_by(**ref._asdict())).rowcount:
        return False
    own = (segments.c.task_id == ref.task_id) & (segments.c.job_id == ref.job_id)
    tx.execute(
        delete(report_blobs).where(
            report_blobs.c.task_id == ref.task_id,
            report_blobs.c.segment_id.in_(select(segments.c.segment_id).where(own)),
        )
    )
    tx.execute(delete(segments).where(own))
    return True
