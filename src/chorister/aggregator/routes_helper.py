"""The helper over HTTP, for its leader alone.

    POST {url}tasks/ID/aggregation_jobs         verify and add up; answered when it is durable
    GET, POST, DELETE {url}tasks/ID/aggregation_jobs/ID
    POST {url}tasks/ID/aggregate_shares         the helper's share, released once
    GET, DELETE {url}tasks/ID/aggregate_shares/ID

Whoever carries no token of the leader is refused before its body is read. Verification runs in
threads, a few at once; further jobs wait with their bodies unread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from chorister.aggregator.answers import Answer, made
from chorister.aggregator.app import build_starlette, endpoint
from chorister.aggregator.auth import CREDENTIAL_HEADER, Bearers
from chorister.aggregator.gate import (
    Gate,
    Heads,
    check_media_type,
    identifier,
    read_body,
    read_heads,
)
from chorister.aggregator.helper import Helper
from chorister.aggregator.metrics import Metrics
from chorister.aggregator.tasks import KnownTask
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
from chorister.dap.messages import AggregationJobContinueReq
from chorister.dap.problems import invalid_message
from chorister.errors import DecodeError, ProblemError

__all__ = ["HelperRoutes", "helper_app"]

_SHARE_BYTES: Final = 65_536


@dataclass(kw_only=True)
class HelperRoutes:
    """What the handlers need."""

    helper: Helper
    gate: Gate
    leaders: Bearers[bool]
    metrics: Metrics
    prefix: str
    job_bytes: int
    jobs_at_once: int
    _slots: anyio.Semaphore = field(init=False)
    _threads: anyio.CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        self._slots = anyio.Semaphore(self.jobs_at_once)
        self._threads = anyio.CapacityLimiter(self.jobs_at_once)

    def routes(self) -> Sequence[Route]:
        """All of them."""
        jobs = f"{self.prefix}tasks/{{task}}/aggregation_jobs"
        shares = f"{self.prefix}tasks/{{task}}/aggregate_shares"
        return [
            self._route(jobs, "aggregation_jobs", self.create_job, "POST"),
            self._route(f"{jobs}/{{job}}", "aggregation_jobs", self.job, "GET", "POST", "DELETE"),
            self._route(shares, "aggregate_shares", self.create_share, "POST"),
            self._route(f"{shares}/{{share}}", "aggregate_shares", self.share, "GET", "DELETE"),
        ]

    def _route(self, path: str, name: str, handler: Any, *methods: str) -> Route:  # noqa: ANN401
        return Route(path, endpoint(name, handler, self.metrics), methods=list(methods))

    async def _enter(self, request: Request) -> tuple[Heads, KnownTask]:
        """The leader's token, then the task."""
        heads = read_heads(request.headers.raw, CREDENTIAL_HEADER)
        if not self.leaders.owner(heads.authorization):
            raise ProblemError(None, "the leader's bearer token is needed", status=401)
        return heads, await self.gate.task(request.path_params["task"], heads.advertised)

    # --- aggregation jobs -----------------------------------------------------------------------

    async def create_job(self, request: Request) -> Answer:
        """POST aggregation_jobs."""
        heads, task = await self._enter(request)
        check_media_type(heads.content_type, AGGREGATION_JOB_INIT_REQUEST)
        async with self._slots:
            body = await read_body(request, self.job_bytes, heads.length)
            with self.metrics.job_seconds.labels("aggregate").time():
                job_id, response = await anyio.to_thread.run_sync(
                    self.helper.aggregate, task, body, limiter=self._threads
                )
        self.metrics.jobs.labels("aggregate", "done").inc()
        location = self.prefix + aggregation_jobs_path(task.task_id, job_id)
        return made(response, media_type=AGGREGATION_JOB_RESPONSE, headers={"location": location})

    async def job(self, request: Request) -> Answer:
        """GET, POST and DELETE of one job."""
        heads, task = await self._enter(request)
        job_id = identifier(request.path_params["job"], Problem.UNRECOGNIZED_AGGREGATION_JOB, task)
        if request.method == "DELETE":
            await anyio.to_thread.run_sync(self.helper.delete_aggregation_job, task, job_id)
            return made()
        if request.method == "POST":
            check_media_type(heads.content_type, AGGREGATION_JOB_CONTINUE_REQUEST)
            body = await read_body(request, self.job_bytes, heads.length)
            await anyio.to_thread.run_sync(self.helper.aggregation_job, task, job_id)
            raise self._no_such_step(task, body)
        response = await anyio.to_thread.run_sync(self.helper.aggregation_job, task, job_id)
        if request.query_params.get("step", "0") != "0":
            raise ProblemError(
                Problem.STEP_MISMATCH, "Prio3's only step is step 0", task_id=task.task_id
            )
        return made(response, media_type=AGGREGATION_JOB_RESPONSE)

    @staticmethod
    def _no_such_step(task: KnownTask, body: bytes) -> ProblemError:
        """Prio3 has one round: a job is finished when it is created."""
        try:
            asked = AggregationJobContinueReq.decode(body)
        except DecodeError as error:
            return invalid_message(error, task_id=task.task_id)
        # In the draft's order: no job continues to step 0, and no report of this one waits.
        kind = Problem.STEP_MISMATCH
        if not asked.step or asked.continues:
            kind = Problem.INVALID_MESSAGE
        why = f"the job is finished, there is no step {asked.step}"
        return ProblemError(kind, why, task_id=task.task_id)

    # --- aggregate shares -----------------------------------------------------------------------

    async def create_share(self, request: Request) -> Answer:
        """POST aggregate_shares."""
        heads, task = await self._enter(request)
        check_media_type(heads.content_type, AGGREGATE_SHARE_REQUEST)
        body = await read_body(request, _SHARE_BYTES, heads.length)
        share_id, response = await anyio.to_thread.run_sync(self.helper.aggregate_share, task, body)
        self.metrics.jobs.labels("collect", "done").inc()
        location = self.prefix + aggregate_shares_path(task.task_id, share_id)
        return made(response, media_type=AGGREGATE_SHARE, headers={"location": location})

    async def share(self, request: Request) -> Answer:
        """GET and DELETE of one share."""
        _, task = await self._enter(request)
        share_id = identifier(request.path_params["share"], None, task)
        if request.method == "DELETE":
            await anyio.to_thread.run_sync(self.helper.delete_aggregate_share, task, share_id)
            return made()
        response = await anyio.to_thread.run_sync(
            self.helper.stored_aggregate_share, task, share_id
        )
        return made(response, media_type=AGGREGATE_SHARE)


def helper_app(
    routes: HelperRoutes,
    common: Sequence[Route],
    lifespan: Callable[[], AbstractAsyncContextManager[None]],
) -> Starlette:
    """The whole helper as an ASGI application."""
    return build_starlette([*common, *routes.routes()], routes.metrics, lifespan)
