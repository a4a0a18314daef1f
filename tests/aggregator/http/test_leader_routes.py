"""The leader's resources: who may, what is answered, and what no request can do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from chorister._native import HPKEKeypair
from chorister.canonical import b64url_encode, sha256
from chorister.clock import SystemClock
from chorister.dap.draft import (
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    HPKE_CONFIG_LIST,
    PROBLEM,
    TASKPROV_HEADER,
    UPLOAD_ERRORS,
    UPLOAD_REQUEST,
    Problem,
    ReportError,
)
from chorister.dap.http import parse_problem
from chorister.dap.messages import CollectionJobReq, HpkeConfigList, Query
from chorister.dap.task import Task, advertise
from chorister.dap.upload_messages import UploadErrors
from chorister.transparency.note import key_name
from tests.aggregator.inprocess_pair import InProcessPair, a_pair, wait_until
from tests.aggregator.operators import TOKENS

QUIET = {"run_jobs": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessPair]:
    with a_pair(tmp_path_factory.mktemp("pair"), settings={"leader": QUIET}) as pair:
        yield pair


@pytest.fixture(scope="module")
def task(pair: InProcessPair) -> Task:
    return pair.publish(pair.operators.recipe("ages", SystemClock().now()))


@pytest.fixture(scope="module")
def other(pair: InProcessPair) -> Task:
    """A task that nobody logged."""
    return pair.operators.task(pair.operators.recipe("unlogged", SystemClock().now()))


def url(pair: InProcessPair, task: Task, rest: str) -> str:
    return f"{pair.operators.at.leader}tasks/{b64url_encode(task.task_id)}/{rest}"


def bearer(whose: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[whose]}"}


def query(task: Task) -> bytes:
    interval = task.configuration.task_interval
    assert interval is not None
    return CollectionJobReq(query=Query.of(interval)).encode()


def test_hpke_config_is_what_the_log_says_and_may_be_cached(
    pair: InProcessPair, task: Task
) -> None:
    assert task is not None
    answer = pair.request("GET", f"{pair.operators.at.leader}hpke_config")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == HPKE_CONFIG_LIST
    assert answer.headers["cache-control"] == "public, max-age=86400"
    configs = HpkeConfigList.decode(answer.content).configs
    assert pair.leader.cosigning is not None
    head = pair.leader.cosigning._head.state.hpke_entries(key_name(pair.operators.at.leader))
    assert configs == (head[-1].config,)


def test_an_upload_twice_is_stored_once(pair: InProcessPair, task: Task) -> None:
    (report,) = pair.seal(task, [1])
    first, second = pair.upload(task, report), pair.upload(task, report)
    assert (first.status_code, first.content) == (200, b"")
    assert second.status_code == 200
    assert second.headers["content-type"] == UPLOAD_ERRORS
    assert UploadErrors.decode(second.content).statuses == (
        (report[:16], ReportError.REPORT_REPLAYED),
    )


def test_of_many_reports_the_bad_ones_are_named_in_order(pair: InProcessPair, task: Task) -> None:
    good, bad, late = pair.seal(task, [1, 2, 3])
    bad = bad[:16] + bytes(8) + bad[24:]  # another timestamp
    late = late[:16] + b"\xff" * 8 + late[24:]
    answer = pair.upload(task, good + bad + late)
    assert UploadErrors.decode(answer.content).statuses == (
        (bad[:16], ReportError.REPORT_DROPPED),
        (late[:16], ReportError.REPORT_DROPPED),
    )
    assert UploadErrors.decode(pair.upload(task, good).content).statuses[0].error == 2


def test_the_task_of_an_upload(pair: InProcessPair, task: Task, other: Task) -> None:
    (report,) = pair.seal(task, [1])
    plain = {"Content-Type": UPLOAD_REQUEST}
    foreign = advertise(other.configuration.encode())
    cases = [
        (task, plain, None),  # known without being advertised
        (task, {**plain, "DAP-Taskprov": "nonsense"}, None),  # ignored
        (task, {**plain, "DAP-Taskprov": "42"}, None),
        (task, plain | foreign, Problem.UNRECOGNIZED_TASK),
        (other, plain, Problem.UNRECOGNIZED_TASK),
        (other, plain | foreign, Problem.INVALID_TASK),
    ]
    for which, headers, problem in cases:
        answer = pair.request("POST", url(pair, which, "reports"), headers=headers, body=report)
        if problem is None:
            assert answer.status_code == 200
        else:
            refusal = parse_problem(
                answer.status_code, answer.headers["content-type"], answer.content
            )
            assert (refusal.problem, refusal.task_id) == (problem, which.task_id)
    # An invented task leaves nothing behind.
    assert pair.leader.core.tasks.find(other.task_id) is None


@pytest.mark.parametrize(
    ("headers", "body", "status", "problem"),
    [
        ({"Content-Type": "text/plain"}, b"", 415, None),
        ({}, b"", 415, None),
        ({"Content-Type": UPLOAD_REQUEST}, b"noise", 400, Problem.INVALID_MESSAGE),
        ({"Content-Type": UPLOAD_REQUEST}, bytes(17 << 20), 413, None),
    ],
)
def test_refused_uploads(
    pair: InProcessPair,
    task: Task,
    headers: dict[str, str],
    body: bytes,
    status: int,
    problem: Problem | None,
) -> None:
    answer = pair.request("POST", url(pair, task, "reports"), headers=headers, body=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == PROBLEM
    refusal = parse_problem(status, PROBLEM, answer.content)
    assert refusal.problem == problem


def test_media_types_are_compared_as_http_does(pair: InProcessPair, task: Task) -> None:
    (report,) = pair.seal(task, [1])
    kind = 'Application/PPM-DAP; Message="upload-req"; version=18'
    answer = pair.request(
        "POST", url(pair, task, "reports"), headers={"Content-Type": kind}, body=report
    )
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "rest", "status"),
    [
        ("GET", "reports", 405),
        ("PUT", "collection_jobs", 405),
        ("GET", "collection_jobs", 405),
        ("POST", "aggregation_jobs", 404),  # the helper's
        ("GET", "nothing", 404),
    ],
)
def test_what_does_not_exist(
    pair: InProcessPair, task: Task, method: str, rest: str, status: int
) -> None:
    answer = pair.request(method, url(pair, task, rest))
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
    assert json.loads(answer.content)["status"] == status


# --- the collector ------------------------------------------------------------------------------


def test_only_the_recipes_collector_may_collect(pair: InProcessPair, task: Task) -> None:
    kind = {"Content-Type": COLLECTION_JOB_REQUEST}
    jobs = url(pair, task, "collection_jobs")
    for headers, status in (
        (kind, 401),
        (kind | bearer("stranger"), 401),
        (kind | bearer("leader"), 401),
    ):
        answer = pair.request("POST", jobs, headers=headers, body=query(task))
        assert (answer.status_code, answer.headers["www-authenticate"]) == (status, "Bearer")
    answer = pair.request("POST", jobs, headers=kind | bearer("collector"), body=query(task))
    assert (answer.status_code, answer.content) == (202, b"")
    assert answer.headers["retry-after"] == "1"
    job = f"https://leader.example.org{answer.headers['location']}"
    assert pair.request("GET", job).status_code == 401
    assert pair.request("DELETE", job, headers=bearer("stranger")).status_code == 401
    assert pair.request("GET", job, headers=bearer("collector")).status_code == 202
    again = pair.request("POST", jobs, headers=kind | bearer("collector"), body=query(task))
    assert again.headers["location"] == answer.headers["location"]
    assert pair.request("DELETE", job, headers=bearer("collector")).status_code == 200
    assert pair.request("GET", job, headers=bearer("collector")).status_code == 404


def test_another_analyst_with_a_token_gets_nothing(tmp_path: Path) -> None:
    """Another collector is configured, and the recipe is not theirs."""
    stranger = {
        "name": "stranger",
        "hpke_config": b64url_encode(HPKEKeypair.generate(9).config),
        "token_digests": [sha256(TOKENS["stranger"].encode()).hex()],
    }
    settings = {"leader": QUIET | {"collectors": [stranger]}}
    with a_pair(tmp_path, settings=settings) as pair:
        task = pair.publish(pair.operators.recipe("ages", SystemClock().now()))
        headers = {"Content-Type": COLLECTION_JOB_REQUEST} | bearer("stranger")
        answer = pair.request(
            "POST", url(pair, task, "collection_jobs"), headers=headers, body=query(task)
        )
        assert answer.status_code == 403
        recipe = task.configuration.task_info[1:33].hex()
        progress = f"{pair.operators.at.leader}chorister/recipes/{recipe}"
        assert pair.request("GET", progress, headers=bearer("stranger")).status_code == 404


def test_progress_is_in_tenths_and_for_the_collector(tmp_path: Path) -> None:
    with a_pair(tmp_path) as pair:
        recipe = pair.operators.recipe("ages", SystemClock().now(), {"privacy/min_cohort": 10})
        task = pair.publish(recipe)
        progress = f"{pair.operators.at.leader}chorister/recipes/{recipe.digest.hex()}"
        assert pair.request("GET", progress).status_code == 401
        unknown = f"{pair.operators.at.leader}chorister/recipes/{'0' * 64}"
        assert pair.request("GET", unknown, headers=bearer("collector")).status_code == 404
        assert pair.request("GET", f"{progress}0", headers=bearer("collector")).status_code == 404
        for report in pair.seal(task, [1, 1, 1]):
            pair.upload(task, report)
        collector = pair.collector()
        wait_until(lambda: collector.status(recipe.digest).filled == 0.3, "three tenths")
        status = collector.status(recipe.digest)
        assert (status.state, status.reports) == ("collecting", None)
        for report in pair.seal(task, [1] * 9):
            pair.upload(task, report)
        wait_until(lambda: collector.status(recipe.digest).reports == 12, "a full cohort")
        handle = collector.create(task)
        found = wait_until(lambda: pair.result(collector, handle, noise_trials=9), "the result")
        assert found.report_count == 12
        job = pair.request("GET", handle.url, headers=bearer("collector"))
        assert job.headers["content-type"] == COLLECTION_JOB_RESPONSE
        # The same sealed result, until it is deleted.
        assert job.content == pair.request("GET", handle.url, headers=bearer("collector")).content


def test_each_window_of_a_series_has_its_own_progress_and_result(tmp_path: Path) -> None:
    """Six hours each, without a gap, the first one closed: both can still be collected."""
    now, length = SystemClock().now(), 6 * 3600
    limits = {"windows": 3, "longest": "2d", "answers": 3, "cells": 3}
    with a_pair(tmp_path, policy={"series": limits}) as pair:
        opens = now - length - 60
        window = {"opens": opens, "closes": opens + length, "ends": opens + 9 * length}
        series = {"windows": 3, "every": length, "answers": 1}
        recipe = pair.operators.recipe("ages", now, {"window": window, "series": series})
        pair.publish(recipe)
        progress = f"{pair.operators.at.leader}chorister/recipes/{recipe.digest.hex()}"
        first, second, third = (pair.operators.task(recipe, number) for number in range(3))
        (late,) = pair.seal(first, [1])
        assert pair.upload(first, late).content != b""
        for report in pair.seal(second, [1] * 6):
            assert pair.upload(second, report).content == b""
        # A report of one window is none of another's: the task is bound to it.
        (other,) = pair.seal(second, [1])
        assert pair.upload(third, other).content != b""
        collector = pair.collector()
        times = [recipe.window_at(number).opens for number in range(3)]
        wait_until(lambda: collector.status(recipe.digest, times[1]).reports == 6, "six reports")
        assert collector.status(recipe.digest).reports == 6  # the newest that has opened
        assert collector.status(recipe.digest, times[0]).finished
        assert collector.status(recipe.digest, times[2]).filled == 0
        closes = [collector.status(recipe.digest, time).closes for time in times]
        assert closes == [time + length for time in times]
        for wrong in (times[0] + 1, "x", "-1", "9" * 40):
            answer = pair.request("GET", f"{progress}?opens={wrong}", headers=bearer("collector"))
            assert answer.status_code in (400, 404)
        handle = collector.create(second)
        found = wait_until(lambda: pair.result(collector, handle, noise_trials=9), "the result")
        assert found.report_count == 6
        assert collector.status(recipe.digest, times[1]).state == "collected"
        assert collector.status(recipe.digest, times[2]).state == "collecting"


# --- credentials, health ------------------------------------------------------------------------


def test_uploads_may_need_a_credential(tmp_path: Path) -> None:
    digests = [sha256(b"app-credential").hex()]
    settings = {"leader": {"upload_credential_digests": digests, **QUIET}}
    with a_pair(tmp_path, settings=settings) as pair:
        task = pair.publish(pair.operators.recipe("ages", SystemClock().now()))
        (report,) = pair.seal(task, [1])
        assert pair.upload(task, report).status_code == 403
        wrong = {"Chorister-Upload-Credential": "guess"}
        assert pair.upload(task, report, **wrong).status_code == 403
        right = {"Chorister-Upload-Credential": "app-credential"}
        assert pair.upload(task, report, **right).status_code == 200


def accept_good(credential: str) -> bool:
    """The host app's hook."""
    if credential == "explode":
        raise RuntimeError("the app's fault")
    return credential == "good"


def test_uploads_may_be_checked_by_the_host_app(tmp_path: Path) -> None:
    hook = "tests.aggregator.http.test_leader_routes:accept_good"
    with a_pair(tmp_path, settings={"leader": {"upload_credential": hook, **QUIET}}) as pair:
        task = pair.publish(pair.operators.recipe("ages", SystemClock().now()))
        (report,) = pair.seal(task, [1])
        for credential, status in (("bad", 403), ("explode", 500), ("good", 200)):
            header = {"Chorister-Upload-Credential": credential}
            assert pair.upload(task, report, **header).status_code == status


def test_healthz(pair: InProcessPair) -> None:
    for role in ("leader", "helper"):
        service = getattr(pair, role)
        answer = pair.request("GET", f"{service.config.url.removesuffix('dap/')}healthz")
        assert answer.status_code == 200
        assert json.loads(answer.content) == {"ok": True, "role": role}


def test_bodies_that_are_still_arriving_have_bounded_room(pair: InProcessPair, task: Task) -> None:
    """In parts, as over a socket: too long, too much at once, and whoever goes away."""
    app, routes = pair.leader.app, pair.leader.uploads
    assert routes is not None
    path = urlsplit(url(pair, task, "reports")).path
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": "",
        "headers": [(b"content-type", UPLOAD_REQUEST.encode())],
    }

    async def answer(*parts: bytes, gone: bool = False) -> list[Any]:
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages.append({"type": "http.disconnect"} if gone else {"type": "http.request"})
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return sent

    (report,) = pair.seal(task, [1])
    halves = report[:50], report[50:]
    assert asyncio.run(answer(*halves, gone=True)) == []
    too_long = [bytes(1 << 20)] * 17
    assert asyncio.run(answer(*too_long))[0]["status"] == 413
    routes.held_bytes, before = 1000, routes.held_bytes
    try:
        assert asyncio.run(answer(b"x", bytes(2000)))[0]["status"] == 503
        # What waits for its look in a thread is in memory, too.
        routes.held, routes.held_bytes = 1000, 1500
        assert asyncio.run(answer(bytes(600), bytes(10)))[0]["status"] == 503
        routes.held = 0
        routes.upload_bytes, longest = 2000, routes.upload_bytes
        assert asyncio.run(answer(bytes(1000), bytes(1001)))[0]["status"] == 413
        routes.upload_bytes = longest
    finally:
        routes.held_bytes = before
    assert routes.held == 0


def test_a_large_body_counts_until_it_is_queued(pair: InProcessPair, task: Task) -> None:
    routes = pair.leader.uploads
    assert routes is not None
    held: list[int] = []
    check = routes.writer.check

    def looking(*arguments: Any) -> Any:
        held.append(routes.held)
        return check(*arguments)

    (report,) = pair.seal(task, [1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes.writer, "check", looking)
        many = report * (300_000 // len(report))
        pair.upload(task, many)
        pair.upload(task, report)
    assert held == [len(many), 0]
    assert routes.held == 0


def test_only_the_devices_spelling_of_a_task_is_remembered(pair: InProcessPair, task: Task) -> None:
    """Whatever else may stand in the field would fill the memory, as varied as anybody likes."""
    assert pair.leader.uploads is not None
    found = pair.leader.uploads.lookup._cache
    (report,) = pair.seal(task, [1])
    (canonical,) = advertise(task.configuration.encode()).values()
    assert pair.upload(task, report).status_code == 200
    before = len(found)
    for value in ("junk", f"{canonical};a=1", f"{canonical};a=2", "z" * 60_000, ":" * 20_000):
        answer = pair.upload(task, report, **{TASKPROV_HEADER: value})
        assert answer.status_code == 200  # it is ignored, or says the same
    assert len(found) == before


def test_a_slash_too_many_leads_nowhere(pair: InProcessPair) -> None:
    for service in (pair.leader, pair.helper):
        answer = pair.request(
            "GET", f"{service.config.url}hpke_config/", headers={"Host": "evil.example"}
        )
        assert answer.status_code == 404
        assert "location" not in answer.headers


@pytest.mark.parametrize(
    ("method", "rest", "allowed"),
    [
        ("GET", "reports", {"POST"}),
        ("PUT", "reports", {"POST"}),
        ("DELETE", "collection_jobs", {"POST"}),
        ("PUT", "collection_jobs/AAAAAAAAAAAAAAAAAAAAAA", {"GET", "HEAD", "DELETE"}),
    ],
)
def test_wrong_methods(
    pair: InProcessPair, task: Task, method: str, rest: str, allowed: set[str]
) -> None:
    answer = pair.request(method, url(pair, task, rest))
    assert answer.status_code == 405
    assert answer.headers["content-type"] == PROBLEM
    assert {each.strip() for each in answer.headers["allow"].split(",")} == allowed
