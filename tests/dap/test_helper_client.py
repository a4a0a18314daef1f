"""The leader's client against a helper of any manners."""

from __future__ import annotations

import httpx2
import pytest

from chorister.dap.draft import (
    AGGREGATE_SHARE,
    AGGREGATE_SHARE_REQUEST,
    AGGREGATION_JOB_INIT_REQUEST,
    AGGREGATION_JOB_RESPONSE,
    PROBLEM,
    Problem,
    aggregate_shares_path,
    aggregation_jobs_path,
)
from chorister.dap.helper_client import HelperClient
from chorister.dap.http import HTTPClient, problem_document
from chorister.dap.task import advertised, task_configuration
from chorister.errors import ProblemError, Unreachable
from tests.keyboard import POLICY, RECIPE

TASK = task_configuration(POLICY, RECIPE, {"user.locale": "de_DE"})
HELPER = TASK.configuration.helper_aggregator_endpoint
CREDENTIAL = "token"
JOBS = HELPER + aggregation_jobs_path(TASK.task_id)
SHARES = HELPER + aggregate_shares_path(TASK.task_id)


class ScriptedHelper:
    """Answers from a list, and remembers what it was asked."""

    def __init__(self, *answers: httpx2.Response) -> None:
        self.answers = list(answers)
        self.asked: list[httpx2.Request] = []
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        return self.answers.pop(0)

    def client(self, *, max_wait: float = 300) -> HelperClient:
        def sleep(seconds: float) -> None:
            self.now += seconds
            self.pauses.append(seconds)

        http = HTTPClient(token=CREDENTIAL, transport=httpx2.MockTransport(self))
        return HelperClient(
            lambda _: http,
            max_wait=max_wait,
            sleep=sleep,
            monotonic=lambda: self.now,
        )


def ready(body: bytes = b"answer", media: str = AGGREGATION_JOB_RESPONSE) -> httpx2.Response:
    return httpx2.Response(200, headers={"Content-Type": media, "Location": "x"}, content=body)


def later(location: str | None = None, retry_after: str | None = "2") -> httpx2.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    if location is not None:
        headers["Location"] = location
    return httpx2.Response(200, headers=headers)


def refusal(problem: Problem | None, status: int = 400) -> httpx2.Response:
    document = problem_document(ProblemError(problem, "no", status=status))
    return httpx2.Response(status, headers={"Content-Type": PROBLEM}, content=document)


JOB = f"/tasks/{JOBS.split('/')[-2]}/aggregation_jobs/lc7aUeGpdSNosNlh-UZhKA"
SHARE = f"{SHARES}/abc"


def test_a_job_that_is_answered_at_once() -> None:
    helper = ScriptedHelper(ready())
    assert helper.client().create_aggregation_job(TASK, b"request") == b"answer"
    (request,) = helper.asked
    assert (request.method, str(request.url), request.content) == ("POST", JOBS, b"request")
    assert request.headers["Content-Type"] == AGGREGATION_JOB_INIT_REQUEST
    assert request.headers["Authorization"] == "Bearer token"
    assert advertised(request.headers["DAP-Taskprov"]) == TASK.configuration


def test_a_job_that_is_answered_later() -> None:
    """The draft's asynchronous example: its location with the step is asked until ready."""
    helper = ScriptedHelper(later(f"{JOB}?step=0"), later(f"{JOB}?step=0", "5"), later(), ready())
    assert helper.client().create_aggregation_job(TASK, b"request") == b"answer"
    assert [request.method for request in helper.asked] == ["POST", "GET", "GET", "GET"]
    for request in helper.asked[1:]:
        assert str(request.url) == f"{JOBS}/lc7aUeGpdSNosNlh-UZhKA?step=0"
        assert advertised(request.headers["DAP-Taskprov"]) == TASK.configuration
        assert request.headers["Authorization"] == "Bearer token"
        assert not request.content
    assert helper.pauses == [2, 5, 2]


def test_max_wait_ends() -> None:
    helper = ScriptedHelper(*(later(JOB, "30") for _ in range(10)))
    with pytest.raises(Unreachable, match="not ready after 100 s"):
        helper.client(max_wait=100).create_aggregation_job(TASK, b"request")
    assert helper.pauses == [30, 30, 30]


@pytest.mark.parametrize(
    ("retry_after", "pause"), [(None, 1), ("0", 1), ("nonsense", 1), ("10", 10), ("86400", 30)]
)
def test_pauses_are_neither_none_nor_endless(retry_after: str | None, pause: int) -> None:
    helper = ScriptedHelper(later(JOB, retry_after), ready())
    helper.client().create_aggregation_job(TASK, b"request")
    assert helper.pauses == [pause]


@pytest.mark.parametrize("location", [None, "https://evil.example.com/", JOB.replace("jobs", "x")])
def test_a_job_without_its_location(location: str | None) -> None:
    with pytest.raises(Unreachable, match="location"):
        ScriptedHelper(later(location)).client().create_aggregation_job(TASK, b"request")


@pytest.mark.parametrize("media", ["", "text/html", AGGREGATE_SHARE, "application/ppm-dap"])
def test_an_answer_of_another_kind(media: str) -> None:
    with pytest.raises(Unreachable, match="answers with"):
        ScriptedHelper(ready(media=media)).client().create_aggregation_job(TASK, b"request")


@pytest.mark.parametrize("first", [[], [later(JOB)]])
def test_a_refusal_at_once_or_later(first: list[httpx2.Response]) -> None:
    helper = ScriptedHelper(*first, refusal(Problem.INVALID_MESSAGE))
    with pytest.raises(ProblemError) as caught:
        helper.client().create_aggregation_job(TASK, b"request")
    assert caught.value.problem == Problem.INVALID_MESSAGE


def test_an_overloaded_helper_is_asked_again() -> None:
    with pytest.raises(Unreachable, match="503"):
        ScriptedHelper(refusal(None, 503)).client().create_aggregation_job(TASK, b"request")


def test_an_aggregate_share() -> None:
    helper = ScriptedHelper(later(SHARE), ready(b"share", AGGREGATE_SHARE))
    assert helper.client().aggregate_share(TASK, b"request") == b"share"
    assert [str(request.url) for request in helper.asked] == [SHARES, SHARE]
    assert helper.asked[0].headers["Content-Type"] == AGGREGATE_SHARE_REQUEST
    assert advertised(helper.asked[0].headers["DAP-Taskprov"]) == TASK.configuration
