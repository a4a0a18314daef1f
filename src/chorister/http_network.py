"""Exchanges over HTTP with httpcore2, each with one deadline, whatever the server does.

`chorister.http_client` imports this with its first request: importing httpcore2 takes a while, and
a device does it while its sandbox starts.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias, TypeVar

import httpcore2

from chorister.errors import ChoristerError, Unreachable

_T = TypeVar("_T")
ReadResponse: TypeAlias = Callable[[int, Iterable[tuple[bytes, bytes]], Iterable[bytes]], _T]
"""Reads a response from its status, its header fields and the parts of its body."""

_BROKEN: Final = (httpcore2.RemoteProtocolError, httpcore2.ReadError, httpcore2.WriteError)
_KEEP_ALIVE_SECONDS: Final = 5.0
_PORTS: Final = {b"http": 80, b"https": 443}


class Network:
    """The connections of one client: one for each exchange, or one that is kept."""

    FAILURES: Final = (
        httpcore2.NetworkError,
        httpcore2.ProtocolError,
        httpcore2.ProxyError,
        httpcore2.TimeoutException,
        httpcore2.UnsupportedProtocol,
    )

    def __init__(
        self,
        *,
        timeout: float,
        tls: Callable[[], ssl.SSLContext],
        proxy: tuple[str, tuple[str, str] | None] | None,  # a URL; a name and a password for it
        keep_alive: bool,
    ) -> None:
        self._timeout = timeout
        self._tls = tls
        self._proxy = None if proxy is None else httpcore2.Proxy(proxy[0], auth=proxy[1])
        self._keep_alive = keep_alive
        self._turn = threading.Lock()
        self._kept: tuple[Deadline, httpcore2.ConnectionPool] | None = None

    def close(self) -> None:
        """Close the connection that is kept, if any."""
        if self._kept is not None:
            deadline, pool = self._kept
            self._kept = None
            pool.close()
            deadline.release()

    def exchange(
        self,
        method: str,
        url: str,
        fields: Mapping[str, str],
        body: bytes | None,
        read: ReadResponse[_T],
        ends: float,
    ) -> _T:
        """Send a request, and `read` the response; raise one of `FAILURES`, or `Unreachable`."""
        request = _request(method, url, fields, body)
        reused = self._kept is not None
        try:
            return self._send(request, read, ends)
        except _BROKEN:
            # The server may have closed the connection that was kept, just now.
            if not reused or method != "GET":
                raise
        return self._send(request, read, ends)

    @contextmanager
    def _connection(
        self, scheme: bytes, ends: float
    ) -> Iterator[tuple[Deadline, httpcore2.ConnectionPool]]:
        """Provide a pool with at most one connection, and the deadline that ends it."""
        if not self._keep_alive:
            deadline = Deadline(ends - time.monotonic())
            with deadline, self._pool(scheme, deadline) as pool:
                yield deadline, pool
            return
        with self._turn:
            if self._kept is None:
                deadline = Deadline(self._timeout)
                self._kept = deadline, self._pool(scheme, deadline)
            deadline, pool = self._kept
            try:
                deadline.start(ends)
                yield deadline, pool
            except BaseException:
                self.close()
                raise
            if not pool.connections:  # the server closed it
                deadline.release()

    def _pool(self, scheme: bytes, deadline: Deadline) -> httpcore2.ConnectionPool:
        try:
            # Loading authorities takes a while, and plain HTTP (on this machine) needs none.
            context = self._tls() if scheme == b"https" else None
        except (ChoristerError, OSError) as error:
            raise Unreachable(f"the certificate authorities can't be read: {error}") from error
        return httpcore2.ConnectionPool(
            ssl_context=context,
            proxy=self._proxy,
            max_connections=1,
            keepalive_expiry=_KEEP_ALIVE_SECONDS,
            network_backend=DeadlineNetwork(deadline),
        )

    def _send(self, request: httpcore2.Request, read: ReadResponse[_T], ends: float) -> _T:
        request.extensions["timeout"] = dict.fromkeys(
            ("connect", "read", "write", "pool"), max(ends - time.monotonic(), 0.001)
        )
        with self._connection(request.url.scheme, ends) as (deadline, pool):
            response = pool.handle_request(request)
            try:
                found = read(response.status, response.headers, response.iter_stream())
            finally:
                response.close()
            # A connection that was shut down at the deadline looks like a complete body.
            if deadline.remaining() <= 0:
                raise httpcore2.ReadTimeout("the deadline has passed")
            return found


def _request(
    method: str, url: str, fields: Mapping[str, str], body: bytes | None
) -> httpcore2.Request:
    try:
        target = httpcore2.URL(url)
    except (TypeError, ValueError) as error:
        raise Unreachable(f"{url} is not a URL") from error
    if target.scheme not in _PORTS or not target.host:
        raise Unreachable(f"{url} is not a URL")
    host = b"[%b]" % target.host if b":" in target.host else target.host
    if target.port not in {None, _PORTS[target.scheme]}:
        host += b":%d" % target.port
    headers = [(b"Host", host)]
    if body is not None or method == "POST":
        headers.append((b"Content-Length", b"%d" % len(body or b"")))
    headers += [(name.encode(), value.encode()) for name, value in fields.items()]
    return httpcore2.Request(method, target, headers=headers, content=body or None)


# --- One deadline for a whole exchange ----------------------------------------------------------


class Deadline:
    """Shuts down an exchange's connection when its time is over.

    httpcore limits each read and each write, not their sum: a server that trickles bytes, in TLS,
    in header fields or in the body, could hold us forever.
    """

    def __init__(self, seconds: float) -> None:
        self._time = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def remaining(self) -> float:
        """Return the seconds that are left."""
        return self._time - time.monotonic()

    def start(self, ends: float) -> None:
        """Begin an exchange, perhaps over the connection of the last one."""
        self._time = ends
        _timer.add(self._time, self)

    def watch(self, connection: socket.socket) -> None:
        """Apply to this connection, and no longer to the one before."""
        # Our own descriptor: TLS detaches the other one from its socket.
        copy = connection.dup()
        self.release()
        with self._lock:
            self._socket = copy
        if self.remaining() <= 0:
            self.end()

    def end(self) -> None:
        """Shut the connection down: whoever reads or writes finds it closed."""
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):  # the other side was faster
                    self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Apply to no connection."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def __enter__(self) -> None:
        _timer.add(self._time, self)

    def __exit__(self, *_: object) -> None:
        self.release()


class _Timer:
    """One thread that ends all exchanges of a process at their deadlines.

    A thread for each would cost more than a small exchange.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, weakref.ref[Deadline]]] = []
        self._thread: threading.Thread | None = None

    def add(self, time_: float, deadline: Deadline) -> None:
        """End the exchange at `time_`, unless its deadline object is gone by then."""
        with self._changed:
            heapq.heappush(self._waiting, (time_, next(self._order), weakref.ref(deadline)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                self._thread.start()
            elif self._waiting[0][0] == time_:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting or self._waiting[0][0] > time.monotonic():
                    left = self._waiting[0][0] - time.monotonic() if self._waiting else None
                    self._changed.wait(left)
                deadline = heapq.heappop(self._waiting)[2]()
            # The exchange may have ended long ago, and another one begun.
            if deadline is not None and deadline.remaining() <= 0:
                deadline.end()


_timer = _Timer()


def _replace_timer() -> None:
    """Start over in a forked process, which has none of its parent's threads."""
    global _timer
    _timer = _Timer()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_replace_timer)


class DeadlineNetwork(httpcore2.SyncBackend):
    """Resolves a name and connects before the deadline, however many addresses the name has."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002 (the deadline is stricter)
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first address that answers."""
        addresses = _resolve(host, port, self._deadline.remaining())
        failed: Exception = httpcore2.ConnectError("the name has no address")
        for tried, address in enumerate(addresses):
            # An equal share for each: the first may be in a network that leads nowhere.
            share = self._deadline.remaining() / (len(addresses) - tried)
            if share <= 0:
                raise httpcore2.ConnectTimeout("no time is left")
            try:
                stream = super().connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failed = error
                continue
            self._deadline.watch(stream.get_extra_info("socket"))
            return _DeadlineStream(stream, self._deadline)
        raise failed


class _DeadlineStream(httpcore2.NetworkStream):
    """Returns nothing once the deadline has passed.

    After a shutdown the bytes that had already arrived can still be read. They may be megabytes of
    tiny chunks or interim responses, which would take as long again.
    """

    def __init__(self, stream: httpcore2.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._deadline.remaining() <= 0:
            raise httpcore2.ReadTimeout("the deadline has passed")
        return self._stream.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _DeadlineStream(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 (httpcore's type)
        return self._stream.get_extra_info(info)


def _resolve(host: str, port: int, seconds: float) -> list[str]:
    """Return the addresses of a name, each once.

    The system's resolver can't be interrupted, so it runs in its own thread. When the time is over
    nobody waits for that thread any more; it ends by the resolver's own limits.
    """
    with suppress(ValueError):
        return [str(ipaddress.ip_address(host))]  # not a name
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
        raise httpcore2.ConnectTimeout("the name was not resolved in time") from None
    if isinstance(answer, Exception):
        raise httpcore2.ConnectError(str(answer)) from answer
    return answer
