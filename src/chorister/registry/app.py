"""The registry over HTTP: the public folder as static files, and two endpoints to post to.

    GET  /checkpoint, /list/HEX, ...     the files of `transparency.client`
    GET  /status                         what is published, and which cosigners are missing
    POST /entries                        an entry and its body; 201 with its index, or 200 if it
                                         was already there
    POST /cosignatures                   a cosigner's signature line

A CDN can serve all files straight from the folder. Files with a digest in their name never change,
and say so; a missing file is never cached, because a cache would go on withholding it after it has
appeared. Refusals are RFC 9457 problem documents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chorister.errors import (
    ChoristerError,
    DecodeError,
    DuplicateEntry,
    LogSignatureInvalid,
    NotAuthorized,
    ServiceError,
)
from chorister.registry.public_files import PublicFiles
from chorister.registry.registry import CheckpointStatus, Registry
from chorister.registry.witnessing import Witnessing
from chorister.transparency.entries import MAX_SUBMISSION

T = TypeVar("T")
_log = logging.getLogger("chorister.registry")

_STATUS: Final[tuple[tuple[type[ChoristerError], int], ...]] = (
    (DuplicateEntry, 409),
    (DecodeError, 400),
    (NotAuthorized, 403),
    (LogSignatureInvalid, 409),
    (ServiceError, 503),
    (ChoristerError, 422),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits for requests."""

    entry_bytes: int = MAX_SUBMISSION
    cosignature_bytes: int = 1024
    # Seconds for a whole body to arrive.
    body_seconds: float = 30.0
    # Bytes in memory of all bodies of one kind, arriving or waiting.
    held_bytes: int = 8 * MAX_SUBMISSION
    # Requests of one kind that wait for the log.
    waiting: int = 64


@dataclass(kw_only=True, slots=True)
class _Inbox:
    """Posted entries or cosignatures: each kind has its own memory and threads.

    Only the part of a body that has arrived counts, and no body waits for another. If there is no
    room, the body that has been arriving longest makes way, so a slow sender keeps nobody out. The
    connection ends those below a minimum rate.
    """

    limits: Limits
    max_bytes: int  # of one body
    held: int = 0
    waiting: int = 0
    # The deadlines of the bodies that are arriving, oldest first.
    arriving: dict[int, asyncio.Timeout] = field(default_factory=dict)
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(2))

    async def process(self, request: Request, work: Callable[[bytes], T]) -> T | Response:
        """Read the body and call `work` in a thread, or return a refusal."""
        data = bytearray()
        try:
            refusal = await self._read(request, data)
            if refusal is not None:
                return refusal
            if self.waiting >= self.limits.waiting:
                return _busy()
            self.waiting += 1
            try:
                return await anyio.to_thread.run_sync(work, bytes(data), limiter=self.threads)
            finally:
                self.waiting -= 1
        finally:
            self.held -= len(data)

    async def _read(self, request: Request, data: bytearray) -> Response | None:
        too_long = _problem(413, "too-large", f"at most {self.max_bytes} bytes are accepted")
        declared = request.headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared[:20]) > self.max_bytes:
            return too_long
        body = id(data)
        try:
            async with asyncio.timeout(self.limits.body_seconds) as deadline:
                self.arriving[body] = deadline
                async for chunk in request.stream():
                    data += chunk
                    self.held += len(chunk)
                    if len(data) > self.max_bytes:
                        return too_long
                    if self.held > self.limits.held_bytes and not self._make_room(body):
                        return _busy()
        except TimeoutError:
            if body not in self.arriving:
                return _busy()
            seconds = f"{self.limits.body_seconds:g} s"
            return _problem(408, "too-slow", f"the body did not arrive within {seconds}")
        except ClientDisconnect:
            return _problem(400, "disconnected", "the sender disconnected")
        finally:
            self.arriving.pop(body, None)
        return None

    def _make_room(self, body: int) -> bool:
        """Cut off the body that has been arriving longest; False if that is this one."""
        oldest = next(iter(self.arriving))
        if oldest == body:
            return False
        self.arriving.pop(oldest).reschedule(asyncio.get_running_loop().time())
        return True


@dataclass(kw_only=True, slots=True)
class _Service:
    registry: Registry
    files: PublicFiles
    interval: float
    entries: _Inbox
    cosignatures: _Inbox
    witnesses: Sequence[Witnessing]
    # For checkpoints and /status. Like the threads of the inboxes they may wait for the log's
    # lock, so those who read files have other threads.
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(call, limiter=self.threads)

    async def file(self, request: Request) -> Response:
        path = request.path_params["path"]
        return await self.files.answer(request, path) or _problem(
            404, "not-found", f"there is no {path}"
        )

    async def status(self, _: Request) -> Response:
        status = await self._in_thread(self.registry.status)
        return JSONResponse(
            {
                "entries": status.size,
                "published": _summary(status.published),
                "candidate": _summary(status.candidate),
                "waiting_for": list(status.waiting_for),
                "alarms": [each.alarm for each in self.witnesses if each.alarm is not None],
            },
            headers={"Cache-Control": "no-store"},
        )

    async def post_entry(self, request: Request) -> Response:
        receipt = await self.entries.process(request, self.registry.submit)
        if isinstance(receipt, Response):
            return receipt
        return JSONResponse(
            {"index": receipt.index, "leaf": receipt.leaf.hex(), "new": receipt.new},
            status_code=201 if receipt.new else 200,
            headers={"Cache-Control": "no-store"},
        )

    async def post_cosignature(self, request: Request) -> Response:
        missing = await self.cosignatures.process(request, self.registry.add_cosignature)
        if isinstance(missing, Response):
            return missing
        return JSONResponse({"waiting_for": list(missing)}, headers={"Cache-Control": "no-store"})

    async def refresh(self) -> None:
        """Issue a new candidate, unless one still waits. Failures are logged."""
        try:
            before = await self._in_thread(self.registry.status)
            await self._in_thread(self.registry.issue)
            after = await self._in_thread(self.registry.status)
            if before.candidate is not None and before.candidate != after.candidate:
                names = ", ".join(before.waiting_for)
                _log.warning("%s did not cosign in time: there is a new candidate", names)
        except ChoristerError as error:
            _log.error("no new checkpoint: %s", error)
        except Exception:
            # Otherwise the log would silently become stale.
            _log.exception("no new checkpoint, because of a bug in Chorister")

    async def keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            await self.refresh()


def build_app(
    registry: Registry,
    public: Path,
    *,
    interval: float = 60.0,
    limits: Limits | None = None,
    witnesses: Sequence[Witnessing] = (),
) -> Starlette:
    """Return the registry as an ASGI application, which also keeps its checkpoints fresh."""
    limits = limits or Limits()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.refresh()
        tasks = [asyncio.create_task(service.keep_fresh())]
        tasks += [asyncio.create_task(each.run(registry)) for each in witnesses]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    service = _Service(
        registry=registry,
        files=PublicFiles(public),
        interval=interval,
        entries=_Inbox(limits=limits, max_bytes=limits.entry_bytes),
        cosignatures=_Inbox(limits=limits, max_bytes=limits.cosignature_bytes),
        witnesses=witnesses,
    )
    return Starlette(
        routes=[
            Route("/status", service.status, methods=["GET"]),
            Route("/entries", service.post_entry, methods=["POST"]),
            Route("/cosignatures", service.post_cosignature, methods=["POST"]),
            Route("/{path:path}", service.file, methods=["GET"]),
        ],
        exception_handlers={ChoristerError: _refusal, HTTPException: _no_such_request},
        lifespan=lifespan,
    )


async def _refusal(_: Request, error: Exception) -> Response:
    status = next(code for kind, code in _STATUS if isinstance(error, kind))
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__).lower()
    return _problem(status, name, str(error))


async def _no_such_request(request: Request, error: Exception) -> Response:
    """Answer requests that the router refuses."""
    if not isinstance(error, HTTPException):  # Starlette calls this with nothing else.
        raise error
    name = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.url.path} does not support {request.method}"
    return _problem(error.status_code, name, detail, error.headers)


def _busy() -> Response:
    return _problem(503, "busy", "too many requests: try again later", {"Retry-After": "5"})


def _problem(
    status: int, name: str, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an RFC 9457 problem; its type is the name of the error class."""
    return JSONResponse(
        {
            "type": f"urn:chorister:problem:{name}",
            "title": name.replace("-", " "),
            "status": status,
            "detail": detail,
        },
        status_code=status,
        media_type="application/problem+json",
        headers={**(headers or {}), "Cache-Control": "no-store"},
    )


def _summary(status: CheckpointStatus | None) -> dict[str, object] | None:
    if status is None:
        return None
    checkpoint = status.checkpoint
    return {"size": checkpoint.size, "time": status.time, "root": checkpoint.root.hex()}
