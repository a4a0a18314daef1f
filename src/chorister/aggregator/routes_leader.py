"""The leader over HTTP.

    POST {url}tasks/ID/collection_jobs          collect; the recipe's collector only
    GET, DELETE {url}tasks/ID/collection_jobs/ID
    GET  {url}chorister/recipes/DIGEST          a recipe's progress; its collector only

Uploads are in `routes_upload`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from chorister.aggregator.answers import Answer, made
from chorister.aggregator.app import build_starlette, endpoint, json_answer
from chorister.aggregator.asgi import Receive, Scope, Send
from chorister.aggregator.auth import CREDENTIAL_HEADER, Bearers
from chorister.aggregator.gate import (
    Gate,
    Heads,
    check_media_type,
    identifier,
    read_body,
    read_heads,
)
from chorister.aggregator.leader import Leader
from chorister.aggregator.metrics import Metrics
from chorister.aggregator.routes_upload import UploadRoute
from chorister.aggregator.tasks import KnownTask
from chorister.dap.draft import (
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    collection_jobs_path,
)
from chorister.errors import ProblemError

__all__ = ["LeaderApp", "LeaderRoutes"]

_COLLECTION_BYTES: Final = 65_536
# A result follows the last report within two seconds, so whoever waits for one looks every second.
_SOON: Final = "1"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(kw_only=True)
class LeaderRoutes:
    """What the handlers need."""

    leader: Leader
    gate: Gate
    collectors: Bearers[bytes]  # tokens -> the digest of their owner's HPKE config
    metrics: Metrics
    prefix: str
    collection_asked: Callable[[], None] = lambda: None

    def routes(self) -> Sequence[Route]:
        """All of them."""
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

    def _collector(self, heads: Heads) -> bytes:
        collector = self.collectors.owner(heads.authorization)
        if collector is None:
            raise ProblemError(None, "a collector's bearer token is needed", status=401)
        return collector

    async def create(self, request: Request) -> Answer:
        """POST collection_jobs."""
        heads = read_heads(request.headers.raw, CREDENTIAL_HEADER)
        collector = self._collector(heads)
        task = await self.gate.task(request.path_params["task"], heads.advertised)
        check_media_type(heads.content_type, COLLECTION_JOB_REQUEST)
        body = await read_body(request, _COLLECTION_BYTES, heads.length)
        ref = await anyio.to_thread.run_sync(self.leader.create_collection, task, body, collector)
        self.collection_asked()
        location = self.prefix + collection_jobs_path(task.task_id, ref[1])
        return await self._result(task, ref[1], collector, {"location": location})

    async def one(self, request: Request) -> Answer:
        """GET and DELETE of a collection job."""
        heads = read_heads(request.headers.raw, CREDENTIAL_HEADER)
        collector = self._collector(heads)
        task = await self.gate.task(request.path_params["task"], heads.advertised)
        job = identifier(request.path_params["job"], None, task)
        if request.method == "DELETE":
            await anyio.to_thread.run_sync(self.leader.delete_collection, task, job, collector)
            return made()
        return await self._result(task, job, collector, {})

    async def _result(
        self, task: KnownTask, job: bytes, collector: bytes, headers: dict[str, str]
    ) -> Answer:
        found = await anyio.to_thread.run_sync(self.leader.collection, task, job, collector)
        if found is None:
            return made(status=202, headers={**headers, "retry-after": _SOON})
        return made(found.encode(), media_type=COLLECTION_JOB_RESPONSE, headers=headers)

    async def progress(self, request: Request) -> Answer:
        """GET chorister/recipes/DIGEST."""
        collector = self._collector(read_heads(request.headers.raw, CREDENTIAL_HEADER))
        text = request.path_params["digest"]
        if not _DIGEST.fullmatch(text):
            raise ProblemError(None, "a recipe's digest is 64 hexadecimal digits", status=404)
        digest = bytes.fromhex(text)
        found = await anyio.to_thread.run_sync(self._progress, digest, collector)
        return json_answer(found)

    def _progress(self, digest: bytes, collector: bytes) -> dict[str, object]:
        tasks = self.leader.tasks.of_recipe(digest)
        found = None
        if tasks and tasks[0].collector == collector:
            found = self.leader.progress(digest)
        if found is None:  # whether the recipe exists is its own collector's to know
            raise ProblemError(None, "no recipe of this collector", status=404)
        return found


class LeaderApp:
    """The whole leader as an ASGI application."""

    def __init__(
        self,
        routes: LeaderRoutes,
        uploads: UploadRoute,
        common: Sequence[Route],
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
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
        """Uploads go their own way; everything else is Starlette's."""
        if scope["type"] == "http":
            text = self._uploads.task_of(scope["path"])
            if text is not None:
                await self._uploads.upload(text, scope, receive, send)
                return
        await self._rest(scope, receive, send)
