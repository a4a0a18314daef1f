"""A pair for tests of one side, or of clients, that lies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from chorister._native import LeaderJob
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage.batches import StoredResponse
from chorister.dap.messages import (
    AggregateShareReq,
    AggregationJobInitReq,
    AggregationJobResp,
    BatchSelector,
    CollectionJobReq,
    Query,
)
from chorister.dap.task import Interval, verify_key
from chorister.errors import ProblemError
from tests.aggregator.faults import fast_folder
from tests.aggregator.world import (
    Pair,
    small_recipe,
)


@pytest.fixture
def pair() -> Iterator[Pair]:
    folder = fast_folder()
    made = Pair.in_folder(folder)
    yield made
    made.stop()
    shutil.rmtree(folder)


@pytest.fixture
def task(pair: Pair) -> KnownTask:
    (found,) = pair.accept(small_recipe(min_cohort=3, crowd="honest"))
    return found


def begun(pair: Pair, task: KnownTask, reports: bytes) -> LeaderJob:
    """A job as this leader, or any that holds its keys, begins it."""
    key = verify_key(pair.verify_key_init, task.task_id)
    return task.binding.leader_initialize(key, pair.leader.keys.keypairs(), reports)


def sent(pair: Pair, task: KnownTask, verify_inits: bytes) -> StoredResponse:
    return pair.helper.create_job(task, AggregationJobInitReq(verify_inits=verify_inits).encode())


def codes(answer: bytes) -> list[int]:
    return [each.error for each in AggregationJobResp(answer).responses()]


def share_request(
    task: KnownTask, count: int, checksum: bytes, interval: Interval | None = None
) -> bytes:
    return AggregateShareReq(
        collection_job_req=CollectionJobReq(query=Query.of(interval or task.interval)),
        batch_selector=BatchSelector.of(interval or task.interval),
        report_count=count,
        checksum=checksum,
    ).encode()


def refusal(pair: Pair, task: KnownTask, request: bytes) -> str | None:
    with pytest.raises(ProblemError) as caught:
        pair.helper.create_share(task, request)
    return caught.value.problem
