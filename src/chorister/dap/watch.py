"""A time for a whole exchange over HTTP, which httpcore has not."""

from __future__ import annotations

import heapq
import ipaddress
import itertools
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import httpcore2

__all__ = ["FAILURES", "Watch", "WatchedNetwork", "timeouts"]

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


class Watch:
    """Ends the connections of one exchange when its time is over.

    httpcore limits each read and each write, not their sum: a server that trickles, be it TLS,
    header fields or the body, would hold us for ever.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []

    def left(self) -> float:
        """How many seconds."""
        return self._deadline - time.monotonic()

    def over(self, connection: socket.socket) -> None:
        """Watch over a connection."""
        # A descriptor of its own: TLS takes the other one away from its socket.
        copy = connection.dup()
        with self._lock:
            self._sockets.append(copy)
        if self.left() <= 0:
            self.end()

    def end(self) -> None:
        """Whoever reads or writes is told that the connection ended."""
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):  # the other side was faster
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> None:
        _watchman.expect(self._deadline, self)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            while self._sockets:
                self._sockets.pop().close()


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
            if watch is not None:  # the exchange may have ended long ago
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
            return stream
        raise failed


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
