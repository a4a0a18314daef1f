"""Cheap attacks on a registry: nobody who writes slowly, or not at all, keeps others from it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response

from chorister.http_server import Deadlines
from chorister.registry.app import Limits, _Inbox
from chorister.transparency.client import RegistryClient
from chorister.transparency.entries import RecipeBody, open_recipe
from tests.logworld import (
    HELPER,
    HELPER_NAME,
    World,
    hpke_entry,
    identity,
    recipe_entry,
    submission,
)
from tests.registry.serving import ask, serving

POST = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@contextlib.contextmanager
def connections(port: int, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    """So many clients that all said the same."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            each = socket.create_connection(("127.0.0.1", port), timeout=20)
            opened.append(stack.enter_context(each))
            each.sendall(first)
        yield opened


@contextlib.contextmanager
def dripping(clients: list[socket.socket], every: float) -> Iterator[None]:
    """Each client sends a byte now and then."""
    enough = threading.Event()

    def drip() -> None:
        while not enough.wait(every):
            for each in clients:
                with contextlib.suppress(OSError):
                    each.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def seconds_until_all_closed(clients: list[socket.socket], most: float) -> float:
    begun = time.monotonic()
    for each in clients:
        each.settimeout(max(most - (time.monotonic() - begun), 0.01))
        with contextlib.suppress(ConnectionError):
            while each.recv(4096):
                pass
    return time.monotonic() - begun


# Senders may take longer than anybody waits here: who had to wait for them would fail.
PATIENT_LIMITS = Limits(body_seconds=300)
PATIENT = Deadlines(body=300, stall=300)


def a_cosignature(world: World, port: int) -> tuple[str, ...]:
    """Delivered within a minute, or this raises."""
    with RegistryClient(f"http://127.0.0.1:{port}", timeout=60) as client:
        candidate = world.registry.issue().checkpoint
        return client.cosign(identity("leader").sign(candidate, world.clock.now()))


def test_trickling_submissions_starve_no_cosigner_and_no_author(world: World) -> None:
    """Sixty connections of one byte a second."""
    with (
        serving(world, limits=PATIENT_LIMITS, deadlines=PATIENT) as port,
        connections(port, 60, POST % (b"/entries", 10_000)) as clients,
        dripping(clients, 1.0),
    ):
        assert a_cosignature(world, port) == (HELPER_NAME,)
        assert ask(port, "GET", "/candidate")[0] == 200
        with RegistryClient(f"http://127.0.0.1:{port}", timeout=60) as author:
            assert author.submit(hpke_entry(HELPER)) == 1


def test_trickling_cosignatures_starve_nobody(world: World) -> None:
    with (
        serving(world, limits=PATIENT_LIMITS, deadlines=PATIENT) as port,
        connections(port, 60, POST % (b"/cosignatures", 1_000)) as clients,
        dripping(clients, 1.0),
    ):
        assert a_cosignature(world, port) == (HELPER_NAME,)
        assert ask(port, "GET", "/candidate")[0] == 200


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /candidate HTTP/1.1\r\n",
        POST % (b"/entries", 10_000),
        POST % (b"/cosignatures", 1_000),
    ],
)
def test_silent_connections_refuse_nobody(world: World, said: bytes) -> None:
    """More than there are places: a further client is served at once, and they are cut in time."""
    deadlines = Deadlines(header=1.0, stall=1.0)
    with serving(world, deadlines=deadlines) as port, connections(port, 520, said) as clients:
        assert ask(port, "GET", "/candidate")[0] == 200
        assert a_cosignature(world, port) == (HELPER_NAME,)
        assert seconds_until_all_closed(clients, 20) < 20


def test_whoever_sends_below_the_minimum_rate_is_cut(world: World) -> None:
    """Long before the body's own deadline, which is 30 seconds here."""
    deadlines = Deadlines(stall=1.0)
    with (
        serving(world, deadlines=deadlines) as port,
        connections(port, 20, POST % (b"/entries", 10_000)) as clients,
        dripping(clients, 0.1),
    ):
        assert seconds_until_all_closed(clients, 20) < 20


def test_bodies_that_fill_the_room_keep_nobody_out(world: World) -> None:
    """Each waits for its last bytes: the oldest makes way, and is told to try again."""
    limits = Limits(entry_bytes=20_000, held_bytes=50_000, body_seconds=300)
    with (
        serving(world, limits=limits, deadlines=PATIENT) as port,
        connections(port, 3, POST % (b"/entries", 20_000)) as clients,
    ):
        for each in clients:
            each.sendall(bytes(16_000))
        for _ in range(3):
            assert ask(port, "POST", "/entries", bytes(8_000))[0] == 422  # read, and refused
        assert a_cosignature(world, port) == (HELPER_NAME,)
        assert ask(port, "GET", "/candidate")[0] == 200
        clients[0].settimeout(20)
        answer = clients[0].recv(4096)
        assert b" 503 " in answer.split(b"\r\n")[0]
        assert b"retry-after: 5" in answer


def test_an_entry_that_is_slow_to_refuse_keeps_no_cosigner_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes under an author's public key: their signature is checked beside the log's lock."""
    checking, enough = threading.Event(), threading.Event()

    def slow(body: RecipeBody) -> object:
        checking.set()
        assert enough.wait(120)
        return open_recipe(body)

    monkeypatch.setattr("chorister.transparency.entries.open_recipe", slow)
    limits = Limits(waiting=4)
    entry = submission(recipe_entry("one")).encode()
    with serving(world, limits=limits) as port:
        with connections(port, 4, POST % (b"/entries", len(entry)) + entry):
            assert checking.wait(30)
            assert a_cosignature(world, port) == (HELPER_NAME,)
            assert ask(port, "GET", "/status")[0] == 200
            deadline = time.monotonic() + 20
            while ask(port, "POST", "/entries", b"one more")[0] != 503:
                assert time.monotonic() < deadline  # until all four wait
            enough.set()
        while ask(port, "POST", "/entries", entry)[0] != 200:
            assert time.monotonic() < deadline


def test_bodies_that_never_end_keep_no_author_out() -> None:
    """Eight senders fill the room for entries, all but the last bytes of theirs."""

    async def body(data: bytes, *, ends: bool) -> AsyncIterator[bytes]:
        yield data
        if not ends:
            await asyncio.sleep(60)

    def a_request(data: bytes, *, ends: bool) -> Any:
        return SimpleNamespace(headers={}, stream=lambda: body(data, ends=ends))

    async def meet() -> tuple[object, list[object]]:
        inbox = _Inbox(limits=Limits(entry_bytes=1000, held_bytes=8000), max_bytes=1000)
        slow = [
            asyncio.create_task(inbox.process(a_request(bytes(1000), ends=False), len))
            for _ in range(8)
        ]
        await asyncio.sleep(0.05)
        found = await inbox.process(a_request(b"honest", ends=True), len)
        done, waiting = await asyncio.wait(slow, timeout=1)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert inbox.held == 0
        assert not inbox.arriving
        return found, [each.result() for each in done]

    found, cut = asyncio.run(meet())
    assert found == len(b"honest")
    assert [each.status_code for each in cut if isinstance(each, Response)] == [503]


def test_one_address_keeps_only_its_share_of_the_places(world: World) -> None:
    def connect(source: str, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))

    with (
        contextlib.ExitStack() as stack,
        serving(world, deadlines=Deadlines(header=300, per_address=16)) as port,
    ):
        neighbour = stack.enter_context(connect("127.0.0.1", port))
        try:
            crowd = [stack.enter_context(connect("127.0.0.2", port)) for _ in range(100)]
        except OSError as error:  # not Linux: only 127.0.0.1 is local
            pytest.skip(f"this system has no second local address: {error}")
        for oldest in crowd[:-16]:
            with contextlib.suppress(ConnectionError):
                assert oldest.recv(1) == b""
        for each in (neighbour, *crowd[-16:]):
            each.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
            assert each.recv(15) == b"HTTP/1.1 200 OK"
