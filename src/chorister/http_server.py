"""A server's connections: clients who are slow, silent or never stop talking are cut.

Uvicorn limits the time between requests and nothing else. Here a connection is always in one of
six states, each with a deadline:

    state      until                                    ends after (seconds, by default)
    OPENED     the first byte of a request              `header`, together with the head (10)
    HEAD       the end of its header fields             `header` (10)
    BODY       the end of its body                      `body` (30), `stall` below `body_rate` (10)
    ANSWERING  the end of the last answer               `answer` (300)
    IDLE       the first byte of the next request       uvicorn's `timeout_keep_alive` (15)
    CLOSING    the client took all that was written     `taking` (30)

Only the events in the second column lead from one state to another. Other bytes (empty lines,
whatever follows an answer or an `Upgrade`) change nothing, and postpone nothing. Two deadlines hold
in every state: `answer` while an answer is outstanding, whatever the client sends meanwhile, and
`taking` while the client leaves much of an answer unread. There is no timer per request: each
connection looks at its deadlines about once a second. A limit on all that is not body (heads, the
framing of chunks, trailers) holds as well. Trailers are read and dropped; uvicorn would take them
for header fields, behind the back of a proxy that checked those.

Where all places are taken (uvicorn's `limit_concurrency`), the connection that has waited longest
for its client makes room for a new one. A client is waited for unless a whole request of its is
being answered; also while it does not take what was answered. So silent connections, however
many, refuse nobody.

While a request waits behind another one, nothing more is read: what a connection may keep in memory
is one read of its socket, whatever its client sends.

A plain upload is answered right here (`Direct`): a task, a scope and two coroutines per request
would take longer than all that is done for it.
"""

from __future__ import annotations

import asyncio
import enum
import math
import socket
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import httptools
from uvicorn.protocols.http.flow_control import FlowControl, service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chorister.errors import ServiceError

__all__ = [
    "Deadlines",
    "Direct",
    "Incoming",
    "guarded_protocol",
    "listen",
    "server_url",
]

_LOOK_SECONDS: Final = 1.0
_MAX_PIPELINED: Final = 64
"""Requests that wait behind one another on a connection; after these, no more are read from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Seconds, and bytes of a head, or of whatever else carries no body."""

    header: float = 10.0
    body: float = 30.0
    # A body that arrives at less than `body_rate` bytes a second is cut after `stall` seconds.
    stall: float = 10.0
    body_rate: int = 500
    answer: float = 300.0
    # For a client to take what was answered.
    taking: float = 30.0
    head_bytes: int = 65_536


class Answer(Protocol):
    """An answer as bytes (`aggregator.answers.Answer`)."""

    def encode(self, fields: Iterable[tuple[bytes, bytes]], *, keep_alive: bool) -> bytes:
        """The bytes for a socket, with further header fields."""
        ...


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


class State(enum.Enum):
    """Of a connection; see the module's table."""

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
    """Reads from a connection only what can be worked on.

    Uvicorn resumes with every answer, and whenever an application asks for a body.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self.deaf = False  # nothing more is read: the connection closes with its last answer
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Unless somebody waits: of those, only the newest may lack a part of its body."""
        if not self.deaf and not self._pipeline:
            super().resume_reading()


class Waiting(Protocol):
    """A connection whose client is waited for; hashed by identity."""

    transport: asyncio.Transport


class _Guarded(HttpToolsProtocol):
    """One connection."""

    flow: _Flow

    deadlines: ClassVar[Deadlines] = Deadlines()
    direct: ClassVar[Direct | None] = None
    # The server's connections whose client is waited for, the longest first.
    waiting: ClassVar[dict[Waiting, None]]

    _state: State = State.OPENED
    _state_ends: float = 0.0  # by the event loop's clock, as all times here
    _stall_ends: float = 0.0
    _answer_ends: float = math.inf
    _taking_ends: float = math.inf
    _overhead: int = 0  # bytes since a request began, its head ended or a part of its body came
    _running: Any = None  # the cycle that is to be answered next, whoever answers it
    _look: asyncio.TimerHandle | None = None

    # --- The connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        limit = self.config.limit_concurrency
        if limit is not None:
            if not self.make_room():
                self.app = service_unavailable
            # Uvicorn counts tasks as well, and those of connections that were cut have yet to end.
            self.limit_concurrency = 2 * limit
        self._count()
        self._enter(State.OPENED, self.deadlines.header)
        self._look = self.loop.call_later(_LOOK_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        cycle: Any = self.cycle
        if isinstance(cycle, _DirectCycle):
            cycle.request.gone()
        # Uvicorn tells only the newest request, which may be waiting behind this one.
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def make_room(self) -> bool:
        """Whether there is a place, if need be that of a client who is waited for."""
        limit = self.config.limit_concurrency or math.inf
        places: set[Any] = self.connections
        while len(places) >= limit and self.waiting:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            places.discard(oldest)
            oldest.transport.abort()
        return len(places) < limit

    def pause_writing(self) -> None:
        self._taking_ends = self.loop.time() + self.deadlines.taking
        super().pause_writing()
        self._count()

    def resume_writing(self) -> None:
        self._taking_ends = math.inf
        super().resume_writing()
        if not self.transport.is_closing():
            self._count()

    def _count(self) -> None:
        """Whether the client is waited for, and so may have to make room."""
        request = self._running
        if (
            request is None
            or request.more_body
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            self.waiting.setdefault(self)
        else:
            self.waiting.pop(self, None)

    def _go_last(self) -> None:
        self.waiting.pop(self, None)
        self._count()

    def _enter(self, state: State, seconds: float) -> None:
        self._state = state
        self._state_ends = self.loop.time() + seconds

    def _check(self) -> None:
        self._look = self.loop.call_later(_LOOK_SECONDS, self._check)
        now = self.loop.time()
        if self.transport.is_closing() and self._state is not State.CLOSING:
            self._close()
        if self.flow.read_paused:  # the application is slow, not the client
            self._stall_ends = now + self.deadlines.stall
        ends = min(self._answer_ends, self._taking_ends)
        if not self.pipeline:  # else nothing is read, whatever the client sends
            ends = min(ends, self._state_ends)
            if self._state is State.BODY:
                ends = min(ends, self._stall_ends)
        if now <= ends:
            return
        if self._state is State.IDLE and now <= self._taking_ends:
            self.transport.close()  # what was answered may still be on its way
        else:
            self.transport.abort()

    # --- Requests -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.flow.deaf:  # it was on its way
            return
        self._overhead += len(data)
        if self._overhead > self.deadlines.head_bytes + len(data):
            self.transport.abort()
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._listen_no_more()  # the parser can't go on in this protocol
        except httptools.HttpParserError:
            cycle: Any = self.cycle
            if cycle is None or cycle.response_complete or self._state is State.BODY:
                self.send_400_response("Invalid HTTP request received.")
            else:  # what came before is answered first
                self._listen_no_more()

    def _listen_no_more(self) -> None:
        self.flow.deaf = True
        self.flow.pause_reading()
        self.cycle.keep_alive = False

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests wait behind one another")
        self._overhead = 0
        if self._state is State.OPENED:
            self._state = State.HEAD
        else:
            if self._state is State.IDLE:
                self._go_last()  # it was heard from just now
            self._enter(State.HEAD, self.deadlines.header)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state is State.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._overhead = 0
        self._enter(State.BODY, self.deadlines.body)
        self._stall_ends = self.loop.time() + self.deadlines.stall
        request = None
        if self.direct is not None and self._is_plain():
            request = self.direct.begin(self.url, self.headers)
        if request is None:
            super().on_headers_complete()
        else:
            keep_alive = self.parser.should_keep_alive()
            self._running = _DirectCycle(request, keep_alive=keep_alive)
            self.cycle = self._running

    def _is_plain(self) -> bool:
        """Whether it is a POST that waits for no other and asks for nothing but an answer."""
        before: Any = self.cycle
        return (
            self.parser.get_method() == b"POST"
            and (before is None or before.response_complete)
            and not self.expect_100_continue
            and not self.flow.write_paused  # the long way waits for clients that read no answers
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
        elif not cycle.response_complete:
            refused = cycle.request.feed(body)
            if refused is not None:
                cycle.keep_alive = False
                self._answer(cycle, refused)

    def on_message_complete(self) -> None:
        cycle: Any = self.cycle
        if cycle.response_complete:  # it was answered before its body ended
            self._wait_for_next()
            return
        self._enter(State.ANSWERING, self.deadlines.answer)
        self._answer_ends = min(self._answer_ends, self._state_ends)
        cycle.more_body = False
        self._count()
        if isinstance(cycle, _DirectCycle):
            cycle.request.complete(lambda answer: self._answer(cycle, answer))
        else:
            super().on_message_complete()

    # --- Answers --------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:  # noqa: ANN401 (uvicorn's types)
        self._running = cycle
        self._count()
        super()._start_asgi_task(cycle, app)

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
        """Without uvicorn's own: it would set a timer that any byte takes away."""
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
        self._count()
        if self._state is State.ANSWERING:
            self._wait_for_next()

    def _read_on(self) -> None:
        """Go on with a request of which a part has arrived, once none waits before it."""
        if self.pipeline:
            return
        if self._state is State.HEAD:
            self._enter(State.HEAD, self.deadlines.header)
        elif self._state is State.BODY:
            self._enter(State.BODY, self.deadlines.body)
        self.flow.resume_reading()

    def _wait_for_next(self) -> None:
        self._go_last()
        self._enter(State.IDLE, self.timeout_keep_alive)

    def _close(self) -> None:
        """Nothing is said any more; the client has yet to take what was."""
        self._enter(State.CLOSING, self.deadlines.taking)
        self._count()


def guarded_protocol(deadlines: Deadlines, direct: Direct | None = None) -> type[Any]:
    """The protocol class of one server, for uvicorn's `http` option."""
    return type("Guarded", (_Guarded,), {"deadlines": deadlines, "direct": direct, "waiting": {}})


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ServiceError(f"can't listen on {host}:{port}: {error}") from error


def server_url(scheme: str, host: str, listener: socket.socket) -> str:
    """Where a listening socket is found; the system may have chosen its port."""
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{listener.getsockname()[1]}"
