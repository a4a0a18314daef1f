"""`chorister worker`: any number of processes that run one aggregator's jobs, on PostgreSQL.

The functions are those of the embedded loop; only who calls them differs. Procrastinate fetches
what `queue` enqueued, tries again what failed, later each time, and runs what is periodic once
whatever the number of workers. A worker that dies is missed after a few seconds, and what it held
is taken back. When the database goes away the worker waits for it; when the helper goes away it
leaves it alone for a while, and asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import anyio
import procrastinate
from procrastinate import RetryDecision
from procrastinate.jobs import Job
from sqlalchemy.engine import make_url

from chorister.aggregator.config import HelperConfig, LeaderConfig
from chorister.aggregator.leader import CollectionRef, JobRef, Leader, Step
from chorister.aggregator.logs import configure_logs, get_logger
from chorister.aggregator.queue import QUEUE, claim, enqueue_collections, recover
from chorister.aggregator.server import listen, operators_listener
from chorister.aggregator.service import Service
from chorister.clock import Clock
from chorister.errors import ChoristerError, InternalError, ServiceError

__all__ = ["DEAD_AFTER", "Backoff", "Later", "Worker", "cron", "run_worker"]

_HEARTBEAT: Final = 2.0
DEAD_AFTER: Final = 10.0
_RECOVER_EVERY: Final = 5
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_ATTEMPTS: Final = 20
"""After which a job that fails by a bug is left to the operator."""
_AT_ONCE: Final = 32
_POLL: Final = 0.25
"""Seconds: a job that is due later announces itself only when it is enqueued."""


class Later(ChoristerError):
    """A job could not be brought to its end; it is tried again, however often."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


class Backoff(procrastinate.BaseRetryStrategy):
    """When a job is tried again: later each time; never again, after many failures by a bug."""

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        """Decide about one failure."""
        known = isinstance(exception, ChoristerError) and not isinstance(exception, InternalError)
        if not known and job.attempts + 1 >= _ATTEMPTS:
            return None
        seconds = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(job.attempts, 10))
        if isinstance(exception, Later) and exception.seconds is not None:
            seconds = exception.seconds
        spread = 1 + random.random() / 4  # noqa: S311 (not all at the same moment)
        return RetryDecision(retry_in={"milliseconds": int(1000 * seconds * spread)})


class _Brake:
    """Leaves the helper alone after a failure, longer each time, for all jobs of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._pause = _FIRST_PAUSE

    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def failed(self) -> float:
        with self._lock:
            if not self.left():
                self._until = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return self.left()

    def succeeded(self) -> None:
        with self._lock:
            self._pause = _FIRST_PAUSE


class Worker:
    """One aggregator's jobs as Procrastinate's tasks."""

    def __init__(self, service: Service) -> None:
        config = service.config
        if not config.workers:
            raise ServiceError("the settings do not say `workers = true`: the server runs the jobs")
        self.service = service
        self._database = service.core.database
        self._metrics = service.metrics
        self._brake = _Brake()
        self._log = get_logger()
        self.app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(
                conninfo=_address(config.database), min_size=1, max_size=4
            )
        )
        self._longest = 60.0
        retry = Backoff()
        if isinstance(config, LeaderConfig):
            self._longest += 2 * config.helper_seconds + 300
            self.app.task(name="gather", queue=QUEUE, retry=retry)(self.gather)
            self.app.task(name="aggregate", queue=QUEUE, retry=retry)(self.aggregate)
            self.app.task(name="collect", queue=QUEUE, retry=retry)(self.collect)
        periodic = (
            (config.sweep_every, "sweep", self.sweep),
            (_RECOVER_EVERY, "recover", self.recover),
        )
        for seconds, name, function in periodic:
            made = self.app.task(name=name, queue=QUEUE, priority=10)(function)
            self.app.periodic(cron=cron(seconds))(made)

    @property
    def _leader(self) -> Leader:
        return self.service.leader

    # --- the jobs -------------------------------------------------------------------------------

    def gather(self) -> None:
        """Make aggregation jobs of all reports that wait."""
        with self._counted("gather"):
            claim(self._database, "gather", {})
            while len(self._leader.create_aggregation_jobs(_AT_ONCE)) == _AT_ONCE:
                pass

    def aggregate(self, task: str, job: str) -> None:
        """Step one aggregation job."""
        self._step("aggregate", task, lambda: self._leader.step(JobRef(*_bytes(task, job))))

    def collect(self, task: str, job: str) -> None:
        """Step one collection; where it waits for reports, the end of their job enqueues it."""
        with self._counted("collect", task):
            claim(self._database, "collect", {"task": task, "job": job})
        ref = CollectionRef(*_bytes(task, job))
        self._step("collect", task, lambda: self._leader.step_collection(ref))

    def _step(self, kind: str, task: str, step: Callable[[], Step]) -> None:
        left = self._brake.left()
        if left:
            raise Later("the helper is away", left)
        begun = time.monotonic()
        with self._counted(kind, task):
            outcome = step()
        self._metrics.jobs.labels(kind, "done" if outcome.done else "waiting").inc()
        self._metrics.job_seconds.labels(kind).observe(time.monotonic() - begun)
        if outcome.peer:
            pause = self._brake.failed()
            self._log.warning(
                "a job waits for the helper",
                kind=kind,
                task=task,
                reason=outcome.why,
                retry_in=round(pause, 1),
            )
            raise Later(outcome.why or "the helper is away", pause)
        if outcome.done:
            self._brake.succeeded()
        elif kind == "aggregate":
            raise Later(outcome.why or "it waits")

    @contextlib.contextmanager
    def _counted(self, kind: str, task: str | None = None) -> Iterator[None]:
        """A failure is counted and logged; Procrastinate decides when it is tried again."""
        try:
            yield
        except BaseException as error:
            self._metrics.jobs.labels(kind, "failed").inc()
            if isinstance(error, ChoristerError):
                name = type(error).__name__
                self._log.warning("a job failed", kind=kind, task=task, reason=name, error=error)
            else:
                self._log.error("a job failed, by a bug in Chorister", kind=kind, exc_info=error)
            raise

    def sweep(self, timestamp: int) -> None:
        """Delete what has ended; look after collections that nothing announces."""
        del timestamp
        with self._logged("sweeping"):
            if isinstance(self.service.config, HelperConfig):
                self.service.helper.sweep()
                return
            self._leader.sweep()
            enqueue_collections(self._database, self._leader.pending_collections())

    def recover(self, timestamp: int) -> None:
        """Take back what dead workers held."""
        del timestamp
        with self._logged("recovering"):
            number = recover(self._database, heartbeat=DEAD_AFTER, longest=self._longest)
            if number:
                self._log.warning("jobs were enqueued again", jobs=number)

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """A failure is logged; the next turn comes by itself."""
        try:
            yield
        except ChoristerError as error:
            self._log.error(f"{what} failed", kind=type(error).__name__, error=str(error))
        except Exception as error:
            self._log.error(f"{what} failed, by a bug in Chorister", exc_info=error)

    # --- running --------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event, *, jobs: int) -> None:
        """Run jobs until told to stop, `jobs` at once; through whatever the database does."""
        pause = _FIRST_PAUSE
        while not stop.is_set():
            begun = time.monotonic()
            try:
                async with self.app.open_async():
                    await self._run_once(stop, jobs)
            except Exception as error:
                reason = type(error).__name__
                self._log.warning("the queue can't be reached", reason=reason, retry_in=pause)
            if time.monotonic() - begun > _LONGEST_PAUSE:
                pause = _FIRST_PAUSE
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
            pause = min(2 * pause, _LONGEST_PAUSE / 6)

    async def _run_once(self, stop: asyncio.Event, jobs: int) -> None:
        """Until told to stop, or until the database fails us."""
        running = asyncio.create_task(
            self.app.run_worker_async(
                queues=[QUEUE],
                concurrency=jobs,
                delete_jobs="successful",
                fetch_job_polling_interval=_POLL,
                update_heartbeat_interval=_HEARTBEAT,
                stalled_worker_timeout=DEAD_AFTER,
                install_signal_handlers=False,
            )
        )
        lost = asyncio.Event()
        # The end of a job that could not be written is an exception that nobody awaits. Such a job
        # is ours for ever, unless we come back under another name.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: lost.set())
        waits = [asyncio.create_task(each.wait()) for each in (stop, lost)]
        await asyncio.wait([running, *waits], return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if not running.done():
            running.cancel()  # in an orderly way: jobs under way are brought to their end
        with contextlib.suppress(asyncio.CancelledError):
            await running


def cron(seconds: int) -> str:
    """An interval as cron can say it: rounded down to what divides a minute, an hour, a day."""
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


def run_worker(
    config: LeaderConfig | HelperConfig,
    clock: Clock,
    *,
    jobs: int | None = None,
    metrics_port: int | None = None,
    ready: Callable[[], None],
) -> None:
    """Run an aggregator's jobs until SIGTERM or SIGINT; jobs under way finish their step."""
    configure_logs(level=config.log_level, form=config.log_format)
    # Its lines quote whatever failed, addresses too; what matters we say ourselves.
    logging.getLogger("procrastinate").setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        operators = None
        if metrics_port is not None:  # the settings' own port is the server's
            operators = stack.enter_context(listen(config.metrics_host, metrics_port))
        # Cosigning is a server's, too.
        service = Service(config.model_copy(update={"cosign": False}), clock)
        stack.callback(service.close)
        worker = Worker(service)
        wanted = jobs or (config.jobs_in_flight if isinstance(config, LeaderConfig) else 1)
        anyio.run(_main, worker, wanted, operators, ready)


async def _main(
    worker: Worker, jobs: int, operators: socket.socket | None, ready: Callable[[], None]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    service = worker.service
    async with operators_listener(service, operators):
        get_logger().info("started", aggregator=service.config.url, kind="worker")
        ready()
        watch = service.watch() if operators is not None else None
        if watch is not None:
            watch.start()
        await worker.run(stop, jobs=jobs)
        if watch is not None:
            await anyio.to_thread.run_sync(watch.stop)
        get_logger().info("stopped", aggregator=service.config.url, kind="worker")


def _bytes(task: str, job: str) -> tuple[bytes, bytes]:
    return bytes.fromhex(task), bytes.fromhex(job)


def _address(url: str) -> str:
    """What libpq reads."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
