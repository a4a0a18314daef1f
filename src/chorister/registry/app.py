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
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
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
from chorister.registry.log import Registry
from chorister.transparency.checkpoint import Checkpoint
from chorister.transparency.entries import MAX_ENTRY

__all__ = ["Limits", "build_app"]

T = TypeVar("T")
_log = logging.getLogger("chorister.registry")

_IMMUTABLE: Final = "public, max-age=31536000, immutable"
_KEPT_FILES: Final = 256
_KEPT_BYTES: Final = 1 << 16
# Short: a cached checkpoint delays a revocation by as much.
_BRIEF: Final = "public, max-age=30"
_FILES: Final = (
    (re.compile(r"checkpoint"), _BRIEF, "text/plain; charset=utf-8"),
    (re.compile(r"candidate"), "no-store", "text/plain; charset=utf-8"),
    (re.compile(r"about\.json"), _BRIEF, "application/json"),
    (re.compile(r"list/[0-9a-f]{64}"), _IMMUTABLE, "text/plain; charset=utf-8"),
    (re.compile(r"entry/[0-9a-f]{64}"), _IMMUTABLE, "application/octet-stream"),
    (re.compile(r"policy/[0-9a-f]{64}\.toml"), _IMMUTABLE, "application/toml"),
    (
        re.compile(r"tile/0/(?:x[0-9]{3}/){0,6}[0-9]{3}(?:\.p/[0-9]{1,3})?"),
        _IMMUTABLE,
        "application/octet-stream",
    ),
)
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
    # Bodies read at once; their sizes add up in memory.
    uploads: int = 8


@dataclass(kw_only=True, slots=True)
class _Service:
    registry: Registry
    public: Path
    interval: float
    limits: Limits
    uploads: asyncio.Semaphore = field(init=False)
    # Threads for whatever takes the log's lock, apart from those that read files: a write that
    # waits for the disk keeps no reader waiting.
    threads: anyio.CapacityLimiter = field(init=False)
    kept: dict[str, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.uploads = asyncio.Semaphore(self.limits.uploads)
        self.threads = anyio.CapacityLimiter(4)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(call, limiter=self.threads)

    async def file(self, request: Request) -> Response:
        path = request.path_params["path"]
        for pattern, caching, kind in _FILES:
            if pattern.fullmatch(path):
                try:
                    data = await self._read(path, keep=caching is _IMMUTABLE)
                except OSError:
                    break
                return _file_response(request, data, caching, kind)
        return _problem(404, "not-found", f"there is no {path}")

    async def _read(self, path: str, *, keep: bool) -> bytes:
        """A public file; what never changes and all devices fetch is read once."""
        data = self.kept.get(path)
        if data is None:
            data = await run_in_threadpool((self.public / path).read_bytes)
            if keep and len(data) <= _KEPT_BYTES:
                while len(self.kept) >= _KEPT_FILES:
                    del self.kept[next(iter(self.kept))]
                self.kept[path] = data
        return data

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
        data = await self._body(request, self.limits.entry_bytes)
        if isinstance(data, Response):
            return data
        receipt = await self._in_thread(lambda: self.registry.submit(data))
        address = receipt.address.hex()
        return JSONResponse(
            {"index": receipt.index, "address": address, "new": receipt.new},
            status_code=201 if receipt.new else 200,
            headers={"Location": f"/entry/{address}", "Cache-Control": "no-store"},
        )

    async def post_cosignature(self, request: Request) -> Response:
        data = await self._body(request, self.limits.cosignature_bytes)
        if isinstance(data, Response):
            return data
        missing = await self._in_thread(lambda: self.registry.add_cosignature(data))
        return JSONResponse({"waiting_for": list(missing)}, headers={"Cache-Control": "no-store"})

    async def _body(self, request: Request, limit: int) -> bytes | Response:
        """The body, or why it was not read to its end."""
        too_long = _problem(413, "too-large", f"at most {limit} bytes are accepted")
        declared = request.headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared[:20]) > limit:
            return too_long
        data = bytearray()
        try:
            async with self.uploads, asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > limit:
                        return too_long
        except TimeoutError:
            seconds = f"{self.limits.body_seconds:g} s"
            return _problem(408, "too-slow", f"the body did not arrive within {seconds}")
        except ClientDisconnect:
            return _problem(400, "disconnected", "the sender went away")
        return bytes(data)

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
        registry=registry, public=public, interval=interval, limits=limits or Limits()
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


def _file_response(request: Request, data: bytes, caching: str, kind: str) -> Response:
    tag = f'"{hashlib.sha256(data).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": caching, "X-Content-Type-Options": "nosniff"}
    asked = request.headers.get("if-none-match", "")
    if tag in {candidate.strip() for candidate in asked.split(",")}:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)


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
