"""Between device and sandbox: every answer is parsed as if an attacker wrote it, by a deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.clock import uptime
from chorister.device.sandbox import wire
from chorister.device.sandbox.wire import (
    ANSWER,
    MAX_ENCODING_BYTES,
    Job,
    decode_job,
    encode_job,
    receive,
    receive_answer,
    receive_frame,
    send_frame,
)
from chorister.errors import DecodeError
from chorister.recipe.model import MAX_RECIPE_BYTES

SOON = 30.0
"""The longest that a wait of half a second may take on a busy machine: others take hours."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_job_survives() -> None:
    job = Job(
        query="SELECT 'ä'", tables=("t",), functions=("a", "b"), seconds=0.5, selection="uniform"
    )
    assert decode_job(encode_job(job)) == job


def test_an_encoding_may_be_as_long_as_a_recipe() -> None:
    assert MAX_ENCODING_BYTES >= MAX_RECIPE_BYTES


def test_frames_survive_and_long_ones_are_refused(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    threading.Thread(target=send_frame, args=(theirs, b"head", bytes(300_000))).start()
    head, size = receive_frame(ours, max_body=300_000)
    assert head == b"head"
    assert bytes(receive(ours, size)) == bytes(300_000)
    send_frame(theirs, b"head", bytes(101))
    with pytest.raises(DecodeError, match="too long"):
        receive_frame(ours, max_body=100)
    send_frame(theirs, b"head")
    receive(ours, 4 + 101)  # what is left of the one before
    with pytest.raises(DecodeError, match="too long"):
        receive_frame(ours, max_head=3)


# --- the answer -----------------------------------------------------------------------------------


def answered(data: bytes, bins: int) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.close()
        return receive_answer(ours, bins=bins, until=uptime() + 20)


@given(st.integers(1, 2**31 - 1).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_a_bin_survives(case: tuple[int, int]) -> None:
    bins, bin_ = case
    assert answered(ANSWER.pack(bin_), bins) == bin_


@given(st.binary(max_size=12), st.integers(1, 2**31 - 1))
def test_any_bytes_are_a_bin_or_a_typed_error(data: bytes, bins: int) -> None:
    try:
        found = answered(data, bins)
    except DecodeError:
        assert len(data) != ANSWER.size or ANSWER.unpack(data)[0] >= bins
        return
    assert len(data) == ANSWER.size
    assert 0 <= found < bins


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\0", b"\0\0\0\0\0", bytes(10**6), ANSWER.pack(10), ANSWER.pack(2**32 - 1)]
)
def test_an_answer_is_four_bytes_and_one_of_the_bins(data: bytes) -> None:
    with pytest.raises(DecodeError):
        answered(data[:60_000], bins=10)
    assert answered(ANSWER.pack(9), bins=10) == 9


# --- deadlines ------------------------------------------------------------------------------------

WAITS: dict[str, Callable[[socket.socket, float], object]] = {
    "a frame": lambda peer, until: receive_frame(peer, max_head=10**9, max_body=10**9, until=until),
    "bytes": lambda peer, until: receive(peer, 10**6, until=until),
    "an answer": lambda peer, until: receive_answer(peer, bins=10, until=until),
    "to be read": lambda peer, until: send_frame(peer, bytes(10**7), until=until),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_deadline_in_the_past_is_over_even_if_data_is_ready(
    name: str, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    theirs.sendall(bytes(50_000))
    with pytest.raises(TimeoutError):
        WAITS[name](ours, uptime() - 1e-6)
    assert len(ours.recv(60_000)) == 50_000  # nothing was read


@pytest.mark.parametrize("name", WAITS)
def test_what_does_not_come_ends_at_the_deadline(
    name: str, pair: tuple[socket.socket, socket.socket]
) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        WAITS[name](pair[0], uptime() + 0.2)
    assert 0.1 < time.monotonic() - start < SOON


@pytest.mark.parametrize("name", ["a frame", "bytes", "to be read"])
def test_a_peer_that_dribbles_gets_no_more_time(
    name: str, pair: tuple[socket.socket, socket.socket]
) -> None:
    """A byte every few milliseconds, each before a timeout: for hours, if each began a new one."""
    ours, theirs = pair
    over = threading.Event()

    def dribble() -> None:
        theirs.settimeout(0.01)
        lengths = b"\x0f" + bytes(11)  # a frame of 250 million bytes begins
        for byte in lengths + bytes(10**6):
            if over.wait(0.002):
                return
            try:
                theirs.recv(500) if name == "to be read" else theirs.send(bytes([byte]))
            except (TimeoutError, OSError):
                continue

    thread = threading.Thread(target=dribble)
    thread.start()
    start = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            WAITS[name](ours, uptime() + 0.5)
    finally:
        over.set()
        thread.join()
    assert time.monotonic() - start < SOON


def test_a_deadline_passes_while_the_machine_is_suspended(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's timeouts do not count that time; `uptime` does, and is asked again and again."""
    begin = time.monotonic()
    asleep = threading.Timer(0.3, lambda: monkeypatch.setattr(wire, "uptime", lambda: 10_000.0))
    monkeypatch.setattr(wire, "uptime", lambda: 0.0)
    asleep.start()
    with pytest.raises(TimeoutError):
        receive(pair[0], 1, until=3600.0)
    asleep.join()
    assert time.monotonic() - begin < 30


def test_a_peer_that_is_gone_is_noticed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(EOFError):
        receive_frame(ours, until=uptime() + 20)
    with pytest.raises(DecodeError):
        receive_answer(ours, bins=10, until=uptime() + 20)
