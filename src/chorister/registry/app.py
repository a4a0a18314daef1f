"""The registry over HTTP: the public folder as static files, and two places to post to.

    GET  /checkpoint, /list/HEX, ...     the files of `transparency.sources`
    GET  /status                         what is published, and who is waited for
    POST /entries                        an entry; 201 with its place, 200 if it was there before
    POST /cosignatures                   a cosigner's signature line

Everything under GET may as well be served by a CDN from the folder itself. Whatever has a digest
in its name never changes and says so; a missing file is never cached, or a cache would go on
withholding an entry that has come since. Refusals are RFC 9457 problem documents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
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
from chorister.registry.files import PublicFiles
from chorister.registry.log import Registry
from chorister.transparency.checkpoint import Checkpoint
from chorister.transparency.entries import MAX_ENTRY

__all__ = ["Limits", "build_app"]

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
    """What a request may take."""

    entry_bytes: int = MAX_ENTRY
    cosignature_bytes: int = 1024
    # Seconds for a whole body to arrive, however slowly it trickles.
    body_seconds: float = 30.0
    # Bytes of entries in memory, of all that are arriving or waiting.
    held_bytes: int = 8 * MAX_ENTRY
    # Postings of one kind that wait for the log.
    waiting: int = 64


@dataclass(kw_only=True, slots=True)
class _Postings:
    """Entries, or cosignatures: each kind has its own room and threads.

    A body counts by what has arrived of it, and it keeps no other waiting: whoever trickles
    takes no room. The connection cuts those who are slower than a minimum rate.
    """

    limits: Limits
    longest: int  # bytes of one body
    room: int  # bytes of all bodies
    threads: anyio.CapacityLimiter
    held: int = 0
    waiting: int = 0

    async def take(self, request: Request, work: Callable[[bytes], T]) -> T | Response:
        """Read the body and work on it in a thread; an answer if it does not come to that."""
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
        too_long = _problem(413, "too-large", f"at most {self.longest} bytes are accepted")
        declared = request.headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared[:20]) > self.longest:
            return too_long
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    self.held += len(chunk)
                    if len(data) > self.longest:
                        return too_long
                    if self.held > self.room:
                        return _busy()
        except TimeoutError:
            seconds = f"{self.limits.body_seconds:g} s"
            return _problem(408, "too-slow", f"the body did not arrive within {seconds}")
        except ClientDisconnect:
            return _problem(400, "disconnected", "the sender went away")
        return None


@dataclass(kw_only=True, slots=True)
class _Service:
    registry: Registry
    files: PublicFiles
    interval: float
    limits: Limits
    entries: _Postings = field(init=False)
    cosignatures: _Postings = field(init=False)
    # Threads for our own checkpoints, and for whoever asks about them: like those of the postings
    # they may wait for the log's lock, and none of them keeps a reader of files waiting.
    threads: anyio.CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.entries = _Postings(
            limits=limits,
            longest=limits.entry_bytes,
            room=limits.held_bytes,
            threads=anyio.CapacityLimiter(2),
        )
        self.cosignatures = _Postings(
            limits=limits,
            longest=limits.cosignature_bytes,
            room=limits.held_bytes,
            threads=anyio.CapacityLimiter(2),
        )
        self.threads = anyio.CapacityLimiter(4)

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
            },
            headers={"Cache-Control": "no-store"},
        )

    async def post_entry(self, request: Request) -> Response:
        receipt = await self.entries.take(request, self.registry.submit)
        if isinstance(receipt, Response):
            return receipt
        address = receipt.address.hex()
        return JSONResponse(
            {"index": receipt.index, "address": address, "new": receipt.new},
            status_code=201 if receipt.new else 200,
            headers={"Location": f"/entry/{address}", "Cache-Control": "no-store"},
        )

    async def post_cosignature(self, request: Request) -> Response:
        missing = await self.cosignatures.take(request, self.registry.add_cosignature)
        if isinstance(missing, Response):
            return missing
        return JSONResponse({"waiting_for": list(missing)}, headers={"Cache-Control": "no-store"})

    async def refresh(self) -> None:
        """Offer a new candidate, unless one still waits; a failure is logged and not the end."""
        try:
            before = await self._in_thread(self.registry.status)
            candidate = await self._in_thread(self.registry.issue)
            if before.candidate not in (None, candidate.checkpoint):
                names = ", ".join(before.waiting_for)
                _log.warning("a candidate was replaced that %s did not cosign in time", names)
        except ChoristerError as error:
            _log.error("no new checkpoint: %s", error)
        except Exception:
            # Without this the log would grow stale in silence.
            _log.exception("no new checkpoint, by a bug in Chorister")

    async def keep_fresh(self) -> None:
        """A new candidate every interval."""
        while True:
            await asyncio.sleep(self.interval)
            await self.refresh()


def build_app(
    registry: Registry, public: Path, *, interval: float = 60.0, limits: Limits | None = None
) -> Starlette:
    """The registry as an ASGI application, which also keeps its checkpoints fresh."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.refresh()
        task = asyncio.create_task(service.keep_fresh())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    service = _Service(
        registry=registry,
        files=PublicFiles(public),
        interval=interval,
        limits=limits or Limits(),
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
    """What the router refuses before any of ours is called."""
    if not isinstance(error, HTTPException):  # Starlette calls this with nothing else.
        raise error
    name = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} is not for {request.url.path}"
    return _problem(error.status_code, name, detail, error.headers)


def _busy() -> Response:
    return _problem(503, "busy", "too many are posting; come back", {"Retry-After": "5"})


def _problem(
    status: int, name: str, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """RFC 9457; the type names what went wrong, as the error class does."""
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


def _summary(checkpoint: Checkpoint | None) -> dict[str, object] | None:
    if checkpoint is None:
        return None
    return {"size": checkpoint.size, "time": checkpoint.time, "root": checkpoint.root.hex()}
