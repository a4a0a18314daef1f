"""The helper's resources: the leader's token first, and one answer for one request."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2
import pytest

from chorister.aggregator.storage.counters import task_status
from chorister.canonical import b64url_encode
from chorister.clock import SystemClock
from chorister.dap.draft import (
    AGGREGATE_SHARE,
    AGGREGATE_SHARE_REQUEST,
    AGGREGATION_JOB_CONTINUE_REQUEST,
    AGGREGATION_JOB_INIT_REQUEST,
    AGGREGATION_JOB_RESPONSE,
    PROBLEM,
    Problem,
    VerifyRespType,
)
from chorister.dap.http import parse_problem
from chorister.dap.messages import (
    AggregateShareReq,
    AggregationJobContinueReq,
    AggregationJobInitReq,
    AggregationJobResp,
    BatchSelector,
    CollectionJobReq,
    Query,
)
from chorister.dap.task import Task, task_binding, verify_key
from tests.aggregator.inprocess_pair import InProcessPair, a_pair
from tests.aggregator.operators import TOKENS

LEADER = {"Authorization": f"Bearer {TOKENS['leader']}"}
INIT = {"Content-Type": AGGREGATION_JOB_INIT_REQUEST}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessPair]:
    quiet = {"leader": {"run_jobs": False}}
    with a_pair(tmp_path_factory.mktemp("pair"), settings=quiet) as pair:
        yield pair


@pytest.fixture
def task(pair: InProcessPair, request: pytest.FixtureRequest) -> Task:
    name = re.sub(r"\W", "_", request.node.name)
    return pair.publish(pair.operators.recipe(name, SystemClock().now()))


def url(pair: InProcessPair, task: Task, rest: str) -> str:
    return f"{pair.operators.at.helper}tasks/{b64url_encode(task.task_id)}/{rest}"


def job(pair: InProcessPair, task: Task, rows: list[int]) -> tuple[bytes, bytes]:
    """A leader's request, and the checksum of its reports if all are valid."""
    binding = task_binding(task.configuration)
    led = binding.leader_initialize(
        verify_key(bytes(32), task.task_id),
        pair.leader.core.keys.keypairs(),
        b"".join(pair.seal(task, rows)),
        threads=1,
    )
    request = AggregationJobInitReq(verify_inits=led.verify_inits).encode()
    resps, _ = binding.helper_initialize(
        verify_key(bytes(32), task.task_id), pair.helper.core.keys.keypairs(), led.verify_inits
    )
    return request, led.finish(resps).checksum


def share_request(task: Task, count: int, checksum: bytes) -> bytes:
    interval = task.configuration.task_interval
    assert interval is not None
    return AggregateShareReq(
        collection_job_req=CollectionJobReq(query=Query.of(interval)),
        batch_selector=BatchSelector.of(interval),
        report_count=count,
        checksum=checksum,
    ).encode()


def problem_of(answer: httpx2.Response) -> str | None:
    kind = answer.headers["content-type"]
    return parse_problem(answer.status_code, kind, answer.content).problem


def test_a_job_is_verified_once_and_answered_again(pair: InProcessPair, task: Task) -> None:
    request, _ = job(pair, task, [0, 1, 2])
    jobs = url(pair, task, "aggregation_jobs")
    first = pair.request("POST", jobs, headers=INIT | LEADER, body=request)
    assert first.status_code == 200
    assert first.headers["content-type"] == AGGREGATION_JOB_RESPONSE
    kinds = [each.kind for each in AggregationJobResp.decode(first.content).responses()]
    assert kinds == [VerifyRespType.CONTINUE] * 3
    again = pair.request("POST", jobs, headers=INIT | LEADER, body=request)
    assert again.content == first.content
    assert again.headers["location"] == first.headers["location"]
    at = f"https://helper.example.net{first.headers['location']}"
    assert pair.request("GET", f"{at}?step=0", headers=LEADER).content == first.content
    later = pair.request("GET", f"{at}?step=1", headers=LEADER)
    assert problem_of(later) == Problem.STEP_MISMATCH
    further = pair.request(
        "POST",
        at,
        headers=LEADER | {"Content-Type": AGGREGATION_JOB_CONTINUE_REQUEST},
        body=AggregationJobContinueReq(step=1, continues=()).encode(),
    )
    assert problem_of(further) == Problem.STEP_MISMATCH
    known = pair.helper.core.tasks.find(task.task_id)
    assert known is not None
    (status,) = task_status(pair.helper.core.database, [known])
    assert status.verified == 3
    assert pair.request("DELETE", at, headers=LEADER).status_code == 200
    gone = pair.request("GET", at, headers=LEADER)
    assert (gone.status_code, problem_of(gone)) == (404, Problem.UNRECOGNIZED_AGGREGATION_JOB)
    # What protects against replays is still there: all three are refused now.
    replay = pair.request("POST", jobs, headers=INIT | LEADER, body=request)
    kinds = [each.kind for each in AggregationJobResp.decode(replay.content).responses()]
    assert kinds == [VerifyRespType.REJECT] * 3


def test_the_share_is_released_once_to_the_right_request(pair: InProcessPair, task: Task) -> None:
    request, checksum = job(pair, task, [0, 1, 2])
    pair.request("POST", url(pair, task, "aggregation_jobs"), headers=INIT | LEADER, body=request)
    shares = url(pair, task, "aggregate_shares")
    headers = LEADER | {"Content-Type": AGGREGATE_SHARE_REQUEST}
    for count, sum_ in ((2, checksum), (3, bytes(32))):
        answer = pair.request(
            "POST", shares, headers=headers, body=share_request(task, count, sum_)
        )
        assert problem_of(answer) == Problem.BATCH_MISMATCH
    right = share_request(task, 3, checksum)
    first = pair.request("POST", shares, headers=headers, body=right)
    assert (first.status_code, first.headers["content-type"]) == (200, AGGREGATE_SHARE)
    again = pair.request("POST", shares, headers=headers, body=right)
    assert again.content == first.content  # its noise was drawn once
    at = f"https://helper.example.net{first.headers['location']}"
    assert pair.request("GET", at, headers=LEADER).content == first.content
    assert pair.request("DELETE", at, headers=LEADER).status_code == 200
    assert pair.request("GET", at, headers=LEADER).status_code == 404
    overlap = pair.request("POST", shares, headers=headers, body=right)
    assert problem_of(overlap) == Problem.BATCH_OVERLAP


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("POST", "aggregation_jobs"),
        ("GET", f"aggregation_jobs/{'A' * 22}"),
        ("POST", f"aggregation_jobs/{'A' * 22}"),
        ("DELETE", f"aggregation_jobs/{'A' * 22}"),
        ("POST", "aggregate_shares"),
        ("GET", f"aggregate_shares/{'A' * 22}"),
        ("DELETE", f"aggregate_shares/{'A' * 22}"),
    ],
)
def test_nobody_but_the_leader(pair: InProcessPair, task: Task, method: str, rest: str) -> None:
    for token in ("", "Bearer ", f"Bearer {TOKENS['collector']}", f"Basic {TOKENS['leader']}"):
        headers = {"Authorization": token} if token else {}
        answer = pair.request(method, url(pair, task, rest), headers=headers, body=b"")
        assert (answer.status_code, answer.headers["content-type"]) == (401, PROBLEM)


def test_refused_requests(pair: InProcessPair, task: Task) -> None:
    unlogged = pair.operators.task(pair.operators.recipe("unlogged", SystemClock().now()))
    request, _ = job(pair, task, [0])
    jobs = url(pair, task, "aggregation_jobs")

    def post(at: str, headers: dict[str, str], body: bytes) -> httpx2.Response:
        return pair.request("POST", at, headers=headers, body=body)

    answers = [
        (post(jobs, LEADER, request), 415, None),
        (post(jobs, INIT | LEADER, b"noise"), 400, Problem.INVALID_MESSAGE),
        (post(jobs, INIT | LEADER, b""), 400, Problem.INVALID_MESSAGE),
        (
            post(url(pair, unlogged, "aggregation_jobs"), INIT | LEADER, request),
            400,
            Problem.UNRECOGNIZED_TASK,
        ),
        (
            post(jobs.replace(b64url_encode(task.task_id), "short"), INIT | LEADER, request),
            400,
            Problem.UNRECOGNIZED_TASK,
        ),
        (
            pair.request("GET", f"{jobs}/{'A' * 22}", headers=LEADER),
            404,
            Problem.UNRECOGNIZED_AGGREGATION_JOB,
        ),
        (
            pair.request("GET", f"{jobs}/x", headers=LEADER),
            404,
            Problem.UNRECOGNIZED_AGGREGATION_JOB,
        ),
        (post(jobs, INIT | LEADER, bytes((64 << 20) + 1)), 413, None),
    ]
    for answer, status, problem in answers:
        assert (answer.status_code, problem_of(answer)) == (status, problem)
    assert pair.helper.core.tasks.find(unlogged.task_id) is None


def test_the_minimum_is_the_devices_own(pair: InProcessPair, task: Task) -> None:
    request, checksum = job(pair, task, [0, 1])
    pair.request("POST", url(pair, task, "aggregation_jobs"), headers=INIT | LEADER, body=request)
    headers = LEADER | {"Content-Type": AGGREGATE_SHARE_REQUEST}
    shares = url(pair, task, "aggregate_shares")
    answer = pair.request("POST", shares, headers=headers, body=share_request(task, 2, checksum))
    assert problem_of(answer) == Problem.INVALID_BATCH_SIZE
