"""The job loop against a leader that is only told about: what runs when, how many at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from chorister.aggregator.jobs.aggregation_job_driver import (
    FIRST_PAUSE_SECONDS,
    AggregationJobDriver,
    StepResult,
)
from chorister.aggregator.jobs.collection_job_driver import CollectionJobDriver
from chorister.aggregator.jobs.job_loop import JobLoop, Periodic
from chorister.aggregator.operations.metrics import Metrics
from chorister.aggregator.storage.batches import CollectionRef
from chorister.aggregator.storage.reports import JobRef
from chorister.errors import ServiceError
from tests.aggregator.inprocess_pair import wait_until

Ref = tuple[bytes, bytes]


@dataclass
class Told:
    """A leader whose reports are numbers."""

    waiting: deque[int] = field(default_factory=deque)
    jobs: dict[Ref, list[int]] = field(default_factory=dict)
    collections: set[Ref] = field(default_factory=set)
    verified: list[int] = field(default_factory=list)
    collected: list[Ref] = field(default_factory=list)
    stepping: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    step_hook: Callable[[], StepResult | None] = lambda: None
    refused: set[Ref] = field(default_factory=set)
    refusal: Exception | None = None
    tries: dict[Ref, list[float]] = field(default_factory=dict)
    helper: str = "well"  # of all tasks but the one called "away"
    creation_failures: list[Exception] = field(default_factory=list)
    created: int = 0

    def create_aggregation_jobs(self, limit: int) -> list[Ref]:
        made: list[Ref] = []
        if self.creation_failures:
            raise self.creation_failures.pop()
        with self.lock:
            while self.waiting and len(made) < limit:
                self.created += 1
                ref = (b"task", bytes([self.created]))
                self.jobs[ref] = [self.waiting.popleft() for _ in range(min(10, len(self.waiting)))]
                made.append(ref)
        return made

    def unfinished_jobs(self) -> list[Ref]:
        with self.lock:
            return list(self.jobs)

    def step(self, ref: Ref) -> StepResult:
        with self.lock:
            self.stepping += 1
            self.most = max(self.most, self.stepping)
        try:
            time.sleep(0.005)
            if ref[0] == b"away":
                return StepResult(done=False, reason="away", helper_away=True)
            self.tries.setdefault(ref, []).append(time.monotonic())
            if ref in self.refused:
                if self.refusal is not None:
                    raise self.refusal
                return StepResult(done=False, reason="refused")
            outcome = self.step_hook()
            if outcome is not None:
                return outcome
            with self.lock:
                self.verified += self.jobs.pop(ref, [])
            return StepResult(done=True)
        finally:
            with self.lock:
                self.stepping -= 1

    def pending_collections(self) -> list[Ref]:
        with self.lock:
            return sorted(self.collections)

    def step_collection(self, ref: Ref) -> StepResult:
        with self.lock:
            if self.jobs or self.waiting or len(self.verified) < 5:
                return StepResult(done=False, reason="too few")
            self.collections.discard(ref)
            self.collected.append(ref)
        return StepResult(done=True)

    @property
    def drivers(self) -> tuple[AggregationJobDriver, CollectionJobDriver]:
        return ToldAggregation(self), ToldCollection(self)

    def upload(self, *reports: int) -> None:
        with self.lock:
            self.waiting.extend(reports)


class ToldAggregation(AggregationJobDriver):
    def __init__(self, told: Told) -> None:
        self.told = told

    def create_jobs(self, limit: int, *, away: Collection[str] = ()) -> list[JobRef]:
        if self.told.helper in away:
            return []
        return [JobRef(*ref) for ref in self.told.create_aggregation_jobs(limit)]

    def helper_of(self, task_id: bytes) -> str:
        return "away" if task_id == b"away" else self.told.helper

    def unfinished(self, limit: int = 1000) -> list[JobRef]:
        return [JobRef(*ref) for ref in self.told.unfinished_jobs()][:limit]

    def step(self, ref: JobRef) -> StepResult:
        return self.told.step(ref)


class ToldCollection(CollectionJobDriver):
    def __init__(self, told: Told) -> None:
        self.told = told

    def pending(self) -> list[CollectionRef]:
        return [CollectionRef(*ref) for ref in self.told.pending_collections()]

    def step(self, ref: CollectionRef) -> StepResult:
        return self.told.step_collection(ref)


@pytest.fixture
def told() -> Told:
    return Told()


def test_what_an_earlier_process_left_is_finished(told: Told) -> None:
    told.jobs[b"task", b"old"] = [1, 2]
    told.upload(3)
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=60)  # it waited before
    loop.start()
    wait_until(lambda: sorted(told.verified) == [1, 2, 3], "everything")
    loop.stop()


@pytest.fixture
def rare_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens soon was woken by something, and not found by an idle look."""
    monkeypatch.setattr("chorister.aggregator.jobs.job_loop.POLL_SECONDS", 600.0)


@pytest.mark.usefixtures("rare_looks")
def test_a_result_follows_the_last_report(told: Told) -> None:
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=0.5)
    loop.start()
    told.collections.add((b"task", b"c"))
    loop.collection_created()
    for number in range(6):
        told.upload(number)
        loop.reports_stored()
    wait_until(lambda: told.collected, "the collection")
    assert told.created <= 2  # they waited for company
    loop.stop()


def test_several_jobs_are_in_flight_and_no_more_than_allowed(told: Told) -> None:
    told.upload(*range(300))
    loop = JobLoop(*told.drivers, Metrics(), in_flight=3, batch_delay=0)
    loop.start()
    wait_until(lambda: len(told.verified) == 300, "all reports", 20)
    loop.stop()
    assert sorted(told.verified) == list(range(300))
    assert 2 <= told.most <= 3


def test_when_the_helper_is_away_the_loop_waits_and_goes_on_by_itself(told: Told) -> None:
    away = threading.Event()
    away.set()
    tries = []

    def hook() -> StepResult | None:
        tries.append(time.monotonic())
        return StepResult(done=False, reason="away", helper_away=True) if away.is_set() else None

    told.step_hook = hook
    told.upload(1)
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=0)
    loop.start()
    wait_until(lambda: len(tries) >= 3, "three tries", 20)
    assert tries[1] - tries[0] > 0.6 * FIRST_PAUSE_SECONDS
    assert tries[2] - tries[1] > 1.2 * FIRST_PAUSE_SECONDS  # twice as long
    away.clear()
    wait_until(lambda: told.verified == [1], "the helper's return", 20)
    loop.stop()


def test_a_helper_that_is_away_delays_no_task_with_another_helper(told: Told) -> None:
    for number in range(60):
        told.jobs[b"away", bytes([number])] = [0]
    told.upload(*range(50))
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=0)
    loop.start()
    wait_until(lambda: len(told.verified) == 50, "the others")
    loop.stop()


@pytest.mark.parametrize("error", [ServiceError("the disk is full"), RuntimeError("a bug")])
def test_a_failing_step_is_tried_again(told: Told, error: Exception) -> None:
    failures = [error]

    def hook() -> StepResult | None:
        if failures:
            raise failures.pop()
        return None

    told.step_hook = hook
    told.upload(1)
    metrics = Metrics()
    loop = JobLoop(*told.drivers, metrics, batch_delay=0)
    loop.start()
    wait_until(lambda: told.verified == [1], "the second try", 20)
    loop.stop()
    assert b'chorister_jobs_total{kind="aggregate",outcome="failed"} 1.0' in metrics.text()


@pytest.mark.usefixtures("rare_looks")
@pytest.mark.parametrize("error", [ServiceError("the disk is full"), RuntimeError("a bug")])
def test_reports_are_not_forgotten_when_jobs_can_not_be_made(told: Told, error: Exception) -> None:
    told.creation_failures = [error]
    told.upload(1)
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=0)
    loop.start()
    wait_until(lambda: told.verified == [1], "the second try")
    loop.stop()


def test_reports_that_another_process_took_are_found(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chorister.aggregator.jobs.job_loop.POLL_SECONDS", 0.5)
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=0)
    loop.start()
    wait_until(lambda: loop.idle, "the first look", 10)
    told.upload(1)  # and nobody tells the loop
    wait_until(lambda: told.verified == [1], "the next look", 10)
    loop.stop()


def a_bad_job(told: Told, error: Exception | None) -> Ref:
    told.refusal = error
    bad = (b"other", b"bad")
    told.jobs[bad] = [-1]
    told.refused.add(bad)
    return bad


FAILURES = pytest.mark.parametrize(
    "error", [None, ServiceError("a row is broken"), RuntimeError("a bug")]
)


@FAILURES
@pytest.mark.usefixtures("rare_looks")
def test_a_job_that_fails_delays_itself_alone(
    told: Told, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses for longer than anybody waits here."""
    monkeypatch.setattr("chorister.aggregator.jobs.job_loop.FIRST_PAUSE_SECONDS", 600.0)
    bad = a_bad_job(told, error)
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=0)
    loop.start()
    wait_until(lambda: bad in told.tries, "a try")
    for number in range(5):
        told.upload(number)
        loop.reports_stored()
        wait_until(lambda: len(told.verified) > number, "a good report")  # noqa: B023
    assert len(told.tries[bad]) == 1
    loop.stop()


@FAILURES
def test_a_job_that_fails_is_tried_again_later_each_time(
    told: Told, error: Exception | None
) -> None:
    bad = a_bad_job(told, error)
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=0)
    loop.start()
    wait_until(lambda: len(told.tries.get(bad, ())) >= 3, "three tries", 20)
    tries = told.tries[bad]
    assert tries[1] - tries[0] > 0.6 * FIRST_PAUSE_SECONDS
    assert tries[2] - tries[1] > 1.2 * FIRST_PAUSE_SECONDS  # twice as long
    told.refused.clear()
    wait_until(lambda: -1 in told.verified, "another try of the job", 20)
    loop.stop()


def test_stopping_waits_for_the_step_under_way(told: Told) -> None:
    entered = threading.Event()

    def hook() -> None:
        entered.set()
        time.sleep(0.2)

    told.step_hook = hook
    told.upload(1)
    loop = JobLoop(*told.drivers, Metrics(), batch_delay=0)
    loop.start()
    assert entered.wait(10)
    loop.stop()
    assert told.verified == [1]
    assert loop.idle or not told.waiting


def test_periodic_goes_on_after_a_failure() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise ServiceError("not yet")
        if len(calls) == 2:
            raise RuntimeError("a bug")

    thread = Periodic("looking", 0.01, call)
    thread.start()
    wait_until(lambda: len(calls) >= 4, "four calls", 10)
    thread.stop()
    seen = len(calls)
    time.sleep(0.05)
    assert len(calls) == seen
