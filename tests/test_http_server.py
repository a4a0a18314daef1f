"""Slow, endless and oversized clients over real sockets: they are cut off, others are served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from chorister.errors import ServiceError
from chorister.http_server import Deadlines, guarded_protocol, listen
from tests.aggregator.inprocess_pair import wait_until

QUICK = Deadlines(header=1.0, body=1.5, answer=2.0, unread=2.0, head_bytes=2_000)
# Longer than any test waits, on a machine that stands still for a while: what ends here had another
# reason.
PATIENT = Deadlines(header=300.0, body=300.0, stall=300.0, unread=300.0, head_bytes=2_000)


async def echo_length(scope, receive, send):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    """Answers with the body's length, on /fields with that of the head; on /never not at all.

    On /large with more than the system's buffers of a connection hold.
    """
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
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
    body = str(size).encode() if scope["path"] != "/large" else bytes(20_000_000)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def serving(
    limit: int | None = None, *, deadlines: Deadlines = QUICK, keep_alive: int = 3
) -> Iterator[tuple[int, uvicorn.Server]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(
        echo_length,
        http=guarded_protocol(deadlines),
        log_config=None,
        lifespan="off",
        ws="none",
        access_log=False,
        limit_concurrency=limit,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started, "the server")
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as (port, _):
        yield port


@pytest.fixture(scope="module")
def patient_port() -> Iterator[int]:
    with serving(deadlines=PATIENT, keep_alive=300) as (port, _):
        yield port


PATIENCE = 15
"""Seconds after which a connection is taken for one that nobody cuts."""


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        yield connection


def seconds_until_cut(
    connection: socket.socket, drip: bytes = b"", begun: float | None = None
) -> float:
    """Drip bytes until the other side has had enough."""
    begun = time.monotonic() if begun is None else begun
    connection.settimeout(0.1)
    while time.monotonic() - begun < PATIENCE:
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
    """What has arrived, with the whole body if a length was announced for a short one."""
    got = connection.recv(65_536)
    head, end, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: ([0-9]{1,4})\b", head)
    while end and length and len(body) < int(length[1]) and (more := connection.recv(65_536)):
        got, body = got + more, body + more
    return got


def test_a_usual_client_is_served_again_and_again(patient_port: int) -> None:
    with connected(patient_port) as connection:
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
    begun = time.monotonic()
    with connected(port) as connection:
        if begin:
            connection.sendall(begin)
        assert least < seconds_until_cut(connection, drip, begun) < most


def test_a_head_is_not_endless(patient_port: int) -> None:
    with connected(patient_port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for number in range(2_000):
                connection.sendall(b"X-%d: %s\r\n" % (number, b"y" * 100))
        assert seconds_until_cut(connection) < PATIENCE


@pytest.mark.parametrize(("fields", "status"), [(100, b"200"), (101, b"400")])
def test_header_fields_are_limited_in_number(patient_port: int, fields: int, status: bytes) -> None:
    """Each becomes an object of many times its length: a head of 64 kB took 1.3 MB."""
    with connected(patient_port) as connection:
        connection.sendall(b"GET /fields HTTP/1.1\r\n" + b"ab:\r\n" * fields + b"\r\n")
        got = answer(connection)
        assert got.split()[1] == status
        if status == b"200":
            assert got.endswith(b"\r\n\r\n100")
        else:
            assert seconds_until_cut(connection) < PATIENCE


@pytest.mark.parametrize(
    "bad",
    [b"GET http://a:b/ HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"ab:\r\n" * 102],
)
def test_a_bad_request_does_not_overtake_the_answer_before_it(
    patient_port: int, bad: bytes
) -> None:
    with connected(patient_port) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + bad)
        assert b" 200 " in answer(connection)
        assert answer(connection) == b""


CHUNKED = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\n", b"A: b\r\n" * 100),  # trailers without end
        (b"0\r\nA: ", b"b" * 600),  # one trailer without end
        (b"5;a=", b"b" * 600),  # a chunk that never says what it holds
    ],
)
def test_what_is_no_body_is_not_endless(patient_port: int, begin: bytes, more: bytes) -> None:
    with connected(patient_port) as connection:
        connection.sendall(CHUNKED % b"/never" + begin)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 300_000:
                connection.sendall(more)
                sent += len(more)
                time.sleep(0.001)
        # A server that is slow may still have to read what was sent.
        assert sent < 300_000 or seconds_until_cut(connection) < PATIENCE


def test_empty_lines_between_requests_are_not_endless(patient_port: int) -> None:
    with connected(patient_port) as connection:
        connection.sendall(CHUNKED % b"/" + b"0\r\n\r\n")
        assert b"200" in answer(connection)
        assert seconds_until_cut(connection, b"\r\n" * 400) < PATIENCE


def test_chunks_are_a_body_however_many(patient_port: int) -> None:
    with connected(patient_port) as connection:
        connection.sendall(CHUNKED % b"/")
        for _ in range(300):
            connection.sendall(b"a\r\n0123456789\r\n")
        connection.sendall(b"0\r\nA: b\r\n\r\n")
        assert answer(connection).endswith(b"\r\n\r\n3000")


def test_trailers_are_no_header_fields(patient_port: int) -> None:
    with connected(patient_port) as connection:
        connection.sendall(CHUNKED % b"/fields" + b"0\r\nAuthorization: b\r\n\r\n")
        assert answer(connection).endswith(b"\r\n\r\n2")


def test_another_protocol_is_not_spoken_nor_logged(
    patient_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with connected(patient_port) as connection:
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
        assert seconds_until_cut(connection, b"x") < PATIENCE


def test_an_idle_connection_is_kept_for_a_while() -> None:
    with serving(keep_alive=300) as (port, _), connected(port) as connection:
        request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(request)
        assert answer(connection)
        time.sleep(1.6)  # longer than a head may take: it has not begun
        connection.sendall(request)
        assert answer(connection)


def test_slow_clients_keep_nobody_waiting(patient_port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            slow = stack.enter_context(connected(patient_port))
            slow.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n1")
        with connected(patient_port) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n1")
            assert answer(connection).endswith(b"1")


# --- Every state has a deadline --------------------------------------------------------------

ANSWERED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
EXPECTS = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
STATES = {
    "opened": (b"", b""),
    "empty lines": (b"\r\n\r\n", b""),
    "head": (b"GET / HTTP/1.1\r\nHo", b""),
    "body": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1", b""),
    "chunks": (CHUNKED % b"/" + b"1\r\nx\r\n", b""),
    "continue": (EXPECTS, b"1"),
    "answering": (b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    "idle": (ANSWERED, b""),
    "idle, then an empty line": (ANSWERED, b"\r\n"),
    "answered before its body": (
        b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
        b"1",
    ),
    "answered, then its body, then an empty line": (
        b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n",
        b"1\r\n",
    ),
    "upgrade": (UPGRADE, b""),
    "upgrade, then bytes": (UPGRADE + b"after", b"\r\n"),
    "half of a second request": (ANSWERED + b"GET / HT", b""),
    "half of a second body": (ANSWERED + CHUNKED % b"/" + b"1\r\nx\r\n", b""),
    "a second request that is answered before its body": (ANSWERED + CHUNKED % b"/early", b""),
    "a second answer that is not taken": (2 * LARGE, b""),
    "a last answer that is not taken": (LARGE.replace(b"Host: x", b"Connection: close"), b""),
    "requests in line": (2 * b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    "old": (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"\r\n"),
}


@contextlib.contextmanager
def silent(port: int, count: int, first: bytes, then: bytes) -> Iterator[list[socket.socket]]:
    """Clients who said something, read an answer if there is one, said more, and fell silent."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(connected(port)))
            with contextlib.suppress(ConnectionError):
                opened[-1].sendall(first)
                if then and answer(opened[-1]):
                    opened[-1].sendall(then)
        yield opened


def still_open(clients: list[socket.socket], deadline: float) -> int:
    """How many are not closed when the time is over."""
    left = 0
    for each in clients:
        try:
            each.settimeout(max(deadline - time.monotonic(), 0.01))
            while each.recv(4096):
                pass
        except TimeoutError:
            left += 1
        except ConnectionError:
            pass
    return left


def test_silent_connections_are_closed_in_every_state(port: int) -> None:
    with contextlib.ExitStack() as stack:
        clients = {
            state: stack.enter_context(silent(port, 20, *said)) for state, said in STATES.items()
        }
        # The longest deadline is 3 seconds here; the rest is for a machine that is busy.
        deadline = time.monotonic() + 15
        left = {state: still_open(each, deadline) for state, each in clients.items()}
        assert not any(left.values()), left
        with connected(port) as connection:
            connection.sendall(ANSWERED)
            assert answer(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("drip", [b"\r\n", b"\n"])
def test_empty_lines_keep_no_connection_open(port: int, drip: bytes) -> None:
    """One a tenth of a second: far below the limit on bytes."""
    with connected(port) as connection:
        connection.sendall(ANSWERED)
        assert b"200" in answer(connection)
        assert seconds_until_cut(connection, drip) < 12


def test_a_half_closed_connection_is_closed(port: int) -> None:
    for said in (b"", b"GET / HT", ANSWERED):
        with connected(port) as connection:
            connection.sendall(said)
            if said == ANSWERED:
                assert answer(connection)
            connection.shutdown(socket.SHUT_WR)
            assert seconds_until_cut(connection) < 12


@pytest.mark.parametrize(
    "state",
    [state for state in STATES if state not in ("answering", "upgrade", "upgrade, then bytes")],
)
def test_where_all_places_are_taken_the_longest_silent_client_makes_room(state: str) -> None:
    with serving(limit=30) as (port, server):
        with silent(port, 60, *STATES[state]):
            for _ in range(5):  # at once, and not once the deadlines are over
                with connected(port) as connection:
                    connection.sendall(ANSWERED)
                    assert answer(connection).startswith(b"HTTP/1.1 200")
            assert len(server.server_state.connections) <= 30
        wait_until(lambda: not server.server_state.connections, "an empty server", 20)


def test_requests_under_way_are_not_cut_for_newcomers() -> None:
    with (
        serving(limit=10, deadlines=PATIENT) as (port, server),
        contextlib.ExitStack() as stack,
    ):
        never = b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(9):  # the newcomer would be the tenth
            stack.enter_context(connected(port)).sendall(never)
        wait_until(lambda: len(server.server_state.tasks) == 9, "nine requests")
        with connected(port) as connection:
            connection.sendall(ANSWERED)
            assert answer(connection).startswith(b"HTTP/1.1 503")


def test_pipelined_requests_are_queued_to_a_limit(patient_port: int) -> None:
    """In one read; what is beyond the limit is not answered, and the connection ends."""
    slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(patient_port) as connection:
        connection.sendall(slow + 1_000 * ANSWERED)
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65_536):
                received += part
        assert 1 < received.count(b"HTTP/1.1 200") <= 66


def test_what_waits_behind_an_answer_is_not_read() -> None:
    """However much is sent meanwhile: an answer must not let in more than it made room for."""
    slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n" + bytes(50_000)
    most, unsent = 0, b""
    with serving(deadlines=PATIENT) as (port, server), connected(port) as connection:
        connection.sendall(6 * slow)
        connection.setblocking(False)
        begun = time.monotonic()
        while time.monotonic() - begun < 2.5:
            with contextlib.suppress(BlockingIOError):
                unsent = unsent or post
                unsent = unsent[connection.send(unsent) :]
            for each in list(server.server_state.connections):
                one: Any = each
                most = max(most, sum(len(cycle.body) for cycle, _ in list(one.pipeline)))
            time.sleep(0.005)
    assert most < 400_000  # a read of the socket has 256 KiB


def test_answers_that_nobody_takes_end_the_connection() -> None:
    """A client that asks and never reads: of the answers, so much is written and then no more."""
    with serving() as (port, server), connected(port) as connection:
        connection.settimeout(1)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(100 * ANSWERED)
        wait_until(lambda: not server.server_state.connections, "the end of it", 20)


def test_a_port_that_is_taken_is_said_in_words() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(ServiceError, match="another program"):
        listen("127.0.0.1", first.getsockname()[1])
    for host, port in (("203.0.113.1", 0), ("127.0.0.1", 70_000)):
        with pytest.raises(ServiceError, match="can't listen on"):
            listen(host, port)
