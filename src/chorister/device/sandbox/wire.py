"""What device and sandbox say to each other: frames of a head and a body, and one fixed answer.

The sandbox's answer is parsed as if an attacker wrote it, because a query that broke SQLite did.
Every wait of the device's ends at a deadline, a time of `chorister.clock.uptime`. Only the standard
library is imported here, for the zygote holds as little as possible.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Final

from chorister.clock import uptime
from chorister.encoding.encoder import Selection
from chorister.errors import DecodeError

__all__ = [
    "ANSWER",
    "MAX_BODY_BYTES",
    "MAX_ENCODING_BYTES",
    "MAX_HEAD_BYTES",
    "Job",
    "decode_job",
    "encode_job",
    "receive",
    "receive_answer",
    "receive_frame",
    "send_frame",
    "waits",
]

MAX_HEAD_BYTES: Final = 1_000_000
MAX_ENCODING_BYTES: Final = 8_000_000
"""As long as a recipe: an encoding is a part of one."""
MAX_BODY_BYTES: Final = 2**30
ANSWER: Final = struct.Struct("!I")
"""All that a query on data is answered with: the number of a bin."""
_LENGTHS: Final = struct.Struct("!IQ")
_MAX_WAIT_SECONDS: Final = 1.0


def waits(until: float) -> Iterator[float]:
    """Timeouts to wait with, one after the other, until the deadline; then `TimeoutError`.

    They are short, because the system's timeouts stand still while it is suspended.
    """
    while (left := until - uptime()) > 0:
        yield min(left, _MAX_WAIT_SECONDS)
    raise TimeoutError("the deadline has passed")


def _attempts(peer: socket.socket, until: float | None) -> Iterator[None]:
    """Before each attempt to send or receive: set the timeout, or raise `TimeoutError`.

    None is for the sandbox, which waits for the device as long as it takes, and may set nothing.
    """
    if until is None:
        yield from repeat(None)
    else:
        for timeout in waits(until):
            peer.settimeout(timeout)
            yield


def send_frame(
    peer: socket.socket, head: bytes, body: bytes = b"", *, until: float | None = None
) -> None:
    """Send a head and a body."""
    attempts = _attempts(peer, until)
    for part in (_LENGTHS.pack(len(head), len(body)) + head, body):
        view = memoryview(part)
        while view:
            next(attempts)
            with suppress(TimeoutError):
                view = view[peer.send(view) :]


def receive(peer: socket.socket, size: int, *, until: float | None = None) -> bytearray:
    """Exactly `size` bytes."""
    data = bytearray(size)
    view = memoryview(data)
    attempts = _attempts(peer, until)
    while view:
        next(attempts)
        with suppress(TimeoutError):
            count = peer.recv_into(view)
            if not count:
                raise EOFError("the other side is gone")
            view = view[count:]
    return data


def receive_frame(
    peer: socket.socket,
    *,
    max_head: int = MAX_HEAD_BYTES,
    max_body: int = 0,
    until: float | None = None,
) -> tuple[bytes, int]:
    """A head, and the length of the body that the caller then receives."""
    head, body = _LENGTHS.unpack(receive(peer, _LENGTHS.size, until=until))
    if head > max_head or body > max_body:
        raise DecodeError("a frame of the sandbox is too long")
    return bytes(receive(peer, head, until=until)), body


def receive_answer(peer: socket.socket, *, bins: int, until: float) -> int:
    """The number of one of so many bins: `ANSWER`, and then nothing more."""
    data = bytearray()
    attempts = _attempts(peer, until)
    while len(data) <= ANSWER.size:
        next(attempts)
        with suppress(TimeoutError):
            part = peer.recv(ANSWER.size + 1 - len(data))
            if not part:
                break
            data += part
    if len(data) != ANSWER.size:
        raise DecodeError("the sandbox's answer is a number of four bytes")
    number: int = ANSWER.unpack(data)[0]
    if number >= bins:
        raise DecodeError("the sandbox's answer is not a bin")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a sandbox is asked to do. In frames: this; the encoding, with the database's image."""

    query: str
    tables: tuple[str, ...]
    functions: tuple[str, ...]
    seconds: float  # of the clock and of the processor
    selection: Selection | None  # of a row; None to compile only, which touches none


def encode_job(job: Job) -> bytes:
    """A job as the head of a frame."""
    return json.dumps({name: getattr(job, name) for name in Job.__slots__}).encode()


def decode_job(head: bytes) -> Job:
    """The job in a head."""
    tree = json.loads(head)
    return Job(
        query=str(tree["query"]),
        tables=tuple(map(str, tree["tables"])),
        functions=tuple(map(str, tree["functions"])),
        seconds=float(tree["seconds"]),
        selection=tree["selection"],
    )
