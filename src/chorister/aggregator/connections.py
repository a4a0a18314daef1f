"""Connections of clients who are slow, or who never stop talking, are cut.

Uvicorn limits the time between requests and nothing else. This protocol adds three deadlines (for
a request's head, for its body, for the whole exchange) and a limit on all that is no body: heads,
the framing of chunks, trailers. There is no timer a request: each connection looks at its own
deadline about once a second. Trailers are read and forgotten; uvicorn would take them for header
fields, behind the back of a proxy that checked those.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Deadlines", "guarded_protocol"]

_LOOK: Final = 1.0
# For a client that takes its answer slowly, after which the connection is cut.
_LINGER: Final = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Seconds, and bytes of a head, or of whatever else brings no body along."""

    header: float = 10.0
    body: float = 30.0
    answer: float = 300.0
    head_bytes: int = 65_536


class _Guarded(HttpToolsProtocol):
    """One connection."""

    deadlines: ClassVar[Deadlines] = Deadlines()

    _deadline: float = math.inf
    _overhead: int = 0  # bytes since a request began, its head ended or a part of its body came
    _in_head: bool = True
    _unfinished: bool = False  # a request whose body has not ended
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self.deadlines.header)
        self._look = self.loop.call_later(_LOOK, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        if self._overhead > self.deadlines.head_bytes + len(data):
            self.transport.abort()
            return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head = self._unfinished = True
        self._overhead = 0
        self._expect(self.deadlines.header)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._overhead = 0
        self._expect(self.deadlines.body)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished = False
        self._expect(self.deadlines.answer)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect(_LINGER)
        elif self.pipeline or not self.cycle.response_complete:
            self._expect(self.deadlines.answer)
        elif not self._unfinished:
            self._deadline = math.inf  # idle: uvicorn's keep-alive timer sees to it

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: whoever asks for another protocol is answered in this one."""

    def _expect(self, seconds: float) -> None:
        self._deadline = self.loop.time() + seconds

    def _check(self) -> None:
        if self.loop.time() > self._deadline:
            self._look = None
            self.transport.abort()
        else:
            self._look = self.loop.call_later(_LOOK, self._check)


def guarded_protocol(deadlines: Deadlines) -> type[Any]:
    """The protocol class for uvicorn's `http` option."""
    return type("Guarded", (_Guarded,), {"deadlines": deadlines})
