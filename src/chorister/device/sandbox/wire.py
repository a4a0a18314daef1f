"""What device and sandbox say to each other: frames of a JSON head and a body of bytes.

The sandbox's answer is parsed as if an attacker wrote it, because a query that broke SQLite did.
Only the standard library is imported here, for the zygote holds as little as possible.
"""

from __future__ import annotations

import json
import math
import re
import socket
import struct
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, TypeAlias

from chorister.errors import DecodeError

__all__ = [
    "LAST",
    "MAX_ANSWER_BYTES",
    "MAX_BODY_BYTES",
    "MAX_CELLS",
    "MAX_COLUMNS",
    "ROWS_PER_BLOCK",
    "Job",
    "Result",
    "Value",
    "decode_job",
    "encode_block",
    "encode_job",
    "encode_names",
    "receive",
    "receive_frame",
    "send_frame",
]

Value: TypeAlias = int | float | str | None

MAX_HEAD_BYTES: Final = 1_000_000
MAX_BODY_BYTES: Final = 2**30
MAX_ANSWER_BYTES: Final = 2**25
"""Of all blocks of an answer, heads included."""
MAX_CELLS: Final = 2_000_000
"""Of an answer: a text of two bytes on the wire is one of fifty, and a pointer to it, in Python."""
MAX_COLUMNS: Final = 256
_LENGTHS: Final = struct.Struct("!IQ")
_TYPES: Final = frozenset({int, float, str, type(None)})
_JSON_TEXT: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"')


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
    columns: tuple[str, ...] | None  # of the result: those that come back; None: all
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
        columns=None if tree["columns"] is None else tuple(map(str, tree["columns"])),
        seconds=float(tree["seconds"]),
        compile_only=bool(tree["compile_only"]),
    )


# --- answers: sandbox to device ------------------------------------------------------------------
#
# A frame with the columns' names, a frame for each block of rows while the next is computed, and a
# last one, without which there is no answer. Columns of one type, which most are, are packed by C
# code: integers and reals as 8 bytes each, texts with NUL between them. Any other column is JSON.

_INTEGERS: Final = "q"
_REALS: Final = "d"
_TEXTS: Final = "t"
_MIXED: Final = "m"
LAST: Final = b'"end"'
ROWS_PER_BLOCK: Final = 1_000


def encode_names(names: Sequence[str]) -> bytes:
    """The first frame's head."""
    return json.dumps(names).encode()


def encode_block(rows: Sequence[Sequence[Any]], columns: Iterable[int]) -> tuple[bytes, bytes]:
    """Some columns of some rows as a frame. Blobs become NULL: no feature has a cell for one."""
    packed = [_pack(list(map(itemgetter(i), rows))) for i in columns]
    layout = [len(rows), *[(kind, len(data)) for kind, data in packed]]
    return json.dumps(layout).encode(), b"".join([data for _, data in packed])


def _pack(column: list[Any]) -> tuple[str, bytes]:
    types = set(map(type, column))
    if types == {int}:
        return _INTEGERS, array("q", column).tobytes()
    if types == {float}:
        return _REALS, array("d", column).tobytes()
    if types == {str}:
        text = "\0".join(column)
        if text.count("\0") == len(column) - 1:
            return _TEXTS, text.encode()
    if bytes in types:
        column = [None if type(value) is bytes else value for value in column]
    return _MIXED, json.dumps(column).encode()


class Result:
    """An answer as it comes in, which may say anything."""

    def __init__(self, head: bytes) -> None:
        names = _loads(head)
        if not isinstance(names, list) or not all(type(name) is str for name in names):
            raise DecodeError("the sandbox's names are texts")
        if not 1 <= len(names) <= MAX_COLUMNS:
            raise DecodeError(f"an answer of the sandbox's has 1 to {MAX_COLUMNS} columns")
        self.names = tuple(names)
        self.columns: list[list[Value]] = [[] for _ in names]
        self._cells = MAX_CELLS

    def add(self, head: bytes, body: bytes | bytearray) -> None:
        """One more block of rows."""
        view = memoryview(body)
        try:
            rows, *layout = _loads(head)
            if type(rows) is not int or not 1 <= rows <= ROWS_PER_BLOCK:
                raise DecodeError(f"a block of the sandbox's has 1 to {ROWS_PER_BLOCK} rows")
            self._cells -= rows * len(self.columns)
            if self._cells < 0:
                raise DecodeError(f"the sandbox's answer has more than {MAX_CELLS} values")
            for column, (kind, size) in zip(self.columns, layout, strict=True):
                if type(size) is not int or not 0 <= size <= len(view):
                    raise DecodeError("the sandbox's columns are not as long as it says")
                column += _unpack(kind, view[:size], rows)
                view = view[size:]
        except (ValueError, TypeError):
            raise DecodeError("a block of the sandbox's can't be read") from None
        if view:
            raise DecodeError("a block of the sandbox's is longer than it says")


def _loads(data: bytes) -> Any:  # noqa: ANN401
    try:
        return json.loads(data, parse_constant=_infinity)
    except (ValueError, RecursionError):
        raise DecodeError("the sandbox's answer is not JSON") from None


def _unpack(kind: str, data: memoryview, rows: int) -> list[Value]:
    # Counted before they are unpacked: a megabyte of NUL would be a million texts.
    if kind in (_INTEGERS, _REALS):
        numbers = array(kind)
        if len(data) != rows * numbers.itemsize:
            raise DecodeError("the sandbox's columns differ in length")
        numbers.frombytes(data)
        if kind == _REALS and any(map(math.isnan, numbers)):
            raise DecodeError("the sandbox's reals are numbers: SQLite has NULL in place of NaN")
        return list(numbers)
    if kind == _TEXTS:
        text = str(data, "utf-8")
        if text.count("\0") != rows - 1:
            raise DecodeError("the sandbox's columns differ in length")
        return list[Value](text.split("\0"))
    bare = _JSON_TEXT.sub(b"", data)
    if bare.count(b",") != rows - 1 or bare.count(b"[") != 1 or b"{" in bare or b'"' in bare:
        raise DecodeError("the sandbox's columns differ in length, or hold more than values")
    column = _loads(bytes(data))
    if kind != _MIXED or not isinstance(column, list) or not _TYPES.issuperset(map(type, column)):
        raise DecodeError("the sandbox's values are numbers, text and NULL")
    if len(column) != rows:
        raise DecodeError("the sandbox's columns differ in length")
    return column


def _infinity(text: str) -> float:
    # SQLite has infinities, and NULL in place of NaN.
    if text == "NaN":
        raise ValueError("NaN")
    return float(text)
