"""The server's own job loop: reports are verified as they arrive.

One thread decides, a few others work. Reports wait for others for a fraction of a second, so that
single uploads do not become single jobs. Then jobs are created and stepped, a few at a time: while
the helper verifies one, the leader prepares the next. A collection is stepped when one of its
task's jobs has ended. When a helper can't be reached, everything that needs it pauses, longer each
time, and then one job at a time tries it again: tasks with another helper go on. A job that fails
for reasons of its own, or that the helper refuses, pauses alone: no task delays the others.

Every job may run twice, here or in another process, without harm: the loop keeps no state that
matters, and what it finds unfinished at the start is simply stepped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeAlias

from chorister.aggregator.jobs.aggregation_job_driver import (
    FIRST_PAUSE_SECONDS,
    AggregationJobDriver,
    HelperPause,
    StepResult,
    run_step,
)
from chorister.aggregator.jobs.collection_job_driver import CollectionJobDriver
from chorister.aggregator.operations.logs import get_logger, log_failure
from chorister.aggregator.operations.metrics import Metrics

POLL_SECONDS: Final = 5.0
"""How often the database is read without being woken: other processes may have written to it."""
_COLLECT_SECONDS: Final = 0.05
"""The shortest time between two passes over the pending collections."""
_MAX_JOB_PAUSE_SECONDS: Final = 300.0
"""For one job that fails while others do not."""

_REMEMBERED_TASKS: Final = 10_000

Ref: TypeAlias = tuple[bytes, bytes]
"""A task's id and a job's."""


class JobLoop:
    """Runs one leader's jobs until it is stopped."""

    def __init__(
        self,
        aggregation: AggregationJobDriver,
        collection: CollectionJobDriver,
        metrics: Metrics,
        *,
        in_flight: int = 3,
        batch_delay: float = 0.2,
    ) -> None:
        """`batch_delay`: seconds for which reports wait for others before a job is created."""
        self._aggregation = aggregation
        self._collection = collection
        self._metrics = metrics
        self._in_flight = in_flight
        self._batch_delay = batch_delay
        self._log = get_logger()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(in_flight, thread_name_prefix="jobs")
        self._thread = threading.Thread(target=self._run, name="job loop", daemon=True)
        # Everything below belongs to the deciding thread.
        self._running: dict[Ref, Future[StepResult]] = {}
        self._ready: list[Ref] = []
        self._collecting: dict[Ref, Future[StepResult]] = {}
        self._finished_tasks: set[bytes] = set()
        self._paused: dict[Ref, float] = {}  # jobs that pause, and until when
        self._paused_collections: dict[Ref, float] = {}
        self._pauses: dict[Ref, float] = {}  # how long each failing job paused last
        self._helpers: dict[str, HelperPause] = {}  # by URL
        self._helper_of: dict[bytes, str] = {}  # by task
        self._collect_at = 0.0
        self._poll_at = 0.0
        # Written by other threads, under the lock: since when reports wait unseen.
        self._lock = threading.Lock()
        # What the process before left has waited long enough.
        self._arrived: float | None = time.monotonic() - batch_delay
        self._collection_created = True

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the steps under way; the next process steps what is unfinished."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown()

    def reports_stored(self) -> None:
        """Tell the loop that reports were stored. Cheap, and safe from any thread."""
        if self._arrived is None:
            with self._lock:
                self._arrived = time.monotonic()
            self._wake.set()

    def collection_created(self) -> None:
        """Tell the loop that a collection job was created."""
        self._collection_created = True
        self._wake.set()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is known to wait; for tests."""
        busy = self._running or self._ready or self._collecting or self._paused
        return not busy and self._arrived is None

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                wait = self._turn()
            except Exception as error:
                log_failure("the job loop failed", error)
                wait = 1.0
            self._wake.wait(wait)

    def _turn(self) -> float:
        """Handle what has ended, start what can start. Returns the seconds until the next turn."""
        now = time.monotonic()
        self._reap(now)
        poll = now >= self._poll_at
        if poll:
            self._poll_at = now + POLL_SECONDS
            with self._lock:  # reports that another process stored, or left behind
                if self._arrived is None:
                    self._arrived = now - self._batch_delay
            known = {*self._running, *self._ready, *self._paused}
            self._ready += [ref for ref in self._aggregation.unfinished() if ref not in known]
        for ref in [ref for ref, until in self._paused.items() if until <= now]:
            del self._paused[ref]
            self._ready.append(ref)
        self._start_ready()
        wait = self._collect(now, poll=poll)
        wait = min(wait, self._gather(now))  # last: if it fails, the rest is done
        self._start_ready()
        wait = min(wait, self._poll_at - now, self._next_retry() - now, self._next_resumption())
        return max(0.0, wait)

    def _start_ready(self) -> None:
        ready, self._ready = self._ready, []  # if this fails, the next poll finds the rest
        for ref in ready:
            if len(self._running) >= self._in_flight or self._is_held(ref):
                self._ready.append(ref)
            else:
                self._running[ref] = self._start_step("aggregate", self._aggregation.step, ref)

    def _is_held(self, ref: Ref) -> bool:
        """Whether a job has to wait for its helper: one that fails gets one request at a time."""
        helper = self._pause_of(ref)
        return bool(helper.seconds_left()) or (
            helper.failing and any(self._pause_of(each) is helper for each in self._running)
        )

    def _pause_of(self, ref: Ref) -> HelperPause:
        url = self._helper_of.get(ref[0])
        if url is None:
            if len(self._helper_of) >= _REMEMBERED_TASKS:
                self._helper_of.clear()
            url = self._helper_of[ref[0]] = self._aggregation.helper_of(ref[0])
        return self._helpers.setdefault(url, HelperPause())

    def _next_resumption(self) -> float:
        """Return the seconds until a helper's pause is over for which a job is ready."""
        left = (self._pause_of(ref).seconds_left() for ref in self._ready)
        return min((each for each in left if each), default=math.inf)

    def _next_retry(self) -> float:
        return min(self._paused.values(), default=math.inf)

    def _gather(self, now: float) -> float:
        """Create jobs from waiting reports, once they have waited and there is room."""
        arrived = self._arrived
        if arrived is None:
            return POLL_SECONDS
        if sum(not self._is_held(ref) for ref in self._ready) >= self._in_flight:
            return POLL_SECONDS
        if now < arrived + self._batch_delay:
            return arrived + self._batch_delay - now
        with self._lock:
            self._arrived = None  # before: later reports may be too late for this pass
        room = 2 * self._in_flight
        try:
            away = {url for url, each in self._helpers.items() if each.seconds_left()}
            created = self._aggregation.create_jobs(room, away=away)
        except BaseException:
            with self._lock:
                self._arrived = arrived
            raise
        self._ready += created
        if len(created) == room:  # there may be more
            with self._lock:
                self._arrived = now - self._batch_delay
        return POLL_SECONDS

    def _collect(self, now: float, *, poll: bool) -> float:
        """Step the collections that may have become ready."""
        created = self._collection_created
        if not (created or poll or self._finished_tasks):
            return POLL_SECONDS
        if now < self._collect_at and not created:
            return self._collect_at - now
        self._collect_at = now + _COLLECT_SECONDS
        self._collection_created = False
        tasks, self._finished_tasks = self._finished_tasks, set()
        for ref in self._collection.pending():
            rested = self._paused_collections.get(ref, now) <= now
            due = ref[0] in tasks or ((created or poll) and rested)
            if due and ref not in self._collecting and not self._pause_of(ref).seconds_left():
                self._collecting[ref] = self._start_step("collect", self._collection.step, ref)
            elif due:  # once the helper's pause is over; a running step may have started too early
                self._finished_tasks.add(ref[0])
        return POLL_SECONDS

    def _start_step(
        self, kind: str, step: Callable[[Any], StepResult], ref: Ref
    ) -> Future[StepResult]:
        def run() -> StepResult:
            try:
                return run_step(self._metrics, kind, lambda: step(ref))
            except BaseException:
                self._metrics.jobs.labels(kind, "failed").inc()
                raise

        future = self._pool.submit(run)
        future.add_done_callback(lambda _: self._wake.set())
        return future

    def _reap(self, now: float) -> None:
        for ref in [ref for ref, future in self._running.items() if future.done()]:
            until = self._settle("aggregate", ref, self._running.pop(ref), now)
            if until is None:
                self._finished_tasks.add(ref[0])
            else:
                self._paused[ref] = until
        for ref in [ref for ref, future in self._collecting.items() if future.done()]:
            until = self._settle("collect", ref, self._collecting.pop(ref), now)
            if until is None:
                self._paused_collections.pop(ref, None)
            else:
                self._paused_collections[ref] = until

    def _settle(self, kind: str, ref: Ref, future: Future[StepResult], now: float) -> float | None:
        """Handle a step's outcome. Returns when to repeat it; None if the job is done.

        A collection mostly waits for reports, and is stepped whenever there are more of them.
        """
        try:
            outcome = future.result()
        except Exception as error:
            until = self._pause_alone(ref, now)
            log_failure(
                "a job failed",
                error,
                level=logging.WARNING,
                kind=kind,
                task=ref[0].hex(),
                retry_in=round(until - now, 1),
            )
            return until
        if outcome.done:
            self._pauses.pop(ref, None)
            if kind == "aggregate":
                self._pause_of(ref).succeeded()
            return None
        if not outcome.helper_away and kind == "collect":
            return now
        if outcome.helper_away and kind == "aggregate":
            until = now + self._pause_of(ref).failed()
        else:  # the helper may refuse one collection and still serve everything else
            until = self._pause_alone(ref, now)
        self._log.warning(
            "a job waits for the helper" if outcome.helper_away else "a job waits",
            kind=kind,
            task=ref[0].hex(),
            reason=outcome.reason,
            retry_in=round(until - now, 1),
        )
        return until

    def _pause_alone(self, ref: Ref, now: float) -> float:
        """Pause one job, longer each time. Returns until when."""
        last = self._pauses.get(ref)
        self._pauses[ref] = (
            FIRST_PAUSE_SECONDS if last is None else min(2 * last, _MAX_JOB_PAUSE_SECONDS)
        )
        return now + self._pauses[ref]


class Periodic:
    """Calls a function at regular intervals, in its own thread; failures are logged."""

    def __init__(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        self._name = name
        self._seconds = seconds
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start, with the first call immediately."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the call under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._call()
            except Exception as error:
                log_failure(f"{self._name} failed", error)
            if self._stop.wait(self._seconds):
                return
