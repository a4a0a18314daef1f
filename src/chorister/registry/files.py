"""The registry's public files over HTTP.

What is short and never changes is kept in memory, for all devices fetch it. A long file is read
piece by piece, as its client takes it: clients who ask for it and take nothing fill no memory.
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

__all__ = ["PublicFiles"]

T = TypeVar("T")

_IMMUTABLE: Final = "public, max-age=31536000, immutable"
_KEPT_FILES: Final = 256
_KEPT_BYTES: Final = 1 << 16
_KEPT_TAGS: Final = 4096
_PIECE_BYTES: Final = 1 << 16
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


class PublicFiles:
    """The files below a folder that belong to the log, and no others."""

    def __init__(self, public: Path) -> None:
        self._public = public
        self._kept: dict[str, bytes] = {}
        self._tags: dict[str, tuple[str, int]] = {}  # of long files, with their length

    async def answer(self, request: Request, path: str) -> Response | None:
        """The file at a path; None if it is not one of the log's, or not there."""
        for pattern, caching, kind in _FILES:
            if pattern.fullmatch(path):
                with contextlib.suppress(OSError):
                    return await self._answer(request, path, caching, kind)
        return None

    async def _answer(self, request: Request, path: str, caching: str, kind: str) -> Response:
        data = self._kept.get(path)
        if data is None:
            keep = caching is _IMMUTABLE
            if keep and await self._is_long(path):
                return await self._long(request, path, kind)
            data = await run_in_threadpool((self._public / path).read_bytes)
            if keep:
                _keep(self._kept, path, data, _KEPT_FILES)
        tag = _tag(hashlib.sha256(data).hexdigest())
        return _unchanged(request, tag, caching) or Response(
            data, media_type=kind, headers=_file_headers(tag, caching)
        )

    async def _is_long(self, path: str) -> bool:
        found = await run_in_threadpool((self._public / path).stat)
        return found.st_size > _KEPT_BYTES

    async def _long(self, request: Request, path: str, kind: str) -> Response:
        """A file that never changes and is too long to be kept; its digest is computed once."""
        file = self._public / path
        if path not in self._tags:
            _keep(self._tags, path, await run_in_threadpool(_digest, file), _KEPT_TAGS)
        tag, size = self._tags[path]
        return _unchanged(request, tag, _IMMUTABLE) or _Pieces(
            file, size, media_type=kind, headers=_file_headers(tag, _IMMUTABLE)
        )


class _Pieces(Response):
    """A long file. Each piece is read when the one before has left for its client.

    The file is open only while a piece is read: there may be more clients than files.
    """

    def __init__(
        self, file: Path, size: int, *, media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(media_type=media_type, headers={**headers, "Content-Length": str(size)})
        self._file = file
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send it."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        at = 0
        while scope["method"] != "HEAD" and at < self._size:
            piece = await run_in_threadpool(_piece, self._file, at)
            if not piece:  # cut since: the server notices an answer without its end
                return
            at += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": at < self._size})
        if at == 0:
            await send({"type": "http.response.body", "body": b""})


def _piece(file: Path, at: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(at)
        return opened.read(_PIECE_BYTES)


def _digest(file: Path) -> tuple[str, int]:
    with file.open("rb") as opened:
        return _tag(hashlib.file_digest(opened, "sha256").hexdigest()), opened.tell()


def _tag(digest: str) -> str:
    return f'"{digest}"'


def _keep(kept: dict[str, T], path: str, value: T, most: int) -> None:
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[path] = value


def _unchanged(request: Request, tag: str, caching: str) -> Response | None:
    asked = request.headers.get("if-none-match", "")
    if tag in {candidate.strip() for candidate in asked.split(",")}:
        return Response(status_code=304, headers=_file_headers(tag, caching))
    return None


def _file_headers(tag: str, caching: str) -> dict[str, str]:
    return {"ETag": tag, "Cache-Control": caching, "X-Content-Type-Options": "nosniff"}
