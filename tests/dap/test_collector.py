"""The collector against honest, slow and lying leaders."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister._native import HPKEKeypair, hpke_seal
from chorister.clock import SettableClock
from chorister.dap.collector import Collected, CollectionHandle, Collector, NotYet, RecipeStatus
from chorister.dap.draft import (
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    PROBLEM,
    Problem,
    Role,
    aggregate_share_info,
    collection_jobs_path,
)
from chorister.dap.http import problem_document
from chorister.dap.messages import AggregateShareAad, CollectionJobReq, CollectionJobResp, Query
from chorister.dap.task import (
    Interval,
    Task,
    advertised,
    task_binding,
    task_configuration,
    task_id,
)
from chorister.dap.upload_client import seal_report
from chorister.errors import (
    CollectionInvalid,
    DecodeError,
    InvalidInput,
    ProblemError,
    Unreachable,
)
from tests.keyboard import POLICY, RECIPE, recipe_at

FEW = recipe_at({"privacy/min_cohort": 4})
TASK = task_configuration(POLICY, FEW, {"user.locale": "de_DE"})
INTERVAL = Interval(FEW.window.bucket.number, 1)
LEADER = TASK.configuration.leader_aggregator_endpoint
JOBS = LEADER + collection_jobs_path(TASK.task_id)
KEYS = HPKEKeypair.generate(9)
OPEN = FEW.window.opens
ENDS = INTERVAL.start * TASK.configuration.time_precision + TASK.configuration.time_precision


def shares(count: int) -> tuple[bytes, bytes, list[int]]:
    """The aggregate shares of some reports, and what they add up to."""
    leader, helper = HPKEKeypair.generate(1), HPKEKeypair.generate(2)
    rows = [FEW.randomizer.randomize(index) for index in range(count)]
    reports = b"".join(
        seal_report(
            TASK.configuration,
            bits,
            report_id=secrets.token_bytes(16),
            leader_config=leader.config,
            helper_config=helper.config,
        )
        for bits in rows
    )
    binding, key = task_binding(TASK.configuration), secrets.token_bytes(32)
    job = binding.leader_initialize(key, [leader], reports)
    answers, helped = binding.helper_initialize(key, [helper], job.verify_inits)
    led = job.finish(answers)
    assert led.count == count
    total = np.array([list(row) for row in rows]).sum(axis=0)
    return led.share, helped.share, total.tolist()


LEADER_SHARE, HELPER_SHARE, COUNTS = shares(5)


def sealed(
    share: bytes,
    role: Role,
    *,
    task: Task = TASK,
    interval: Interval = INTERVAL,
    keys: HPKEKeypair = KEYS,
) -> bytes:
    aad = AggregateShareAad(
        task_id=task.task_id,
        task_configuration=task.configuration,
        collection_job_req=CollectionJobReq(query=Query.of(interval)),
    )
    return hpke_seal(keys.config, aggregate_share_info(role), aad.encode(), share)


HONEST = CollectionJobResp(
    report_count=5,
    interval=INTERVAL,
    leader_encrypted_agg_share=sealed(LEADER_SHARE, Role.LEADER),
    helper_encrypted_agg_share=sealed(HELPER_SHARE, Role.HELPER),
)


def ready(body: bytes, media: str = COLLECTION_JOB_RESPONSE) -> httpx2.Response:
    return httpx2.Response(200, headers={"Content-Type": media}, content=body)


def refusal(problem: Problem | None, status: int = 400) -> httpx2.Response:
    document = problem_document(ProblemError(problem, "no", status=status))
    return httpx2.Response(status, headers={"Content-Type": PROBLEM}, content=document)


class ScriptedLeader:
    """Creates one job, and answers looks at it from a list."""

    def __init__(self, *answers: httpx2.Response) -> None:
        self.answers = list(answers)
        self.asked: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        if request.method == "POST":
            return httpx2.Response(201, headers={"Location": f"{JOBS}/abc", "Retry-After": "9"})
        return self.answers.pop(0)

    def collector(self, now: int = OPEN) -> Collector:
        transport = httpx2.MockTransport(self)
        return Collector(LEADER, "token", KEYS, transport=transport, clock=SettableClock(now))


def poll(*answers: httpx2.Response) -> Collected | NotYet:
    collector = ScriptedLeader(*answers).collector()
    return collector.poll(collector.create(TASK))


def test_a_result() -> None:
    leader = ScriptedLeader(ready(HONEST.encode()))
    collector = leader.collector()
    collected = collector.poll(collector.create(TASK))
    assert isinstance(collected, Collected)
    assert collected.counts.tolist() == COUNTS
    assert collected.counts.dtype == np.uint64
    assert (collected.report_count, collected.interval) == (5, INTERVAL)
    assert (collected.leader_share, collected.helper_share) == (LEADER_SHARE, HELPER_SHARE)


def test_what_is_asked() -> None:
    leader = ScriptedLeader(ready(HONEST.encode()))
    collector = leader.collector()
    collector.poll(collector.create(TASK))
    post, get = leader.asked
    assert (post.method, str(post.url)) == ("POST", JOBS)
    assert post.headers["Content-Type"] == COLLECTION_JOB_REQUEST
    asked = CollectionJobReq.decode(post.content)
    assert asked == CollectionJobReq(query=Query.of(INTERVAL))
    assert (get.method, str(get.url)) == ("GET", f"{JOBS}/abc")
    for request in leader.asked:
        assert request.headers["Authorization"] == "Bearer token"
        assert advertised(request.headers["DAP-Taskprov"]) == TASK.configuration


@pytest.mark.parametrize(
    ("retry_after", "pause"), [("30", 30), ("0", 1), ("999999", 300), ("soon", 1)]
)
def test_nothing_yet(retry_after: str, pause: int) -> None:
    outcome = poll(httpx2.Response(202, headers={"Retry-After": retry_after}))
    assert outcome == NotYet(retry_after=pause, reason="the leader has no result yet")


def test_too_few_reports_are_no_error() -> None:
    outcome = poll(refusal(Problem.INVALID_BATCH_SIZE))
    assert isinstance(outcome, NotYet)
    assert "too few reports" in outcome.reason


def test_a_collector_that_crashed_resumes() -> None:
    """By the handle's JSON, or by asking again: the same job, the same sealed result."""
    leader = ScriptedLeader(ready(HONEST.encode()), ready(HONEST.encode()), ready(HONEST.encode()))
    collector = leader.collector()
    handle = collector.create(TASK)
    kept = handle.to_json()
    assert collector.create(TASK) == handle
    assert CollectionHandle.from_json(kept) == handle
    outcomes = [collector.poll(each) for each in (handle, CollectionHandle.from_json(kept))]
    for outcome in outcomes:
        assert isinstance(outcome, Collected)
        assert outcome.counts.tolist() == COUNTS


def test_noise_of_the_aggregators_is_allowed_for() -> None:
    vdaf = TASK.configuration.vdaf.native()
    noise = np.full(len(COUNTS), 7, dtype=np.uint64)
    noisy = dataclasses.replace(
        HONEST,
        leader_encrypted_agg_share=sealed(vdaf.add_counts(LEADER_SHARE, noise), Role.LEADER),
    )
    leader = ScriptedLeader(ready(noisy.encode()), ready(noisy.encode()))
    collector = leader.collector()
    handle = collector.create(TASK)
    outcome = collector.poll(handle, noise_trials=7)
    assert isinstance(outcome, Collected)
    assert outcome.counts.tolist() == [count + 7 for count in COUNTS]
    with pytest.raises(CollectionInvalid):  # without noise no bin can have so many
        collector.poll(handle)


# --- lies ---

OTHER = task_configuration(POLICY, FEW, {"user.locale": "en_US"})
STRANGER = HPKEKeypair.generate(9)
LIES: dict[str, CollectionJobResp] = {
    "too few reports": dataclasses.replace(HONEST, report_count=3),
    "before the task": dataclasses.replace(HONEST, interval=Interval(INTERVAL.start - 1, 2)),
    "after the task": dataclasses.replace(HONEST, interval=Interval(INTERVAL.start + 1, 1)),
    "longer than the task": dataclasses.replace(HONEST, interval=Interval(INTERVAL.start, 2)),
    "endless": dataclasses.replace(HONEST, interval=Interval(INTERVAL.start, 2**64 - 1)),
    "no time at all": dataclasses.replace(HONEST, interval=Interval(INTERVAL.start, 0)),
    "shares swapped": dataclasses.replace(
        HONEST,
        leader_encrypted_agg_share=HONEST.helper_encrypted_agg_share,
        helper_encrypted_agg_share=HONEST.leader_encrypted_agg_share,
    ),
    "one share twice": dataclasses.replace(
        HONEST, helper_encrypted_agg_share=HONEST.leader_encrypted_agg_share
    ),
    "another task's share": dataclasses.replace(
        HONEST, helper_encrypted_agg_share=sealed(HELPER_SHARE, Role.HELPER, task=OTHER)
    ),
    "another query's share": dataclasses.replace(
        HONEST,
        helper_encrypted_agg_share=sealed(
            HELPER_SHARE, Role.HELPER, interval=Interval(INTERVAL.start, 2)
        ),
    ),
    "another collector's share": dataclasses.replace(
        HONEST, helper_encrypted_agg_share=sealed(HELPER_SHARE, Role.HELPER, keys=STRANGER)
    ),
    "a share of another batch": dataclasses.replace(
        HONEST, helper_encrypted_agg_share=sealed(shares(5)[1], Role.HELPER)
    ),
    "a share too short": dataclasses.replace(
        HONEST, helper_encrypted_agg_share=sealed(HELPER_SHARE[:-16], Role.HELPER)
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_no_result(lie: str) -> None:
    with pytest.raises(CollectionInvalid, match="did not answer with the result"):
        poll(ready(LIES[lie].encode()))


@given(at=st.integers(0, len(HONEST.encode()) - 1), bit=st.integers(0, 7))
def test_no_altered_bit_goes_unnoticed(at: int, bit: int) -> None:
    body = bytearray(HONEST.encode())
    body[at] ^= 1 << bit
    if at < 8:
        return  # the count alone is the leader's word; `min_batch_size` and the bound still hold
    with pytest.raises(CollectionInvalid):
        poll(ready(bytes(body)))


@given(st.binary(min_size=1, max_size=200))
def test_any_answer_is_refused(body: bytes) -> None:
    with pytest.raises(CollectionInvalid):
        poll(ready(body))


@pytest.mark.parametrize("media", ["", "text/html", COLLECTION_JOB_REQUEST])
def test_an_answer_of_another_kind(media: str) -> None:
    with pytest.raises(Unreachable, match="answers with"):
        poll(ready(HONEST.encode(), media))


def test_a_refusal() -> None:
    with pytest.raises(ProblemError) as caught:
        poll(refusal(Problem.BATCH_OVERLAP))
    assert caught.value.problem == Problem.BATCH_OVERLAP


# --- taking part ---


def test_a_task_that_ended_is_left() -> None:
    leader = ScriptedLeader()
    leader.collector(ENDS - 1).create(TASK)
    with pytest.raises(InvalidInput, match="ended"):
        leader.collector(ENDS).create(TASK)
    assert len(leader.asked) == 1


def test_a_credential_is_for_one_leader() -> None:
    elsewhere = recipe_at({"aggregators/leader": "https://other.example.org/dap/"})
    leader = ScriptedLeader()
    with pytest.raises(InvalidInput, match="credential"):
        leader.collector().create(task_configuration(POLICY, elsewhere, {"user.locale": "de_DE"}))
    assert not leader.asked


def test_the_id_is_the_configuration_s() -> None:
    with pytest.raises(InvalidInput, match="id"):
        ScriptedLeader().collector().create(TASK._replace(task_id=bytes(32)))


CHANGES: list[Callable[[], Task]] = [
    lambda: _task(vdaf_type=1, vdaf_configuration=b""),
    lambda: _task(task_interval=None),
]


def _task(**changes: object) -> Task:
    configuration = dataclasses.replace(TASK.configuration, **changes)  # type: ignore[arg-type]
    return Task(TASK.group, configuration, task_id(configuration))


@pytest.mark.parametrize("task", CHANGES)
def test_tasks_that_chorister_does_not_run(task: Callable[[], Task]) -> None:
    leader = ScriptedLeader()
    with pytest.raises((InvalidInput, DecodeError)):
        leader.collector().create(task())
    assert not leader.asked


# --- the rest ---


@pytest.mark.parametrize("status", [200, 204, 404, 410])
def test_deleting(status: int) -> None:
    leader = ScriptedLeader(httpx2.Response(status))
    collector = leader.collector()
    collector.delete(collector.create(TASK))
    assert (leader.asked[1].method, str(leader.asked[1].url)) == ("DELETE", f"{JOBS}/abc")


def test_deleting_may_be_refused() -> None:
    collector = ScriptedLeader(refusal(None, 403)).collector()
    with pytest.raises(ProblemError, match="403"):
        collector.delete(collector.create(TASK))


def test_status() -> None:
    leader = ScriptedLeader(
        httpx2.Response(200, json={"tasks": 2, "state": "ready", "reports": 40})
    )
    status = leader.collector().status(RECIPE.digest)
    assert (status.state, status.reports) == ("ready", 40)
    assert str(leader.asked[0].url) == f"{LEADER}chorister/recipes/{RECIPE.digest.hex()}"


HANDLE = ScriptedLeader().collector().create(TASK).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"job": "../x"},
        {"job": ""},
        {"job": "a#b"},
        {"request": "AAAA"},
        {"request": "="},
        {"task_configuration": "AAAA"},
        {"more": "1"},
    ],
)
def test_a_handle_that_is_none(change: dict[str, object]) -> None:
    tree = json.loads(HANDLE) | change
    data = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(DecodeError):
        CollectionHandle.from_json(data)


@given(st.binary())
def test_any_handle(data: bytes) -> None:
    with pytest.raises(DecodeError):
        CollectionHandle.from_json(data)


def test_a_handle_holds_no_secret() -> None:
    assert b"token" not in HANDLE
    assert KEYS.private_key() not in HANDLE


TREE: dict[str, object] = {
    "tasks": 3,
    "state": "collecting",
    "filled": 0.4,
    "waiting_for": "reports",
    "rejected": {"leader": {"task_expired": 2}, "helper": {"vdaf_verify_error": 1}},
    "closes": 100,
    "ends": 200,
}


def test_what_a_leader_says() -> None:
    status = RecipeStatus.parse(json.dumps(TREE).encode())
    assert (status.tasks, status.state, status.filled) == (3, "collecting", 0.4)
    assert status.rejected.helper == {"vdaf_verify_error": 1}
    assert status.reports is None


def test_a_later_leader_may_say_more() -> None:
    status = RecipeStatus.parse(json.dumps(TREE | {"weather": "fine"}).encode())
    assert status == RecipeStatus.parse(json.dumps(TREE).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": -1},
        {"tasks": "3"},
        {"state": "sulking"},
        {"filled": 1.5},
        {"waiting_for": "\x1b[31m"},
        {"rejected": {"leader": {"a": -1}}},
        {"rejected": []},
    ],
)
def test_what_can_t_be_read(change: dict[str, object]) -> None:
    with pytest.raises(Unreachable, match="is not readable"):
        RecipeStatus.parse(json.dumps(TREE | change).encode())


@given(st.one_of(st.binary(), st.text().map(lambda text: json.dumps({"state": text}).encode())))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(Unreachable):
        RecipeStatus.parse(data)
