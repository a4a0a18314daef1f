"""Connections of clients who are slow, or who never stop talking, are cut.

Uvicorn limits the time between requests and nothing else. This protocol adds three deadlines (for
a request's head, for its body, for the whole exchange) and a limit on all that is no body: heads,
the framing of chunks, trailers. There is no timer a request: each connection looks at its own
deadline about once a second. Trailers are read and forgotten; uvicorn would take them for header
fields, behind the back of a proxy that checked those.

A plain upload is answered right here (`Direct`): a task, a scope and two coroutines a request would
take longer than all that is done for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chorister.aggregator.answers import Answer

__all__ = ["Deadlines", "Direct", "Incoming", "guarded_protocol"]

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


class Incoming(Protocol):
    """A request that is answered without the application."""

    def feed(self, part: bytes) -> Answer | None:
        """A part of its body; an answer if that is the end of it."""
        ...

    def complete(self, answer: Callable[[Answer], None]) -> None:
        """The body is complete: answer it, now or later, once."""
        ...

    def gone(self) -> None:
        """Nobody waits for an answer any more."""
        ...


class Direct(Protocol):
    """Which requests are answered without the application."""

    def begin(self, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Incoming | None:
        """A POST, by its head; None where it has to go the long way."""
        ...


class _DirectCycle:
    """A direct request as uvicorn sees it, in place of its own `RequestResponseCycle`."""

    __slots__ = ("disconnected", "keep_alive", "request", "response_complete")

    message_event: ClassVar[asyncio.Event] = asyncio.Event()  # nobody waits for it

    def __init__(self, request: Incoming, *, keep_alive: bool) -> None:
        self.request = request
        self.keep_alive = keep_alive
        self.response_complete = False
        self.disconnected = False


class _Guarded(HttpToolsProtocol):
    """One connection."""

    deadlines: ClassVar[Deadlines] = Deadlines()
    direct: ClassVar[Direct | None] = None

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
        cycle: Any = self.cycle
        if isinstance(cycle, _DirectCycle):
            cycle.request.gone()
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
        self._unset_keepalive_if_required()  # the answer before may have come within one read
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._overhead = 0
        self._expect(self.deadlines.body)
        request = None
        if self.direct is not None and self._is_plain():
            request = self.direct.begin(self.url, self.headers)
        if request is None:
            super().on_headers_complete()
        else:
            keep_alive = self.parser.should_keep_alive()
            self.cycle = _DirectCycle(request, keep_alive=keep_alive)  # type: ignore[assignment]

    def _is_plain(self) -> bool:
        """Whether it is a POST that waits for no other and asks for nothing but an answer."""
        before: Any = self.cycle
        return (
            self.parser.get_method() == b"POST"
            and (before is None or before.response_complete)
            and not self.expect_100_continue
            and not self.flow.write_paused  # the long way waits for who does not read his answers
            and not self.parser.should_upgrade()
            and self.parser.get_http_version() == "1.1"
            and (self.limit_concurrency is None or len(self.connections) < self.limit_concurrency)
        )

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        cycle: Any = self.cycle
        if not isinstance(cycle, _DirectCycle):
            super().on_body(body)
        elif not cycle.response_complete:
            refused = cycle.request.feed(body)
            if refused is not None:
                cycle.keep_alive = False
                self._answer(cycle, refused)

    def on_message_complete(self) -> None:
        self._unfinished = False
        self._expect(self.deadlines.answer)
        cycle: Any = self.cycle
        if not isinstance(cycle, _DirectCycle):
            super().on_message_complete()
        elif not cycle.response_complete:
            cycle.request.complete(lambda answer: self._answer(cycle, answer))

    def _answer(self, cycle: _DirectCycle, answer: Answer) -> None:
        cycle.response_complete = True
        if self.transport.is_closing():
            return
        self.transport.write(
            answer.encode(self.server_state.default_headers, keep_alive=cycle.keep_alive)
        )
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

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


def guarded_protocol(deadlines: Deadlines, direct: Direct | None = None) -> type[Any]:
    """The protocol class for uvicorn's `http` option."""
    return type("Guarded", (_Guarded,), {"deadlines": deadlines, "direct": direct})
