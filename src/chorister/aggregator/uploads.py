"""Uploads at the leader: looked at without a database, then stored, many requests at a time.

`check_upload` is cheap and decides all that a report's header and our clock decide. `store_uploads`
is one durable transaction for any number of requests: the ids are claimed in it (of two copies of a
report, at the same moment, one is taken), and with them the reports are written as they came.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from sqlalchemy import Connection

from chorister._native import scan_reports
from chorister.aggregator import batches, segments
from chorister.aggregator.counters import UPLOADED, count, rejections
from chorister.aggregator.database import Database
from chorister.aggregator.hpke_keys import KeyRing
from chorister.aggregator.queue import JobQueue
from chorister.aggregator.schema import BatchState
from chorister.aggregator.tasks import MAX_SKEW, KnownTask
from chorister.clock import Clock
from chorister.dap.draft import REPORT_ID_BYTES, Problem, ReportError
from chorister.dap.messages import ReportUploadStatus, UploadErrors
from chorister.dap.problems import invalid_message
from chorister.errors import DecodeError, ProblemError

__all__ = ["UploadPlan", "Uploads", "job_capacity"]

_MAX_JOB_REPORTS: Final = 500
_MAX_JOB_BYTES: Final = 16 << 20
"""Of output shares, which wait in memory until the helper has answered."""
_MAX_SEGMENT_REPORTS: Final = 64
_MANY: Final = 256
_SEGMENT_ID_BYTES: Final = 16


def job_capacity(task: KnownTask) -> int:
    """How many reports a job of the task may have."""
    return max(1, min(_MAX_JOB_REPORTS, _MAX_JOB_BYTES // (16 * task.vdaf.length)))


class UploadPlan(NamedTuple):
    """One request, looked at: what would be stored, and what not. (A tuple is made fastest.)"""

    task: KnownTask
    reports: bytes
    ids: tuple[bytes, ...]
    ends: tuple[int, ...]  # where each report ends
    errors: bytes  # a `ReportError` a report, 0 where there is none yet


class _Part(NamedTuple):
    """A plan, and what becomes of each of its reports."""

    plan: UploadPlan
    codes: bytearray


_ALL_TAKEN: Final = UploadErrors(())


def _refused(plan: UploadPlan, codes: bytearray) -> UploadErrors:
    return UploadErrors(
        tuple(
            ReportUploadStatus(report_id, code)
            for report_id, code in zip(plan.ids, codes, strict=True)
            if code
        )
    )


class Uploads:
    """The leader's door."""

    def __init__(self, database: Database, keys: KeyRing, clock: Clock, *, queue: JobQueue) -> None:
        self._database = database
        self._keys = keys
        self._clock = clock
        self._queue = queue

    def check_upload(self, task: KnownTask, reports: bytes) -> UploadPlan:
        """Look at a request; raises `ProblemError` where it is no list of reports."""
        try:
            headers = scan_reports(reports)
        except DecodeError as error:
            raise invalid_message(error, task_id=task.task_id) from None
        joined = headers.ids
        self._check_number(task, len(joined) // REPORT_ID_BYTES, len(reports))
        if len(joined) == REPORT_ID_BYTES:
            ids: tuple[bytes, ...] = (joined,)
        else:
            ids = tuple(
                joined[start : start + REPORT_ID_BYTES]
                for start in range(0, len(joined), REPORT_ID_BYTES)
            )
        # Plain loops: a request has one report, mostly, and then numpy is what would cost time.
        extensions, config_ids = headers.extensions, headers.config_ids
        ends = tuple(memoryview(headers.ends).cast("Q"))
        times = memoryview(headers.times).cast("Q")
        known = self._keys.living(config_ids)
        now, bucket, size = self._clock.now(), task.interval.start, task.report_bytes
        early, closed = now < task.starts - MAX_SKEW, now >= task.closes
        errors = bytearray(len(ids))
        start = 0
        for place, end in enumerate(ends):
            # Of several complaints the first one: those that end a device's attempts.
            if closed:
                errors[place] = ReportError.TASK_EXPIRED
            elif times[place] != bucket:
                errors[place] = ReportError.REPORT_DROPPED
            elif end - start != size or extensions[place]:
                errors[place] = ReportError.INVALID_MESSAGE
            elif early:
                errors[place] = ReportError.REPORT_TOO_EARLY
            elif config_ids[place] not in known:
                errors[place] = ReportError.OUTDATED_CONFIG
            start = end
        return UploadPlan(task, reports, ids, ends, bytes(errors))

    @staticmethod
    def _check_number(task: KnownTask, count: int, size: int) -> None:
        """Refuse a body most of whose reports must be too short, before each of them gets a word.

        A few wrong ones among good ones are named; hundreds of thousands are somebody's game.
        """
        if count > _MANY and count * task.report_bytes > 2 * size:
            raise ProblemError(
                Problem.INVALID_MESSAGE,
                f"{size} bytes hold no {count} reports of this task, of {task.report_bytes} each",
                task_id=task.task_id,
            )

    def store_uploads(self, plans: Sequence[UploadPlan]) -> list[UploadErrors]:
        """Store what can be stored, all in one transaction; what was refused, plan by plan.

        Durable when it returns: then, and not before, the requests are answered.
        """
        by_task: dict[bytes, list[_Part]] = defaultdict(list)
        parts = [_Part(plan, bytearray(plan.errors)) for plan in plans]
        for part in parts:
            by_task[part.plan.task.task_id].append(part)
        with self._database.write() as connection:
            taken = 0
            for task_id in sorted(by_task):
                taken += self._store(connection, by_task[task_id])
            if taken:
                self._queue.reports_stored(connection)
        return [_refused(plan, codes) if any(codes) else _ALL_TAKEN for plan, codes in parts]

    def _store(self, connection: Connection, parts: Sequence[_Part]) -> int:
        """The plans of one task; how many reports were taken."""
        task = parts[0].plan.task
        state = batches.lock(connection, task.task_id, alone=False)
        if state is not BatchState.OPEN:
            over = state is None or state >= BatchState.ENDING
            closed = ReportError.TASK_EXPIRED if over else ReportError.BATCH_COLLECTED
            for _, codes in parts:
                codes[:] = bytes(code or closed for code in codes)
            if over:
                return 0  # nothing about it is written any more
        wanted: set[bytes] = set()
        for plan, codes in parts:
            if any(codes):
                wanted.update(each for each, code in zip(plan.ids, codes, strict=True) if not code)
            else:
                wanted.update(plan.ids)
        new = batches.add_ids(self._database, connection, task.task_id, wanted)
        taken: list[bytes] = []
        for plan, codes in parts:
            start = 0
            for place, (report_id, end) in enumerate(zip(plan.ids, plan.ends, strict=True)):
                if not codes[place]:
                    if report_id in new:
                        new.discard(report_id)  # a second copy in the same requests
                        taken.append(plan.reports[start:end])
                    else:
                        codes[place] = ReportError.REPORT_REPLAYED
                start = end
        size = min(_MAX_SEGMENT_REPORTS, job_capacity(task))
        segments.write(
            self._database,
            connection,
            task.task_id,
            [
                segments.Segment(self._segment_id(), taken[start : start + size])
                for start in range(0, len(taken), size)
            ],
        )
        names = {UPLOADED: len(taken)} | rejections("upload", b"".join(codes for _, codes in parts))
        count(self._database, connection, task.task_id, names)
        return len(taken)

    def _segment_id(self) -> bytes:
        """In the order of arrival, and unique."""
        return self._clock.now().to_bytes(6, "big") + secrets.token_bytes(_SEGMENT_ID_BYTES - 6)
