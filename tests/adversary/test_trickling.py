"""A server that trickles: no part of an exchange holds a device past its timeout."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from chorister.device.transport import HTTPTransport
from chorister.errors import Unreachable

TIMEOUT = 1.0
AT_MOST = 8.5  # the machine may be busy; without one deadline for all it takes 9 seconds or more


@contextmanager
def trickling(first: bytes, drop: Callable[[int], bytes]) -> Iterator[int]:
    """A port that sends `first` at once and then one drop after the other, without end."""
    over = threading.Event()

    def run() -> None:
        with suppress(OSError), server.accept()[0] as connection:
            connection.recv(10_000)
            connection.sendall(first)
            count = 0
            while not over.wait(0.2):
                connection.sendall(drop(count))
                count += 1

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join()


def timed(url: str, proxy: str | None = None) -> float:
    start = time.monotonic()
    with pytest.raises(Unreachable, match="takes more than 1 s"):
        HTTPTransport(timeout=TIMEOUT, proxy=proxy).get(url, limit=1000)
    return time.monotonic() - start


HEAD = b"HTTP/1.1 200 OK\r\n"
TRICKLES: dict[str, tuple[bytes, Callable[[int], bytes]]] = {
    "status": (b"", lambda count: HEAD[count : count + 1]),
    "headers": (HEAD, lambda count: b"X-%d: 1\r\n" % count),
    "one header": (HEAD + b"X: ", lambda _: b"x"),
    "early answers": (b"", lambda _: b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "body": (HEAD + b"Content-Length: 900\r\n\r\n", lambda _: b"x"),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", lambda _: b"1\r\nx\r\n"),
    "body until the end": (HEAD + b"\r\n", lambda _: b"x"),
}


@pytest.mark.parametrize("what", TRICKLES)
def test_every_part_of_an_answer_counts(what: str) -> None:
    with trickling(*TRICKLES[what]) as port:
        assert timed(f"http://127.0.0.1:{port}/x") < AT_MOST


def test_tls_counts() -> None:
    # A handshake record that announces 16000 bytes.
    with trickling(b"\x16\x03\x03\x3e\x80", lambda _: b"\x02") as port:
        assert timed(f"https://localhost:{port}/x") < AT_MOST


def test_a_proxy_counts() -> None:
    with trickling(HEAD, lambda count: b"X-%d: 1\r\n" % count) as port:
        assert timed("https://example.org/x", proxy=f"http://127.0.0.1:{port}") < AT_MOST


def test_a_message_that_nobody_reads_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        start = time.monotonic()
        with pytest.raises(Unreachable, match="takes more than 1 s"):
            HTTPTransport(timeout=TIMEOUT).post(url, headers={}, body=bytes(50_000_000), limit=10)
        assert time.monotonic() - start < AT_MOST


def test_every_address_of_a_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with many addresses, none of which answers."""
    given: list[float] = []

    def connect(address: tuple[str, int], timeout: float, **_: object) -> socket.socket:
        given.append(timeout)
        time.sleep(timeout)
        raise TimeoutError

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"192.0.2.{i}", 443)) for i in range(9)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", connect)
    context = ssl.create_default_context()  # before: it may take as long as an address has
    start = time.monotonic()
    with pytest.raises(Unreachable):
        # Long enough that every address has a second, whatever else the machine does.
        HTTPTransport(timeout=9.0, tls=lambda: context).get("https://example.org/x", limit=10)
    assert time.monotonic() - start < 9.0 + AT_MOST  # with a timeout for each, it takes 81
    assert len(given) == 9


def test_a_resolver_that_does_not_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(20) and [])
    try:
        assert timed("http://localhost:1/x") < AT_MOST
        assert timed("https://example.org/x", proxy="http://proxy.example:3128") < AT_MOST
    finally:
        over.set()


def test_the_next_address_is_tried() -> None:
    """`localhost` may be ::1 first, where nobody listens."""
    with trickling(HEAD + b"Content-Length: 1\r\n\r\nx", lambda _: b"") as port:
        answer = HTTPTransport(timeout=60).get(f"http://localhost:{port}/x", limit=10)
    assert answer.body == b"x"


def test_no_timer_outlives_its_exchange() -> None:
    with trickling(HEAD + b"Content-Length: 1\r\n\r\nx", lambda _: b"") as port:
        HTTPTransport(timeout=60).get(f"http://127.0.0.1:{port}/x", limit=10)
        assert not any(isinstance(each, threading.Timer) for each in threading.enumerate())
