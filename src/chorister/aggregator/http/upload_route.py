"""Uploads over HTTP: POST {url}tasks/ID/reports.

An upload does almost nothing in Python: its task is looked up in a dictionary, one native call
reads the headers of its reports, and it waits in the queue for the next transaction. The web
server's own work is most of what is left, so there are two paths. The common case (a cached task, a
short body of declared length, a credential that is quick to check) is answered by the connection
itself (`http_server.Direct`). Everything else, and every refusal by header, is handled by an ASGI
application without Starlette.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
from starlette.requests import Request
from starlette.routing import Route

from chorister.aggregator.http.app import ACCEPTED, failure, make_route, success
from chorister.aggregator.http.report_writer import (
    CheckedUpload,
    QueueFull,
    ReportWriter,
    UploadQueue,
)
from chorister.aggregator.http.request_checks import (
    TaskLookup,
    UploadCredential,
    body_parts,
    check_media_type,
    read_headers,
)
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.operations.metrics import Metrics
from chorister.dap.draft import UPLOAD_ERRORS, UPLOAD_REQUEST
from chorister.dap.upload_messages import UploadErrors
from chorister.errors import ProblemError
from chorister.http_server import RawResponse

_UPLOAD_TYPE: Final = UPLOAD_REQUEST.encode()
_LARGE_BYTES: Final = 1 << 17
_LARGE_AT_ONCE: Final = 2


@dataclass(kw_only=True)
class UploadRoute:
    """Handles uploads."""

    writer: ReportWriter
    lookup: TaskLookup
    queue: UploadQueue[CheckedUpload, UploadErrors]
    metrics: Metrics
    prefix: str
    upload_bytes: int
    held_bytes: int
    # How an upload's credential is checked: right away, or in a thread; neither if none is needed.
    credential: UploadCredential | None = None
    slow_credential: UploadCredential | None = None
    held: int = 0  # bytes of bodies that are arriving, or being checked in a thread
    _arriving: dict[_ArrivingBody, None] = field(default_factory=dict)  # the oldest first
    _url: re.Pattern[bytes] = field(init=False)
    _threads: anyio.CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        # Their own threads, so that large uploads take none from other requests.
        self._threads = anyio.CapacityLimiter(_LARGE_AT_ONCE)
        self._url = re.compile(re.escape(self.prefix).encode() + rb"tasks/([\w-]+)/reports")
        self._short = min(_LARGE_BYTES - 1, self.upload_bytes)
        self._answered = self.metrics.requests.labels("reports", "200")
        self._stored = self.metrics.reports.labels("stored")
        self._refused = self.metrics.reports.labels("refused")

    def route(self) -> Route:
        path = f"{self.prefix}tasks/{{task}}/reports"
        return make_route(self.metrics, "reports", path, self.upload, "POST")

    # --- the common case ------------------------------------------------------------------------

    def begin(
        self, url: bytes, headers: Sequence[tuple[bytes, bytes]], disconnect: Callable[[], None]
    ) -> _IncomingUpload | None:
        """Start an upload that only needs to be stored; None for any other request."""
        found = self._url.fullmatch(url)
        if found is None or self.slow_credential is not None:
            return None
        found_headers = read_headers(headers)
        if (
            found_headers.content_type != _UPLOAD_TYPE
            or found_headers.length is None
            or found_headers.length > self._short
            or (
                self.credential is not None
                and not _is_valid(self.credential, found_headers.credential)
            )
        ):
            return None
        task = self.lookup.cached(found[1].decode(), found_headers.advertised)
        return None if task is None else _IncomingUpload(self, task, disconnect)

    def store(self, task: KnownTask, body: bytes, respond: Callable[[RawResponse], None]) -> None:
        """Store a short body; `respond` is called when it is durable."""
        try:
            upload = self.writer.check(task, body)

            def stored(outcome: UploadErrors | BaseException) -> None:
                if isinstance(outcome, BaseException):
                    # Not raised again: all uploads of a transaction have the same error, and its
                    # traceback, which is logged, would grow with each.
                    response = self.failed(outcome)
                else:
                    try:
                        response = self._outcome(upload, outcome)
                        self._answered.inc()
                    except Exception as error:
                        response = self.failed(error)
                respond(response)  # outside: if it fails, the request must not be answered twice

            self.queue.add(upload, len(body), stored)
        except Exception as error:
            respond(self.failed(error))

    def failed(self, error: BaseException) -> RawResponse:
        """Return the response to an error, and count it."""
        response = failure(error, "reports")
        self.metrics.requests.labels("reports", str(response.status)).inc()
        return response

    # --- all other cases ------------------------------------------------------------------------

    async def upload(self, request: Request) -> RawResponse:
        headers = read_headers(request.headers.raw)
        if self.credential is not None or self.slow_credential is not None:
            await self._check_credential(headers.credential)
        task = await self.lookup.find(request.path_params["task"], headers.advertised)
        check_media_type(headers.content_type, UPLOAD_REQUEST)
        body = await self._body(request, headers.length)
        if len(body) < _LARGE_BYTES:
            upload = self.writer.check(task, body)
        else:  # many reports: checking takes time, and the body counts until it is queued
            self.held += len(body)
            try:
                upload = await anyio.to_thread.run_sync(
                    self.writer.check, task, body, limiter=self._threads
                )
            finally:
                self.held -= len(body)
        return self._outcome(upload, await self.queue.put(upload, len(body)))

    async def _body(self, request: Request, length: int | None) -> bytes:
        try:
            async with asyncio.timeout(None) as until:
                body = _ArrivingBody(drop=lambda: until.reschedule(0))
                try:
                    async for part in body_parts(request, self.upload_bytes, length):
                        self.hold(body, part)
                        if body.dropped:
                            raise QueueFull
                    return b"".join(body.parts)
                finally:
                    self.release(body)
        except TimeoutError:
            raise QueueFull from None

    # --- memory for bodies ----------------------------------------------------------------------

    def hold(self, body: _ArrivingBody, part: bytes) -> None:
        """Keep a part of a body. If there is no room, drop those that have been arriving longest.

        So clients that send slowly, or stop, take no room from others: what has arrived counts, not
        what was announced, and newer bodies take its place.
        """
        if body.dropped:
            return
        self._arriving.setdefault(body)
        body.parts.append(part)
        body.size += len(part)
        self.held += len(part)
        while self.held > self.held_bytes and self._arriving:
            oldest = next(iter(self._arriving))
            self.release(oldest)
            oldest.dropped = True
            oldest.drop()

    def release(self, body: _ArrivingBody) -> None:
        self._arriving.pop(body, None)
        self.held -= body.size
        body.size = 0
        body.parts = []

    # --- credentials and responses --------------------------------------------------------------

    async def _check_credential(self, given: bytes | None) -> None:
        if self.credential is not None:
            valid = _is_valid(self.credential, given)
        else:
            valid = await anyio.to_thread.run_sync(_is_valid, self.slow_credential, given)
        if not valid:
            raise ProblemError(None, "uploads need a valid credential of the host app", status=403)

    def _outcome(self, upload: CheckedUpload, errors: UploadErrors) -> RawResponse:
        refused = len(errors.statuses)
        self._stored.inc(len(upload.ids) - refused)
        if not refused:
            return ACCEPTED
        self._refused.inc(refused)
        return success(errors.encode(), media_type=UPLOAD_ERRORS)


class _ArrivingBody:
    """What has arrived of a body. `drop` tells its client that there is no room for it."""

    __slots__ = ("drop", "dropped", "parts", "size")

    def __init__(self, drop: Callable[[], None]) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.drop = drop
        self.dropped = False


class _IncomingUpload(_ArrivingBody):
    """An upload of the common case while it arrives (`http_server.Incoming`)."""

    __slots__ = ("_route", "_task")

    def __init__(self, route: UploadRoute, task: KnownTask, disconnect: Callable[[], None]) -> None:
        def drop() -> None:
            route.failed(QueueFull())  # counted; nobody reads it
            disconnect()

        super().__init__(drop)
        self._route = route
        self._task = task

    def feed(self, part: bytes) -> None:
        self._route.hold(self, part)

    def complete(self, respond: Callable[[RawResponse], None]) -> None:
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.gone()
        if not self.dropped:
            self._route.store(self._task, body, respond)

    def gone(self) -> None:
        self._route.release(self)


def _is_valid(check: UploadCredential | None, given: bytes | None) -> bool:
    return check is not None and given is not None and check(given.decode("latin-1"))
