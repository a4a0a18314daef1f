"""Messages between device and sandbox: frames of a head and a body, and one fixed answer.

The sandbox's answer is parsed as if an attacker wrote it, because a query that broke SQLite could.
Every wait of the device ends at a deadline, a time of `chorister.clock.uptime`. Imports are kept to
a minimum here, because the zygote holds as little as possible.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Final, NamedTuple

from chorister.clock import uptime
from chorister.encoding.encoder import Selection
from chorister.errors import DecodeError

COMMAND: Final = struct.Struct("!ci")
"""What the device sends to the zygote: one of these letters, and the id of a process."""
RUN: Final = b"r"
END: Final = b"e"
TRY: Final = b"t"
MAX_HEAD_BYTES: Final = 1_000_000
MAX_ENCODING_BYTES: Final = 8_000_000
"""As much as a recipe, which an encoding is part of."""
MAX_BODY_BYTES: Final = 2**30
ANSWER: Final = struct.Struct("!I")
"""The whole answer to a query on data: the number of a bin."""
_LENGTHS: Final = struct.Struct("!IQ")
_MAX_WAIT_SECONDS: Final = 1.0


def waits(until: float) -> Iterator[float]:
    """Iterate over timeouts to wait with until the deadline, then raise `TimeoutError`.

    They are short, because the system's timeouts do not count while it is suspended.
    """
    while (left := until - uptime()) > 0:
        yield min(left, _MAX_WAIT_SECONDS)
    raise TimeoutError("the deadline has passed")


def _attempts(peer: socket.socket, until: float | None) -> Iterator[None]:
    """Set the timeout before each attempt to send or receive, or raise `TimeoutError`.

    `until` is None in the sandbox, which waits for the device without a limit.
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
    attempts = _attempts(peer, until)
    for part in (_LENGTHS.pack(len(head), len(body)) + head, body):
        view = memoryview(part)
        while view:
            next(attempts)
            with suppress(TimeoutError):
                view = view[peer.send(view) :]


def receive(peer: socket.socket, size: int, *, until: float | None = None) -> bytearray:
    """Receive exactly `size` bytes."""
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
    """Receive a head; return it with the length of the body, which the caller then receives."""
    head, body = _LENGTHS.unpack(receive(peer, _LENGTHS.size, until=until))
    if head > max_head or body > max_body:
        raise DecodeError("a frame of the sandbox is too long")
    return bytes(receive(peer, head, until=until)), body


def receive_answer(peer: socket.socket, *, bins: int, until: float) -> int:
    """Receive the number of one of so many bins: `ANSWER`, and then nothing more."""
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
        raise DecodeError("the sandbox's answer must be a number of four bytes")
    number: int = ANSWER.unpack(data)[0]
    if number >= bins:
        raise DecodeError("the sandbox's answer is not a bin")
    return number


class Job(NamedTuple):
    """What a sandbox is asked to do; a frame with the encoding and the database's image follows."""

    query: str
    tables: tuple[str, ...]
    functions: tuple[str, ...]
    seconds: float  # of real time and of processor time
    selection: Selection | None  # of a row; None only compiles the query


def encode_job(job: Job) -> bytes:
    return json.dumps(job._asdict()).encode()


def decode_job(head: bytes) -> Job:
    tree = json.loads(head)
    return Job(
        query=str(tree["query"]),
        tables=tuple(map(str, tree["tables"])),
        functions=tuple(map(str, tree["functions"])),
        seconds=float(tree["seconds"]),
        selection=tree["selection"],
    )
