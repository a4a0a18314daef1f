"""Long files: whole, with their digest, and out of memory for whoever takes nothing of them."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import secrets
import socket
import time
import tracemalloc
from pathlib import Path

import pytest

from chorister.transparency.entries import MAX_BODY
from tests.logworld import World
from tests.registry.serving import ask, serving

PATH = f"body/{'ab' * 32}"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def a_file(world: World, size: int) -> bytes:
    data = secrets.token_bytes(size)
    (world.public / PATH).parent.mkdir(exist_ok=True)
    (world.public / PATH).write_bytes(data)
    return data


@pytest.mark.parametrize("size", [0, 65_536, 65_537, 131_072, 1_000_000])
def test_a_file_of_any_length_arrives_as_it_is(world: World, size: int) -> None:
    data = a_file(world, size)
    tag = f'"{hashlib.sha256(data).hexdigest()}"'
    with serving(world) as port:
        for _ in range(2):
            status, headers, body = ask(port, "GET", f"/{PATH}")
            assert (status, headers["etag"], body) == (200, tag, data)
            assert headers["content-length"] == str(size)
            assert headers["cache-control"] == "public, max-age=31536000, immutable"
        assert ask(port, "GET", f"/{PATH}", if_none_match=tag)[::2] == (304, b"")
        status, headers, body = ask(port, "HEAD", f"/{PATH}")
        assert (status, headers["content-length"], body) == (200, str(size), b"")


def test_a_file_that_is_cut_is_not_passed_off_as_whole(world: World) -> None:
    a_file(world, 200_000)
    with serving(world) as port:
        assert ask(port, "HEAD", f"/{PATH}")[0] == 200
        a_file(world, 100_000)
        with pytest.raises(http.client.IncompleteRead):
            ask(port, "GET", f"/{PATH}")
        (world.public / PATH).unlink()
        assert ask(port, "GET", f"/{PATH}")[0] == 404


def test_clients_who_take_nothing_of_a_long_file_fill_no_memory(world: World) -> None:
    """Twenty clients, each asking twice for the longest entry that there may be: 440 MiB."""
    a_file(world, MAX_BODY)
    twice = 2 * f"GET /{PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with serving(world) as port, contextlib.ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for _ in range(20):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(twice)
        time.sleep(3)
        assert ask(port, "GET", "/candidate")[0] == 200
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
