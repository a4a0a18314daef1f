"""What a server checks of its system before it serves, and what one address can't do to it."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from chorister.aggregator.server import allow_connections
from chorister.errors import ServiceError
from chorister.http_client import WebClient
from tests.aggregator.operators import OperatorAddresses, Operators
from tests.aggregator.server_processes import server_processes


class OpenFiles:
    """The system's limit on open files, as far as it lets itself be told."""

    def __init__(self, soft: int, hard: int) -> None:
        self.now = (soft, hard)

    def get(self, _: int) -> tuple[int, int]:
        return self.now

    def set(self, _: int, limits: tuple[int, int]) -> None:
        self.now = limits


def asked(
    monkeypatch: pytest.MonkeyPatch, connections: int, *, soft: int, hard: int
) -> tuple[int, int]:
    limits = OpenFiles(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    allow_connections(connections)
    return limits.now


def test_the_limit_on_open_files_is_raised_if_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = resource.RLIM_INFINITY
    assert asked(monkeypatch, 4096, soft=1024, hard=20_000) == (4608, 20_000)
    assert asked(monkeypatch, 4096, soft=256, hard=endless) == (4608, endless)
    assert asked(monkeypatch, 100, soft=1024, hard=2048) == (1024, 2048)
    assert asked(monkeypatch, 4096, soft=endless, hard=endless) == (endless, endless)


def test_more_connections_than_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError, match="set connections to at most 3584"):
        asked(monkeypatch, 4096, soft=1024, hard=4096)


SILENT = 2000


@contextlib.contextmanager
def silence(port: int) -> Iterator[None]:
    """So many clients of one address that connect and say nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < SILENT + 500:
        pytest.skip(f"the system allows {hard} open files, not {SILENT + 500}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SILENT + 500), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(SILENT):
            try:
                client = socket.create_connection(
                    ("127.0.0.1", port), timeout=20, source_address=("127.0.0.2", 0)
                )
            except OSError as error:  # not Linux: only 127.0.0.1 is local
                pytest.skip(f"this system has no second local address: {error}")
            stack.enter_context(client)
        yield


def test_two_thousand_silent_connections_of_one_address_keep_nobody_else_out(
    tmp_path: Path,
) -> None:
    operators = Operators(tmp_path, OperatorAddresses.local())
    with server_processes(operators):
        for role in ("registry", "leader", "helper"):
            url = getattr(operators.at, role)
            path = "/status" if role == "registry" else "/healthz"
            with silence(urlsplit(url).port or 0), WebClient(timeout=20) as web:
                for _ in range(3):
                    answer = web.exchange("GET", urljoin(url, path), limit=1 << 20)
                    assert answer.status == 200
                    time.sleep(0.2)
