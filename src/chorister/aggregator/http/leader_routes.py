"""The leader over HTTP.

    POST {url}tasks/ID/collection_jobs          collect; the recipe's collector only
    GET, DELETE {url}tasks/ID/collection_jobs/ID
    GET  {url}chorister/recipes/DIGEST          a recipe's progress; its collector only

`upload_route` handles uploads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from chorister.aggregator.http.app import (
    Lifespan,
    RawResponse,
    Receive,
    Scope,
    Send,
    build_starlette,
    endpoint,
    json_response,
    success,
)
from chorister.aggregator.http.request_checks import (
    BearerTokens,
    RequestHeaders,
    TaskLookup,
    check_media_type,
    read_body,
    read_headers,
    resource_id,
)
from chorister.aggregator.http.upload_route import UploadRoute
from chorister.aggregator.jobs.collection_job_driver import CollectionJobDriver
from chorister.aggregator.operations.metrics import Metrics
from chorister.aggregator.operations.progress import recipe_progress
from chorister.aggregator.storage.database import Database
from chorister.aggregator.storage.statistics import task_status
from chorister.aggregator.storage.tasks import TaskStore
from chorister.aggregator.task import KnownTask
from chorister.clock import Clock
from chorister.dap.draft import (
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    collection_jobs_path,
)
from chorister.errors import ProblemError

_MAX_REQUEST_BYTES: Final = 65_536
# A result follows the last report within two seconds, so clients should poll every second.
_RETRY_AFTER: Final = "1"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(kw_only=True)
class LeaderRoutes:
    """The handlers and what they need."""

    collection: CollectionJobDriver
    database: Database
    tasks: TaskStore
    clock: Clock
    lookup: TaskLookup
    collectors: BearerTokens[bytes]  # the digest of each owner's HPKE configuration
    metrics: Metrics
    prefix: str
    on_collection: Callable[[], None] = lambda: None  # called when a collection was created

    def routes(self) -> Sequence[Route]:
        jobs = f"{self.prefix}tasks/{{task}}/collection_jobs"
        return [
            Route(jobs, self._endpoint("collection_jobs", self.create), methods=["POST"]),
            Route(
                f"{jobs}/{{job}}",
                self._endpoint("collection_jobs", self.one),
                methods=["GET", "DELETE"],
            ),
            Route(
                f"{self.prefix}chorister/recipes/{{digest}}",
                self._endpoint("recipes", self.progress),
                methods=["GET"],
            ),
        ]

    def _endpoint(self, route: str, handler: Any) -> Callable[..., Any]:  # noqa: ANN401
        return endpoint(route, handler, self.metrics)

    # --- collection -----------------------------------------------------------------------------

    def _collector(self, headers: RequestHeaders) -> bytes:
        collector = self.collectors.owner(headers.authorization)
        if collector is None:
            raise ProblemError(None, "a collector's bearer token is required", status=401)
        return collector

    async def create(self, request: Request) -> RawResponse:
        headers = read_headers(request.headers.raw)
        collector = self._collector(headers)
        task = await self.lookup.find(request.path_params["task"], headers.advertised)
        check_media_type(headers.content_type, COLLECTION_JOB_REQUEST)
        body = await read_body(request, _MAX_REQUEST_BYTES, headers.length)
        ref = await anyio.to_thread.run_sync(self.collection.create, task, body, collector)
        self.on_collection()
        location = self.prefix + collection_jobs_path(task.task_id, ref.collection_id)
        return await self._result(task, ref.collection_id, collector, {"location": location})

    async def one(self, request: Request) -> RawResponse:
        headers = read_headers(request.headers.raw)
        collector = self._collector(headers)
        task = await self.lookup.find(request.path_params["task"], headers.advertised)
        job = resource_id(request.path_params["job"], None, task)
        if request.method == "DELETE":
            await anyio.to_thread.run_sync(self.collection.delete, task, job, collector)
            return success()
        return await self._result(task, job, collector, {})

    async def _result(
        self, task: KnownTask, job: bytes, collector: bytes, headers: dict[str, str]
    ) -> RawResponse:
        found = await anyio.to_thread.run_sync(self.collection.result, task, job, collector)
        if found is None:
            return success(status=202, headers={**headers, "retry-after": _RETRY_AFTER})
        return success(found.encode(), media_type=COLLECTION_JOB_RESPONSE, headers=headers)

    async def progress(self, request: Request) -> RawResponse:
        collector = self._collector(read_headers(request.headers.raw))
        text = request.path_params["digest"]
        if not _DIGEST.fullmatch(text):
            raise ProblemError(None, "a recipe digest has 64 hexadecimal digits", status=404)
        digest = bytes.fromhex(text)
        found = await anyio.to_thread.run_sync(self._progress, digest, collector)
        return json_response(found)

    def _progress(self, digest: bytes, collector: bytes) -> dict[str, object]:
        tasks = self.tasks.of_recipe(digest)
        # Only its own collector may know whether the recipe exists.
        if not tasks or tasks[0].collector != collector:
            raise ProblemError(None, "this collector has no such recipe", status=404)
        return recipe_progress(task_status(self.database, tasks), self.clock.now())


class LeaderApp:
    """The whole leader as an ASGI application."""

    def __init__(
        self,
        routes: LeaderRoutes,
        uploads: UploadRoute,
        common: Sequence[Route],
        lifespan: Lifespan,
    ) -> None:
        self._routes = routes
        self._uploads = uploads
        self._rest: Starlette = build_starlette(
            [*common, *routes.routes()], routes.metrics, lifespan
        )

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Handle uploads directly, and everything else with Starlette."""
        if scope["type"] == "http":
            text = self._uploads.task_of(scope["path"])
            if text is not None:
                await self._uploads.upload(text, scope, receive, send)
                return
        await self._rest(scope, receive, send)
