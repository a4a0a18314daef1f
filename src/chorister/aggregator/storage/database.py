"""SQLite or PostgreSQL behind one interface: short transactions, durable if the caller asks.

**SQLite** (one file per role) uses the write-ahead log and one writer at a time, started with BEGIN
IMMEDIATE so that what a writer reads still holds when it writes. Writers of one process queue at a
lock of their own, because SQLite's own lock is a busy loop. **PostgreSQL** runs at READ COMMITTED;
a transaction that depends on what it read locks the row (see `batches.py`).

*Durable* means on disk before the block ends: for everything that is acknowledged. The
rest (a job created or finished) may be lost with the power, because it is repeated with the same
outcome; it is never lost out of order.

SQLite copies its log into the file within the commit that makes the log too long, and everybody
waits. Under a stream of uploads, a thread of its own copies most of it before (`written`).

Secrets at rest are encrypted with AES-256-GCM under a key that is not in the database. The
associated data names the table and the row, so a value can't be moved elsewhere. Nonces are random:
one key may encrypt 2^32 values, one for each aggregation job.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import ExecutionContext
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from chorister.aggregator.storage.schema import properties
from chorister.codec import vector
from chorister.dap.draft import Role
from chorister.errors import InternalError, KeyUnavailable, ServiceError, StorageDamaged

Transaction: TypeAlias = Connection
"""An open transaction; other packages pass it on and never look inside."""

BINARY_ROWS: Final = {"chorister_binary": True}
"""Execution options to read many bytes: as text, PostgreSQL sends two digits for each."""

_IDS_PER_QUERY: Final = 500
KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_BUSY_TIMEOUT_SECONDS: Final = 30
# SQLite needs a connection per thread: the web framework's 40, a leader's 64 jobs, the loops.
_MAX_CONNECTIONS: Final = 112
# Large pages write reports fastest, small pages write their ids (scattered over the tree) fastest.
_PAGE_BYTES: Final = 16_384
# Size of the write-ahead log before it is copied into the file. Pages that were written several
# times, as those of the ids, and rows that are soon deleted are then copied once.
_LOG_BYTES: Final = 64 << 20
# How much is written before a thread starts to copy the log, and what it leaves to a commit.
_EARLY_BYTES: Final = 40 << 20
_REST_BYTES: Final = 8 << 20
_MAX_PASSES: Final = 4
_CACHE_KIB: Final = 65_536
_VACUUM_PAGES: Final = 250
_KEY_CHECK: Final = b"chorister at-rest key"
_MIGRATION_LOCK: Final = 0x63686F72_00
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Sealer:
    """Encrypts and decrypts values of one database. Never prints its key."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise KeyUnavailable(f"the at-rest key has {len(key)} bytes; it must have {KEY_BYTES}")
        self._cipher = AESGCM(key)

    def seal(self, value: bytes, table: str, *row: bytes) -> bytes:
        """Encrypt a value for one place: a table, and the key of a row in it."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, value, _associated_data(table, row))

    def open(self, sealed: bytes, table: str, *row: bytes) -> bytes:
        """Decrypt a value of this place; `StorageDamaged` if it is from another place or key."""
        nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, ciphertext, _associated_data(table, row))
        except (InvalidTag, ValueError):
            raise StorageDamaged(
                f"an encrypted value in {table} can't be decrypted: it was altered or moved, or "
                "the at-rest key is not the one it was written with"
            ) from None


def _associated_data(table: str, row: tuple[bytes, ...]) -> bytes:
    return b"".join(vector(part, prefix=2) for part in (table.encode(), *row))


class Database:
    """One aggregator's database. Threads share it; each transaction has its own connection."""

    def __init__(self, engine: Engine, sealer: Sealer) -> None:
        self.engine = engine
        self.sealer = sealer
        self.is_sqlite: Final = engine.dialect.name == "sqlite"
        # Over how many rows a task's sum and each of its counters are spread.
        self.shards: Final = 1 if self.is_sqlite else 16
        self._writer: contextlib.AbstractContextManager[object] = (
            threading.Lock() if self.is_sqlite else contextlib.nullcontext()
        )
        self._written = 0  # bytes, about, since the log was last copied
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies = threading.Lock()  # held by whoever copies the log
        # Whether SQLite's log may hold what must not be read again; at first, by the last process.
        self.log_holds_deleted = self.is_sqlite

    @classmethod
    def open(cls, url: str, *, role: Role, sealer: Sealer, migrate: bool = False) -> Database:
        """Open the database of one role: `sqlite:///FILE` or `postgresql+psycopg://...`.

        Raises `ServiceError` if its schema is another version's (unless `migrate` is set) or it
        belongs to the other role, and `KeyUnavailable` if the at-rest key is the wrong one.
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

    @property
    def conninfo(self) -> str:
        """The address of a PostgreSQL database, password included, as libpq reads it."""
        return self.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)

    def close(self) -> None:
        self._copying.shutdown()
        self.engine.dispose()

    def ping(self) -> None:
        """Raise `ServiceError` unless the database answers."""
        with self.read() as tx:
            tx.exec_driver_sql("SELECT 1")

    @contextlib.contextmanager
    def read(self) -> Iterator[Transaction]:
        """Open a consistent snapshot: what others commit meanwhile is invisible."""
        with _as_service_error(), self.engine.connect() as raw:
            connection = raw
            if not self.is_sqlite:  # SQLite readers always see a snapshot
                connection = raw.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Transaction]:
        """Open a transaction: committed when the block ends, rolled back if it raises."""
        with _as_service_error(), self._writer, self.engine.connect() as raw:
            connection = raw.execution_options(chorister_write=True, chorister_durable=durable)
            with connection.begin():
                yield connection

    def insert(self, table: Table) -> Any:  # noqa: ANN401 - both dialects' own `Insert`
        """Return an INSERT with ON CONFLICT, which both dialects spell alike."""
        return sqlite_insert(table) if self.is_sqlite else postgresql_insert(table)

    def insert_new(
        self, tx: Transaction, table: Table, rows: Sequence[Mapping[str, object]]
    ) -> int:
        """Insert rows that do not exist yet. Returns the number of rows inserted."""
        statement = self.insert(table).on_conflict_do_nothing()
        # Without this option psycopg's row count of an INSERT is lost, and -1 is returned.
        statement = statement.execution_options(preserve_rowcount=True)
        inserted = [int(tx.execute(statement, row).rowcount) for row in rows]
        if any(number not in (0, 1) for number in inserted):
            raise InternalError("the database does not say how many rows it inserted")
        return sum(inserted)

    # --- versions -------------------------------------------------------------------------------

    def migrate(self) -> None:
        """Upgrade the schema to this version, if it is older."""
        with self.write() as connection:
            if not self.is_sqlite:  # several processes may start at the same time
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            config = _alembic()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def revision(self) -> str | None:
        """Return the version of the schema; None in an empty database."""
        with self.read() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def _check_version(self, *, migrate: bool) -> None:
        known, found = _revisions(), self.revision()
        wanted = known[0]
        if found == wanted or (migrate and (found is None or found in known)):
            return
        if found is not None and found not in known:
            raise ServiceError(
                f"the database has schema {found}, newer than this software's {wanted}: "
                "upgrade the software"
            )
        raise ServiceError(
            f"the database has schema {found or 'none'}, but this software needs {wanted}: "
            "start the server, which migrates it"
        )

    def _check_owner(self, role: Role) -> None:
        name = role.name.lower()
        with self.write() as connection:
            self.insert_new(connection, properties, [{"name": "role", "value": name.encode()}])
            sealed = self.sealer.seal(_KEY_CHECK, "properties", b"at-rest key")
            self.insert_new(connection, properties, [{"name": "at-rest key", "value": sealed}])
            found = {row.name: bytes(row.value) for row in connection.execute(properties.select())}
        if not hmac.compare_digest(found["role"], name.encode()):
            raise ServiceError(
                f"the database belongs to a {found['role'].decode()}, not a {name}: "
                "each needs its own"
            )
        try:
            self.sealer.open(found["at-rest key"], "properties", b"at-rest key")
        except StorageDamaged:
            raise KeyUnavailable(
                "the at-rest key is not the one this database was created with"
            ) from None

    # --- space ----------------------------------------------------------------------------------

    def free_disk_space(self) -> None:
        """Return free pages to the file system, a few at a time; PostgreSQL vacuums itself.

        Also empties SQLite's log, where what was deleted could still be read. If somebody reads the
        log meanwhile, `log_holds_deleted` stays, so that it is tried again.
        """
        if not self.is_sqlite:
            return
        self.log_holds_deleted = True  # until it is empty, also if this fails
        with self._sqlite_connection() as raw:
            (free,) = raw.execute("PRAGMA freelist_count").fetchone()
            for _ in range(0, free, _VACUUM_PAGES):
                with self._writer:
                    # As a script: the driver executes one step only of a statement without columns.
                    raw.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
            # While our other thread copies the log, SQLite would refuse at once.
            with self._copies, self._writer:
                busy, _, _ = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                self.log_holds_deleted = bool(busy)

    def written(self, size: int) -> None:
        """Count about so many bytes written, and have SQLite's log copied if it may be long.

        Never raises: what was committed must not look as if it had failed.
        """
        if not self.is_sqlite:
            return
        self._written += size  # by several threads: a little less may be counted
        if self._written >= _EARLY_BYTES:
            self._written = 0
            # Refused once the database is closed, or without a thread: a commit copies the log.
            with contextlib.suppress(RuntimeError):
                self._copying.submit(self._copy_log)

    def _copy_log(self) -> None:
        """Copy SQLite's log into the file while others append to it, until little is left.

        The next commit finds the log too long, copies the rest and starts it again. It would copy
        everything if this failed.
        """
        with (
            contextlib.suppress(ServiceError),
            self._copies,
            self._sqlite_connection() as raw,
        ):
            before = 0
            for _ in range(_MAX_PASSES):
                _, pages, _ = raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if (pages - before) * _PAGE_BYTES <= _REST_BYTES:
                    break
                before = pages

    @contextlib.contextmanager
    def _sqlite_connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection without a transaction."""
        with _as_service_error(), self.engine.connect() as connection:
            raw = connection.connection.dbapi_connection
            if not isinstance(raw, sqlite3.Connection):
                raise InternalError("a SQLite connection without its driver")
            yield raw


# --- PostgreSQL only, for the job queue ---------------------------------------------------------

_OBJECT_EXISTS: Final = sa.text(
    """
    SELECT EXISTS (SELECT FROM pg_proc WHERE proname = :name)
        OR to_regclass(:name) IS NOT NULL OR to_regtype(:name) IS NOT NULL
    """
)


def database_time(tx: Transaction) -> datetime:
    """Return the transaction's time by PostgreSQL's clock."""
    return tx.scalars(sa.select(sa.func.now())).one()


def missing_objects(tx: Transaction, names: Sequence[str]) -> list[str]:
    """Return the names that are not a table, type or function of a PostgreSQL database."""
    return [name for name in names if not tx.scalar(_OBJECT_EXISTS, {"name": name})]


def in_queries(ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Cut a list of ids into pieces that fit into one query each."""
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ids[start : start + _IDS_PER_QUERY]


_SYNCHRONOUS: Final = """
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off'
"""

# --- details ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_service_error() -> Iterator[None]:
    try:
        yield
    except PoolTimeout as error:
        raise ServiceError("all database connections are in use; try again") from error
    except (DBAPIError, sqlite3.Error) as error:  # or what the driver raised when called directly
        cause = error.orig if isinstance(error, DBAPIError) else error
        reason = str(cause).splitlines()[0] if cause else type(error).__name__
        if getattr(cause, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
            raise ServiceError(
                f"the database is damaged ({reason}): stop the server and restore it from a backup"
            ) from error
        raise ServiceError(f"the database failed: {reason}; try again") from error


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", "chorister.aggregator.storage:migrations")
    return config


@cache
def _revisions() -> tuple[str, ...]:
    """Return the schema versions that this software knows, the newest first."""
    script = ScriptDirectory.from_config(_alembic())
    return tuple(each.revision for each in script.walk_revisions())


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ServiceError(
            "the database setting is not a URL: use sqlite:///FILE or postgresql://..."
        ) from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise ServiceError(f"{backend}: an aggregator runs on SQLite or PostgreSQL")
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ServiceError("an aggregator's SQLite database is a file: sqlite:///FILE")
    return parsed


def _prepare_file(path: Path, *, create: bool) -> None:
    """Create the file, if allowed to, readable by its owner alone.

    SQLite gives its write-ahead log the permissions of the database.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        os.close(os.open(path, flags, 0o600))
    except FileNotFoundError:
        raise ServiceError(
            f"there is no database at {path}: correct the path, or start the server to create it"
        ) from None
    except OSError as error:
        raise ServiceError(f"can't open the database {path}: {error.strerror}") from error


def _engine(parsed: URL) -> Engine:
    match parsed.get_backend_name():
        case "sqlite":
            return _sqlite(sa.create_engine(
                parsed.set(drivername="sqlite+pysqlite"),
                connect_args={"timeout": _BUSY_TIMEOUT_SECONDS, "isolation_level": None,
                              "check_same_thread": False, "cached_statements": 256},
                pool_size=8, max_overflow=_MAX_CONNECTIONS - 8,
            ))  # fmt: skip
        case "postgresql":
            return _postgresql(sa.create_engine(
                parsed.set(drivername="postgresql+psycopg"),
                # All of an operator's processes share PostgreSQL's connections, often 100.
                pool_size=8, max_overflow=24, pool_pre_ping=True,
                isolation_level="READ COMMITTED",
            ))  # fmt: skip
    raise InternalError("an engine for an unknown kind of database")


def _sqlite(engine: Engine) -> Engine:
    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:
        # Properties of the file, set while it is empty; later each would wait for a writer.
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            for pragma in (f"page_size = {_PAGE_BYTES}", "auto_vacuum = INCREMENTAL"):
                connection.execute(f"PRAGMA {pragma}").fetchall()
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
        for pragma in (
            "foreign_keys = ON",
            "trusted_schema = OFF",
            # Overwrites a destroyed key in its page, but does not rewrite whole pages of sealed
            # reports, which only that key could open, just to delete them.
            "secure_delete = FAST",
            f"cache_size = -{_CACHE_KIB}",
            f"wal_autocheckpoint = {_LOG_BYTES // _PAGE_BYTES}",
            f"journal_size_limit = {2 * _LOG_BYTES}",  # cutting it off and extending it costs time
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
    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:  # noqa: ANN401 - the driver's own
        # What is acknowledged must be on disk, however the database is tuned for other clients.
        connection.execute(_SYNCHRONOUS)
        connection.commit()

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
