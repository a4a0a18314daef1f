"""Opening, versions, owners, transactions; and secrets at rest."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import sqlalchemy.exc
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from hypothesis import given
from hypothesis import strategies as st

from chorister.aggregator.storage import database as database_module
from chorister.aggregator.storage.database import Database, Sealer
from chorister.aggregator.storage.schema import metadata, properties, tasks
from chorister.dap.draft import Role
from chorister.errors import KeyUnavailable, ServiceError, StorageDamaged
from tests.aggregator.conftest import MakePair
from tests.aggregator.inprocess_pair import wait_until
from tests.aggregator.postgres import PostgresServer

SEALER = Sealer(bytes(range(32)))


def opened(path: Path, *, migrate: bool = True, role: Role = Role.LEADER) -> Database:
    return Database.open(f"sqlite:///{path}/a.db", role=role, sealer=SEALER, migrate=migrate)


def is_ours(_: object, name: str | None, kind: str, *__: object) -> bool:
    """The queue's tables are Procrastinate's."""
    return not (kind == "table" and name is not None and name.startswith("procrastinate_"))


def test_the_migrations_make_the_tables_of_the_schema(make_pair: MakePair) -> None:
    database = make_pair().databases[0]
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": is_ours})
        assert compare_metadata(context, metadata) == []


def test_sealed_reports_are_not_compressed(make_pair: MakePair) -> None:
    database = make_pair().databases[0]
    if database.is_sqlite:
        return  # it never compresses
    asked = (
        "SELECT attstorage::text FROM pg_attribute "
        "WHERE attrelid = 'report_blobs'::regclass AND attname = 'reports'"
    )
    with database.read() as connection:
        assert connection.exec_driver_sql(asked).scalar() == "e"


def test_every_key_of_what_belongs_to_a_task_begins_with_its_id() -> None:
    for name, table in metadata.tables.items():
        if name not in ("properties", "hpke_keys"):
            assert next(iter(table.primary_key)).name == "task_id"


def test_an_empty_database_is_not_taken_for_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    with pytest.raises(ServiceError, match="start the server, which migrates it"):
        opened(tmp_path, migrate=False)
    opened(tmp_path).close()
    opened(tmp_path, migrate=False).close()


def test_a_mistyped_path_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="correct the path"):
        opened(tmp_path, migrate=False)
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_reads_the_files(tmp_path: Path) -> None:
    database = opened(tmp_path)
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM counters")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("a.db*")} == {0o600}
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA secure_delete").scalar() == 2
    database.close()


def test_a_pool_that_is_used_up_is_worth_another_try(tmp_path: Path) -> None:
    database = opened(tmp_path)
    with pytest.raises(ServiceError, match="try again"), database.read():
        raise sqlalchemy.exc.TimeoutError("QueuePool limit")
    database.close()


@pytest.mark.parametrize("migrate", [False, True])
def test_a_newer_schema_is_left_alone(tmp_path: Path, migrate: bool) -> None:
    database = opened(tmp_path)
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(ServiceError, match="newer"):
        opened(tmp_path, migrate=migrate)


def test_one_database_a_role_and_a_key(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(ServiceError, match="each needs its own"):
        opened(tmp_path, role=Role.HELPER)
    with pytest.raises(KeyUnavailable, match="not the one"):
        Database.open(f"sqlite:///{tmp_path}/a.db", role=Role.LEADER, sealer=Sealer(bytes(32)))


@pytest.mark.parametrize("url", ["nonsense", "sqlite://", "mysql://localhost/a"])
def test_other_databases_are_refused_in_words(url: str) -> None:
    with pytest.raises(ServiceError):
        Database.open(url, role=Role.LEADER, sealer=SEALER)


def test_what_raises_leaves_nothing_behind(make_pair: MakePair) -> None:
    database = make_pair().databases[0]

    def fail() -> None:
        with database.write() as connection:
            connection.execute(properties.insert().values(name="half", value=b""))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with database.read() as connection:
        names = [row.name for row in connection.execute(properties.select())]
    assert "half" not in names


def test_a_databases_complaint_is_a_service_error(make_pair: MakePair) -> None:
    database = make_pair().databases[0]
    with pytest.raises(ServiceError, match="the database failed: "), database.write() as connection:
        connection.execute(tasks.insert().values(task_id=b"half a row"))


def test_durable_writes_reach_the_disk_and_others_may_wait(tmp_path: Path) -> None:
    database = opened(tmp_path)
    found = []
    for durable in (True, False):
        with database.write(durable=durable) as connection:
            found.append(connection.exec_driver_sql("PRAGMA synchronous").scalar())
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() == 2
    database.close()
    assert found == [2, 1]  # FULL, NORMAL


def test_postgresql_writes_what_is_acknowledged_to_disk_whatever_its_default(
    postgres: PostgresServer,
) -> None:
    found = []
    with postgres.databases(1) as (url,):
        for _ in range(2):
            database = Database.open(url, role=Role.LEADER, sealer=SEALER)
            for durable in (True, False, True):
                with database.write(durable=durable) as tx:
                    found.append(tx.exec_driver_sql("SHOW synchronous_commit").scalar())
                    name = tx.exec_driver_sql("SELECT current_database()").scalar()
            with database.write() as tx:
                tx.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
            database.close()
    assert found == ["on", "off", "on"] * 2


def _add_properties(database: Database, number: int) -> None:
    with database.write() as tx:
        rows = [{"name": f"{number}-{each}", "value": bytes(10_000)} for each in range(100)]
        database.insert_new(tx, properties, rows)


def test_a_stream_of_writes_has_its_log_copied_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_EARLY_BYTES", 1_500_000)
    monkeypatch.setattr(database_module, "_REST_BYTES", 0)
    database = opened(tmp_path)
    file = tmp_path / "a.db"
    before = file.stat().st_size
    _add_properties(database, 1)
    database.written(1_000_000)
    _add_properties(database, 2)
    assert file.stat().st_size == before  # the log is not long yet
    reader = database.read()
    with reader as tx:  # somebody who still reads the log keeps nobody from it
        tx.execute(properties.select()).all()
        database.written(1_000_000)
        wait_until(lambda: file.stat().st_size > before + 2_000_000, "the copy")
        _add_properties(database, 3)
    with database.read() as tx:
        assert len(tx.execute(properties.select()).all()) == 2 + 300
    database.close()


def test_a_copy_of_the_log_that_fails_is_left_to_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_EARLY_BYTES", 1)
    database = opened(tmp_path)

    def fails() -> None:
        raise ServiceError("all database connections are in use; try again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_sqlite_connection", fails)
        database.written(1)
        _add_properties(database, 1)
    database.close()
    again = opened(tmp_path)
    with again.read() as tx:
        assert len(tx.execute(properties.select()).all()) == 2 + 100
    again.close()


def test_what_was_committed_while_the_database_closed_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_EARLY_BYTES", 1)
    database = opened(tmp_path)
    with database.write() as tx:
        database.insert_new(tx, properties, [{"name": "a", "value": b"b"}])
    database.close()
    database.written(1)  # its upload is answered as stored


def test_a_disk_that_is_full_while_space_is_freed_is_no_bug(tmp_path: Path) -> None:
    database = opened(tmp_path)
    _add_properties(database, 1)
    database.free_disk_space()
    assert not database.log_holds_deleted
    _add_properties(database, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ServiceError, match="the database failed: "):
            database.free_disk_space()
        assert database.log_holds_deleted
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    database.free_disk_space()
    assert not database.log_holds_deleted
    database.close()


def test_the_migrations_are_in_the_package() -> None:
    folder = Path(database_module.__file__).parent / "migrations"
    assert (folder / "env.py").is_file()
    assert list((folder / "versions").glob("v*.py"))


# --- secrets at rest ----------------------------------------------------------------------------


@given(value=st.binary(max_size=100), row=st.lists(st.binary(max_size=9), max_size=3))
def test_sealed_values_open_at_their_place_only(value: bytes, row: list[bytes]) -> None:
    sealed = SEALER.seal(value, "table", *row)
    assert SEALER.open(sealed, "table", *row) == value
    for table, elsewhere in (("table", [*row, b""]), ("other", row), ("tabl", [b"e", *row])):
        with pytest.raises(StorageDamaged):
            SEALER.open(sealed, table, *elsewhere)
    with pytest.raises(StorageDamaged):
        Sealer(os.urandom(32)).open(sealed, "table", *row)


@given(data=st.binary(max_size=60))
def test_any_other_bytes_do_not_open(data: bytes) -> None:
    with pytest.raises(StorageDamaged):
        SEALER.open(data, "table")


def test_a_key_never_prints() -> None:
    assert "KEY" not in repr(SEALER)
    with pytest.raises(KeyUnavailable, match="must have 32"):
        Sealer(bytes(31))
