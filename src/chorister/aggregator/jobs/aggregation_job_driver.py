"""The leader's aggregation jobs: created from waiting reports, verified with the helper, added up.

A job's reports and their order are fixed when it is created, and everything computed from them is
deterministic. An interrupted job is simply started again: its request comes out byte for byte the
same, so the helper repeats its stored response. The request's SHA-256, durable before the first
byte is sent, proves it. The transaction that finishes a job deletes it: a second one, even in
another process, finds nothing to finish and adds nothing.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from chorister._native import Aggregated, LeaderJob
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.operations.metrics import Metrics
from chorister.aggregator.storage import batches, reports
from chorister.aggregator.storage.counters import VERIFIED, count, rejections
from chorister.aggregator.storage.database import Database
from chorister.aggregator.storage.hpke_keys import KeyRing
from chorister.aggregator.storage.reports import JobRef
from chorister.aggregator.storage.schema import BatchState
from chorister.aggregator.storage.tasks import TaskStore
from chorister.canonical import sha256
from chorister.clock import Clock
from chorister.dap.draft import VerifyRespType
from chorister.dap.helper_client import HelperClient
from chorister.dap.messages import AggregationJobInitReq, AggregationJobResp
from chorister.dap.task import verify_key
from chorister.errors import DecodeError, ProblemError, Unreachable

if TYPE_CHECKING:
    from chorister.aggregator.jobs.job_queue import JobQueue

FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 30.0
MAX_REASON_CHARACTERS: Final = 300
_SEARCHED_TASKS: Final = 1000
_MAX_JOB_REPORTS: Final = 500
_MAX_JOB_BYTES: Final = 16 << 20
"""Limits the output shares, which stay in memory until the helper has responded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The outcome of one step of a job."""

    done: bool  # nothing is left to do for this job
    reason: str | None = None  # if not done: what it waits for
    helper_away: bool = False  # the helper can't be reached, or asks for a pause: back off


def run_step(metrics: Metrics, kind: str, step: Callable[[], StepResult]) -> StepResult:
    """Run one step of a job, counted and timed."""
    started = time.monotonic()
    outcome = step()
    metrics.jobs.labels(kind, "done" if outcome.done else "waiting").inc()
    metrics.job_seconds.labels(kind).observe(time.monotonic() - started)
    return outcome


class HelperPause:
    """Pauses all of a process's requests to one helper after a failure, longer each time."""

    def __init__(self) -> None:
        self.failing = False  # since the last success
        self._lock = threading.Lock()
        self._until = 0.0
        self._seconds = FIRST_PAUSE_SECONDS

    def seconds_left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def failed(self) -> float:
        """Start a pause unless one is under way. Returns the seconds left."""
        with self._lock:
            self.failing = True
            if not self.seconds_left():
                self._until = time.monotonic() + self._seconds
                self._seconds = min(2 * self._seconds, MAX_PAUSE_SECONDS)
            return self.seconds_left()

    def succeeded(self) -> None:
        """Make the next pause a short one again."""
        with self._lock:
            self.failing = False
            self._seconds = FIRST_PAUSE_SECONDS


def job_capacity(task: KnownTask) -> int:
    """Return how many reports a job of the task may have."""
    return max(1, min(_MAX_JOB_REPORTS, _MAX_JOB_BYTES // (16 * task.vdaf.length)))


class AggregationJobDriver:
    """Creates and steps the jobs of one leader. Any thread of any process may call it."""

    def __init__(
        self,
        database: Database,
        tasks: TaskStore,
        keys: KeyRing,
        clock: Clock,
        *,
        verify_key_init: Callable[[str], bytes],
        helper: HelperClient,
        queue: JobQueue | None = None,
        threads: int = 0,
    ) -> None:
        """`verify_key_init` maps a helper's URL to the secret shared with it (taskprov).

        `queue`: where workers fetch jobs; None if the server's own loop runs them.
        `threads`: of the native calls of one step; 0 for all cores.
        """
        self._database = database
        self._tasks = tasks
        self._keys = keys
        self._clock = clock
        self._verify_key_init = verify_key_init
        self._helper = helper
        self._queue = queue
        self._threads = threads
        self._last_task = b""

    def create_jobs(self, limit: int, *, away: Collection[str] = ()) -> list[JobRef]:
        """Create up to `limit` jobs, from each task in turn; fewer mean that no report waits.

        None for the helpers that are `away`: their reports go on waiting for others.
        """
        with self._database.read() as tx:
            found, last = reports.tasks_with_waiting_reports(
                tx, self._last_task, _SEARCHED_TASKS if away else limit
            )
        known = (task for task in map(self._tasks.find, found) if task is not None)
        waiting = [task for task in known if task.helper_url not in away][:limit]
        self._last_task = waiting[-1].task_id if away and waiting else last
        created: list[JobRef] = []
        if not waiting:
            return created
        with self._database.write(durable=False) as tx:
            while waiting and len(created) < limit:
                task = waiting.pop(0)
                ref = reports.create_job(
                    tx, task.task_id, capacity=job_capacity(task), now=self._clock.now()
                )
                if ref is not None:
                    created.append(ref)
                    waiting.append(task)
            if self._queue is not None:
                self._queue.jobs_created(tx, created)
        return created

    def helper_of(self, task_id: bytes) -> str:
        """Return the URL of a task's helper; nothing if the task is gone."""
        task = self._tasks.find(task_id)
        return "" if task is None else task.helper_url

    def unfinished(self, limit: int = 1000) -> list[JobRef]:
        """List the jobs to step; after a start, those of the process before.

        Those that failed least often come first, so that stuck jobs never hide others.
        """
        with self._database.read() as tx:
            return reports.unfinished_jobs(tx, live_at=self._clock.now(), limit=limit)

    def step(self, ref: JobRef) -> StepResult:
        """Verify and add up a job's reports with the helper. Safe to repeat, even concurrently."""
        task = self._tasks.find(ref.task_id)
        if task is None or self._clock.now() >= task.ends:
            return StepResult(done=True)
        with self._database.read() as tx:
            stored = reports.read_job(tx, ref)
        if stored is None:
            return StepResult(done=True)
        try:
            return self._verify(task, ref, stored)
        except (DecodeError, ProblemError, Unreachable) as error:
            away = isinstance(error, Unreachable)
            return self._failed(ref, f"the helper: {error}", helper_away=away)

    def _verify(self, task: KnownTask, ref: JobRef, stored: reports.StoredJob) -> StepResult:
        job = task.binding.leader_initialize(
            verify_key(self._verify_key_init(task.helper_url), task.task_id),
            self._keys.keypairs(),
            stored.reports,
            threads=self._threads,
        )
        verify_resps = b""
        verify_inits = job.verify_inits
        if verify_inits:
            request = AggregationJobInitReq(verify_inits=verify_inits).encode()
            if not self._may_send(ref, sha256(request), stored.request_digest):
                return self._failed(ref, "the request differs from the one that was sent before")
            verify_resps = self._helper.create_aggregation_job(task, request)
        finished = job.finish(verify_resps, threads=self._threads)
        return self._finish(task, ref, finished, _rejections(job, verify_resps, finished))

    def _may_send(self, ref: JobRef, digest: bytes, sent: bytes | None) -> bool:
        """Record, durably, what is about to be sent, unless something was sent before."""
        if sent is None:
            with self._database.write() as tx:
                sent = reports.record_request(tx, ref, digest)
        # None: another worker has finished the job, and the helper's response will be the same.
        return sent is None or hmac.compare_digest(bytes(sent), digest)

    def _finish(
        self, task: KnownTask, ref: JobRef, added: Aggregated, rejected: dict[str, int]
    ) -> StepResult:
        names = {VERIFIED: added.count} | rejected
        with self._database.write(durable=False) as tx:
            state = batches.lock_batch(tx, task.task_id, exclusive=False)
            if state is not BatchState.OPEN and state is not BatchState.FROZEN:
                return StepResult(done=True)  # the task has ended meanwhile
            if not reports.delete_job(tx, ref):
                return StepResult(done=True)  # another worker was faster, and did the same
            batches.accumulate(self._database, tx, task, added)
            count(self._database, tx, task.task_id, names)
            if self._queue is not None:
                self._queue.job_ended(tx, task.task_id)
        return StepResult(done=True)

    def _failed(self, ref: JobRef, reason: str, *, helper_away: bool = False) -> StepResult:
        reason = reason[:MAX_REASON_CHARACTERS]
        with self._database.write(durable=False) as tx:
            reports.record_job_failure(tx, ref, reason)
        return StepResult(done=False, reason=reason, helper_away=helper_away)


def _rejections(job: LeaderJob, verify_resps: bytes, added: Aggregated) -> dict[str, int]:
    """Count rejections by who made them: the leader alone, the helper, or the leader against it."""
    counted = rejections("leader", job.errors)
    asked = [after for before, after in zip(job.errors, added.errors, strict=True) if not before]
    if any(asked):
        responses = AggregationJobResp(verify_resps).responses()
        by_them = [response.kind is VerifyRespType.REJECT for response in responses]
        by_helper = [code for code, refused in zip(asked, by_them, strict=True) if refused]
        disputed = [code for code, refused in zip(asked, by_them, strict=True) if not refused]
        counted |= rejections("helper", by_helper) | rejections("disputed", disputed)
    return counted
