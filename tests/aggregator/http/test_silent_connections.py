"""Silent connections to real servers, more than they have places for: others are served.

Each server is a process of its own. Its clients say something, fall silent, and stay connected.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.aggregator.operators import OperatorAddresses, Operators
from tests.aggregator.server_processes import ServerProcesses, process, server_processes
from tests.certificates import a_certificate
from tests.test_http_server import still_open

# Quicker than a connection that is idle, and no quicker: a machine may stand still for a while.
QUICK = {"connections": 40, "header_seconds": 8, "body_seconds": 8}
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
POST = b"POST /dap/tasks/x/reports HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
STATES = {
    "opened": (b"", b""),
    "head": (b"GET / HTTP/1.1\r\n", b""),
    "body": (POST, b""),
    "answered": (GET, b""),
    "answered, then an empty line": (GET, b"\r\n"),
    "upgrade": (UPGRADE, b""),
    "upgrade, then bytes": (UPGRADE + b"after", b"\r\n"),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    # All come from one address, whose own limit other tests are about.
    registry = {"connections_per_address": 10_000}
    settings = {"leader": QUICK, "helper": QUICK, "registry": registry}
    folder = tmp_path_factory.mktemp("silent")
    with server_processes(
        Operators(folder, OperatorAddresses.local(), settings=settings)
    ) as processes:
        yield processes


@contextlib.contextmanager
def silent(
    address: tuple[str, int], count: int, first: bytes, then: bytes
) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection(address, timeout=20)))
            with contextlib.suppress(ConnectionError):
                opened[-1].sendall(first)
                if then and opened[-1].recv(4096):
                    opened[-1].sendall(then)
        yield opened


def status(address: tuple[str, int], path: bytes) -> int:
    """What a further client gets."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(GET % path)
        return int(connection.recv(64).split()[1])


@pytest.mark.parametrize(
    ("role", "path", "count"),
    [("leader", b"/healthz", 60), ("helper", b"/healthz", 60), ("registry", b"/status", 520)],
)
def test_silent_connections_refuse_nobody_and_are_closed(
    servers: ServerProcesses, role: str, path: bytes, count: int
) -> None:
    url = urlsplit(getattr(servers.operators.at, role))
    address = (url.hostname or "", url.port or 0)
    asked = {state: (first.replace(b"%s", path), then) for state, (first, then) in STATES.items()}
    for state, said in asked.items():
        with silent(address, count, *said):
            assert status(address, path) == 200, state  # at once
    with contextlib.ExitStack() as stack:
        clients = {
            state: stack.enter_context(silent(address, 5, *said)) for state, said in asked.items()
        }
        # The longest: 15 seconds idle, then half a minute for a machine that is busy.
        deadline = time.monotonic() + 45
        left = {state: still_open(each, deadline) for state, each in clients.items()}
        assert not any(left.values()), left
        assert status(address, path) == 200


def test_tls_handshakes_have_a_deadline(tmp_path: Path) -> None:
    """Before its handshake a connection is not counted; those that never begin one are cut."""
    key, chain = a_certificate(tmp_path)
    tls = {"tls_certificate": chain.name, "tls_key": key.name, **QUICK}
    operators = Operators(tmp_path, OperatorAddresses.local(), settings={"leader": tls})
    settings = operators.settings("leader")
    with process("leader", settings, tmp_path / "log", "--begin-log") as (found, _):
        address = ("127.0.0.1", urlsplit(found).port or 0)
        with silent(address, 60, b"\x16\x03\x01", b"") as clients:
            context = ssl.create_default_context(cafile=str(chain))
            with (
                socket.create_connection(address, timeout=20) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                connection.sendall(GET % b"/healthz")
                assert connection.recv(64).split()[1] == b"200"
            assert not still_open(clients, time.monotonic() + 30)  # asyncio's own limit is 60
