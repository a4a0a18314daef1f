"""Inside the sandbox: one query on one database, with SQLite's own protections.

SQLite's authorizer is not a boundary: `select * from t natural full join (select null a)` reads
`t` without asking it. It is the second layer; the first is that nothing undeclared is here. The
compiled program shows what the authorizer is not asked about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from typing import Any, Final

import apsw

from chorister.device.sandbox.functions import TABLE_FUNCTIONS, block_table_functions, register
from chorister.device.sandbox.wire import Job, decode_job, encode_job
from chorister.encoding.encoder import Encoder, WorkLimit

MAX_ROWS: Final = 1_000_000
ROWS_PER_BLOCK: Final = 1_000
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


def explain(
    connection: apsw.Connection, job: Job, image: bytes | bytearray
) -> str | tuple[tuple[str, str | None], ...]:
    """Compile a query on empty tables; return its columns, or what is wrong.

    A column has a name, and the declared type of the field that it selects, if it selects one. The
    connection is from `connect`, here and below, and serves this one job.
    """
    pages = _open(connection, job, image)
    if "\0" in job.query:
        return "a NUL character, after which SQLite would stop reading"
    try:
        columns, first = _compile(connection, job.query)
        if not columns:
            return "not a SELECT"
        if len(first) < len(job.query):
            return "more than one statement"
        if _reads_others(connection, job.query, pages):
            return "access to SQLite's own tables is prohibited"
    except (apsw.Error, ValueError) as error:
        return str(error)
    return columns


def _compile(
    connection: apsw.Connection, query: str
) -> tuple[tuple[tuple[str, str | None], ...], str]:
    """Return the columns of the first statement if it is a SELECT, and its text; run nothing."""
    columns: tuple[tuple[str, str | None], ...] = ()
    first = ""

    def before(cursor: apsw.Cursor, statement: str, _bindings: object) -> bool:
        nonlocal columns, first
        first = statement
        if cursor.has_vdbe and cursor.is_readonly and not cursor.is_explain:
            columns = tuple((each[0], each[1]) for each in cursor.get_description())
        return False

    cursor = connection.cursor()
    cursor.exec_trace = before
    with suppress(apsw.ExecTraceAbort):
        cursor.execute(query, can_cache=False)
    return columns, first


def rows(
    connection: apsw.Connection, job: Job, image: bytes | bytearray
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Return the names of the result's columns, and its rows; raise if anything is wrong."""
    pages = _open(connection, job, image)
    if "\0" in job.query or _reads_others(connection, job.query, pages):
        raise ValueError("reads more than the declared tables")
    names: list[str] = []

    def before(cursor: apsw.Cursor, _sql: str, _bindings: object) -> bool:
        # Called for each statement. Only the first is run, and only if it is a plain SELECT.
        if names or not cursor.is_readonly or cursor.is_explain:
            return False
        names.extend(column[0] for column in cursor.get_description())
        return bool(names)

    connection.exec_trace = before
    found = connection.execute(job.query)
    return names, found


def choose(
    connection: apsw.Connection, job: Job, encoder: Encoder, image: bytes | bytearray
) -> int:
    """Return the one bin to report, from all rows of the query; raise if anything is wrong."""
    if job.selection is None:
        raise ValueError("the job has no selection")
    names, found = rows(connection, job, image)
    # If two columns have the same name, the first counts.
    places = {name: itemgetter(names.index(name)) for name in encoder.columns}
    bins, budget = list[int](), WorkLimit()
    # In blocks, so that their memory is reused.
    while block := list(islice(found, ROWS_PER_BLOCK)):
        columns = {name: list(map(place, block)) for name, place in places.items()}
        bins += encoder.find(columns, budget)
        if len(bins) > MAX_ROWS:
            raise ValueError("too many rows")
    return encoder.select(bins, job.selection)


def _reads_others(connection: apsw.Connection, query: str, pages: Collection[int]) -> bool:
    """Return whether the compiled query opens any table except the declared ones.

    Virtual tables need no check: there are none except the listed functions.
    """
    program = connection.execute(query, can_cache=False, explain=1)
    return any(
        p3 != 0 or p2 not in pages or (p5 or 0) & _P2_IS_REGISTER
        for _, opcode, _, p2, p3, _, p5, _ in program
        if opcode == "ReopenIdx" or (opcode.startswith("Open") and opcode not in _OPEN_ITS_OWN)
    )


def rehearse() -> None:
    """Run a query on nothing while nobody waits, so that shared memory is copied ahead of time."""
    # From here on, SQLite's randomness is not a copy of the zygote's.
    apsw.randomness(0)
    table = apsw.Connection(":memory:")
    table.execute("CREATE TABLE t (a TEXT, b INTEGER); INSERT INTO t VALUES ('a', random())")
    job = Job(
        query="SELECT a, b FROM t", tables=("t",), functions=(), seconds=1.0, selection="uniform"
    )
    encoder, image = Encoder.parse(_TRIAL), table.serialize("main")
    choose(connect(), decode_job(encode_job(job)), encoder, image)


_TRIAL: Final = b"""{"features": [
    {"kind": "prefix_tree", "column": "a", "prefixes": ["a"], "vocabulary": ["b"]},
    {"kind": "intervals", "column": "b", "edges": ["0", "1"]}
], "deny": []}"""


def connect() -> apsw.Connection:
    """Return a connection to an empty database with all protections that need no job."""
    connection = apsw.Connection(":memory:")
    connection.pragma("temp_store", 2)
    connection.pragma("cell_size_check", 1)
    connection.pragma("query_only", 1)
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_VIEW, 0)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    # A misspelled name in double quotes is an error, not a string.
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
    block_table_functions(connection)
    for limit, value in _LIMITS.items():
        connection.limit(limit, value)
    return connection


def _open(connection: apsw.Connection, job: Job, image: bytes | bytearray) -> frozenset[int]:
    """Put the data there, and the job's own protections; return the declared tables' root pages."""
    apsw.hard_heap_limit(_HEAP + 2 * len(image))
    connection.deserialize("main", image)
    found = connection.execute("SELECT tbl_name, rootpage FROM sqlite_schema").fetchall()
    for name in job.functions:
        if name in TABLE_FUNCTIONS:
            register(connection, name)
    connection.authorizer = _Authorizer(job)
    return frozenset(page for table, page in found if table in job.tables and isinstance(page, int))


class _Authorizer:
    """Refuses everything except SELECT, the declared tables and the listed functions."""

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
