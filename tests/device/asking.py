"""A small table to ask about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import apsw

from chorister.device.sandbox import Answer, Sandbox
from chorister.device.sandbox.functions import known_functions
from chorister.device.schema import FieldType
from chorister.device.store import Snapshot

TABLES: Mapping[str, Mapping[str, FieldType]] = {"t": {"a": "text", "b": "integer"}}
ENDLESS = "SELECT count(*) FROM t AS a, t AS b, t AS c, t AS d, t AS e"  # 200^5 rows


def snapshot(rows: Sequence[tuple[Any, ...]]) -> Snapshot:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (a TEXT, b INTEGER) STRICT")
    connection.executemany("INSERT INTO t VALUES (?, ?)", rows)
    return Snapshot(tables=TABLES, image=connection.serialize("main"))


DATA = snapshot([(f"how are you {i}", i) for i in range(200)])
ALL = known_functions()


def ask(sandbox: Sandbox, query: str, data: Snapshot = DATA, deadline: float = 20) -> Answer:
    return sandbox.run(query, data, functions=ALL, deadline=deadline)
