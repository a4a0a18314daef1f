"""TLS handshakes have places and deadlines, and whoever shakes hands in one breath is served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import uvicorn

from chorister.http_server import Deadlines, guarded_protocol
from chorister.http_server_tls import limit_handshakes
from tests.aggregator.inprocess_pair import wait_until
from tests.certificates import a_certificate
from tests.test_http_server import (
    ANSWERED,
    QUICK,
    answer,
    connected,
    echo_length,
    still_open,
)

Loop = Literal["asyncio", "uvloop"]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Loop:
    found: Loop = request.param
    return found


@contextlib.contextmanager
def serving(
    folder: Path, loop: Loop, *, limit: int, seconds: float, deadlines: Deadlines | None = None
) -> Iterator[tuple[int, uvicorn.Server, ssl.SSLContext]]:
    key, chain = a_certificate(folder)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(
        echo_length,
        http=guarded_protocol(deadlines or Deadlines()),
        loop=loop,
        log_config=None,
        lifespan="off",
        ws="none",
        access_log=False,
        limit_concurrency=limit,
        timeout_keep_alive=3,
        timeout_graceful_shutdown=1,
        ssl_certfile=str(chain),
        ssl_keyfile=str(key),
    )
    server = uvicorn.Server(config)

    async def serve() -> None:
        limit_handshakes(seconds)
        await server.serve(sockets=[listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server")
        yield listener.getsockname()[1], server, ssl.create_default_context(cafile=str(chain))
    finally:
        server.should_exit = True
        thread.join()


def ask(port: int, context: ssl.SSLContext, request: bytes = ANSWERED) -> bytes:
    with (
        connected(port) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(request)
        found = answer(connection)
        while found and not found.partition(b"\r\n\r\n")[2]:  # a record for the head
            found += answer(connection)
        return found


def places(server: uvicorn.Server) -> int:
    taken: set[Any] = server.server_state.connections
    return len(taken)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
def test_silent_handshakes_make_room(tmp_path: Path, loop: Loop, said: bytes) -> None:
    """Long before their deadline: else they would take all descriptors of the process."""
    with serving(tmp_path, loop, limit=30, seconds=60) as (port, server, context):
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(connected(port)) for _ in range(200)]
            for each in silent:
                with contextlib.suppress(OSError):
                    each.sendall(said)
            for _ in range(5):
                assert ask(port, context).startswith(b"HTTP/1.1 200")
            assert places(server) <= 30
            assert still_open(silent, time.monotonic() + 5) <= 30
        wait_until(lambda: not places(server), "an empty server", 20)


def test_handshakes_have_a_deadline(tmp_path: Path, loop: Loop) -> None:
    with (
        serving(tmp_path, loop, limit=30, seconds=1) as (port, server, _),
        connected(port) as one,
        connected(port) as other,
    ):
        other.sendall(b"\x16\x03\x01")
        assert not still_open([one, other], time.monotonic() + 20)
        wait_until(lambda: not places(server), "an empty server", 20)


def test_what_is_no_handshake_is_cut(tmp_path: Path, loop: Loop) -> None:
    with serving(tmp_path, loop, limit=30, seconds=60) as (port, server, context):
        for said in (ANSWERED, bytes(100_000), b"\x16\x03\x01\x00\x05hello"):
            with connected(port) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(said)
                    connection.shutdown(socket.SHUT_WR)
                assert not still_open([connection], time.monotonic() + 20)
        with connected(port) as connection:  # in the middle of one
            connection.sendall(b"\x16\x03\x01")
        wait_until(lambda: not places(server), "an empty server", 20)
        assert ask(port, context).startswith(b"HTTP/1.1 200")


def test_many_clients_shake_hands_and_ask_in_one_breath(tmp_path: Path, loop: Loop) -> None:
    size = 100_000
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
    with serving(tmp_path, loop, limit=100, seconds=60) as (port, server, context):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: ask(port, context, post), range(150)))
        assert all(each.endswith(b"\r\n\r\n100000") for each in found)
        wait_until(lambda: not places(server), "an empty server", 20)


def test_a_server_that_ends_waits_for_no_handshake(tmp_path: Path, loop: Loop) -> None:
    with contextlib.ExitStack() as stack:
        with serving(tmp_path, loop, limit=30, seconds=60) as (port, server, _):
            silent = [stack.enter_context(connected(port)) for _ in range(5)]
            wait_until(lambda: places(server) == 5, "all five", 20)
        assert not still_open(silent, time.monotonic() + 20)


def test_encrypted_connections_end_in_every_state(tmp_path: Path, loop: Loop) -> None:
    """Even if the client reads nothing, and never answers the server's close."""
    says = (
        b"",
        b"GET / HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n",
        ANSWERED,
        b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n",
        b"not HTTP",
    )
    with (
        serving(tmp_path, loop, limit=30, seconds=5, deadlines=QUICK) as (port, server, context),
        contextlib.ExitStack() as stack,
    ):
        for said in says:
            plain = stack.enter_context(connected(port))
            client = stack.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
            with contextlib.suppress(OSError):  # whoever is too slow is cut before it spoke
                client.sendall(said)
        wait_until(lambda: not places(server), "an empty server", 40)
