"""The leader over HTTP.

    POST {url}tasks/ID/reports                  upload
    POST {url}tasks/ID/collection_jobs          collect; the recipe's collector only
    GET, DELETE {url}tasks/ID/collection_jobs/ID
    GET  {url}chorister/recipes/DIGEST          a recipe's progress; its collector only

An upload does almost nothing in Python: its task is a dictionary's answer, one native call reads
the headers of its reports, and it waits in the queue for the next transaction. It does not pass
through Starlette, which would take longer than all of that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from chorister.aggregator.answers import ACCEPTED, Answer, made, refusal
from chorister.aggregator.app import build_starlette, endpoint, failure, json_answer
from chorister.aggregator.asgi import Receive, Scope, Send
from chorister.aggregator.auth import CREDENTIAL_HEADER, Bearers, UploadCredential
from chorister.aggregator.gate import (
    Gate,
    Heads,
    check_media_type,
    identifier,
    read_body,
    read_heads,
)
from chorister.aggregator.leader import Leader, NotReady, UploadPlan
from chorister.aggregator.metrics import Metrics
from chorister.aggregator.tasks import KnownTask
from chorister.aggregator.upload_queue import QueueFull, UploadQueue
from chorister.dap.draft import (
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    UPLOAD_ERRORS,
    UPLOAD_REQUEST,
    collection_jobs_path,
)
from chorister.dap.messages import UploadErrors
from chorister.errors import ProblemError

__all__ = ["LeaderApp", "LeaderRoutes"]

_UPLOAD_TYPE: Final = UPLOAD_REQUEST.encode()
_COLLECTION_BYTES: Final = 65_536
_SOON: Final = "1"
_LARGE: Final = 1 << 17
_LARGE_AT_ONCE: Final = 2
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_GONE: Final = Answer(499, ())  # the sender went away: nobody reads it


@dataclass(kw_only=True)
class LeaderRoutes:
    """What the handlers need."""

    leader: Leader
    gate: Gate
    queue: UploadQueue[UploadPlan, UploadErrors]
    collectors: Bearers[bytes]  # tokens -> the digest of their owner's HPKE config
    metrics: Metrics
    prefix: str
    upload_bytes: int
    held_bytes: int
    # How an upload's credential is checked: at once, or in a thread; neither, if none is needed.
    credential: UploadCredential | None = None
    slow_credential: UploadCredential | None = None
    collection_asked: Callable[[], None] = lambda: None
    _uploads: re.Pattern[str] = field(init=False)
    _threads: anyio.CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        self._held = 0
        # Of their own, so that large uploads take no thread from other requests.
        self._threads = anyio.CapacityLimiter(_LARGE_AT_ONCE)
        self._uploads = re.compile(re.escape(self.prefix) + r"tasks/([^/]+)/reports")
        self._accepted = self.metrics.requests.labels("reports", "200")
        self._stored = self.metrics.reports.labels("stored")
        self._refused = self.metrics.reports.labels("refused")

    def routes(self) -> Sequence[Route]:
        """All but the uploads."""
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

    # --- uploads --------------------------------------------------------------------------------

    def upload_task(self, scope: Scope) -> str | None:
        """The task's id, as it stands in the URL, if it is the URL of uploads."""
        found = self._uploads.fullmatch(scope["path"])
        return None if found is None else found[1]

    async def upload(
        self,
        text: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """One upload, from its first byte to its answer."""
        if scope["method"] != "POST":
            await self._wrong_method(scope["method"]).send(send)
            return
        try:
            answer = await self._upload(
                text, read_heads(scope["headers"], CREDENTIAL_HEADER), receive
            )
        except Exception as error:
            answer = failure(_as_problem(error), "reports")
        if answer is ACCEPTED:
            self._accepted.inc()
        else:
            self.metrics.requests.labels("reports", str(answer.status)).inc()
        if answer is not _GONE:
            await answer.send(send)

    def _wrong_method(self, method: str) -> Answer:
        self.metrics.requests.labels("reports", "405").inc()
        error = ProblemError(None, f"method not allowed: {method}", status=405)
        return refusal(error, {"allow": "POST"})

    async def _upload(self, text: str, heads: Heads, receive: Receive) -> Answer:
        if self.credential is not None or self.slow_credential is not None:
            await self._check_credential(heads.credential)
        task = self.gate.remembered(text, heads.advertised)
        if task is None:
            task = await self.gate.task(text, heads.advertised)
        if heads.content_type != _UPLOAD_TYPE:
            check_media_type(heads.content_type, UPLOAD_REQUEST)
        if heads.length is not None and heads.length > self.upload_bytes:
            raise self._too_long()
        message = await receive()
        body = message.get("body", b"")
        if message.get("more_body"):
            whole = await self._rest_of(body, receive)
            if whole is None:
                return _GONE
            body = whole
        elif message["type"] == "http.disconnect":
            return _GONE
        elif len(body) > self.upload_bytes:  # undeclared, and yet in one part
            raise self._too_long()
        return await self._store(task, body)

    async def _rest_of(self, body: bytes, receive: Receive) -> bytes | None:
        """A body that comes in parts; None if its sender went away.

        What all of them hold together is bounded, by what has arrived and not by what was
        announced: whoever trickles takes no room from others.
        """
        parts, size, more = [body], len(body), True
        self._held += size
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._held += len(parts[-1])
                if size > self.upload_bytes:
                    raise self._too_long()
                if self._held > self.held_bytes:
                    raise QueueFull
                more = message.get("more_body", False)
        finally:
            self._held -= size
        return b"".join(parts)

    async def _store(self, task: KnownTask, body: bytes) -> Answer:
        if len(body) < _LARGE:
            plan = self.leader.check_upload(task, body)
        else:  # many reports: the look takes its time, and the body counts until it is queued
            self._held += len(body)
            try:
                plan = await anyio.to_thread.run_sync(
                    self.leader.check_upload, task, body, limiter=self._threads
                )
            finally:
                self._held -= len(body)
        errors = await self.queue.put(plan, len(body))
        refused = len(errors.statuses)
        if not refused:
            self._stored.inc(len(plan.ids))
            return ACCEPTED
        self._stored.inc(len(plan.ids) - refused)
        self._refused.inc(refused)
        return made(errors.encode(), media_type=UPLOAD_ERRORS)

    def _too_long(self) -> ProblemError:
        return ProblemError(None, f"at most {self.upload_bytes} bytes are accepted", status=413)

    async def _check_credential(self, given: bytes | None) -> None:
        good = False
        if given is not None:
            text = given.decode("latin-1")
            if self.credential is not None:
                good = self.credential(text)
            elif self.slow_credential is not None:
                good = await anyio.to_thread.run_sync(self.slow_credential, text)
        if not good:
            raise ProblemError(None, "uploads need a credential of the host app", status=403)

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
        if isinstance(found, NotReady):
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


def _as_problem(error: Exception) -> Exception:
    if isinstance(error, QueueFull):
        return ProblemError(None, "too many uploads wait for the disk; come back", status=503)
    return error


class LeaderApp:
    """The whole leader as an ASGI application."""

    def __init__(
        self,
        routes: LeaderRoutes,
        common: Sequence[Route],
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self._routes = routes
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
            text = self._routes.upload_task(scope)
            if text is not None:
                await self._routes.upload(text, scope, receive, send)
                return
        await self._rest(scope, receive, send)
