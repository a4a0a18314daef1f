"""Every state of a connection has a deadline: all short conversations, in virtual time.

A client says up to three things out of `SAYS`, then falls silent or drips bytes that never make a
whole request. Whatever it said, whatever the application does, the connection ends within the
deadlines' sum. The parser, the protocol and uvicorn's cycles are the real ones; the transport and
the clock are not.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from chorister.http_server import Deadlines, guarded_protocol

KEEP_ALIVE = 4
LIMITS = Deadlines(header=3.0, body=5.0, answer=8.0, unread=3.0, head_bytes=2_000)
# The longest way: a head, a body, then three answers in a row, idle, and a close that nobody reads;
# a second for each look at the clock.
BOUND = 3 + 5 + 3 * 8 + 4 + 3 + 8

GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket"
EOF = b"<the client half-closes>"
WAIT = b"<a second passes>"
SAYS = (
    WAIT,
    EOF,
    b"\r\n",
    b"\x00",
    b"x",
    b"GET /now HTTP/1.1\r\nHost",
    b": x\r\n\r\n",
    GET % b"/now",
    GET % b"/slow",
    GET % b"/never",
    GET % b"/large",
    GET % b"/fails",
    b"GET /now HTTP/1.0\r\n\r\n",
    b"GET /slow HTTP/1.1\r\nConnection: close\r\n\r\n",
    b"GET /now HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n\r\n",
    b"GET /slow HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n\r\n" + b"after",
    POST % (b"/now", b"Content-Length: 3"),
    POST % (b"/early", b"Content-Length: 3"),
    POST % (b"/now", b"Content-Length: 3\r\nExpect: 100-continue"),
    POST % (b"/early", b"Content-Length: 3\r\nExpect: 100-continue"),
    POST % (b"/never", b"Transfer-Encoding: chunked"),
    POST % (b"/now", b"Transfer-Encoding: chunked"),
    b"1\r\nx\r\n",
    b"0\r\n\r\n",
    GET % b"/slow" + GET % b"/now" + b"GET /half HTTP/1.1\r\n",
    GET % b"/slow" + GET % b"http://a:b/",
    b"GET /now HTTP/1.1\r\n" + b"ab:\r\n" * 102,
)
DRIPS = (b"", b"\r\n", b"x", b"1\r\nx\r\n")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when nothing is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        ready = selector.select

        def select(timeout: float | None) -> Any:
            if timeout:
                self.now += timeout + 1e-6
            return ready(0)

        selector.select = select

    def time(self) -> float:
        return self.now


class VirtualSocket(asyncio.Transport):
    """A client's socket as its server sees it; a client that reads nothing leaves all in it."""

    def __init__(self, loop: VirtualLoop, *, reads: bool) -> None:
        super().__init__()
        self.loop = loop
        self.reads = reads
        self.protocol: Any = None
        self.unsent = 0
        self.closing = self.lost = self.paused = False

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        if not self.reads and not self.lost:
            if self.unsent <= 65_536 < self.unsent + len(data):
                self.protocol.pause_writing()
            self.unsent += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.closing = True
        if not self.unsent:
            self._lose()

    def abort(self) -> None:
        self.closing = True
        self._lose()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            self.loop.call_soon(self.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def say(self, data: bytes) -> None:
        if self.paused or self.closing:
            return
        if data == EOF:
            self.protocol.eof_received()
            self.close()
        else:
            self.protocol.data_received(data)


async def application(scope: Any, receive: Any, send: Any) -> None:
    path = scope["path"]
    if path == "/fails":
        raise RuntimeError("a bug")
    if path == "/never":
        await asyncio.sleep(10_000)
    if path == "/slow":
        await asyncio.sleep(6)
    more = path != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message.get("more_body", False)
    body = b"x" * (100_000 if path == "/large" else 2)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def seconds_open(says: Iterable[bytes], drip: bytes, *, reads: bool) -> float:
    """How long a connection lives after its client said the last of these."""
    loop = VirtualLoop()
    config = uvicorn.Config(
        application,
        http=guarded_protocol(LIMITS),
        log_config=None,
        log_level="critical",
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE,
    )
    config.load()
    state = ServerState()

    async def conversation() -> float:
        wire = VirtualSocket(loop, reads=reads)
        protocol: Any = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=state, app_state={}, _loop=loop
        )
        wire.protocol = protocol
        protocol.connection_made(wire)
        for word in says:
            if word == WAIT:
                await asyncio.sleep(1)
            else:
                wire.say(word)
                for _ in range(5):
                    await asyncio.sleep(0)
        begun = loop.time()
        while not wire.lost and loop.time() - begun <= BOUND:
            await asyncio.sleep(0.5)
            if drip:
                wire.say(drip)
        left = loop.time() - begun
        wire.abort()
        await asyncio.sleep(0)
        assert not state.connections
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return left

    try:
        return loop.run_until_complete(conversation())
    finally:
        loop.close()


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("drip", DRIPS)
def test_every_conversation_of_two_ends(drip: bytes, reads: bool) -> None:
    for says in itertools.product(SAYS, repeat=2):
        assert seconds_open(says, drip, reads=reads) <= BOUND, says


@pytest.mark.parametrize("reads", [True, False])
def test_longer_conversations_end(reads: bool) -> None:
    """A sample of those of three to six; the seed is fixed."""
    chosen = random.Random(16)
    for _ in range(1_500):
        says = chosen.choices(SAYS, k=chosen.randint(3, 6))
        drip = chosen.choice(DRIPS)
        assert seconds_open(says, drip, reads=reads) <= BOUND, (says, drip)


def test_a_client_who_goes_on_asking_is_served() -> None:
    """No deadline is for the connection as a whole: this one lives for an hour."""
    says = [GET % b"/now", WAIT] * 3_600
    assert seconds_open(says, b"", reads=True) <= KEEP_ALIVE + 2
