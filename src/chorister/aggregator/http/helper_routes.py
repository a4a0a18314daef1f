"""The helper over HTTP, for its leader alone.

    POST {url}tasks/ID/aggregation_jobs         verify and add up; answered once it is durable
    GET, POST, DELETE {url}tasks/ID/aggregation_jobs/ID
    POST {url}tasks/ID/aggregate_shares         the helper's share, released once
    GET, DELETE {url}tasks/ID/aggregate_shares/ID

A request without the leader's token is refused before its body is read. Verification runs in
threads, a few at once; further jobs wait, most of them with their bodies unread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio
from starlette.requests import Request
from starlette.routing import Route

from chorister.aggregator.http.app import make_route, success
from chorister.aggregator.http.request_checks import (
    BearerTokens,
    RequestHeaders,
    TaskLookup,
    check_media_type,
    read_body,
    read_headers,
    resource_id,
)
from chorister.aggregator.jobs.helper import Helper
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.operations.metrics import Metrics
from chorister.dap.draft import (
    AGGREGATE_SHARE,
    AGGREGATE_SHARE_REQUEST,
    AGGREGATION_JOB_CONTINUE_REQUEST,
    AGGREGATION_JOB_INIT_REQUEST,
    AGGREGATION_JOB_RESPONSE,
    Problem,
    aggregate_shares_path,
    aggregation_jobs_path,
)
from chorister.dap.http import invalid_message
from chorister.dap.messages import AggregationJobContinueReq
from chorister.errors import DecodeError, ProblemError
from chorister.http_server import RawResponse

_MAX_SHARE_REQUEST_BYTES: Final = 65_536
_BODIES_PER_JOB: Final = 4


@dataclass(kw_only=True)
class HelperRoutes:
    """The handlers and what they need."""

    helper: Helper
    lookup: TaskLookup
    leaders: BearerTokens[Callable[[str], bool]]  # whether a token is valid for a leader's URL
    metrics: Metrics
    prefix: str
    job_bytes: int
    jobs_at_once: int
    _slots: anyio.Semaphore = field(init=False)
    _threads: anyio.CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        # Bodies in memory: more than can be verified at once, so that the next one is always there.
        self._slots = anyio.Semaphore(_BODIES_PER_JOB * self.jobs_at_once)
        self._threads = anyio.CapacityLimiter(self.jobs_at_once)

    def routes(self) -> Sequence[Route]:
        tasks = f"{self.prefix}tasks/{{task}}"
        jobs = partial(make_route, self.metrics, "aggregation_jobs")
        shares = partial(make_route, self.metrics, "aggregate_shares")
        return [
            jobs(f"{tasks}/aggregation_jobs", self.create_job, "POST"),
            jobs(f"{tasks}/aggregation_jobs/{{job}}", self.job, "GET", "POST", "DELETE"),
            shares(f"{tasks}/aggregate_shares", self.create_share, "POST"),
            shares(f"{tasks}/aggregate_shares/{{share}}", self.share, "GET", "DELETE"),
        ]

    async def _enter(self, request: Request) -> tuple[RequestHeaders, KnownTask]:
        """Check the leader's token, then find the task."""
        headers = read_headers(request.headers.raw)
        is_valid_for = self.leaders.owner(headers.authorization)
        if is_valid_for is None:
            raise ProblemError(None, "the leader's bearer token is required", status=401)
        task = await self.lookup.find(request.path_params["task"], headers.advertised)
        if not is_valid_for(task.leader_url):
            raise ProblemError(None, "the token is not that of this task's leader", status=403)
        return headers, task

    # --- aggregation jobs -----------------------------------------------------------------------

    async def create_job(self, request: Request) -> RawResponse:
        headers, task = await self._enter(request)
        check_media_type(headers.content_type, AGGREGATION_JOB_INIT_REQUEST)
        async with self._slots:
            body = await read_body(request, self.job_bytes, headers.length)
            with self.metrics.job_seconds.labels("aggregate").time():
                response = await anyio.to_thread.run_sync(
                    self.helper.create_job, task, body, limiter=self._threads
                )
        self.metrics.jobs.labels("aggregate", "done").inc()
        location = self.prefix + aggregation_jobs_path(task.task_id, response.resource_id)
        return success(
            response.body, media_type=AGGREGATION_JOB_RESPONSE, headers={"location": location}
        )

    async def job(self, request: Request) -> RawResponse:
        headers, task = await self._enter(request)
        job_id = resource_id(request.path_params["job"], Problem.UNRECOGNIZED_AGGREGATION_JOB, task)
        if request.method == "DELETE":
            await anyio.to_thread.run_sync(self.helper.delete_job, task, job_id)
            return success()
        if request.method == "POST":
            check_media_type(headers.content_type, AGGREGATION_JOB_CONTINUE_REQUEST)
            body = await read_body(request, self.job_bytes, headers.length)
            await anyio.to_thread.run_sync(self.helper.find_job, task, job_id)
            raise self._no_such_step(task, body)
        response = await anyio.to_thread.run_sync(self.helper.find_job, task, job_id)
        if request.query_params.get("step", "0") != "0":
            raise task.refusal(Problem.STEP_MISMATCH, "Prio3's only step is step 0")
        return success(response, media_type=AGGREGATION_JOB_RESPONSE)

    @staticmethod
    def _no_such_step(task: KnownTask, body: bytes) -> ProblemError:
        """Refuse to continue a job: Prio3 has one round, so it is finished when it is created."""
        try:
            asked = AggregationJobContinueReq.decode(body)
        except DecodeError as error:
            return invalid_message(error, task_id=task.task_id)
        # In the draft's order: no job continues to step 0, and none of its reports wait.
        kind = Problem.STEP_MISMATCH
        if not asked.step or asked.continues:
            kind = Problem.INVALID_MESSAGE
        detail = f"the job is finished, there is no step {asked.step}"
        return task.refusal(kind, detail)

    # --- aggregate shares -----------------------------------------------------------------------

    async def create_share(self, request: Request) -> RawResponse:
        headers, task = await self._enter(request)
        check_media_type(headers.content_type, AGGREGATE_SHARE_REQUEST)
        body = await read_body(request, _MAX_SHARE_REQUEST_BYTES, headers.length)
        response = await anyio.to_thread.run_sync(self.helper.create_share, task, body)
        self.metrics.jobs.labels("collect", "done").inc()
        location = self.prefix + aggregate_shares_path(task.task_id, response.resource_id)
        return success(response.body, media_type=AGGREGATE_SHARE, headers={"location": location})

    async def share(self, request: Request) -> RawResponse:
        _, task = await self._enter(request)
        share_id = resource_id(request.path_params["share"], None, task)
        if request.method == "DELETE":
            await anyio.to_thread.run_sync(self.helper.delete_share, task, share_id)
            return success()
        response = await anyio.to_thread.run_sync(self.helper.find_share, task, share_id)
        return success(response, media_type=AGGREGATE_SHARE)
