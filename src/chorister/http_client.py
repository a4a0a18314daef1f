"""HTTP requests to servers that may be hostile: one deadline, a limit on every answer, no more.

A deadline is for a whole exchange, from the name's address to the answer's last byte. An answer is
cut at its limit as it arrives, and never unpacked: whoever sends a packed one, though none was
asked for, is not understood. There are no redirects and no cookies, and the environment's proxies,
credentials and authorities don't exist here.
"""

from __future__ import annotations

import heapq
import ipaddress
import itertools
import os
import queue
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import httpcore2
import httpx2

from chorister.closing import Closing
from chorister.errors import InvalidInput, Unreachable

__all__ = [
    "ERROR_BYTES",
    "FAILURES",
    "Answer",
    "TooLong",
    "Watch",
    "WatchedNetwork",
    "WebClient",
    "authorities",
    "printable",
    "timeouts",
]

ERROR_BYTES: Final = 65_536
"""What is always read of a refusal, for it may say why."""
_MAX_WORDS: Final = 500
_KEPT_SECONDS: Final = 5.0
_HEADERS: Final = {"User-Agent": "chorister", "Accept": "*/*", "Accept-Encoding": "identity"}

FAILURES: Final = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpcore2.TimeoutException,
    httpcore2.UnsupportedProtocol,
)
"""What httpcore raises where there is no answer."""


def timeouts(seconds: float) -> dict[str, Any]:
    """The extension of a request that limits each of its steps."""
    return {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), seconds)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server answered, whatever its status."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class TooLong(Unreachable):
    """An answer of more bytes than it may have."""


class WebClient(Closing):
    """Whoever asks servers over HTTP. Safe to share between threads."""

    def __init__(
        self,
        *,
        timeout: float,
        ca_bundle: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
        lasting: bool = False,
    ) -> None:
        """`timeout` is for a whole exchange; `ca_bundle` names the only authorities to believe.

        `transport` replaces the network, for applications in the same process. A `lasting` client
        is for one server: it keeps its connection for the next request, and makes one at a time.
        """
        self._timeout = timeout
        self._transport = transport
        self._tls = None if ca_bundle is None else authorities(ca_bundle)
        self._lasting = lasting
        self._turn = threading.Lock()
        self._kept: tuple[Watch, httpcore2.ConnectionPool] | None = None

    def close(self) -> None:
        """Give the connection back."""
        if self._kept is not None:
            watch, pool = self._kept
            self._kept = None
            pool.close()
            watch.release()

    def exchange(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: int,
    ) -> Answer:
        """Send a request and read the answer, of at most `limit` bytes if it is a success.

        Raises `Unreachable` where there is no such answer, `TooLong` among the reasons.
        """
        connection = "keep-alive" if self._lasting else "close"
        try:
            request = httpx2.Request(
                method,
                url,
                headers={**_HEADERS, "Connection": connection, **(headers or {})},
                content=body,
            )
        except httpx2.InvalidURL as error:
            raise Unreachable(f"{url} is not a URL") from error
        ends = time.monotonic() + self._timeout
        try:
            if self._transport is not None:
                return _through(self._transport, request, limit)
            with self._connection(request.url.scheme) as (watch, pool):
                answer = self._over(pool, request, limit)
                # A connection that the watch ended looks like an answer that ended.
                if watch.left() <= 0:
                    raise httpcore2.ReadTimeout("the time is over")
                return answer
        except (*FAILURES, httpx2.HTTPError, httpx2.StreamError) as error:
            if time.monotonic() >= ends:
                raise Unreachable(f"{url} takes more than {self._timeout:g} s to answer") from error
            raise Unreachable(f"{url} can't be reached: {type(error).__name__}") from error

    @contextmanager
    def _connection(self, scheme: str) -> Iterator[tuple[Watch, httpcore2.ConnectionPool]]:
        """A pool with one connection at most, and the watch over it."""
        if not self._lasting:
            watch = Watch(self._timeout)
            with watch, self._pool(scheme, watch) as pool:
                yield watch, pool
            return
        with self._turn:
            if self._kept is None:
                watch = Watch(self._timeout)
                self._kept = watch, self._pool(scheme, watch)
            watch, pool = self._kept
            try:
                watch.start()
                yield watch, pool
            except BaseException:
                self.close()
                raise
            if not pool.connections:  # the server keeps none
                watch.release()

    def _pool(self, scheme: str, watch: Watch) -> httpcore2.ConnectionPool:
        if scheme == "https" and self._tls is None:
            self._tls = httpx2.create_ssl_context(trust_env=False)
        return httpcore2.ConnectionPool(
            # Loading authorities takes a while; on this machine nothing is encrypted.
            ssl_context=self._tls if scheme == "https" else None,
            max_connections=1,
            keepalive_expiry=_KEPT_SECONDS,
            network_backend=WatchedNetwork(watch),
        )

    def _over(self, pool: httpcore2.ConnectionPool, request: httpx2.Request, limit: int) -> Answer:
        url = request.url
        with pool.stream(
            request.method,
            httpcore2.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=request.headers.raw,
            content=request.content or None,
            extensions=timeouts(self._timeout),
        ) as response:
            return _read(response.status, response.headers, response.iter_stream(), url, limit)


def _through(transport: httpx2.BaseTransport, request: httpx2.Request, limit: int) -> Answer:
    response = transport.handle_request(request)
    try:
        # Not `iter_raw`: a transport may hand over an answer that it has read.
        stream = cast("httpx2.SyncByteStream", response.stream)
        return _read(response.status_code, response.headers.raw, stream, request.url, limit)
    finally:
        response.close()


def _read(
    status: int,
    headers: Iterable[tuple[bytes, bytes]],
    chunks: Iterable[bytes],
    url: httpx2.URL,
    limit: int,
) -> Answer:
    allowed = limit if 200 <= status < 300 else max(limit, ERROR_BYTES)
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > allowed:
            raise TooLong(f"{url} answers with more than {allowed} bytes")
    return Answer(status=status, headers=_fields(headers), body=bytes(data))


def _fields(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Header fields by name in lower case, those of one name joined (RFC 9110, section 5.3)."""
    fields: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def printable(text: str) -> str:
    """A stranger's text, short and fit for a terminal and a log."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_WORDS])


def authorities(ca_bundle: Path) -> ssl.SSLContext:
    """A context that believes these authorities and no others."""
    try:
        return ssl.create_default_context(cafile=str(ca_bundle))
    except OSError as error:
        raise InvalidInput(f"{ca_bundle} holds no certificates of authorities: {error}") from None


# --- One deadline for all of it ------------------------------------------------------------------


class Watch:
    """Ends the connection of an exchange when its time is over.

    httpcore limits each read and each write, not their sum: a server that trickles, be it TLS,
    header fields or the body, would hold us forever.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def left(self) -> float:
        """How many seconds."""
        return self._deadline - time.monotonic()

    def start(self) -> None:
        """Begin an exchange, perhaps over the connection of the one before."""
        self._deadline = time.monotonic() + self._seconds
        _watchman.expect(self._deadline, self)

    def over(self, connection: socket.socket) -> None:
        """Watch over a connection, in place of the one before."""
        # A descriptor of its own: TLS takes the other one away from its socket.
        copy = connection.dup()
        self.release()
        with self._lock:
            self._socket = copy
        if self.left() <= 0:
            self.end()

    def end(self) -> None:
        """Whoever reads or writes is told that the connection ended."""
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):  # the other side was faster
                    self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Watch over nothing."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def __enter__(self) -> None:
        _watchman.expect(self._deadline, self)

    def __exit__(self, *_: object) -> None:
        self.release()


class _Watchman:
    """One thread that looks at the clock for all exchanges of a process.

    A thread for each would cost more than a small exchange does.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, weakref.ref[Watch]]] = []
        self._thread: threading.Thread | None = None

    def expect(self, deadline: float, watch: Watch) -> None:
        """End it then, unless nobody holds it any more."""
        with self._changed:
            heapq.heappush(self._waiting, (deadline, next(self._order), weakref.ref(watch)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="watchman", daemon=True)
                self._thread.start()
            elif self._waiting[0][0] == deadline:
                self._changed.notify()

    def _look(self) -> None:
        while True:
            with self._changed:
                while not self._waiting or self._waiting[0][0] > time.monotonic():
                    left = self._waiting[0][0] - time.monotonic() if self._waiting else None
                    self._changed.wait(left)
                watch = heapq.heappop(self._waiting)[2]()
            # The exchange may have ended long ago, and another begun.
            if watch is not None and watch.left() <= 0:
                watch.end()


_watchman = _Watchman()


def _hire() -> None:
    """A forked process has none of its parent's threads."""
    global _watchman
    _watchman = _Watchman()


os.register_at_fork(after_in_child=_hire)


class WatchedNetwork(httpcore2.SyncBackend):
    """Finds and connects within the time that is left, however many addresses a name has."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002 (the watch knows better)
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first address that answers."""
        addresses = _resolve(host, port, self._watch.left())
        failed: Exception = httpcore2.ConnectError("the name has no address")
        for tried, address in enumerate(addresses):
            # A share for each: the first may be of a network that leads nowhere.
            share = self._watch.left() / (len(addresses) - tried)
            if share <= 0:
                raise httpcore2.ConnectTimeout("no time is left")
            try:
                stream = super().connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failed = error
                continue
            self._watch.over(stream.get_extra_info("socket"))
            return _WatchedStream(stream, self._watch)
        raise failed


class _WatchedStream(httpcore2.NetworkStream):
    """Hands out nothing once the time is over.

    A connection that was ended still has what had arrived: megabytes, perhaps, of tiny chunks or
    of interim answers, which would take as long again to read.
    """

    def __init__(self, stream: httpcore2.NetworkStream, watch: Watch) -> None:
        self._stream = stream
        self._watch = watch

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read what is there, in time."""
        if self._watch.left() <= 0:
            raise httpcore2.ReadTimeout("the time is over")
        return self._stream.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send it all."""
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        """End the connection."""
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        """Encrypt from here on."""
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _WatchedStream(stream, self._watch)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 (httpcore's type)
        """What the system knows about the connection."""
        return self._stream.get_extra_info(info)


def _resolve(host: str, port: int, seconds: float) -> list[str]:
    """The addresses of a name, each once.

    The system's resolver can't be interrupted. It is asked in a thread of its own, which nobody
    waits for when the time is over: it ends by the resolver's own limits.
    """
    with suppress(ValueError):
        return [str(ipaddress.ip_address(host))]  # no name: there is nobody to ask
    answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(str(each[4][0]) for each in found)))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="resolver", daemon=True).start()
    try:
        answer = answers.get(timeout=max(seconds, 0))
    except queue.Empty:
        raise httpcore2.ConnectTimeout("the name's addresses were not found in time") from None
    if isinstance(answer, Exception):
        raise httpcore2.ConnectError(str(answer)) from answer
    return answer
