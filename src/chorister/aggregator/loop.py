"""The embedded job loop: reports are verified as they arrive.

One thread decides, a few others work. Reports wait for company for a fraction of a second, so that
single uploads do not make single jobs; then jobs are made and stepped, several at once: while the
helper verifies one, the leader prepares the next. A collection is stepped when one of its task's
jobs has ended. When the helper is away, everything that needs it pauses, longer each time, and
goes on by itself. A job that fails for reasons of its own, or that the helper refuses, pauses
alone: no task delays the others.

Every job may run twice, here or in another process, and does no harm: the loop keeps no state that
matters, and what it found unfinished at the start is simply stepped.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeAlias

from chorister.aggregator.logs import get_logger
from chorister.aggregator.metrics import Metrics
from chorister.errors import ChoristerError

__all__ = ["JobLoop", "Outcome", "Periodic", "Work"]

_IDLE: Final = 5.0
"""Seconds after which the database is looked at, woken or not: others may have written to it."""
_GATHER: Final = 0.05
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_LONGEST_ALONE: Final = 300.0
"""Of one job that fails while others do not."""

Ref: TypeAlias = tuple[bytes, bytes]
"""A task's id and a job's."""


class Outcome(Protocol):
    """What became of a step."""

    @property
    def done(self) -> bool:
        """Nothing is left to do."""
        ...

    @property
    def why(self) -> str | None:
        """What it waits for."""
        ...

    @property
    def peer(self) -> bool:
        """The helper is away, for whatever job: leave it alone for a while."""
        ...


class Work(Protocol):
    """A leader's jobs (`leader.Leader`)."""

    def create_aggregation_jobs(self, limit: int) -> Sequence[Ref]:
        """Make jobs of waiting reports."""
        ...

    def unfinished_jobs(self) -> Sequence[Ref]:
        """Jobs that were made and not finished."""
        ...

    def step(self, ref: Any) -> Outcome:  # noqa: ANN401 (whatever the two above return)
        """Bring one job to its end."""
        ...

    def pending_collections(self) -> Sequence[Ref]:
        """Collections without an outcome."""
        ...

    def step_collection(self, ref: Any) -> Outcome:  # noqa: ANN401
        """Bring one collection as far as it gets."""
        ...


class JobLoop:
    """Runs one leader's jobs until it is stopped."""

    def __init__(
        self, work: Work, metrics: Metrics, *, in_flight: int = 3, linger: float = 0.2
    ) -> None:
        self._work = work
        self._metrics = metrics
        self._in_flight = in_flight
        self._linger = linger
        self._log = get_logger()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(in_flight, thread_name_prefix="jobs")
        self._thread = threading.Thread(target=self._run, name="job loop", daemon=True)
        # All below belongs to the deciding thread.
        self._running: dict[Ref, Future[Outcome]] = {}
        self._ready: list[Ref] = []
        self._collecting: dict[Ref, Future[Outcome]] = {}
        self._finished_tasks: set[bytes] = set()
        self._later: dict[Ref, float] = {}  # jobs that pause, and until when
        self._resting: dict[Ref, float] = {}  # collections, in the same way
        self._pauses: dict[Ref, float] = {}  # of what failed: how long it paused last
        self._resume = 0.0
        self._pause = _FIRST_PAUSE
        self._look_at = 0.0
        self._everything_at = 0.0
        # Written by others, under the lock: since when reports, or collections, wait unseen.
        self._lock = threading.Lock()
        self._arrived: float | None = time.monotonic()
        self._asked = True

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the steps under way; what is unfinished is stepped by the next process."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown()

    def reports_arrived(self) -> None:
        """Reports were stored. Cheap, and may be called from any thread."""
        if self._arrived is None:
            with self._lock:
                self._arrived = time.monotonic()
            self._wake.set()

    def collection_asked(self) -> None:
        """A collection job was created."""
        self._asked = True
        self._wake.set()

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing is known to wait; for tests."""
        busy = self._running or self._ready or self._collecting or self._later
        return not busy and self._arrived is None

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                wait = self._turn()
            except ChoristerError as error:
                self._log.error(
                    "the job loop stumbled", kind=type(error).__name__, error=str(error)
                )
                wait = 1.0
            except Exception as error:
                self._log.error("the job loop stumbled, by a bug in Chorister", exc_info=error)
                wait = 1.0
            self._wake.wait(wait)

    def _turn(self) -> float:
        """Look at what has ended, begin what can begin; for how long there is nothing to do."""
        now = time.monotonic()
        self._reap(now)
        if now < self._resume:
            return self._resume - now
        everything = now >= self._everything_at
        if everything:
            self._everything_at = now + _IDLE
            with self._lock:  # reports that another process took, or that were left behind
                if self._arrived is None:
                    self._arrived = now - self._linger
            known = {*self._running, *self._ready, *self._later}
            self._ready += [ref for ref in self._work.unfinished_jobs() if ref not in known]
        for ref in [ref for ref, until in self._later.items() if until <= now]:
            del self._later[ref]
            self._ready.append(ref)
        self._begin_ready()
        wait = self._collect(now, everything=everything)
        wait = min(wait, self._gather(now))  # last: where it fails, the rest goes on
        self._begin_ready()
        return max(0.0, min(wait, self._everything_at - now, self._next_retry() - now))

    def _begin_ready(self) -> None:
        while self._ready and len(self._running) < self._in_flight:
            ref = self._ready.pop(0)
            self._running[ref] = self._begin("aggregate", self._work.step, ref)

    def _next_retry(self) -> float:
        return min(self._later.values(), default=math.inf)

    def _gather(self, now: float) -> float:
        """Make jobs of what waits, if it has waited for company, and there is room."""
        arrived = self._arrived
        if arrived is None or len(self._ready) >= self._in_flight:
            return _IDLE
        if now < arrived + self._linger:
            return arrived + self._linger - now
        with self._lock:
            self._arrived = None  # before: what arrives meanwhile may be too late for this look
        room = 2 * self._in_flight
        try:
            made = self._work.create_aggregation_jobs(room)
        except BaseException:
            with self._lock:
                self._arrived = arrived
            raise
        self._ready += made
        if len(made) == room:  # there may be more
            with self._lock:
                self._arrived = now - self._linger
        return _IDLE

    def _collect(self, now: float, *, everything: bool) -> float:
        """Step the collections that may have become ready."""
        asked = self._asked
        if not (asked or everything or self._finished_tasks):
            return _IDLE
        if now < self._look_at and not asked:
            return self._look_at - now
        self._look_at = now + _GATHER
        self._asked = False
        tasks, self._finished_tasks = self._finished_tasks, set()
        for ref in self._work.pending_collections():
            rested = self._resting.get(ref, now) <= now
            due = ref[0] in tasks or ((asked or everything) and rested)
            if due and ref not in self._collecting:
                self._collecting[ref] = self._begin("collect", self._work.step_collection, ref)
            elif due:
                self._finished_tasks.add(ref[0])  # it may have looked too early
        return _IDLE

    def _begin(self, kind: str, step: Callable[[Any], Outcome], ref: Ref) -> Future[Outcome]:
        def run() -> Outcome:
            begun = time.monotonic()
            try:
                outcome = step(ref)
            except BaseException:
                self._metrics.jobs.labels(kind, "failed").inc()
                raise
            self._metrics.jobs.labels(kind, "done" if outcome.done else "waiting").inc()
            self._metrics.job_seconds.labels(kind).observe(time.monotonic() - begun)
            return outcome

        future = self._pool.submit(run)
        future.add_done_callback(lambda _: self._wake.set())
        return future

    def _reap(self, now: float) -> None:
        for ref in [ref for ref, future in self._running.items() if future.done()]:
            until = self._settle("aggregate", ref, self._running.pop(ref), now)
            if until is None:
                self._finished_tasks.add(ref[0])
            else:
                self._later[ref] = until
        for ref in [ref for ref, future in self._collecting.items() if future.done()]:
            until = self._settle("collect", ref, self._collecting.pop(ref), now)
            if until is None:
                self._resting.pop(ref, None)
            else:
                self._resting[ref] = until

    def _settle(self, kind: str, ref: Ref, future: Future[Outcome], now: float) -> float | None:
        """Note what became of a step; when to try it again, None if it came to its end.

        A collection waits for reports, mostly, and is looked at whenever there are more of them.
        """
        try:
            outcome = future.result()
        except ChoristerError as error:
            until = self._pause_alone(ref, now)
            self._log.warning(
                "a job failed",
                kind=kind,
                task=ref[0].hex(),
                reason=type(error).__name__,
                error=str(error),
                retry_in=round(until - now, 1),
            )
            return until
        except Exception as error:
            self._log.error("a job failed, by a bug in Chorister", kind=kind, exc_info=error)
            return self._pause_alone(ref, now)
        if outcome.done:
            self._pauses.pop(ref, None)
            if kind == "aggregate":
                self._pause = _FIRST_PAUSE
            return None
        if not outcome.peer and kind == "collect":
            return now
        if outcome.peer and kind == "aggregate":
            self._hold(now)
            until = self._resume
        else:  # the helper may refuse one collection while it helps with everything else
            until = self._pause_alone(ref, now)
        self._log.warning(
            "a job waits for the helper" if outcome.peer else "a job does not step",
            kind=kind,
            task=ref[0].hex(),
            reason=outcome.why,
            retry_in=round(until - now, 1),
        )
        return until

    def _pause_alone(self, ref: Ref, now: float) -> float:
        """One job pauses, longer each time; until when."""
        last = self._pauses.get(ref)
        self._pauses[ref] = _FIRST_PAUSE if last is None else min(2 * last, _LONGEST_ALONE)
        return now + self._pauses[ref]

    def _hold(self, now: float) -> None:
        """Leave the helper alone for a while, longer each time."""
        if now >= self._resume:
            self._resume = now + self._pause
            self._everything_at = self._resume
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class Periodic:
    """Calls something every so often, in a thread of its own; a failure is logged, not the end."""

    def __init__(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        self._name = name
        self._seconds = seconds
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin, with a first call at once."""
        self._thread.start()

    def stop(self) -> None:
        """End after the call under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._call()
            except ChoristerError as error:
                get_logger().error(
                    f"{self._name} failed", kind=type(error).__name__, error=str(error)
                )
            except Exception as error:
                get_logger().error(f"{self._name} failed, by a bug in Chorister", exc_info=error)
            if self._stop.wait(self._seconds):
                return
