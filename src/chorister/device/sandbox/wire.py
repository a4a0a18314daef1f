"""What device and sandbox say to each other: frames of a JSON head and a body of bytes.

The sandbox's answer is parsed as if an attacker wrote it, because a query that broke SQLite did.
Only the standard library is imported here, for the zygote holds as little as possible.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from chorister.errors import DecodeError

__all__ = [
    "MAX_ANSWER_BYTES",
    "MAX_BODY_BYTES",
    "Job",
    "Value",
    "decode_answer",
    "decode_job",
    "encode_answer",
    "encode_job",
    "receive",
    "receive_frame",
    "send_frame",
]

Value: TypeAlias = int | float | str | None

MAX_HEAD_BYTES: Final = 1_000_000
MAX_BODY_BYTES: Final = 2**30
MAX_ANSWER_BYTES: Final = 2**26
_LENGTHS: Final = struct.Struct("!IQ")
_TYPES: Final = frozenset({int, float, str, type(None)})


# --- frames --------------------------------------------------------------------------------------


def send_frame(peer: socket.socket, head: bytes, body: bytes = b"") -> None:
    """Send a head and a body."""
    peer.sendall(_LENGTHS.pack(len(head), len(body)) + head)
    if body:
        peer.sendall(body)


def receive(peer: socket.socket, size: int, until: float | None = None) -> bytearray:
    """Exactly `size` bytes, by the time `until` of the monotonic clock."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if until is not None:
            peer.settimeout(max(until - time.monotonic(), 1e-6))
        count = peer.recv_into(view)
        if not count:
            raise EOFError("the other side is gone")
        view = view[count:]
    return data


def receive_frame(
    peer: socket.socket, *, max_body: int, until: float | None = None
) -> tuple[bytes, int]:
    """A head, and the length of the body that the caller then receives."""
    head, body = _LENGTHS.unpack(receive(peer, _LENGTHS.size, until))
    if head > MAX_HEAD_BYTES or body > max_body:
        raise DecodeError("a frame of the sandbox is too long")
    return bytes(receive(peer, head, until)), body


# --- jobs: device to sandbox ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a sandbox is asked to do; the body is the database's image."""

    query: str
    tables: tuple[str, ...]
    functions: tuple[str, ...]
    seconds: float  # of the clock and of the processor
    compile_only: bool  # no rows are touched; the answer may then say what is wrong


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
        compile_only=bool(tree["compile_only"]),
    )


# --- answers: sandbox to device ------------------------------------------------------------------


def encode_answer(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """A result, column by column. Blobs become NULL: no feature has a cell for them."""
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [[] for _ in names]
    for i, column in enumerate(columns):
        if bytes in set(map(type, column)):
            columns[i] = [None if type(value) is bytes else value for value in column]
    answer = {"names": list(names), "columns": columns}
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def decode_answer(body: bytes | bytearray) -> tuple[tuple[str, ...], list[list[Value]]]:
    """Names and columns of an answer, which may say anything."""
    try:
        tree = json.loads(body.decode("utf-8"), parse_constant=_infinity)
    except (ValueError, RecursionError):
        raise DecodeError("the sandbox's answer is not JSON") from None
    if not isinstance(tree, dict) or tree.keys() != {"names", "columns"}:
        raise DecodeError("the sandbox's answer has names and columns")
    names, columns = tree["names"], tree["columns"]
    if not isinstance(names, list) or not isinstance(columns, list) or len(names) != len(columns):
        raise DecodeError("the sandbox's answer has a name for every column")
    if not all(type(name) is str for name in names):
        raise DecodeError("the sandbox's names are text")
    for column in columns:
        if not isinstance(column, list) or len(column) != len(columns[0]):
            raise DecodeError("the sandbox's columns are lists of one length")
        if not _TYPES.issuperset(map(type, column)):
            raise DecodeError("the sandbox's values are numbers, text and NULL")
    return tuple(names), columns


def _infinity(text: str) -> float:
    # SQLite has infinities, and NULL in place of NaN.
    if text == "NaN":
        raise ValueError("NaN")
    return float(text)
