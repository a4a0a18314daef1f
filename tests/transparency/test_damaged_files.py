"""Any file of a log, damaged in any way: every reader raises typed errors, or is not deceived."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.clock import SettableClock
from chorister.errors import DecodeError, LogError, LogWithheld
from chorister.transparency.auditor import audit
from chorister.transparency.monitor import LogMonitor
from chorister.transparency.reader import read_current
from chorister.transparency.tiles import bundle_path, encode_bundle, read_entries
from tests.logworld import a_world, authority, trust

# What somebody would try: other line ends, blank lines, numbers out of range, lines by strangers.
PIECES = [b"\r\n", b"\n\n", b"9" * 19, b"9" * 30, b"-1", b"\x00", b"\xff\xff", b"=", b" "]
PIECES += [
    "— a AAAAAAA=\n".encode(),
    "\u2028".encode(),
    "— registry.example/log AAAAAAA=\n".encode(),
]


class Files(dict[str, bytes]):
    """A log in memory."""

    def read(self, path: str, *, limit: int) -> bytes:
        if path not in self or len(self[path]) > limit:
            raise LogWithheld(f"{path} is missing or too long", path=path)
        return self[path]


@functools.cache
def honest() -> tuple[Files, int]:
    """A log's files, and the time."""
    with tempfile.TemporaryDirectory() as folder:
        world = a_world(Path(folder))
        paths = [path for path in world.public.rglob("*") if path.is_file()]
        files = Files({str(path.relative_to(world.public)): path.read_bytes() for path in paths})
        return files, world.clock.now()


@st.composite
def damaged_logs(draw: st.DrawFn) -> Files:
    files = Files(honest()[0])
    names = st.sampled_from(sorted(files))
    name = draw(names)
    data = files[name]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        insert = draw(st.sampled_from(PIECES) | st.binary(max_size=3))
        data = data[:at] + insert + data[at + draw(st.integers(0, 40)) :]
    files[name] = draw(st.just(data) | names.map(honest()[0].__getitem__))
    return files


@given(damaged_logs())
def test_readers_of_a_damaged_log_raise_typed_errors_or_read_the_truth(files: Files) -> None:
    truth, now = honest()
    clock = SettableClock(now)
    readers: tuple[Callable[[Files], object], ...] = (
        lambda log: audit(log, authority=authority(), clock=clock).entries,
        lambda log: LogMonitor(log, authority=authority(), clock=clock).fetch_new(),
        lambda log: read_current(log, trust=trust(), clock=clock),
    )
    for read in readers:
        with contextlib.suppress(LogError, DecodeError):
            assert read(files) == read(truth)


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=4), st.data())
def test_damaged_bundles(entries: list[bytes], data: st.DataObject) -> None:
    good = encode_bundle(entries)
    path = bundle_path(0, len(entries))
    assert list(read_entries(Files({path: good}), 0, len(entries))) == entries
    at = data.draw(st.integers(0, len(good)))
    damaged = good[:at] + data.draw(st.binary(max_size=3)) + good[at + 1 :]
    try:
        found = list(read_entries(Files({path: damaged}), 0, len(entries)))
    except LogWithheld:
        return
    assert encode_bundle(found) == damaged


def test_nothing_is_fetched_where_nothing_is_new() -> None:
    assert list(read_entries(Files(), 7, 7)) == []
    with pytest.raises(LogWithheld):
        list(read_entries(Files(), 6, 7))
