"""Answers as bytes: successes, and RFC 9457 problem documents for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.responses import Response

from chorister.aggregator.asgi import Send
from chorister.dap.draft import PROBLEM
from chorister.dap.problems import problem_document
from chorister.errors import ProblemError

__all__ = ["ACCEPTED", "Answer", "made", "refusal"]

_NO_STORE: Final = (b"cache-control", b"no-store")
# After these the rest of the body is not worth reading.
_LAST_WORD: Final = frozenset((408, 413))
_BUSY: Final = frozenset((429, 503))
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; uploads send it without Starlette in between."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""

    async def send(self, send: Send) -> None:
        """Send it over ASGI."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})

    def encode(self, fields: Iterable[tuple[bytes, bytes]], *, keep_alive: bool) -> bytes:
        """The same for a socket, with further header fields."""
        lines = [_STATUS_LINES[self.status]]
        for name, value in (*fields, *self.headers):
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
        return b"".join((*lines, self.body))

    def response(self) -> Response:
        """The same for Starlette."""
        response = Response(self.body, status_code=self.status)
        response.raw_headers = list(self.headers)
        return response


def made(
    body: bytes = b"",
    *,
    status: int = 200,
    media_type: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """A success."""
    fields = [(b"content-length", str(len(body)).encode())]
    if media_type is not None:
        fields.append((b"content-type", media_type.encode()))
    named = {"cache-control": "no-store"} | {
        name.lower(): value for name, value in (headers or {}).items()
    }
    fields += [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
    return Answer(status, tuple(fields), body)


ACCEPTED: Final = Answer(200, ((b"content-length", b"0"), _NO_STORE))
"""What an upload gets whose reports were all taken."""


def refusal(error: ProblemError, headers: Mapping[str, str] | None = None) -> Answer:
    """A refusal in words."""
    if error.problem is None and "title" not in error.extra:
        error.extra["title"] = HTTPStatus(error.status).phrase
    named = dict(headers or {})
    if error.status == HTTPStatus.UNAUTHORIZED:
        named["www-authenticate"] = "Bearer"
    if error.status in _LAST_WORD:
        named["connection"] = "close"
    if error.status in _BUSY:
        named.setdefault("retry-after", "1")
    return made(problem_document(error), status=error.status, media_type=PROBLEM, headers=named)
