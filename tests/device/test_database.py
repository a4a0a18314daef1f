"""Encrypted databases: one way to open, one way to write, nothing in clear."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from chorister.device.database import (
    forget,
    open_database,
    setting_up,
    transaction,
    upgrade,
)
from chorister.device.keys import SecretKey
from chorister.errors import StoreError

KEY = SecretKey(bytes(range(32)))
STEPS = ["CREATE TABLE note (words TEXT NOT NULL) STRICT"]
TYPED = "the quick brown fox"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


def filled(path: Path) -> apsw.Connection:
    connection = open_database(path, KEY)
    upgrade(connection, "notes", STEPS)
    with transaction(connection):
        connection.executemany("INSERT INTO note VALUES (?)", [(TYPED,)] * 1000)
    return connection


def notes(connection: apsw.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM note").get)


def bytes_on_disk(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir() if file.is_file())


def test_what_is_written_is_there_after_opening_again(path: Path) -> None:
    filled(path).close()
    assert notes(open_database(path, KEY, create=False)) == 1000


def test_neither_database_nor_log_holds_anything_in_clear(path: Path) -> None:
    connection = filled(path)
    assert (path.parent / "events.db-wal").stat().st_size > 0
    for data in (bytes_on_disk(path.parent), (forget(connection), bytes_on_disk(path.parent))[1]):
        assert TYPED.encode() not in data
        assert b"CREATE TABLE" not in data
        assert b"SQLite format 3" not in data
        assert KEY.reveal() not in data


def test_files_are_for_their_owner_only(path: Path) -> None:
    connection = filled(path)
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file
    connection.close()


def test_another_key_is_refused_and_changes_nothing(path: Path) -> None:
    filled(path).close()
    before = bytes_on_disk(path.parent)
    with pytest.raises(StoreError, match="does not open with this key") as caught:
        open_database(path, SecretKey(bytes(32)))
    assert KEY.reveal().hex() not in str(caught.value)
    assert bytes_on_disk(path.parent) == before


def test_a_database_in_clear_is_refused(path: Path) -> None:
    apsw.Connection(str(path)).execute("CREATE TABLE t (a)").connection.close()
    with pytest.raises(StoreError, match="does not open"):
        open_database(path, KEY)


def test_a_changed_page_does_not_decrypt(path: Path) -> None:
    connection = filled(path)
    forget(connection)
    connection.close()
    with path.open("r+b") as file:
        file.seek(3 * 4096 + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    connection = open_database(path, KEY)
    for query in ("SELECT sum(length(words)) FROM note", "SELECT words FROM note"):
        with pytest.raises(StoreError, match=r"is damaged .*restore it"):
            connection.execute(query).fetchall()
    connection.close()


def test_an_empty_file_is_not_taken_for_a_new_database(path: Path) -> None:
    filled(path).close()
    path.write_bytes(b"")
    with pytest.raises(StoreError, match=r"is empty.*restore it"):
        open_database(path, KEY, create=False)
    assert path.stat().st_size == 0


def test_a_missing_database_or_folder_says_what_to_do(tmp_path: Path) -> None:
    for path, create in ((tmp_path / "none.db", False), (tmp_path / "none" / "events.db", True)):
        with pytest.raises(StoreError, match="device init"):
            open_database(path, KEY, create=create)


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    filled(path).close()
    (tmp_path / "link.db").symlink_to(path)
    with pytest.raises(StoreError):
        open_database(tmp_path / "link.db", KEY)


def test_the_settings_are_in_force(path: Path) -> None:
    connection = filled(path)
    settings = {
        "journal_mode": "wal",
        "synchronous": 2,
        "secure_delete": 1,
        "temp_store": 2,
        "foreign_keys": 1,
        "trusted_schema": 0,
    }
    assert {name: connection.pragma(name) for name in settings} == settings


def test_the_key_stays_in_no_cache_of_statements(path: Path) -> None:
    connection = filled(path)
    material = f"raw:{KEY.reveal().hex()}".encode().hex()
    shown = repr(connection.cache_stats(include_entries=True)).lower()
    assert material not in shown
    assert "key" not in shown


def test_a_transaction_is_all_or_nothing(path: Path) -> None:
    connection = filled(path)

    def work() -> None:
        with transaction(connection):
            connection.execute("DELETE FROM note")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert notes(connection) == 1000
    assert not connection.in_transaction


def test_an_error_of_the_database_in_a_transaction_is_typed(path: Path) -> None:
    connection = filled(path)
    with pytest.raises(StoreError, match="nothing was written"), transaction(connection):
        connection.execute("INSERT INTO note VALUES (NULL)")
    assert notes(connection) == 1000


def test_a_second_writer_waits_then_says_so(path: Path) -> None:
    first = filled(path)
    second = open_database(path, KEY, busy_seconds=0.05)
    with transaction(first):
        with pytest.raises(StoreError, match="another process"), transaction(second):
            pass
        assert notes(second) == 1000
    with transaction(second):
        second.execute("INSERT INTO note VALUES ('x')")
    assert notes(first) == 1001


def test_threads_that_open_a_new_database_at_once_all_succeed(path: Path) -> None:
    outcomes: list[object] = []

    def work() -> None:
        try:
            connection = open_database(path, KEY)
            upgrade(connection, "notes", STEPS)
            with transaction(connection):
                connection.execute("INSERT INTO note VALUES ('x')")
            connection.close()
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [None] * 6
    assert notes(open_database(path, KEY)) == 6


def test_a_schema_grows_step_by_step_and_part_by_part(path: Path) -> None:
    connection = filled(path)
    more = [*STEPS, "CREATE TABLE extra (a TEXT) STRICT; INSERT INTO extra VALUES ('kept')"]
    for _ in range(2):
        upgrade(connection, "notes", more)
    upgrade(connection, "others", ["CREATE TABLE other (a TEXT) STRICT"])
    assert notes(connection) == 1000
    assert connection.execute("SELECT a FROM extra").get == "kept"
    versions = connection.execute("SELECT part, version FROM schema_version ORDER BY part")
    assert versions.fetchall() == [("notes", 2), ("others", 1)]


def test_a_store_of_a_newer_chorister_is_refused(path: Path) -> None:
    connection = filled(path)
    with pytest.raises(StoreError, match="upgrade Chorister"):
        upgrade(connection, "notes", [])


def test_a_step_that_fails_leaves_the_old_schema(path: Path) -> None:
    connection = filled(path)
    with pytest.raises(StoreError):
        upgrade(connection, "notes", [*STEPS, "CREATE TABLE extra (a); SELECT nonsense"])
    assert not connection.table_exists("main", "extra")


def test_a_new_database_has_all_parts_or_none(path: Path) -> None:
    others = ["CREATE TABLE other (a TEXT) STRICT"]

    def fail(connection: apsw.Connection) -> None:
        with setting_up(connection):
            upgrade(connection, "notes", STEPS)
            upgrade(connection, "broken", ["SELECT nonsense"])

    with closing(open_database(path, KEY, create=True)) as connection:
        with pytest.raises(StoreError):
            fail(connection)
        assert not connection.execute("SELECT name FROM sqlite_schema").fetchall()
        with setting_up(connection):
            upgrade(connection, "notes", STEPS)
            upgrade(connection, "others", others)
        with setting_up(connection):  # a later part waits for nobody else's transaction
            assert not connection.in_transaction
            upgrade(connection, "later", ["CREATE TABLE later (a TEXT) STRICT"])
    with closing(open_database(path, KEY, create=False)) as connection:
        upgrade(connection, "notes", STEPS)
        upgrade(connection, "others", others)
        parts = connection.execute("SELECT part FROM schema_version ORDER BY part").fetchall()
        assert parts == [("later",), ("notes",), ("others",)]


def test_what_was_deleted_is_gone_from_database_and_log(path: Path) -> None:
    """Looked for in the decrypted pages, where it would be if it were only marked as free."""
    connection = filled(path)
    with transaction(connection):
        connection.execute("DELETE FROM note")
    assert forget(connection)
    assert (path.parent / "events.db-wal").stat().st_size == 0
    assert TYPED.encode() not in connection.serialize("main")


def test_forgetting_waits_for_no_reader(path: Path) -> None:
    connection = filled(path)
    reader = open_database(path, KEY)
    rows = reader.execute("SELECT words FROM note")
    next(rows)
    with transaction(connection):
        connection.execute("DELETE FROM note")
    connection.set_busy_timeout(20)
    assert not forget(connection)
    rows.close()
    assert forget(connection)


DIES_AFTER_ITS_FIRST_COMMIT = """
import os, signal, sys
from chorister.device.database import open_database, transaction
from chorister.device.keys import SecretKey
connection = open_database(sys.argv[1], SecretKey(bytes(range(32))))
with transaction(connection):
    connection.execute("INSERT INTO note VALUES ('kept')")
connection.execute("BEGIN IMMEDIATE")
connection.execute("INSERT INTO note VALUES ('lost')")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_commit_survives_kill(path: Path) -> None:
    filled(path).close()
    run = subprocess.run([sys.executable, "-c", DIES_AFTER_ITS_FIRST_COMMIT, path], check=False)
    assert run.returncode == -9
    assert notes(open_database(path, KEY)) == 1001
