"""The registry's public files over HTTP.

Short files that never change are cached in memory, because all devices fetch them. Long files are
read chunk by chunk, as fast as the client reads: clients that request them and read nothing do not
fill the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

_IMMUTABLE: Final = "public, max-age=31536000, immutable"
_CACHED_FILES: Final = 256
_MAX_CACHED_BYTES: Final = 1 << 16
_CACHED_TAGS: Final = 4096
_CHUNK_BYTES: Final = 1 << 16
# A few seconds, as c2sp.org/tlog-tiles says: a cached checkpoint delays a revocation.
_BRIEF: Final = "public, max-age=5"
_FILES: Final = (
    (re.compile(r"checkpoint"), _BRIEF, "text/plain; charset=utf-8"),
    (re.compile(r"list\.tlog-proof"), _BRIEF, "text/plain; charset=utf-8"),
    (re.compile(r"candidate"), "no-store", "text/plain; charset=utf-8"),
    (re.compile(r"about\.json"), _BRIEF, "application/json"),
    (re.compile(r"list/[0-9a-f]{64}"), _IMMUTABLE, "text/plain; charset=utf-8"),
    (re.compile(r"body/[0-9a-f]{64}"), _IMMUTABLE, "application/octet-stream"),
    (re.compile(r"policy/[0-9a-f]{64}\.toml"), _IMMUTABLE, "application/toml"),
    (
        re.compile(
            r"tile/(?:[0-9]|[1-5][0-9]|6[0-3]|entries)/(?:x[0-9]{3}/){0,6}[0-9]{3}(?:\.p/[1-9][0-9]{0,2})?"
        ),
        _IMMUTABLE,
        "application/octet-stream",
    ),
)


class PublicFiles:
    """The log's files in a folder, and no others."""

    def __init__(self, public: Path) -> None:
        self._public = public
        self._cache: dict[str, bytes] = {}
        self._tags: dict[str, tuple[str, int]] = {}  # ETag and length of long files

    async def answer(self, request: Request, path: str) -> Response | None:
        """Return the file at a path; None if it does not exist, or is not one of the log's."""
        for pattern, caching, kind in _FILES:
            if pattern.fullmatch(path):
                with contextlib.suppress(OSError):
                    return await self._answer(request, path, caching, kind)
        return None

    async def _answer(self, request: Request, path: str, caching: str, kind: str) -> Response:
        data = self._cache.get(path)
        if data is None:
            file, immutable = self._public / path, caching is _IMMUTABLE
            if immutable and (await run_in_threadpool(file.stat)).st_size > _MAX_CACHED_BYTES:
                return await self._answer_long(request, path, kind)
            data = await run_in_threadpool(file.read_bytes)
            if immutable:
                _cache(self._cache, path, data, _CACHED_FILES)
        tag = _tag(hashlib.sha256(data).hexdigest())
        return _unchanged(request, tag, caching) or Response(
            data, media_type=kind, headers=_file_headers(tag, caching)
        )

    async def _answer_long(self, request: Request, path: str, kind: str) -> Response:
        """Answer with a file that never changes and is too long to cache; hash it only once."""
        file = self._public / path
        if path not in self._tags:
            _cache(self._tags, path, await run_in_threadpool(_digest, file), _CACHED_TAGS)
        tag, size = self._tags[path]
        return _unchanged(request, tag, _IMMUTABLE) or _ChunkedFile(
            file, size, media_type=kind, headers=_file_headers(tag, _IMMUTABLE)
        )


class _ChunkedFile(Response):
    """A long file. Each chunk is read when the one before has been sent.

    The file is open only while a chunk is read: there may be more clients than descriptors.
    """

    def __init__(
        self, file: Path, size: int, *, media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(media_type=media_type, headers={**headers, "Content-Length": str(size)})
        self._file = file
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        at = 0
        while scope["method"] != "HEAD" and at < self._size:
            chunk = await run_in_threadpool(_read_chunk, self._file, at)
            if not chunk:  # truncated meanwhile: the server notices an incomplete answer
                return
            at += len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": at < self._size})
        if at == 0:
            await send({"type": "http.response.body", "body": b""})


def _read_chunk(file: Path, at: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(at)
        return opened.read(_CHUNK_BYTES)


def _digest(file: Path) -> tuple[str, int]:
    with file.open("rb") as opened:
        return _tag(hashlib.file_digest(opened, "sha256").hexdigest()), opened.tell()


def _tag(digest: str) -> str:
    return f'"{digest}"'


def _cache(cached: dict[str, T], path: str, value: T, limit: int) -> None:
    while len(cached) >= limit:
        del cached[next(iter(cached))]
    cached[path] = value


def _unchanged(request: Request, tag: str, caching: str) -> Response | None:
    asked = request.headers.get("if-none-match", "")
    if tag in {candidate.strip() for candidate in asked.split(",")}:
        return Response(status_code=304, headers=_file_headers(tag, caching))
    return None


def _file_headers(tag: str, caching: str) -> dict[str, str]:
    return {"ETag": tag, "Cache-Control": caching, "X-Content-Type-Options": "nosniff"}
