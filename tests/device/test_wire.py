"""Frames between device and sandbox: every answer is parsed as if an attacker wrote it."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.device.sandbox.wire import (
    MAX_CELLS,
    ROWS_PER_BLOCK,
    Job,
    Result,
    decode_job,
    encode_block,
    encode_job,
    encode_names,
    receive,
    receive_frame,
    send_frame,
)
from chorister.errors import DecodeError

TYPES = (int, float, str, type(None))
sqlite_values = st.one_of(
    st.none(),
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.just("a\0b"),
    st.binary(),
)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[sqlite_values] * n))))
def test_what_sqlite_returns_survives_except_blobs(rows: list[tuple[Any, ...]]) -> None:
    names = [f"c{i}" for i in range(len(rows[0]) if rows else 2)]
    result = Result(encode_names(names))
    for block in (rows[:3], rows[3:]):
        if block:
            result.add(*encode_block(block, range(len(names))))
    assert result.names == tuple(names)
    columns = result.columns
    wanted = [
        [None if isinstance(v, bytes) else v for v in column] for column in zip(*rows, strict=True)
    ]
    assert columns == (wanted if rows else [[], []])
    for column, expected in zip(columns, wanted, strict=bool(rows)):
        assert list(map(type, column)) == list(map(type, expected))


def check_anything(head: bytes, body: bytes, names: tuple[str, ...] = ("a", "b")) -> None:
    """Whatever comes, it is columns of one length and of SQLite's types, or a typed error."""
    result = Result(encode_names(names))
    try:
        result.add(head, body)
    except DecodeError:
        return
    assert len({len(column) for column in result.columns}) <= 1
    for column in result.columns:
        assert all(type(value) in TYPES for value in column)
        assert not any(type(value) is float and math.isnan(value) for value in column)


@given(st.binary(), st.binary())
def test_any_bytes_are_a_block_or_a_typed_error(head: bytes, body: bytes) -> None:
    check_anything(head, body)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_names_or_a_typed_error(head: bytes) -> None:
    try:
        result = Result(head)
    except DecodeError:
        return
    assert all(type(name) is str for name in result.names)


columns = st.tuples(st.sampled_from("qdtmx"), st.integers(-8, 40)) | json_values
heads = st.tuples(st.integers(-1, 5) | json_values, columns, columns) | json_values


@given(heads, st.binary(max_size=64) | json_values.map(lambda v: json.dumps(v).encode()))
def test_any_json_is_a_block_or_a_typed_error(head: object, body: bytes) -> None:
    check_anything(json.dumps(head).encode(), body)


@given(st.data())
def test_a_changed_block_is_a_block_or_a_typed_error(data: st.DataObject) -> None:
    head, body = map(bytearray, encode_block([(1, "x", None), (2, "y", 0.5)], range(3)))
    for part in (head, body):
        place = data.draw(st.integers(0, len(part) - 1))
        part[place] ^= data.draw(st.integers(0, 255))
    check_anything(bytes(head), bytes(body), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("d", b"\0\0\0\0\0\0\xf8\x7f"),
        ("m", b"[NaN]"),
        ("m", b"[true]"),
        ("m", b"[[1]]"),
        ("m", b"[" * 100_000),
        ("m", b"[" + b"9" * 10_000 + b"]"),
        ("t", b"\xff"),
        ("q", b"1234567"),
        ("x", b"[1]"),
        ("t", b"\0" * 1_000_000),
        ("q", bytes(16)),
        ("m", b"[1,2]"),
        ("m", b"[[],[],[]]"),
        ("m", b"[[[]]]"),
        ("m", b'[{"a":1}]'),
        ("m", b'["a'),
    ],
)
def test_a_hostile_column_is_refused(kind: str, body: bytes) -> None:
    with pytest.raises(DecodeError):
        Result(b'["a"]').add(json.dumps([1, [kind, len(body)]]).encode(), body)


def test_a_hostile_column_is_counted_before_it_takes_memory() -> None:
    body = b"[" + b"[]," * 1_000_000 + b"[]]"
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            Result(b'["a"]').add(json.dumps([1, ["m", len(body)]]).encode(), body)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()


def test_an_answer_has_a_most_of_values_and_columns() -> None:
    head, body = encode_block([(1,) * 200] * ROWS_PER_BLOCK, range(200))
    result = Result(encode_names(["x"] * 200))
    for _ in range(MAX_CELLS // (200 * ROWS_PER_BLOCK)):
        result.add(head, body)
    with pytest.raises(DecodeError):
        result.add(head, body)
    for names in ([], ["x"] * 257):
        with pytest.raises(DecodeError, match="columns"):
            Result(encode_names(names))


def test_a_job_survives() -> None:
    job = Job(
        query="SELECT 'ä'",
        tables=("t",),
        functions=("a", "b"),
        columns=("a", "ü"),
        seconds=0.5,
        compile_only=True,
    )
    assert decode_job(encode_job(job)) == job


def test_frames_survive_and_long_ones_are_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=send_frame, args=(theirs, b"head", bytes(300_000))).start()
        head, size = receive_frame(ours, max_body=300_000)
        assert head == b"head"
        assert bytes(receive(ours, size)) == bytes(300_000)
        send_frame(theirs, b"head", bytes(101))
        with pytest.raises(DecodeError, match="too long"):
            receive_frame(ours, max_body=100)


def test_a_frame_that_does_not_end_ends_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\0")
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            receive_frame(ours, max_body=0, until=start + 0.1)
        assert time.monotonic() - start < 5
        theirs.close()
        with pytest.raises(EOFError):
            receive_frame(ours, max_body=0)
