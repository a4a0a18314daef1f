"""Exchanges end when their time is over, each at its own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpcore2
import pytest

from chorister.errors import Unreachable
from chorister.http_client import WebClient, authorities
from chorister.http_network import Deadline, DeadlineNetwork


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def watched(stack: ExitStack, seconds: float) -> socket.socket:
    """The other end of a connection, on which nobody ever writes."""
    near, far = (stack.enter_context(each) for each in socket.socketpair())
    deadline = Deadline(seconds)
    stack.enter_context(deadline)
    deadline.watch(near)
    far.settimeout(20)
    return far


def test_the_one_that_came_last_may_end_first(stack: ExitStack) -> None:
    begun = time.monotonic()
    last, late, early = watched(stack, 300), watched(stack, 2.0), watched(stack, 0.3)
    assert early.recv(1) == b""
    first = time.monotonic() - begun
    assert late.recv(1) == b""
    second = time.monotonic() - begun
    assert 0.3 <= first <= second
    assert second >= 2.0
    last.setblocking(False)
    with pytest.raises(BlockingIOError):
        last.recv(1)


def test_what_ended_in_time_is_left_in_peace(stack: ExitStack) -> None:
    near, far = (stack.enter_context(each) for each in socket.socketpair())
    deadline = Deadline(300)
    with deadline:
        deadline.watch(near)
        deadline.start(time.monotonic() + 1.0)
    time.sleep(1.5)
    near.sendall(b"still there")
    assert far.recv(100) == b"still there"


def test_a_connection_that_comes_too_late_is_ended_at_once(stack: ExitStack) -> None:
    near, far = (stack.enter_context(each) for each in socket.socketpair())
    deadline = Deadline(0.0)
    stack.enter_context(deadline)
    deadline.watch(near)
    far.settimeout(20)
    assert far.recv(1) == b""
    assert deadline.remaining() <= 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # threads are the point
def test_a_forked_process_is_watched_too(stack: ExitStack) -> None:
    watched(stack, 60)  # there is a thread in this process, and none in the next
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with ExitStack() as own:
                code = 0 if watched(own, 0.2).recv(1) == b"" else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_arrived_in_time_is_not_read_afterwards(stack: ExitStack) -> None:
    """A connection that was ended still has what its peer had sent."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    deadline = Deadline(300)
    stack.enter_context(deadline)
    stream = DeadlineNetwork(deadline).connect_tcp(*listener.getsockname())
    stack.callback(stream.close)
    peer = stack.enter_context(listener.accept()[0])
    peer.sendall(bytes(100_000))
    assert stream.read(1) == b"\0"
    deadline.start(time.monotonic() + 0.2)
    time.sleep(0.4)
    with pytest.raises(httpcore2.ReadTimeout):
        stream.read(1)


def test_authorities_that_can_t_be_read_are_no_answer_like_any_other(tmp_path: Path) -> None:
    """A device that fails in a way of its own would stop deleting what has expired."""
    client = WebClient(timeout=5, tls=partial(authorities, tmp_path / "missing.pem"))
    with pytest.raises(Unreachable, match="certificate authorities"):
        client.exchange("GET", "https://localhost:1/x", limit=10)
