"""Encrypted databases (SQLite3 Multiple Ciphers), all opened in the same way.

ChaCha20-Poly1305 covers every page, under a raw 32-byte key: whoever has the file learns only its
size, and a page that was changed does not decrypt.

They use **the write-ahead log**, not a rollback journal. With `synchronous=FULL` a commit is
durable when it returns, after one sync of one file instead of three or four; a query's snapshot is
read while the app donates; and a killed process leaves nothing to roll back. The log is encrypted
with the same key. Deleted data stays in it (encrypted) until `forget` empties it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import apsw

from chorister.device.files import KEEP
from chorister.device.keys import SecretKey
from chorister.errors import InternalError, StoreError

_CIPHER: Final = "chacha20"
_BUSY_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.02
_PAGES_PER_CHECKPOINT: Final = 1_000  # as by default
_DAMAGED: Final = (apsw.CorruptError, apsw.NotADBError)


def open_database(
    path: str | os.PathLike[str],
    key: SecretKey,
    *,
    create: bool = True,
    busy_seconds: float = _BUSY_SECONDS,
) -> apsw.Connection:
    """Open, or `create`, the database at `path` under its own key (`SecretKey.derive`).

    Raises `StoreError` if the key does not fit, or if the file is damaged or not one of ours.
    """
    path = Path(path)
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW | apsw.SQLITE_OPEN_EXRESCODE
    try:
        if create:
            _create_file(path)
        elif os.lstat(path).st_size == 0:
            # SQLite would take it for a new database, in which nothing was ever spent.
            raise StoreError(
                f"the database {path} is empty: unless another process is just creating it, it was "
                "cut off; restore it from a backup, or create a store with `chorister device init`"
            )
        # The folder may be a link, but not the file. As text: `Path` takes longer than SQLite.
        folder, name = os.path.split(os.fspath(path))
        connection = _SharedConnection(os.path.join(os.path.realpath(folder), name), flags=flags)  # noqa: PTH118
    except (apsw.Error, OSError) as error:
        raise StoreError(
            f"the database {path} can't be opened: {_reason(error)}; check that its folder exists "
            "and is writable, or create a store with `chorister device init`"
        ) from None
    try:
        connection.set_busy_timeout(round(1000 * busy_seconds))
        _set_key(connection, key)
        _retry_while_busy(lambda: _prepare(connection), busy_seconds)
    except apsw.Error as error:
        connection.close()
        raise StoreError(_explain_failure(path, error)) from None
    except BaseException:
        connection.close()
        raise
    connection.cursor_factory = _CheckedCursor
    return connection


class _SharedConnection(apsw.Connection):
    """A connection that several threads may use, one statement after the other.

    apsw raises an error if two use it at once. And while one thread has a statement open, another
    can't begin to write: SQLite does not wait for a reader on the same connection.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 (as apsw's)
        super().__init__(*args, **options)
        self.using = threading.RLock()

    def txn_state(self, schema: str | None = None) -> int:
        with self.using:
            return super().txn_state(schema)


class _CheckedCursor(apsw.Cursor):
    """Says what to do about a damaged page, and leaves no statement open that was fetched."""

    connection: _SharedConnection

    def execute(self, *args: Any, **options: Any) -> apsw.Cursor:  # noqa: ANN401 (as apsw's)
        try:
            with self.connection.using:
                return super().execute(*args, **options)
        except _DAMAGED as error:
            raise self._damaged(error) from None

    @property
    def get(self) -> Any:  # noqa: ANN401 (a value, a row or all rows)
        with self.connection.using:
            return super().get

    def fetchall(self) -> list[Any]:
        with self.connection.using:
            return super().fetchall()

    def fetchone(self) -> Any:  # noqa: ANN401 (a row of any columns, or None)
        """Return the first row, and end the statement.

        An open one keeps its connection reading. apsw ends it with the cursor, but not while
        another thread uses the connection.
        """
        rows = self.fetchall()
        return rows[0] if rows else None

    def __next__(self) -> Any:  # noqa: ANN401 (a row of any columns)
        try:
            with self.connection.using:
                return super().__next__()
        except _DAMAGED as error:
            raise self._damaged(error) from None

    def _damaged(self, error: apsw.Error) -> StoreError:
        return StoreError(
            f"the database {self.connection.filename} is damaged ({error}): restore it from a "
            "backup, or create a new store with `chorister device init`"
        )


@contextmanager
def transaction(connection: apsw.Connection) -> Iterator[apsw.Connection]:
    """Write in one transaction: when the block ends, all of it is on disk, or nothing."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except apsw.BusyError:
        raise StoreError("another process is writing to this store: try again") from None
    except apsw.Error as error:
        raise StoreError(f"the store can't be written to: {_reason(error)}") from None
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException as error:
        # SQLite may have rolled it back already, if the disk is full for example.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, apsw.Error):
            raise StoreError(f"nothing was written to the store: {_reason(error)}") from error
        raise


@contextmanager
def setting_up(connection: apsw.Connection) -> Iterator[None]:
    """Create all parts of a new database in one transaction; others are upgraded part by part."""
    if connection.table_exists("main", "schema_version"):
        yield
    else:
        with transaction(connection):
            yield


def joined(connection: apsw.Connection) -> AbstractContextManager[object]:
    """Write in the transaction that is open, or in one of its own."""
    return nullcontext() if connection.in_transaction else transaction(connection)


def upgrade(connection: apsw.Connection, part: str, steps: Sequence[str]) -> None:
    """Bring one part of a database (`events`, `ledger`, …) to its newest schema.

    `steps` are SQL scripts; step i leads from version i to i + 1. Existing steps never change; new
    ones are added. Each part has its own version in the table `schema_version`.
    """
    if _version(connection, part) == len(steps):
        return
    with joined(connection):
        connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_version"
            " (part TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT, WITHOUT ROWID"
        )
        version = _version(connection, part)
        if version > len(steps):
            raise StoreError(
                f"the store's {part} were written by a newer Chorister (schema {version}, this one "
                f"knows {len(steps)}): upgrade Chorister"
            )
        for step in steps[version:]:
            connection.execute(step)
        connection.execute(
            "INSERT INTO schema_version VALUES (?, ?)"
            " ON CONFLICT (part) DO UPDATE SET version = excluded.version",
            (part, len(steps)),
        )


def forget(connection: apsw.Connection, seconds: float | None = None) -> bool:
    """Move the write-ahead log into the database, overwriting what was deleted, and empty it.

    Waits for nobody and stops after `seconds`, because the log can be long. Returns False if the
    time, a reader or a full disk prevented it: then deleted data stays in the log, encrypted, until
    the next call.
    """
    try:
        with waiting(connection, 0.0), _interrupted_after(connection, seconds):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except (apsw.Error, StoreError):
        return False
    return True


@contextmanager
def _interrupted_after(connection: apsw.Connection, seconds: float | None) -> Iterator[None]:
    if seconds is None:
        yield
        return
    alarm = threading.Timer(seconds, connection.interrupt)
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        alarm.join()


@contextmanager
def no_checkpoint(connection: apsw.Connection) -> Iterator[None]:
    """Let no transaction in the block checkpoint the write-ahead log, however long it is."""
    connection.wal_autocheckpoint(0)
    try:
        yield
    finally:
        connection.wal_autocheckpoint(_PAGES_PER_CHECKPOINT)


@contextmanager
def waiting(connection: apsw.Connection, seconds: float) -> Iterator[None]:
    """Let statements in the block wait at most this long for other writers."""
    connection.set_busy_timeout(round(1000 * seconds))
    try:
        yield
    finally:
        connection.set_busy_timeout(round(1000 * _BUSY_SECONDS))


def _create_file(path: Path) -> None:
    # SQLite would let everybody read it. It is encrypted, but its size and times reveal something.
    os.close(os.open(path, KEEP, 0o600))


def _retry_while_busy(step: Callable[[], None], seconds: float) -> None:
    """Repeat a step: SQLite does not wait if two processes switch to the log at once."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return step()
        except apsw.BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _set_key(connection: apsw.Connection, key: SecretKey) -> None:
    # "raw:" skips the key derivation that a passphrase would need.
    material = f"raw:{key.reveal().hex()}".encode().hex()
    try:
        cipher = connection.pragma("cipher", _CIPHER)
        answer = connection.pragma("hexkey", material)
    except apsw.Error:
        # Without its cause: SQLite's message quotes the statement, which has the key in it.
        raise InternalError("the database did not accept the key") from None
    if (cipher, answer) != (_CIPHER, "ok"):
        raise InternalError("this SQLite can't encrypt: apsw-sqlite3mc must be installed, not apsw")


def _prepare(connection: apsw.Connection) -> None:
    # Reads the first page, which only the right key decrypts.
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    wanted = {
        "journal_mode": "wal",
        "synchronous": 2,  # FULL
        "secure_delete": 1,
        "temp_store": 2,  # memory: temporary files would not be encrypted
        "foreign_keys": 1,
        "trusted_schema": 0,
        "cell_size_check": 1,
    }
    for name, value in wanted.items():
        connection.pragma(name, value)
        if connection.pragma(name) != value:
            raise StoreError(
                f"SQLite does not support {name}={value} here: put the store on a local disk"
            )
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 0)


def _version(connection: apsw.Connection, part: str) -> int:
    if not connection.table_exists("main", "schema_version"):
        return 0
    rows = connection.execute("SELECT version FROM schema_version WHERE part = ?", (part,))
    version = rows.get
    return version if isinstance(version, int) else 0


def _explain_failure(path: Path, error: apsw.Error) -> str:
    if isinstance(error, _DAMAGED):
        return (
            f"{path} does not open with this key: it belongs to another key, is damaged, or is not "
            "one of Chorister's databases; restore key and store together"
        )
    if isinstance(error, apsw.BusyError):
        return f"{path} is in use by another process: try again"
    return f"{path} can't be used: {_reason(error)}"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}, {error}"
