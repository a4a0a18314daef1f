"""The event store: what the app donates, encrypted, for as long as the policy allows.

Each stream (many rows) and each profile (one row) is a table. Nothing is kept before the person has
opted in, nor after they opted out.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final

import apsw

from chorister import _native
from chorister.clock import Clock, uptime
from chorister.closing import Closing
from chorister.device.database import (
    forget,
    joined,
    no_checkpoint,
    open_database,
    setting_up,
    transaction,
    upgrade,
    waiting,
)
from chorister.device.keys import SecretKey
from chorister.device.retention import Retention
from chorister.device.schema import FieldType, Schema, TableSchema, Value, quoted
from chorister.errors import InvalidInput, StoreError
from chorister.policy import Policy

_STEPS: Final = (
    "CREATE TABLE consent ("
    " only INTEGER PRIMARY KEY CHECK (only = 1),"
    " opted_in INTEGER NOT NULL CHECK (opted_in IN (0, 1)),"
    " since INTEGER NOT NULL) STRICT;"
    "INSERT INTO consent VALUES (1, 0, 0)",
    "CREATE TABLE deeds ("
    " id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, deed TEXT NOT NULL) STRICT",
)
MAX_SNAPSHOT_ROWS: Final = 1_000_000
MAX_SNAPSHOT_BYTES: Final = 2**26
"""SQLite stops copying there. A snapshot takes about twice that of the device's memory."""
SNAPSHOT_SECONDS: Final = 4.0
"""Then reading stops: noise and sealing need the rest of `Timing.slack`."""
_STEPS_PER_CHECK: Final = 1_000
_ALWAYS: Final = range(-(2**62), 2**62)
_PAGE: Final = 4096
_CACHE_KIB: Final = 65_536  # so that fetching rows in random order decrypts each page once


class ConsentEvent(StrEnum):
    """What the person decided or deleted."""

    OPTED_IN = "opted in"
    OPTED_OUT = "opted out"
    OPTED_OUT_AND_PURGED = "opted out, and data deleted"
    PURGED = "data deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Consent:
    """Whether the person takes part."""

    opted_in: bool
    since: int  # when the person last decided; 0 if never


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A database with the named fields of the named tables, in random order, and nothing else."""

    tables: Mapping[str, Mapping[str, FieldType]]
    image: bytes = field(repr=False)  # SQLite's file format, not encrypted: never on disk

    @classmethod
    def empty(cls, tables: Mapping[str, Mapping[str, FieldType]]) -> Snapshot:
        """Return these tables without rows, to compile a query against."""
        shape = tuple((name, tuple(columns.items())) for name, columns in tables.items())
        return cls(tables=tables, image=_empty_image(shape))


# Most recipes read the same few tables. A policy may have many, so only a few images are kept.
@lru_cache(maxsize=8)
def _empty_image(shape: tuple[tuple[str, tuple[tuple[str, FieldType], ...]], ...]) -> bytes:
    with closing(apsw.Connection(":memory:")) as connection:
        _create_tables(connection, "main", {name: dict(columns) for name, columns in shape})
        return connection.serialize("main")


class EventStore(Closing):
    """The device's events and profiles. Threads may share one; processes may open the same file.

    Reads have their own connection: neither a query's snapshot nor a look at consent waits for an
    app that donates, nor the app for them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        key: SecretKey,
        policy: Policy,
        clock: Clock,
        *,
        create: bool = True,
    ) -> None:
        """`key` is the device's; the database's own key is derived from it."""
        self.schema = Schema.of(policy)
        self._policy = policy
        self._clock = clock
        self._lock = threading.RLock()
        self._reader_lock = threading.RLock()
        with ExitStack() as stack:
            secret = key.derive("events")
            self._connection = open_database(path, secret, create=create)
            stack.callback(self._connection.close)
            with setting_up(self._connection):
                upgrade(self._connection, "events", _STEPS)
                changed = self._follow_policy()
            if changed:
                self._forget()
            self._reader = open_database(path, secret, create=False)
            stack.callback(self._reader.close)
            self._reader.pragma("cache_size", -_CACHE_KIB)
            self._stack = stack.pop_all()
        self._retention = Retention(self._connection, self._writing_soon, clock)
        self._inserts = {
            name: _insert_if_opted_in(table) for name, table in self.schema.tables.items()
        }

    def close(self) -> None:
        """Close the database. The store can't be used afterwards."""
        with self._lock, self._reader_lock:
            self._stack.close()

    # --- donation ---------------------------------------------------------------------------------

    def donate(self, stream: str, event: Mapping[str, object]) -> bool:
        """Store one event, on disk when this returns. Return False without consent."""
        row = self.schema.table(stream, is_profile=False).row(event)
        return self._keep(self._inserts[stream], row)

    def donate_many(self, stream: str, events: Iterable[Mapping[str, object]]) -> bool:
        """Store all events or, if one is refused, none. Return False without consent."""
        table = self.schema.table(stream, is_profile=False)
        rows = table.rows(events)
        now = self._clock.now()
        with self._writing():
            if not self._opted_in():
                return False
            self._connection.executemany(_insert_at(table, now), rows)
        return True

    def set_profile(self, profile: str, row: Mapping[str, object]) -> bool:
        """Replace a profile's row. Return False without consent."""
        values = self.schema.table(profile, is_profile=True).row(row)
        return self._keep(self._inserts[profile], values)

    def profile(self, ref: str) -> Value:
        """Return the value of a profile's field ("user.locale"); None if absent or expired."""
        name, _, column = ref.partition(".")
        table = self.schema.table(name, is_profile=True)
        if column not in table.fields:
            raise table.refuse(column[:64], "the profile has no such field")
        with self._reading():
            rows = self._reader.execute(
                f"SELECT {quoted(f'field_{column}')} FROM {quoted(table.table)} WHERE donated > ?",
                (self._clock.now() - table.retention,),
            ).fetchall()
        return rows[0][0] if rows else None

    # --- consent and deletion ---------------------------------------------------------------------

    @property
    def consent(self) -> Consent:
        """Whether the person has opted in; a new store is opted out."""
        with self._reading():
            row = self._reader.execute("SELECT opted_in, since FROM consent").fetchone()
        if row is None:
            raise StoreError("the store has lost its record of consent: purge it, and ask again")
        return Consent(opted_in=row[0] == 1, since=int(row[1] or 0))

    def opt_in(self) -> None:
        """Let the person take part: donations are kept, and recipes may run."""
        with self._writing():
            self._set_consent(opted_in=True)
            self._note(ConsentEvent.OPTED_IN)

    def opt_out(self, *, purge: bool) -> None:
        """End participation: no recipe runs and no donation is kept; `purge` deletes everything."""
        with self._writing():
            self._set_consent(opted_in=False)
            self._note(ConsentEvent.OPTED_OUT_AND_PURGED if purge else ConsentEvent.OPTED_OUT)
            if purge:
                self._delete_all()
        if purge:
            self._forget()

    def purge(self) -> None:
        """Delete every event and profile."""
        with self._writing():
            self._note(ConsentEvent.PURGED)
            self._delete_all()
        self._forget()

    def consent_events(self) -> list[tuple[str, ConsentEvent]]:
        """Return what the person decided that is not in the audit log yet, each with its own name.

        An event is noted in the transaction that makes the change.
        """
        with self._reading():
            rows = self._reader.execute("SELECT name, deed FROM deeds ORDER BY id").fetchall()
        return [(str(name), ConsentEvent(str(deed))) for name, deed in rows]

    def delete_consent_event(self, name: str) -> None:
        """Forget an event that is in the audit log now."""
        with self._writing():
            self._connection.execute("DELETE FROM deeds WHERE name = ?", (name,))

    def expire(self, seconds: float) -> int:
        """Delete what is older than its retention; return the number of rows deleted.

        Stops after `seconds`, and the next call continues. Queries see none of it meanwhile.
        """
        until = uptime() + seconds
        deleted = self._retention.expire(iter(self.schema.tables.values()), seconds / 2)
        if deleted and self._lock.acquire(timeout=max(0.0, until - uptime())):
            try:
                forget(self._connection, max(0.0, until - uptime()))
            finally:
                self._lock.release()
        return deleted

    # --- what a query sees ------------------------------------------------------------------------

    def snapshot(
        self,
        fields: Mapping[str, Sequence[str]],
        until: float = math.inf,
        *,
        donated: Mapping[str, range] | None = None,
    ) -> Snapshot:
        """Copy the named fields of the named tables to a database that has nothing else.

        Of the streams in `donated`, only events donated at one of these times are copied, without
        the times. Expired rows are left out, deleted or not: nothing that follows a charge may
        depend on how long deleting takes. Rows are in a random order, drawn by the operating
        system. Raises `StoreError` at the limits of memory and time, at the latest when `uptime()`
        is `until`.
        """
        tables = {name: self._named(name, columns) for name, columns in fields.items()}
        with self._reader_lock:
            # An encrypted database needs a key for whatever it attaches; this one has none.
            self._reader.execute("ATTACH DATABASE ':memory:' AS snapshot KEY ''")
            try:
                self._reader.pragma("page_size", _PAGE, schema="snapshot")
                pages = MAX_SNAPSHOT_BYTES // _PAGE
                self._reader.pragma("max_page_count", pages, schema="snapshot")
                with self._reading(), self._by(min(until, uptime() + SNAPSHOT_SECONDS)):
                    _create_tables(self._reader, "snapshot", tables)
                    room = MAX_SNAPSHOT_ROWS
                    for name, columns in tables.items():
                        times = (donated or {}).get(name, _ALWAYS)
                        room = self._copy(self.schema.tables[name], columns, times, room)
                image = self._reader.serialize("snapshot")
            finally:
                self._reader.execute("DETACH DATABASE snapshot")
                # Free the cache now, not later when others wait for it.
                self._reader.pragma("shrink_memory")
        return Snapshot(tables=tables, image=image)

    def _named(self, name: str, columns: Sequence[str]) -> dict[str, FieldType]:
        table = self.schema.tables.get(name)
        unknown = [c for c in columns if table is None or c not in table.fields]
        if table is None or unknown or not columns or len(set(columns)) != len(columns):
            raise InvalidInput(
                f"{name}: name the fields of a stream or profile, each once; unknown: "
                f"{', '.join(unknown) or 'none'}"
            )
        return {column: table.fields[column] for column in columns}

    def _copy(self, table: TableSchema, columns: Iterable[str], times: range, room: int) -> int:
        """Copy a table of at most `room` rows; return how many more there is room for."""
        source, target = quoted(table.table), f"snapshot.{quoted(table.name)}"
        names = ", ".join(quoted(f"field_{column}") for column in columns)
        found = self._range("id", f"main.{source}")
        if found is None:
            return room
        # Counted in ids, of which there are at least as many as rows: all of them are drawn.
        count = found[1] - found[0] + 1
        room -= count
        if room < 0:
            raise StoreError(f"a query reads at most {MAX_SNAPSHOT_ROWS} events")
        drawn = memoryview(_native.random_order(found[0], count)).cast("q")
        # Rows are fetched in the drawn order; the id of one that does not count fetches nothing.
        self._reader.execute(
            f"INSERT INTO {target} SELECT {names} FROM carray(?) AS drawn"
            f" CROSS JOIN main.{source} AS event ON event.id = drawn.value"
            " AND donated >= ? AND donated < ?",
            (
                apsw.carray(drawn),
                max(self._clock.now() - table.retention + 1, times.start),
                times.stop,
            ),
        )
        return room

    # --- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, transaction(self._connection):
            yield

    @contextmanager
    def _writing_soon(self, seconds: float) -> Iterator[None]:
        """Write, but wait for other writers at most this long."""
        if not self._lock.acquire(timeout=max(seconds, 0.0)):
            raise StoreError("the app is writing to this store: try again")
        try:
            # Without a checkpoint: the log can be long, if an app wrote while somebody read.
            with (
                waiting(self._connection, max(seconds, 0.0)),
                no_checkpoint(self._connection),
                transaction(self._connection),
            ):
                yield
        finally:
            self._lock.release()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Provide one consistent view of all tables."""
        with self._reader_lock:
            try:
                self._reader.execute("BEGIN")
                try:
                    yield
                    self._reader.execute("COMMIT")
                finally:
                    # SQLite may have done so itself, for a full database for example.
                    if self._reader.in_transaction:
                        self._reader.execute("ROLLBACK")
            except apsw.FullError:
                raise StoreError(f"a query reads at most {MAX_SNAPSHOT_BYTES} bytes") from None
            except apsw.Error as error:
                raise StoreError(f"the store can't be read: {error}") from None

    @contextmanager
    def _by(self, until: float) -> Iterator[None]:
        """Make statements fail once `uptime()` exceeds `until`."""
        self._reader.set_progress_handler(lambda: uptime() > until, _STEPS_PER_CHECK)
        try:
            yield
        finally:
            self._reader.set_progress_handler(None)

    def _keep(self, insert: str, row: tuple[Value, ...]) -> bool:
        with self._lock:
            try:
                # One statement is a transaction, so that nobody opts out in between.
                self._connection.execute(insert, (self._clock.now(), *row))
            except apsw.BusyError:
                raise StoreError("another process is writing to this store: try again") from None
            except apsw.Error as error:
                raise StoreError(f"nothing was written to the store: {error}") from None
            return self._connection.changes() > 0

    def _opted_in(self) -> bool:
        return self._connection.execute("SELECT opted_in FROM consent").fetchall() == [(1,)]

    def _set_consent(self, *, opted_in: bool) -> None:
        self._connection.execute(
            "INSERT INTO consent VALUES (1, ?, ?) ON CONFLICT (only)"
            " DO UPDATE SET opted_in = excluded.opted_in, since = excluded.since",
            (int(opted_in), self._clock.now()),
        )

    def _note(self, deed: ConsentEvent) -> None:
        self._connection.execute(
            "INSERT INTO deeds (name, deed) VALUES (?, ?)", (secrets.token_hex(16), deed)
        )

    def _delete_all(self) -> None:
        for table in self.schema.tables.values():
            self._connection.execute(f"DELETE FROM {quoted(table.table)}")

    def _forget(self) -> None:
        with self._lock:
            forget(self._connection)

    def _range(self, column: str, table: str) -> tuple[int, int] | None:
        # Two subqueries: SQLite answers each without a scan.
        query = f"SELECT (SELECT min({column}) FROM {table}), (SELECT max({column}) FROM {table})"
        for low, high in self._reader.execute(query):
            if isinstance(low, int) and isinstance(high, int):
                return low, high
        return None

    def _follow_policy(self) -> bool:
        """Adapt the tables to the policy; return whether there was something else before."""
        wanted = {table.table: table.columns for table in self.schema.tables.values()}
        if self._tables() == wanted:
            return False
        with joined(self._connection):
            found = self._tables()
            for name in found.keys() - wanted.keys():
                self._connection.execute(f"DROP TABLE {quoted(name)}")
            for name, columns in wanted.items():
                if name in found:
                    self._follow_table(name, found[name], columns)
                else:
                    fields = "".join(f", {quoted(each)} {kind}" for each, kind in columns.items())
                    self._connection.execute(
                        f"CREATE TABLE {quoted(name)}"
                        f" (id INTEGER PRIMARY KEY, donated INTEGER NOT NULL{fields}) STRICT"
                    )
        return bool(found)

    def _follow_table(self, name: str, found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
        for column, kind in found.items():
            if wanted.get(column) != kind:
                self._connection.execute(f"ALTER TABLE {quoted(name)} DROP COLUMN {quoted(column)}")
        for column, kind in wanted.items():
            if found.get(column) != kind:
                self._connection.execute(
                    f"ALTER TABLE {quoted(name)} ADD COLUMN {quoted(column)} {kind}"
                )

    def _tables(self) -> dict[str, dict[str, str]]:
        rows = self._connection.execute(
            "SELECT t.name, c.name, c.type FROM sqlite_schema AS t, pragma_table_info(t.name) AS c"
            " WHERE t.type = 'table' AND (t.name LIKE 'stream\\_%' ESCAPE '\\'"
            " OR t.name LIKE 'profile\\_%' ESCAPE '\\')"
        ).fetchall()
        tables: dict[str, dict[str, str]] = {}
        for table, column, kind in rows:
            columns = tables.setdefault(str(table), {})
            if str(column).startswith("field_"):
                columns[str(column)] = str(kind)
        return tables


def _insert_if_opted_in(table: TableSchema) -> str:
    columns = ", ".join(quoted(column) for column in table.columns)
    marks = "?" + ", ?" * len(table.columns)
    if table.is_profile:
        into = f"REPLACE INTO {quoted(table.table)} (id, donated, {columns}) SELECT 1, {marks}"
    else:
        into = f"INSERT INTO {quoted(table.table)} (donated, {columns}) SELECT {marks}"
    return f"{into} FROM consent WHERE opted_in"


def _insert_at(table: TableSchema, now: int) -> str:
    # The time is the same for all rows: a literal is not bound a thousand times.
    columns = ", ".join(quoted(column) for column in table.columns)
    marks = ", ?" * len(table.columns)
    return f"INSERT INTO {quoted(table.table)} (donated, {columns}) VALUES ({int(now)}{marks})"


def _create_tables(
    connection: apsw.Connection, database: str, tables: Mapping[str, Mapping[str, FieldType]]
) -> None:
    for name, columns in tables.items():
        typed = ", ".join(f"{quoted(column)} {kind.upper()}" for column, kind in columns.items())
        connection.execute(f"CREATE TABLE {database}.{quoted(name)} ({typed}) STRICT")
