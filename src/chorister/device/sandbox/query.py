"""Inside the sandbox: one query on one database, behind SQLite's own walls.

SQLite's authorizer is not a boundary: `select * from t natural full join (select null a)` reads
`t` without asking it. It is the second wall; the first is that nothing undeclared is here. What the
authorizer is not asked about, the compiled program shows.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, Final

import apsw
import apsw.ext

from chorister.device.sandbox.functions import TABLE_FUNCTIONS, bar, register
from chorister.device.sandbox.wire import (
    LAST,
    MAX_ANSWER_BYTES,
    MAX_CELLS,
    ROWS_PER_BLOCK,
    Job,
    decode_job,
    encode_block,
    encode_job,
    encode_names,
)

__all__ = ["MAX_ROWS", "answer", "explain", "rehearse"]

MAX_ROWS: Final = 1_000_000
_STEPS_PER_CHECK: Final = 10_000
_OPEN_ITS_OWN: Final = frozenset({"OpenEphemeral", "OpenAutoindex", "OpenDup", "OpenPseudo"})
_P2_IS_REGISTER: Final = 0x10
_HEAP: Final = 64 * 2**20

_LIMITS: Final = {
    apsw.SQLITE_LIMIT_LENGTH: 16 * 2**20,  # a row of 200 fields at their longest
    apsw.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    apsw.SQLITE_LIMIT_COLUMN: 256,
    apsw.SQLITE_LIMIT_EXPR_DEPTH: 100,
    apsw.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    apsw.SQLITE_LIMIT_VDBE_OP: 100_000,
    apsw.SQLITE_LIMIT_FUNCTION_ARG: 32,
    apsw.SQLITE_LIMIT_ATTACHED: 0,
    apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    apsw.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    apsw.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    apsw.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def explain(job: Job, image: bytes | bytearray) -> str | tuple[str, ...]:
    """On a database without rows: the names of the query's columns, or what is wrong with it."""
    connection, pages = _open(job, image)
    if "\0" in job.query:
        return "a NUL character, behind which SQLite would not read"
    try:
        details = apsw.ext.query_info(connection, job.query)
        if not details.has_vdbe or details.is_explain or not details.is_readonly:
            return "not a SELECT"
        if details.query_remaining is not None:
            return "more than one statement"
        if _reads_others(connection, job.query, pages):
            return "access to SQLite's own tables is prohibited"
    except (apsw.Error, ValueError) as error:
        return str(error)
    names = tuple(name for name, _ in details.description)
    return names or "not a SELECT"


def answer(job: Job, image: bytes | bytearray) -> Iterator[tuple[bytes, bytes]]:
    """The frames of the answer; whatever is wrong raises before the last one."""
    connection, pages = _open(job, image)
    if "\0" in job.query or _reads_others(connection, job.query, pages):
        raise ValueError("reads more than the declared tables")
    names: list[str] = []

    def before(cursor: apsw.Cursor, _sql: str, _bindings: object) -> bool:
        # Called for each statement. One that is not first, or would write or explain, is not run.
        if names or not cursor.is_readonly or cursor.is_explain:
            return False
        names.extend(column[0] for column in cursor.get_description())
        return bool(names)

    connection.exec_trace = before
    rows = connection.execute(job.query)
    wanted = names if job.columns is None else job.columns
    columns = range(len(names)) if job.columns is None else [names.index(each) for each in wanted]
    yield encode_names(wanted), b""
    room = MAX_ANSWER_BYTES
    for block in _blocks(rows, min(MAX_ROWS, MAX_CELLS // len(wanted))):
        head, body = encode_block(block, columns)
        room -= len(head) + len(body)
        if room < 0:
            raise MemoryError("too long an answer")
        yield head, body
    yield LAST, b""


def _blocks(rows: Iterator[tuple[Any, ...]], most: int) -> Iterator[list[tuple[Any, ...]]]:
    """Some rows at a time: their memory is used again for the next."""
    count = 0
    while block := list(islice(rows, ROWS_PER_BLOCK)):
        count += len(block)
        if count > most:
            raise MemoryError("too many rows")
        yield block


def _reads_others(connection: apsw.Connection, query: str, pages: Collection[int]) -> bool:
    """Whether the compiled query opens a table but the declared ones, whatever names it by.

    Virtual tables need no look: there are none but the listed functions.
    """
    program = apsw.ext.query_info(connection, query, explain=True).explain or []
    return any(
        step.p3 != 0 or step.p2 not in pages or (step.p5 or 0) & _P2_IS_REGISTER
        for step in program
        if step.opcode == "ReopenIdx"
        or (step.opcode.startswith("Open") and step.opcode not in _OPEN_ITS_OWN)
    )


def rehearse() -> None:
    """A query on nothing, while nobody waits: memory that was shared with the zygote is copied."""
    # From here on SQLite's randomness is this process' own, not a copy of the zygote's.
    apsw.randomness(0)
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (a TEXT, b INTEGER); INSERT INTO t VALUES ('a', random())")
    job = Job(
        query="SELECT a, b FROM t",
        tables=("t",),
        functions=(),
        columns=None,
        seconds=1.0,
        compile_only=False,
    )
    list(answer(decode_job(encode_job(job)), connection.serialize("main")))


def _open(job: Job, image: bytes | bytearray) -> tuple[apsw.Connection, frozenset[int]]:
    """The database behind its walls, and the pages where the declared tables begin."""
    apsw.hard_heap_limit(_HEAP + 2 * len(image))
    connection = apsw.Connection(":memory:")
    connection.deserialize("main", image)
    found = connection.execute("SELECT tbl_name, rootpage FROM sqlite_schema").fetchall()
    pages = frozenset(
        page for table, page in found if table in job.tables and isinstance(page, int)
    )
    connection.pragma("temp_store", 2)
    connection.pragma("cell_size_check", 1)
    connection.pragma("query_only", 1)
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_VIEW, 0)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    # A misspelt name in double quotes is an error, not a text.
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
    bar(connection)
    for name in job.functions:
        if name in TABLE_FUNCTIONS:
            register(connection, name)
    for limit, value in _LIMITS.items():
        connection.limit(limit, value)
    end = time.monotonic() + job.seconds
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS_PER_CHECK)
    connection.authorizer = _Authorizer(job)
    return connection, pages


class _Authorizer:
    """Refuses all but SELECT, reading the declared tables, and the listed functions."""

    def __init__(self, job: Job) -> None:
        tables = {table.lower() for table in job.tables}
        self._functions = {name for name in job.functions if name not in TABLE_FUNCTIONS}
        self._tables = tables | (set(job.functions) & TABLE_FUNCTIONS.keys())

    def __call__(
        self, action: int, first: str | None, second: str | None, _db: str | None, _by: str | None
    ) -> int:
        if action == apsw.SQLITE_SELECT:
            return apsw.SQLITE_OK
        if action == apsw.SQLITE_READ and first is not None and first.lower() in self._tables:
            return apsw.SQLITE_OK
        if action == apsw.SQLITE_FUNCTION and second is not None:
            return apsw.SQLITE_OK if second.lower() in self._functions else apsw.SQLITE_DENY
        return apsw.SQLITE_DENY
