"""The HTTP client: requests to servers that may be hostile, with one deadline and a size limit.

A deadline covers a whole exchange, from resolving the name to the last byte of the response. A
response is cut off at its limit as it arrives, and never decompressed: nobody asked for
compression. Redirects are not followed and cookies not kept, and the environment's proxies,
credentials and certificate authorities are ignored.

A device uses the strictest profile of this client (`chorister.device.transport`).
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

import httpcore2
import httpx2

from chorister.closing import Closing
from chorister.errors import ChoristerError, InvalidInput, Unreachable

ERROR_BYTES: Final = 65_536
"""How much of a refusal is read at least, because it may say why."""
_MAX_PRINTED_CHARACTERS: Final = 500
_KEEP_ALIVE_SECONDS: Final = 5.0
# The same for every version: to a server, a rare version would identify a device.
_HEADERS: Final = {"User-Agent": "chorister", "Accept": "*/*", "Accept-Encoding": "identity"}

_FAILURES: Final = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpcore2.TimeoutException,
    httpcore2.UnsupportedProtocol,
    httpx2.HTTPError,  # from a transport in the same process
    httpx2.StreamError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What a server answered, whatever its status."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")


class TooLong(Unreachable):
    """A response with more bytes than the limit."""


class WebClient(Closing):
    """Sends HTTP requests. Safe to share between threads."""

    def __init__(
        self,
        *,
        timeout: float,
        ca_bundle: Path | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        proxy: str | None = None,
        transport: httpx2.BaseTransport | None = None,
        keep_alive: bool = False,
        error_bytes: int = ERROR_BYTES,
    ) -> None:
        """`timeout` covers a whole exchange; `ca_bundle` has the only authorities to trust.

        `tls` creates a context for every connection; without it, one context serves all of them.
        `transport` replaces the network, for applications in the same process. A client with
        `keep_alive` is for one server: it reuses its connection, and sends one request at a time.
        `error_bytes` is how much of a refusal is read even if the limit is lower.
        """
        self._timeout = timeout
        self._tls = _shared_context(ca_bundle) if tls is None else tls
        self._proxy = None if proxy is None else _parse_proxy(proxy)
        self._transport = transport
        self._keep_alive = keep_alive
        self._error_bytes = error_bytes
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
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: int,
    ) -> Response:
        """Send a request; return the response, of at most `limit` bytes if it is a success.

        Raises `Unreachable` if there is no such response: `TooLong` if it was longer.
        """
        connection = "keep-alive" if self._keep_alive else "close"
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
                return self._send_in_process(self._transport, request, limit)
            with self._connection(request.url.scheme) as (deadline, pool):
                response = self._send(pool, request, limit)
                # A connection that was shut down at the deadline looks like a complete body.
                if deadline.remaining() <= 0:
                    raise httpcore2.ReadTimeout("the deadline has passed")
                return response
        except _FAILURES as error:
            if time.monotonic() >= ends:
                raise Unreachable(f"{url} takes more than {self._timeout:g} s to answer") from error
            raise Unreachable(f"{url} can't be reached: {type(error).__name__}") from error

    @contextmanager
    def _connection(self, scheme: str) -> Iterator[tuple[Deadline, httpcore2.ConnectionPool]]:
        """Provide a pool with at most one connection, and the deadline that ends it."""
        if not self._keep_alive:
            deadline = Deadline(self._timeout)
            with deadline, self._pool(scheme, deadline) as pool:
                yield deadline, pool
            return
        with self._turn:
            if self._kept is None:
                deadline = Deadline(self._timeout)
                self._kept = deadline, self._pool(scheme, deadline)
            deadline, pool = self._kept
            try:
                deadline.start()
                yield deadline, pool
            except BaseException:
                self.close()
                raise
            if not pool.connections:  # the server closed it
                deadline.release()

    def _pool(self, scheme: str, deadline: Deadline) -> httpcore2.ConnectionPool:
        try:
            # Loading authorities takes a while, and plain HTTP (on this machine) needs none.
            context = self._tls() if scheme == "https" else None
        except (ChoristerError, OSError) as error:
            raise Unreachable(f"the certificate authorities can't be read: {error}") from error
        return httpcore2.ConnectionPool(
            ssl_context=context,
            proxy=self._proxy,
            max_connections=1,
            keepalive_expiry=_KEEP_ALIVE_SECONDS,
            network_backend=DeadlineNetwork(deadline),
        )

    def _send(
        self, pool: httpcore2.ConnectionPool, request: httpx2.Request, limit: int
    ) -> Response:
        url = request.url
        with pool.stream(
            request.method,
            httpcore2.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=request.headers.raw,
            content=request.content or None,
            extensions={
                "timeout": dict.fromkeys(("connect", "read", "write", "pool"), self._timeout)
            },
        ) as response:
            stream = response.iter_stream()
            return self._read(response.status, response.headers, stream, url, limit)

    def _send_in_process(
        self, transport: httpx2.BaseTransport, request: httpx2.Request, limit: int
    ) -> Response:
        response = transport.handle_request(request)
        try:
            # Not `iter_raw`: the transport may have read the response already.
            stream = cast("httpx2.SyncByteStream", response.stream)
            headers = response.headers.raw
            return self._read(response.status_code, headers, stream, request.url, limit)
        finally:
            response.close()

    def _read(
        self,
        status: int,
        headers: Iterable[tuple[bytes, bytes]],
        chunks: Iterable[bytes],
        url: httpx2.URL,
        limit: int,
    ) -> Response:
        allowed = limit if 200 <= status < 300 else max(limit, self._error_bytes)
        data = bytearray()
        for chunk in chunks:
            data += chunk
            if len(data) > allowed:
                raise TooLong(f"{url} answers with more than {allowed} bytes")
        return Response(status=status, headers=_fields(headers), body=bytes(data))


def _fields(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return header fields by name, those with the same name joined (RFC 9110, section 5.3)."""
    fields: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def printable(text: str) -> str:
    """Return a stranger's text, shortened, without what could disturb a terminal or a log."""
    return "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for c in text[:_MAX_PRINTED_CHARACTERS]
    )


def authorities(ca_bundle: Path) -> ssl.SSLContext:
    """Return a context that trusts these certificate authorities and no others."""
    try:
        return ssl.create_default_context(cafile=str(ca_bundle))
    except OSError as error:
        raise InvalidInput(f"{ca_bundle} has no certificates of authorities: {error}") from None


def default_authorities() -> ssl.SSLContext:
    """Return a new context that trusts the usual authorities, whatever the environment says."""
    return httpx2.create_ssl_context(trust_env=False)


def _shared_context(ca_bundle: Path | None) -> Callable[[], ssl.SSLContext]:
    if ca_bundle is None:
        return cache(default_authorities)
    context = authorities(ca_bundle)
    return lambda: context


def _parse_proxy(url: str) -> httpcore2.Proxy:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidInput("the URL of a proxy starts with http:// or https://")
    auth = None
    if parts.username is not None:
        auth = (unquote(parts.username), unquote(parts.password or ""))
    return httpcore2.Proxy(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", auth=auth)


# --- One deadline for a whole exchange ----------------------------------------------------------


class Deadline:
    """Shuts down an exchange's connection when its time is over.

    httpcore limits each read and each write, not their sum: a server that trickles bytes, in TLS,
    in header fields or in the body, could hold us forever.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._time = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def remaining(self) -> float:
        """Return the seconds that are left."""
        return self._time - time.monotonic()

    def start(self) -> None:
        """Begin an exchange, perhaps over the connection of the last one."""
        self._time = time.monotonic() + self._seconds
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
