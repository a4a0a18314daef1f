"""A server's connections: clients that are slow, silent or never stop sending are cut off.

Uvicorn limits the time between requests and nothing else. Here a connection is always in one of
six states, each with a deadline:

    state      until                                   at most (seconds, by default)
    OPENED     the first byte of a request             `header`, which covers the head too (10)
    HEAD       the end of the request's header         `header` (10)
    BODY       the end of its body                     `body` (30); `stall` below `body_rate` (10)
    ANSWERING  the end of the last answer              `answer` (300)
    IDLE       the first byte of the next request      uvicorn's `timeout_keep_alive` (15)
    CLOSING    the client has read everything          `unread` (30)

Only the events in the second column lead from one state to the next. Other bytes (empty lines,
whatever follows an answer or an `Upgrade`) change nothing and extend no deadline. Two deadlines
hold in every state: `answer` while an answer is due, whatever the client sends meanwhile, and
`unread` while the client leaves much of an answer unread. There is no timer per request: each
connection checks its deadlines about once a second. Header fields are limited in number, and so
are all bytes that are not body (headers, the framing of chunks, trailers). Trailers are read and
dropped: uvicorn would treat them as header fields, which a proxy in front has not checked.

When all places are taken (uvicorn's `limit_concurrency`), the connection that has waited longest
for its client makes room for a new one. A connection waits for its client unless it is answering a
complete request, and again while the client does not read the answer. So silent connections,
however many, keep nobody out. Neither does a client who asks again before it has its answer: with
requests in line, a connection makes room like one that waits. Nor does one address take all places:
if it has `per_address` connections, those of its own that wait make room, and if none waits, the
new one is closed.

While one request waits behind another, nothing more is read: whatever a client sends, a connection
keeps no more than one read of its socket in memory.

Plain uploads are answered right here (`Direct`): a task, a scope and two coroutines per request
would take longer than everything else that is done for one.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import math
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl, service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chorister.errors import ServiceError
from chorister.http_server_addresses import AddressLimit

_MAX_PORT: Final = 65_535
_CHECK_SECONDS: Final = 1.0
_MAX_HEADER_FIELDS: Final = 100
"""As an object, a short field takes 20 times the memory that it takes on the wire."""
_MAX_PIPELINED: Final = 64
"""How many requests may wait on one connection."""
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """The limits of a connection, in seconds and bytes; see the table above."""

    header: float = 10.0
    body: float = 30.0
    # A body that arrives at less than `body_rate` bytes a second is cut off after `stall` seconds.
    stall: float = 10.0
    body_rate: int = 500
    answer: float = 300.0
    unread: float = 30.0
    # Of a header, or of anything else that is not body.
    head_bytes: int = 65_536
    # Connections of one IPv4 address or one IPv6 network of 64 bits; None: no limit.
    per_address: int | None = None


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A complete response. It can be sent as an ASGI application or written to a socket."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""

    async def __call__(
        self, _scope: object, _receive: object, send: Callable[[Any], Awaitable[None]]
    ) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})

    def encode(self, fields: Iterable[tuple[bytes, bytes]], *, keep_alive: bool) -> bytes:
        """Encode it for a socket, with further header fields."""
        lines = [_STATUS_LINES[self.status]]
        for name, value in (*fields, *self.headers):
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
        return b"".join((*lines, self.body))


class Incoming(Protocol):
    """A request that is answered without the application."""

    def feed(self, part: bytes) -> None:
        """Take a part of the body."""
        ...

    def complete(self, respond: Callable[[RawResponse], None]) -> None:
        """Respond once to the whole body, now or later."""
        ...

    def gone(self) -> None:
        """Release everything: the client has disconnected."""
        ...


class Direct(Protocol):
    """Decides which requests are answered without the application."""

    def begin(
        self, url: bytes, headers: Sequence[tuple[bytes, bytes]], disconnect: Callable[[], None]
    ) -> Incoming | None:
        """Start a POST by its header; None if the application has to answer it."""
        ...


class ConnectionState(enum.Enum):
    """The state of a connection; see the module's table."""

    OPENED = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWERING = enum.auto()
    IDLE = enum.auto()
    CLOSING = enum.auto()


class _DirectCycle:
    """A direct request as uvicorn sees it, in place of its own `RequestResponseCycle`."""

    __slots__ = ("disconnected", "keep_alive", "more_body", "request", "response_complete")

    message_event: ClassVar[asyncio.Event] = asyncio.Event()  # nobody waits for it

    def __init__(self, request: Incoming, *, keep_alive: bool) -> None:
        self.request = request
        self.keep_alive = keep_alive
        self.more_body = True
        self.response_complete = False
        self.disconnected = False


class _Flow(FlowControl):
    """Reads from a connection only what can be handled now.

    Uvicorn resumes reading after every answer, and whenever an application asks for a body.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self.deaf = False  # nothing more is read: the connection closes with its last answer
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Resume unless a request waits: only the newest one can lack a part of its body."""
        if not self.deaf and not self._pipeline:
            super().resume_reading()


class GuardedConnection(HttpToolsProtocol):
    """One connection; `guarded_protocol` makes a subclass of it for each server."""

    flow: _Flow

    deadlines: ClassVar[Deadlines] = Deadlines()
    direct: ClassVar[Direct | None] = None
    # The server's connections that wait for their client, the longest first. Each has a
    # `transport`; those that are still in a TLS handshake are `http_server_tls.Handshake`s.
    waiting: ClassVar[dict[Any, None]]
    addresses: ClassVar[AddressLimit]

    _state: ConnectionState = ConnectionState.OPENED
    _state_ends: float = 0.0  # by the event loop's clock, like all times here
    _stall_ends: float = 0.0
    _answer_ends: float = math.inf
    _unread_ends: float = math.inf
    _overhead: int = 0  # bytes since a request began, its header ended or a part of its body came
    _running: Any = None  # the cycle that is to be answered next, whoever answers it
    _next_check: asyncio.TimerHandle | None = None

    # --- the connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        admitted = self.addresses.admit(self)
        if not admitted:
            transport.abort()
        limit = self.config.limit_concurrency
        if limit is not None and admitted:
            if not self.make_room():
                self.app = service_unavailable
            # Uvicorn counts tasks as well, and those of closed connections may not have ended yet.
            self.limit_concurrency = 2 * limit
        self._update_waiting()
        self._enter(ConnectionState.OPENED, self.deadlines.header)
        self._next_check = self.loop.call_later(_CHECK_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self.addresses.release(self)
        if self._next_check is not None:
            self._next_check.cancel()
            self._next_check = None
        cycle: Any = self.cycle
        if isinstance(cycle, _DirectCycle):
            cycle.request.gone()
        # Uvicorn tells only the newest request, which may wait behind this one.
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def make_room(self) -> bool:
        """Close connections that wait for their client if all places are taken.

        Returns whether there is a place.
        """
        limit = self.config.limit_concurrency or math.inf
        places: set[Any] = self.connections
        while len(places) >= limit and self.waiting:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            places.discard(oldest)
            oldest.transport.abort()
        return len(places) < limit

    def pause_writing(self) -> None:
        self._unread_ends = self.loop.time() + self.deadlines.unread
        super().pause_writing()
        self._update_waiting()

    def resume_writing(self) -> None:
        self._unread_ends = math.inf
        super().resume_writing()
        if not self.transport.is_closing():
            self._update_waiting()

    def _update_waiting(self) -> None:
        """Record whether the connection waits for its client, or the like: it may make room."""
        request = self._running
        if (
            request is None
            or request.more_body
            or self.pipeline
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            self.waiting.setdefault(self)
        else:
            self.waiting.pop(self, None)

    def _heard_from(self) -> None:
        """Move to the end of those that wait."""
        self.waiting.pop(self, None)
        self._update_waiting()

    def _enter(self, state: ConnectionState, seconds: float) -> None:
        self._state = state
        self._state_ends = self.loop.time() + seconds

    def _check(self) -> None:
        self._next_check = self.loop.call_later(_CHECK_SECONDS, self._check)
        now = self.loop.time()
        if self.transport.is_closing() and self._state is not ConnectionState.CLOSING:
            self._close()
        if self.flow.read_paused:  # the application is slow, not the client
            self._stall_ends = now + self.deadlines.stall
        ends = min(self._answer_ends, self._unread_ends)
        if not self.pipeline:  # otherwise nothing is read, whatever the client sends
            ends = min(ends, self._state_ends)
            if self._state is ConnectionState.BODY:
                ends = min(ends, self._stall_ends)
        if now <= ends:
            return
        if self._state is ConnectionState.IDLE and now <= self._unread_ends:
            self.transport.close()  # gently: the answer may still be on its way
        else:
            self.transport.abort()

    # --- requests -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.flow.deaf:
            return
        self._overhead += len(data)
        if self._overhead > self.deadlines.head_bytes + len(data):
            self.transport.abort()
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._stop_reading()  # the parser can't go on in another protocol
        except httptools.HttpParserError:
            if self._running is None or self._running.more_body:
                self.send_400_response("Invalid HTTP request received.")
            else:  # the requests before are answered first
                self._stop_reading()

    def _stop_reading(self) -> None:
        self.flow.deaf = True
        self.flow.pause_reading()
        self.cycle.keep_alive = False

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests are waiting on one connection")
        self._overhead = 0
        if self._state is ConnectionState.OPENED:
            self._state = ConnectionState.HEAD
        else:
            if self._state is ConnectionState.IDLE:
                self._heard_from()
            self._enter(ConnectionState.HEAD, self.deadlines.header)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state is ConnectionState.HEAD:
            if len(self.headers) >= _MAX_HEADER_FIELDS:
                raise ValueError("too many header fields")
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._overhead = 0
        self._enter(ConnectionState.BODY, self.deadlines.body)
        self._stall_ends = self.loop.time() + self.deadlines.stall
        request = None
        if self.direct is not None and self._is_plain():
            request = self.direct.begin(self.url, self.headers, self.transport.abort)
        if request is None:
            super().on_headers_complete()
            self._update_waiting()  # it may be in line now
        else:
            keep_alive = self.parser.should_keep_alive()
            self._running = _DirectCycle(request, keep_alive=keep_alive)
            self.cycle = self._running

    def _is_plain(self) -> bool:
        """Whether it is a POST that waits behind no other and asks only for an answer."""
        before: Any = self.cycle
        return (
            self.parser.get_method() == b"POST"
            and (before is None or before.response_complete)
            and not self.expect_100_continue
            and not self.flow.write_paused  # an application waits until the client reads
            and not self.parser.should_upgrade()
            and self.parser.get_http_version() == "1.1"
            and self.app is not service_unavailable
        )

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        earned = self._stall_ends + len(body) / self.deadlines.body_rate
        self._stall_ends = min(earned, self.loop.time() + self.deadlines.stall)
        cycle: Any = self.cycle
        if not isinstance(cycle, _DirectCycle):
            super().on_body(body)
        else:
            cycle.request.feed(body)

    def on_message_complete(self) -> None:
        cycle: Any = self.cycle
        if cycle.response_complete:  # it was answered before its body ended
            self._wait_for_next()
            return
        self._enter(ConnectionState.ANSWERING, self.deadlines.answer)
        self._answer_ends = min(self._answer_ends, self._state_ends)
        cycle.more_body = False
        self._update_waiting()
        if isinstance(cycle, _DirectCycle):
            cycle.request.complete(lambda answer: self._answer(cycle, answer))
        else:
            super().on_message_complete()

    # --- answers --------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:  # noqa: ANN401 (uvicorn's types)
        self._running = cycle
        self._update_waiting()
        super()._start_asgi_task(cycle, app)

    def _answer(self, cycle: _DirectCycle, answer: RawResponse) -> None:
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
        """Replaces uvicorn's own method, which would set a timer that any byte cancels."""
        self.server_state.total_requests += 1
        self._running = None
        if self.transport.is_closing():
            self._close()
            return
        if self.pipeline:
            self._answer_ends = self.loop.time() + self.deadlines.answer
            self._start_asgi_task(*self.pipeline.pop())
            self._read_on()
            return
        self.flow.resume_reading()
        self._answer_ends = math.inf
        self._update_waiting()
        if self._state is ConnectionState.ANSWERING:
            self._wait_for_next()

    def _read_on(self) -> None:
        """Read the rest of a request once no other waits before it."""
        if self.pipeline:
            return
        if self._state is ConnectionState.HEAD:
            self._enter(ConnectionState.HEAD, self.deadlines.header)
        elif self._state is ConnectionState.BODY:
            self._enter(ConnectionState.BODY, self.deadlines.body)
        self.flow.resume_reading()

    def _wait_for_next(self) -> None:
        self._heard_from()
        self._enter(ConnectionState.IDLE, self.timeout_keep_alive)

    def _close(self) -> None:
        """Give the client time to read what was written."""
        self._enter(ConnectionState.CLOSING, self.deadlines.unread)
        self._update_waiting()


def guarded_protocol(deadlines: Deadlines, direct: Direct | None = None) -> type[Any]:
    """Return the protocol class of one server, for uvicorn's `http` option."""
    own: dict[str, Any] = {"deadlines": deadlines, "direct": direct, "waiting": {}}
    own["addresses"] = AddressLimit(deadlines.per_address, own["waiting"])
    return type("Guarded", (GuardedConnection,), own)


def server_config(
    app: Any,  # noqa: ANN401 - any ASGI application
    *,
    connections: int,
    deadlines: Deadlines | None = None,
    direct: Direct | None = None,
    **options: Any,  # noqa: ANN401 - uvicorn's own
) -> uvicorn.Config:
    """Return uvicorn's settings for a server with guarded connections."""
    return uvicorn.Config(
        app,
        http=guarded_protocol(deadlines or Deadlines(), direct),
        limit_concurrency=connections,
        timeout_keep_alive=15,
        # No line per request: who sent what, and when, is nobody's business.
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        **options,
    )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket."""
    # Python would leave a socket open for such a port.
    if not 0 <= port <= _MAX_PORT:
        raise ServiceError(f"can't listen on {host}:{port}: a port is a number up to {_MAX_PORT:,}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "another program uses this port: stop it, or choose another" if taken else error
        raise ServiceError(f"can't listen on {host}:{port}: {why}") from error


def server_url(scheme: str, host: str, listener: socket.socket) -> str:
    """Return the URL of a listening socket, whose port the system may have chosen."""
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{listener.getsockname()[1]}"
