"""One aggregator's jobs as Procrastinate tasks, run by any number of worker processes.

The functions are the same as in the server's own loop; only the caller differs. Procrastinate
fetches what `job_queue` enqueued, retries what failed, later each time, and runs periodic tasks
once, however many workers there are. A dead worker is noticed after a few seconds, and its jobs
are enqueued again. When the database goes away, the worker waits for it; when a helper goes away,
the worker pauses before it asks that one again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Final

import anyio
import procrastinate
from procrastinate import RetryDecision
from procrastinate.jobs import Job

from chorister.aggregator.jobs.aggregation_job_driver import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    AggregationJobDriver,
    HelperPause,
    StepResult,
    run_step,
)
from chorister.aggregator.jobs.collection_job_driver import CollectionJobDriver
from chorister.aggregator.jobs.garbage_collector import GarbageCollector
from chorister.aggregator.jobs.job_queue import (
    PERIODIC_QUEUE,
    QUEUE,
    JobQueue,
    requeue_stalled,
)
from chorister.aggregator.operations.logs import get_logger, log_failure
from chorister.aggregator.operations.metrics import Metrics
from chorister.aggregator.storage.batches import CollectionRef
from chorister.aggregator.storage.reports import JobRef
from chorister.errors import ChoristerError, InternalError

HEARTBEAT_SECONDS: Final = 2.0
DEAD_AFTER_SECONDS: Final = 10.0
_RECOVER_SECONDS: Final = 5
MAX_ATTEMPTS: Final = 20
"""After that many, a job that fails because of a bug is left to the operator."""
_JOBS_PER_PASS: Final = 32
_POLL_SECONDS: Final = 0.25
"""Needed because a job with a delay sends its only notification when it is enqueued."""
_MAX_STEP_SECONDS: Final = 360
"""How long a job may run, in addition to its requests to the helper."""


class RetryLater(ChoristerError):
    """A job is not done yet; it is retried, however often."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


class Backoff(procrastinate.BaseRetryStrategy):
    """When a job is retried: later each time; never again after many failures by a bug."""

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        """Decide whether and when a failed job is retried."""
        known = isinstance(exception, ChoristerError) and not isinstance(exception, InternalError)
        if not known and job.attempts + 1 >= MAX_ATTEMPTS:
            return None
        seconds = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(job.attempts, 10))
        if isinstance(exception, RetryLater) and exception.seconds is not None:
            seconds = exception.seconds
        spread = 1 + random.random() / 4  # noqa: S311 - so that not all retry at the same moment
        return RetryDecision(retry_in={"milliseconds": int(1000 * seconds * spread)})


class Worker:
    """One aggregator's jobs; a helper has periodic ones only."""

    def __init__(
        self,
        conninfo: str,
        queue: JobQueue,
        garbage_collector: GarbageCollector,
        metrics: Metrics,
        *,
        delete_seconds: int,
        leader: tuple[AggregationJobDriver, CollectionJobDriver] | None,
        helper_seconds: int = 0,
    ) -> None:
        """`conninfo`: the database's address for libpq. `delete_seconds`: how often to delete.

        `helper_seconds`: how long the helper may take over one request.
        """
        self._queue = queue
        self._garbage_collector = garbage_collector
        self._leader = leader
        self._metrics = metrics
        self._helpers: dict[str, HelperPause] = {}  # by URL
        self._log = get_logger()
        self.app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(conninfo=conninfo, min_size=1, max_size=4)
        )
        self._max_run_seconds = float(_MAX_STEP_SECONDS + 2 * helper_seconds)
        self._runs: dict[tuple[int, int], float] = {}
        retry = Backoff()
        if leader is not None:
            self.app.task(name="gather", queue=QUEUE, retry=retry)(self.gather)
            self.app.task(name="aggregate", queue=QUEUE, retry=retry)(self.aggregate)
            self.app.task(name="collect", queue=QUEUE, retry=retry)(self.collect)
        periodic = (
            (delete_seconds, "sweep", self.sweep),
            (_RECOVER_SECONDS, "recover", self.recover),
        )
        for seconds, name, function in periodic:
            task = self.app.task(name=name, queue=PERIODIC_QUEUE, priority=10)(function)
            self.app.periodic(cron=cron(seconds))(task)

    def _drivers(self) -> tuple[AggregationJobDriver, CollectionJobDriver]:
        if self._leader is None:
            raise InternalError("a helper's worker got a leader's job")
        return self._leader

    # --- the jobs -------------------------------------------------------------------------------

    def gather(self) -> None:
        """Create aggregation jobs from all waiting reports."""
        aggregation, _ = self._drivers()
        with self._counted("gather"):
            self._queue.claim("gather", {})
            while len(aggregation.create_jobs(_JOBS_PER_PASS)) == _JOBS_PER_PASS:
                pass

    def aggregate(self, task: str, job: str) -> None:
        aggregation, _ = self._drivers()
        ref = JobRef(*_bytes(task, job))
        self._step("aggregate", task, lambda: aggregation.step(ref))

    def collect(self, task: str, job: str) -> None:
        """Step one collection; if it waits for reports, the end of their job enqueues it again."""
        with self._counted("collect", task):
            self._queue.claim("collect", {"task": task, "job": job})
        _, collection = self._drivers()
        ref = CollectionRef(*_bytes(task, job))
        self._step("collect", task, lambda: collection.step(ref))

    def _step(self, kind: str, task: str, step: Callable[[], StepResult]) -> None:
        aggregation, _ = self._drivers()
        helper = self._helpers.setdefault(aggregation.helper_of(bytes.fromhex(task)), HelperPause())
        left = helper.seconds_left()
        if left:
            raise RetryLater("the helper can't be reached", left)
        with self._counted(kind, task):
            outcome = run_step(self._metrics, kind, step)
        if outcome.helper_away:
            pause = helper.failed()
            self._log.warning(
                "a job waits for the helper",
                kind=kind,
                task=task,
                reason=outcome.reason,
                retry_in=round(pause, 1),
            )
            raise RetryLater(outcome.reason or "the helper can't be reached", pause)
        if outcome.done:
            helper.succeeded()
        elif kind == "aggregate":
            raise RetryLater(outcome.reason or "the job waits")

    @contextlib.contextmanager
    def _counted(self, kind: str, task: str | None = None) -> Iterator[None]:
        """Count and log a failure; Procrastinate decides when the job is retried."""
        try:
            yield
        except BaseException as error:
            self._metrics.jobs.labels(kind, "failed").inc()
            log_failure("a job failed", error, level=logging.WARNING, kind=kind, task=task)
            raise

    def sweep(self, timestamp: int) -> None:
        """Delete what has ended, and step collections that no event announces."""
        del timestamp
        with self._logged("deleting ended tasks"):
            self._garbage_collector.run()
            if self._leader is not None:
                self._queue.enqueue_collections(self._leader[1].pending())

    async def recover(self, timestamp: int) -> None:
        """Enqueue again what dead workers held, and what has no job in the queue."""
        del timestamp
        with self._logged("recovering jobs"):
            number = await requeue_stalled(
                self.app.job_manager,
                heartbeat=DEAD_AFTER_SECONDS,
                longest=self._max_run_seconds,
                seen=self._runs,
                now=time.monotonic(),
            )
            if self._leader is not None:
                number += await anyio.to_thread.run_sync(self._queue.enqueue_missing)
            if number:
                self._log.warning("jobs were enqueued again", jobs=number)

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Log a failure; the next run comes on schedule."""
        try:
            yield
        except Exception as error:
            log_failure(f"{what} failed", error)

    # --- running --------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, *, jobs: int) -> None:
        """Run jobs until `stop` is set, `jobs` at a time. Reconnects to the database as needed."""
        pause = FIRST_PAUSE_SECONDS
        while not stop.is_set():
            started = time.monotonic()
            try:
                async with self.app.open_async():
                    await self._run_once(stop, jobs)
            except Exception as error:
                reason = type(error).__name__
                self._log.warning("the queue can't be reached", reason=reason, retry_in=pause)
            if time.monotonic() - started > MAX_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS / 6)

    async def _run_once(self, stop: asyncio.Event, jobs: int) -> None:
        """Run jobs until `stop` is set or the database fails."""
        running = asyncio.create_task(
            self.app.run_worker_async(
                queues=[QUEUE, PERIODIC_QUEUE],
                concurrency=jobs,
                delete_jobs="successful",
                fetch_job_polling_interval=_POLL_SECONDS,
                update_heartbeat_interval=HEARTBEAT_SECONDS,
                stalled_worker_timeout=DEAD_AFTER_SECONDS,
                install_signal_handlers=False,
            )
        )
        lost = asyncio.Event()
        # If the end of a job can't be written, nothing awaits the exception. The job would stay
        # ours forever, unless we reconnect as another worker.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: lost.set())
        waits = [asyncio.create_task(each.wait()) for each in (stop, lost)]
        await asyncio.wait([running, *waits], return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if not running.done():
            running.cancel()  # gracefully: jobs under way finish
        with contextlib.suppress(asyncio.CancelledError):
            await running


def cron(seconds: int) -> str:
    """Write an interval for cron, rounded down to a divisor of a minute, an hour or a day."""
    for unit, pattern, limit in (
        (1, "* * * * * */{}", 60),
        (60, "*/{} * * * *", 60),
        (3600, "0 */{} * * *", 24),
    ):
        number = seconds // unit
        if number < limit:
            fits = max(each for each in range(1, max(number, 1) + 1) if limit % each == 0)
            return pattern.format(fits)
    return "0 0 * * *"


def _bytes(task: str, job: str) -> tuple[bytes, bytes]:
    return bytes.fromhex(task), bytes.fromhex(job)
