"""Slow, endless and oversized clients over real sockets: they are cut off, others are served."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from chorister.aggregator.connections import Deadlines, guarded_protocol
from tests.aggregator.inprocess_pair import wait_until

QUICK = Deadlines(header=1.0, body=1.5, answer=2.0, head_bytes=2_000)


async def echo_length(scope, receive, send):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    """Answers with the body's length, on /fields with that of the head; on /never not at all."""
    if scope["path"] == "/never":
        await receive()
        await receive()
        return
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/fields":
        size = len(scope["headers"])
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        echo_length,
        http=guarded_protocol(QUICK),
        log_config=None,
        lifespan="off",
        ws="none",
        access_log=False,
        timeout_keep_alive=3,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started, "the server")
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        yield connection


def seconds_until_cut(connection: socket.socket, drip: bytes = b"") -> float:
    """Drip bytes until the other side has had enough."""
    begun = time.monotonic()
    connection.settimeout(0.1)
    while time.monotonic() - begun < 15:
        with contextlib.suppress(TimeoutError):
            try:
                if drip:
                    connection.send(drip)
                if not connection.recv(4096):
                    break
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise
                break
    return time.monotonic() - begun


def answer(connection: socket.socket) -> bytes:
    return connection.recv(65_536)


def test_a_usual_client_is_served_again_and_again(port: int) -> None:
    with connected(port) as connection:
        for size in (0, 5, 200_000):
            head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
            connection.sendall(head.encode() + bytes(size))
            assert answer(connection).endswith(f"\r\n\r\n{size}".encode())


@pytest.mark.parametrize(
    ("begin", "drip", "least", "most"),
    [
        (b"", b"", 0.9, 8),  # never says a word
        (b"POST / HTTP/1.1\r\nHost: x\r\n", b"A: b\r\n", 0.9, 8),  # an endless head
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n",
            b"x",
            1.4,
            8,
        ),  # a body that trickles
        (b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n", b"", 1.9, 10),  # nothing to say to it
    ],
)
def test_slow_clients_are_cut_off(
    port: int, begin: bytes, drip: bytes, least: float, most: float
) -> None:
    with connected(port) as connection:
        if begin:
            connection.sendall(begin)
        assert least < seconds_until_cut(connection, drip) < most


def test_a_head_is_not_endless(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for number in range(2_000):
                connection.sendall(b"X-%d: %s\r\n" % (number, b"y" * 100))
        assert seconds_until_cut(connection) < 5


CHUNKED = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\n", b"A: b\r\n" * 100),  # trailers without end
        (b"0\r\nA: ", b"b" * 600),  # one trailer without end
        (b"5;a=", b"b" * 600),  # a chunk that never says what it holds
    ],
)
def test_what_is_no_body_is_not_endless(port: int, begin: bytes, more: bytes) -> None:
    with connected(port) as connection:
        connection.sendall(CHUNKED % b"/never" + begin)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 300_000:  # within the deadline of the body
                connection.sendall(more)
                sent += len(more)
                time.sleep(0.001)
        assert sent < 300_000


def test_empty_lines_between_requests_are_not_endless(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(CHUNKED % b"/" + b"0\r\n\r\n")
        assert b"200" in answer(connection)
        assert seconds_until_cut(connection, b"\r\n" * 400) < 2


def test_chunks_are_a_body_however_many(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(CHUNKED % b"/")
        for _ in range(300):
            connection.sendall(b"a\r\n0123456789\r\n")
        connection.sendall(b"0\r\nA: b\r\n\r\n")
        assert answer(connection).endswith(b"\r\n\r\n3000")


def test_trailers_are_no_header_fields(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(CHUNKED % b"/fields" + b"0\r\nAuthorization: b\r\n\r\n")
        assert answer(connection).endswith(b"\r\n\r\n2")


def test_another_protocol_is_not_spoken_nor_logged(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with connected(port) as connection:
        connection.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert b"200" in answer(connection)
    assert not [each for each in caplog.messages if "pgrade" in each or "WebSocket" in each]


def test_whoever_is_answered_early_may_not_trickle_on(port: int) -> None:
    """The answer came before the body: the body's deadline still holds."""
    with connected(port) as connection:
        connection.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert b"200" in answer(connection)
        assert seconds_until_cut(connection, b"x") < 8


def test_an_idle_connection_is_kept_for_a_while(port: int) -> None:
    with connected(port) as connection:
        request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(request)
        assert answer(connection)
        time.sleep(1.6)  # longer than a head may take: it has not begun
        connection.sendall(request)
        assert answer(connection)


def test_slow_clients_keep_nobody_waiting(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            slow = stack.enter_context(connected(port))
            slow.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n1")
        with connected(port) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n1")
            assert answer(connection).endswith(b"1")
