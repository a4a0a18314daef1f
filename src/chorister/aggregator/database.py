"""SQLite or PostgreSQL behind one face: short transactions, durable or not, as the caller says.

**SQLite** (one file a role): the write-ahead log, one writer at a time, begun with BEGIN IMMEDIATE
so that whatever a writer reads is still so when it writes. Writers of one process queue at a lock
of their own, because SQLite's is a busy loop. **PostgreSQL**: READ COMMITTED; whoever depends on
what it read locks the row (see `batches.py`).

*Durable* means on the disk before the block is left: for whatever is acknowledged to somebody. The
rest (a job made, a job finished) may be lost with the power, because it is done again, with the
same outcome; it is never lost out of order.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import ExecutionContext
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from chorister.aggregator.schema import properties
from chorister.aggregator.sealing import Sealer
from chorister.dap.draft import Role
from chorister.errors import InternalError, KeyUnavailable, ServiceError, StorageDamaged

__all__ = ["BINARY_ROWS", "Database"]

BINARY_ROWS: Final = {"chorister_binary": True}
"""For a statement that reads many bytes: as text, PostgreSQL makes each of them two digits."""

_BUSY_SECONDS: Final = 30
# SQLite: a connection for each thread: the web framework's 40, a leader's 64 jobs, the loops.
_THREADS: Final = 112
# Reports are written fastest with large pages, their ids (here and there in the tree) with small
# ones.
_PAGE_BYTES: Final = 16_384
# Before the log is copied into the file. What was written several times, as the pages of the ids
# are, and rows that are soon deleted, is then copied once.
_LOG_BYTES: Final = 64 << 20
_CACHE_KIB: Final = 65_536
_PAGES_AT_ONCE: Final = 250
_CHECK: Final = b"chorister at-rest key"
_MIGRATION_KEY: Final = 0x63686F72_00


class Database:
    """One aggregator's database. Threads share it; each transaction has a connection."""

    def __init__(self, engine: Engine, sealer: Sealer) -> None:
        self.engine = engine
        self.sealer = sealer
        self.is_sqlite: Final = engine.dialect.name == "sqlite"
        # How many rows the sum and each counter of a task are spread over.
        self.shards: Final = 1 if self.is_sqlite else 16
        self._writer: contextlib.AbstractContextManager[object] = (
            threading.Lock() if self.is_sqlite else contextlib.nullcontext()
        )

    @classmethod
    def open(cls, url: str, *, role: Role, sealer: Sealer, migrate: bool = False) -> Database:
        """Open the database of one role: `sqlite:///FILE` or `postgresql+psycopg://...`.

        Raises `ServiceError` where its schema is not this version's (unless told to `migrate`) or
        it belongs to the other role, and `KeyUnavailable` where the at-rest key is another one.
        """
        parsed = _parsed(url)
        if parsed.get_backend_name() == "sqlite":
            _prepare_file(Path(str(parsed.database)), create=migrate)
        database = cls(_engine(parsed), sealer)
        try:
            database._check_version(migrate=migrate)
            if migrate:
                database.migrate()
            database._check_owner(role)
        except BaseException:
            database.close()
            raise
        return database

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent look: what others commit meanwhile is not seen."""
        with _as_service_error(), self.engine.connect() as raw:
            connection = raw
            if not self.is_sqlite:  # whose readers see a snapshot anyway
                connection = raw.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """One transaction: committed when the block is left, rolled back if it raises."""
        with _as_service_error(), self._writer, self.engine.connect() as raw:
            connection = raw.execution_options(chorister_write=True, chorister_durable=durable)
            with connection.begin():
                yield connection

    def insert(self, table: Table) -> Any:  # noqa: ANN401 - both dialects' own `Insert`
        """INSERT that knows ON CONFLICT, which both dialects spell alike."""
        return sqlite_insert(table) if self.is_sqlite else postgresql_insert(table)

    def insert_new(
        self, connection: Connection, table: Table, rows: Sequence[Mapping[str, object]]
    ) -> int:
        """Insert what is not there yet; how many rows that were."""
        statement = self.insert(table).on_conflict_do_nothing()
        # Without this option psycopg's count of an INSERT is lost, and -1 is returned.
        statement = statement.execution_options(preserve_rowcount=True)
        inserted = [int(connection.execute(statement, row).rowcount) for row in rows]
        if any(number not in (0, 1) for number in inserted):
            raise InternalError("the database does not tell how many rows it inserted")
        return sum(inserted)

    # --- versions -------------------------------------------------------------------------------

    def migrate(self) -> None:
        """Bring the schema up to this version; does nothing if it is."""
        with self.write() as connection:
            if not self.is_sqlite:  # several processes may start at once
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_KEY)))
            config = _alembic()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def revision(self) -> str | None:
        """The version of the schema, None in an empty database."""
        with self.read() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def _check_version(self, *, migrate: bool) -> None:
        known, found = _revisions(), self.revision()
        wanted = known[0]
        if found == wanted or (migrate and (found is None or found in known)):
            return
        if found is not None and found not in known:
            raise ServiceError(
                f"the database has schema {found}, newer than this software's {wanted}: upgrade it"
            )
        raise ServiceError(
            f"the database has schema {found or 'none'}, this software needs {wanted}: migrate it"
        )

    def _check_owner(self, role: Role) -> None:
        name = role.name.lower()
        with self.write() as connection:
            self.insert_new(connection, properties, [{"name": "role", "value": name.encode()}])
            sealed = self.sealer.seal(_CHECK, "properties", b"at-rest key")
            self.insert_new(connection, properties, [{"name": "at-rest key", "value": sealed}])
            found = {row.name: bytes(row.value) for row in connection.execute(properties.select())}
        if not hmac.compare_digest(found["role"], name.encode()):
            raise ServiceError(
                f"the database is a {found['role'].decode()}'s, not a {name}'s: each needs its own"
            )
        try:
            self.sealer.open(found["at-rest key"], "properties", b"at-rest key")
        except StorageDamaged:
            raise KeyUnavailable(
                "the at-rest key is not the one that this database was made with"
            ) from None

    # --- space ----------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Return freed pages to the file system, a few at a time; PostgreSQL vacuums itself."""
        if not self.is_sqlite:
            return
        with _as_service_error(), self.engine.connect() as connection:
            raw = connection.connection.dbapi_connection
            if not isinstance(raw, sqlite3.Connection):
                raise InternalError("SQLite without its driver")
            (free,) = raw.execute("PRAGMA freelist_count").fetchone()
            for _ in range(0, free, _PAGES_AT_ONCE):
                with self._writer:
                    # As a script: the driver would make one step of a statement without columns.
                    raw.executescript(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")
            with self._writer:
                raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@contextlib.contextmanager
def _as_service_error() -> Iterator[None]:
    try:
        yield
    except PoolTimeout as error:
        raise ServiceError("all connections to the database are in use; try again") from error
    except DBAPIError as error:
        reason = str(error.orig).splitlines()[0] if error.orig else type(error).__name__
        raise ServiceError(f"the database does not do its work: {reason}; try again") from error


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", "chorister.aggregator:migrations")
    return config


@cache
def _revisions() -> tuple[str, ...]:
    """The versions that this software knows, the newest first."""
    script = ScriptDirectory.from_config(_alembic())
    return tuple(each.revision for each in script.walk_revisions())


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ServiceError("the database is no URL: sqlite:///FILE or postgresql://...") from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise ServiceError(f"{backend}: an aggregator runs on SQLite or PostgreSQL")
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ServiceError("an aggregator's SQLite database is a file: sqlite:///FILE")
    return parsed


def _prepare_file(path: Path, *, create: bool) -> None:
    """Only who may make tables makes the file, and nobody else may read it.

    SQLite gives its write-ahead log the permissions of the database.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        os.close(os.open(path, flags, 0o600))
    except FileNotFoundError:
        raise ServiceError(f"there is no database at {path}: correct the path, or serve") from None
    except OSError as error:
        raise ServiceError(f"can't open the database {path}: {error.strerror}") from error


def _engine(parsed: URL) -> Engine:
    match parsed.get_backend_name():
        case "sqlite":
            return _sqlite(sa.create_engine(
                parsed.set(drivername="sqlite+pysqlite"),
                connect_args={"timeout": _BUSY_SECONDS, "isolation_level": None,
                              "check_same_thread": False, "cached_statements": 256},
                pool_size=8, max_overflow=_THREADS - 8,
            ))  # fmt: skip
        case "postgresql":
            return _postgresql(sa.create_engine(
                parsed.set(drivername="postgresql+psycopg"),
                # All processes of an operator share the server's connections, often 100.
                pool_size=8, max_overflow=24, pool_pre_ping=True,
                isolation_level="READ COMMITTED",
            ))  # fmt: skip
    raise InternalError("an engine for a database that is neither")


def _sqlite(engine: Engine) -> Engine:
    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:
        # Settings of the file, made while it is empty; later each would wait for a writer.
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            for pragma in (f"page_size = {_PAGE_BYTES}", "auto_vacuum = INCREMENTAL"):
                connection.execute(f"PRAGMA {pragma}").fetchall()
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
        for pragma in (
            "foreign_keys = ON",
            "trusted_schema = OFF",
            # A destroyed key is overwritten in its page; whole pages of sealed reports, which only
            # that key could open, are not written once more just to be deleted.
            "secure_delete = FAST",
            f"cache_size = -{_CACHE_KIB}",
            f"wal_autocheckpoint = {_LOG_BYTES // _PAGE_BYTES}",
            f"journal_size_limit = {_LOG_BYTES}",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("chorister_write"):
            level = "FULL" if options["chorister_durable"] else "NORMAL"
            connection.exec_driver_sql(f"PRAGMA synchronous = {level}")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            connection.exec_driver_sql("BEGIN")

    return engine


def _postgresql(engine: Engine) -> Engine:
    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("chorister_write") and not options["chorister_durable"]:
            connection.exec_driver_sql("SET LOCAL synchronous_commit = off")

    @event.listens_for(engine, "before_cursor_execute")
    def ask(
        _connection: Connection,
        cursor: Any,  # noqa: ANN401 - the driver's own
        _statement: str,
        _parameters: object,
        context: ExecutionContext | None,
        _many: bool,
    ) -> None:
        if context is not None and BINARY_ROWS.items() <= context.execution_options.items():
            cursor.format = 1

    return engine
