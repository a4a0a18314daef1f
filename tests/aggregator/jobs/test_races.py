"""The same thing at the same moment, with threads, on both databases."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from sqlalchemy import select

from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage.batches import lock_batch
from chorister.aggregator.storage.reports import JobRef
from chorister.aggregator.storage.schema import report_ids
from chorister.dap.draft import ReportError
from chorister.dap.messages import (
    AggregateShareReq,
    AggregationJobInitReq,
    BatchSelector,
    CollectionJobReq,
    Query,
)
from chorister.dap.task import verify_key
from tests.aggregator.conftest import MakePair
from tests.aggregator.world import Pair, collector_digest, one_bit, small_recipe

T = TypeVar("T")


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at the same moment; what each returned."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def added_ids(pair: Pair, task: KnownTask) -> set[bytes]:
    with pair.databases[1].read() as connection:
        own = report_ids.c.task_id == task.task_id
        return set(
            map(bytes, connection.execute(select(report_ids.c.report_id).where(own)).scalars())
        )


def test_of_copies_at_the_same_moment_one_is_taken(make_pair: MakePair) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe())
    (copied,) = pair.reports(task, one_bit(4, [2]))
    for _ in range(3):
        own = pair.reports(task, one_bit(4, [1] * 6))
        answers = at_once(
            [lambda mine=mine: pair.upload(task, copied, mine) for mine in own]  # type: ignore[misc]
        )
        for answer in answers:
            assert {status.error for status in answer.statuses} <= {ReportError.REPORT_REPLAYED}
    pair.work()
    (status,) = pair.leader.status([task])
    assert status.uploaded == status.verified == 19
    assert status.rejected("upload") == {"report_replayed": 17}


def test_two_workers_on_one_job_add_it_up_once(make_pair: MakePair) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe(min_cohort=3))
    for _ in range(4):
        pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 1])))
        (job,) = pair.leader.aggregation.create_jobs(5)
        steps = at_once([lambda job=job: pair.leader.aggregation.step(job)] * 3)  # type: ignore[misc]
        assert all(step.done for step in steps)
    ref = pair.collect(task)
    at_once([lambda: pair.leader.collection.step(ref)] * 3)
    collected = pair.result(task)
    assert collected is not None
    assert collected[0] == 12
    # Of the draws of three workers one was committed at each side.
    truth = np.array([4, 8, 0, 0], np.uint64)
    left = [(a + b).tolist() for a in pair.noise[0].draws for b in pair.noise[1].draws]
    assert (collected[1] - truth).tolist() in left
    assert pair.result(task) is not None


def test_many_workers_make_and_step_jobs_at_once(make_pair: MakePair) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe(min_cohort=3))
    for _ in range(10):
        pair.upload(task, *pair.reports(task, one_bit(4, [0, 1, 2, 3])))

    def worker() -> list[JobRef]:
        made = pair.leader.aggregation.create_jobs(1)
        for job in made:
            pair.leader.aggregation.step(job)
        for job in pair.leader.aggregation.unfinished():
            pair.leader.aggregation.step(job)
        return made

    at_once([worker] * 4)
    pair.work()
    (led,) = pair.leader.status([task])
    (helped,) = pair.helper.status([task])
    assert led.verified == helped.verified == 40
    assert pair.row_counts()[0]["segments"] == 0


def test_collecting_while_reports_arrive_and_jobs_run(make_pair: MakePair) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe(min_cohort=8))
    places = {os.urandom(16): place % 4 for place in range(60)}
    ids = list(places)
    reports = pair.reports(task, one_bit(4, [places[each] for each in ids]), ids=ids)
    accepted: set[bytes] = set()
    done = threading.Event()

    def devices() -> None:
        for start in range(0, 60, 2):
            answer = pair.upload(task, *reports[start : start + 2])
            refused = {status.report_id for status in answer.statuses}
            accepted.update(set(ids[start : start + 2]) - refused)
            assert {each.error for each in answer.statuses} <= {ReportError.BATCH_COLLECTED}
        done.set()

    def servers() -> None:
        while not done.is_set():
            pair.work()

    def collector() -> None:
        pair.leader.collection.create(
            task, CollectionJobReq(query=Query.of(task.interval)).encode(), collector_digest()
        )

    at_once([devices, servers, servers, collector])
    pair.work()
    collected = pair.result(task)
    assert collected is not None
    count, summed = collected
    assert added_ids(pair, task) == accepted
    assert count == len(accepted) >= 8
    truth = np.bincount([places[each] for each in accepted], minlength=4)
    possible = [(a + b).tolist() for a in pair.noise[0].draws for b in pair.noise[1].draws]
    assert (summed - truth.astype(np.uint64)).tolist() in possible


def test_a_stream_of_uploads_lets_a_collector_through(make_pair: MakePair) -> None:
    pair = make_pair()
    database = pair.databases[0]
    if database.is_sqlite:
        return  # one upload at a time
    (task,) = pair.accept(small_recipe())
    over, frozen = threading.Event(), threading.Event()

    def uploads(start: float) -> None:
        # Transactions of a few servers: there is always one that has not ended.
        over.wait(start)
        while not over.is_set():
            with database.write() as tx:
                lock_batch(tx, task.task_id, exclusive=False)
                over.wait(0.3)

    def collector() -> None:
        over.wait(0.5)
        with database.write() as tx:
            lock_batch(tx, task.task_id, exclusive=True)
            if not over.is_set():
                frozen.set()

    def watch() -> None:
        frozen.wait(8)
        over.set()

    streams = [lambda start=each: uploads(start) for each in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25)]
    at_once([*streams, collector, watch])
    assert frozen.is_set()


def test_a_leader_that_sends_one_report_in_two_jobs_at_once_counts_it_once(
    make_pair: MakePair,
) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe(min_cohort=2))
    key = verify_key(pair.verify_key_init, task.task_id)
    (shared,) = pair.reports(task, one_bit(4, [2]))
    requests = []
    for _ in range(4):
        (own,) = pair.reports(task, one_bit(4, [0]))
        job = task.binding.leader_initialize(key, pair.leader.keys.keypairs(), shared + own)
        requests.append(AggregationJobInitReq(verify_inits=job.verify_inits).encode())
    known = pair.helper.tasks.find(task.task_id)
    assert known is not None
    at_once([lambda r=r: pair.helper.create_job(known, r) for r in requests])  # type: ignore[misc]
    (status,) = pair.helper.status([known])
    assert status.verified == len(added_ids(pair, task)) == 5
    assert status.rejected("helper") == {"report_replayed": 3}


def test_one_request_twice_at_once_gets_one_answer(make_pair: MakePair) -> None:
    pair = make_pair()
    (task,) = pair.accept(small_recipe(min_cohort=2))
    key = verify_key(pair.verify_key_init, task.task_id)
    reports = b"".join(pair.reports(task, one_bit(4, [0, 3])))
    job = task.binding.leader_initialize(key, pair.leader.keys.keypairs(), reports)
    request = AggregationJobInitReq(verify_inits=job.verify_inits).encode()
    known = pair.helper.tasks.find(task.task_id)
    assert known is not None
    answers = at_once([lambda: pair.helper.create_job(known, request)] * 4)
    assert len(set(answers)) == 1
    led = job.finish(answers[0].body)
    asked = AggregateShareReq(
        collection_job_req=CollectionJobReq(query=Query.of(task.interval)),
        batch_selector=BatchSelector.of(task.interval),
        report_count=led.count,
        checksum=led.checksum,
    ).encode()
    shares = at_once([lambda: pair.helper.create_share(known, asked)] * 4)
    assert led.count == 2
    assert len(set(shares)) == 1  # one draw of noise was committed, whoever drew
