"""A small table to ask about: for a bin, as devices do, or for all rows, which only tests can."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import apsw

from chorister.clock import uptime
from chorister.device.sandbox import Sandbox, processes
from chorister.device.sandbox import sandbox as device_side
from chorister.device.sandbox.functions import known_functions
from chorister.device.sandbox.wire import waits
from chorister.device.schema import FieldType
from chorister.device.store import Snapshot
from chorister.encoding import Categories, Encoding, Selection
from chorister.errors import SandboxFailed

TABLES: Mapping[str, Mapping[str, FieldType]] = {"t": {"a": "text", "b": "integer"}}
ENDLESS = "SELECT count(*) AS x FROM t AS a, t AS b, t AS c, t AS d, t AS e"  # 200^5 rows
ROWS_BOOT = Path(__file__).with_name("rows_boot.py")


def snapshot(rows: Sequence[tuple[Any, ...]]) -> Snapshot:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (a TEXT, b INTEGER) STRICT")
    connection.executemany("INSERT INTO t VALUES (?, ?)", rows)
    return Snapshot(tables=TABLES, image=connection.serialize("main"))


DATA = snapshot([(f"how are you {i}", i) for i in range(200)])
ALL = known_functions()
NUMBERS = Encoding((Categories(column="x", values=tuple(range(1, 1000))),))
"""The bin of a number in the column x is that number."""


def choose(
    sandbox: Sandbox,
    query: str,
    data: Snapshot = DATA,
    *,
    encoding: Encoding = NUMBERS,
    selection: Selection = "first",
    functions: Collection[str] = ALL,
    deadline: float = 20,
) -> int:
    """What a device learns of a query's result."""
    return sandbox.choose(
        query,
        data,
        functions=functions,
        encoding=encoding,
        selection=selection,
        until=uptime() + deadline,
    )


@dataclass(frozen=True)
class Rows:
    """A query's result."""

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class RowSandbox(Sandbox):
    """The real one, but for the last step: its processes answer with all rows, not with a bin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        with mock.patch.object(processes, "_BOOT", ROWS_BOOT):
            self._zygote = processes.Zygote(uptime() + 60)

    def read(
        self, query: str, data: Snapshot, *, functions: Collection[str], deadline: float
    ) -> Rows:
        """What a query reads; `SandboxFailed` where a device would see that."""
        until = uptime() + deadline
        job = device_side._job(query, data, functions, "first", until)
        received = bytearray()
        with suppress(OSError, EOFError), self._process(until) as peer:
            device_side._send_job(peer, job, b"", data.image, until)
            for timeout in waits(until):
                peer.settimeout(timeout)
                with suppress(TimeoutError):
                    received += (part := peer.recv(2**20))
                    if not part:
                        break
        try:
            names, rows = pickle.loads(received)  # noqa: S301 (of a process of ours)
        except (EOFError, pickle.UnpicklingError):
            names = None
        if names is None:
            raise SandboxFailed
        return Rows(tuple(names), rows)


@functools.cache
def _row_sandbox() -> RowSandbox:
    return RowSandbox()


def ask(
    query: str,
    data: Snapshot = DATA,
    *,
    functions: Collection[str] = ALL,
    deadline: float = 20,
) -> Rows:
    """All that a query reads."""
    return _row_sandbox().read(query, data, functions=functions, deadline=deadline)
