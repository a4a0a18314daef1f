"""Databases that die on command, and disks that forget what was not durable."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event

from chorister.aggregator.storage.database import Database, Sealer
from chorister.dap.draft import Role
from tests.simulated_disk import Crash


class FragileDatabase(Database):
    """Every statement, and both sides of every commit, is a place to die at."""

    fuse: int | None = None  # die after so many places
    on_durable: Any = None

    def point(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise Crash

    @contextlib.contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        with super().write(durable=durable) as connection:
            yield connection
            self.point()
        if durable and self.on_durable is not None:
            self.on_durable()
        self.point()


class Opener:
    """Opens fragile databases; a second time by new connections of the same engine.

    For the database that is a new process; only SQLAlchemy need not compile everything again.
    """

    def __init__(self) -> None:
        self._known: dict[str, FragileDatabase] = {}

    def __call__(self, url: str, role: Role, sealer: Sealer) -> FragileDatabase:
        database = self._known.get(url)
        if database is None:
            made = FragileDatabase.open(url, role=role, sealer=sealer)
            if not isinstance(made, FragileDatabase):
                raise TypeError("open() makes another class")
            event.listen(made.engine, "before_cursor_execute", lambda *_: made.point())
            database = self._known[url] = made
        return database


class SQLiteFiles:
    """The files of one SQLite database, as they were when something was last made durable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[Path, bytes] = {}

    def sync(self) -> None:
        self.kept = {
            path: path.read_bytes()
            for path in (self.path, Path(f"{self.path}-wal"))
            if path.exists()
        }

    def lose(self) -> None:
        """The power went: all that was written since the last sync is gone."""
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        for path, content in self.kept.items():
            path.write_bytes(content)


def fast_folder() -> Path:
    """In memory where there is such a file system: a test's syncs need no disk."""
    memory = Path("/dev/shm")  # noqa: S108 - a random name below it
    made = tempfile.mkdtemp(prefix="chorister-", dir=memory if memory.is_dir() else None)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


class Template:
    """A migrated, empty SQLite file to copy: migrations take longer than most tests."""

    def __init__(self) -> None:
        self.folder = fast_folder()
        self.path = self.folder / "template.db"
        database = Database.open(
            f"sqlite:///{self.path}", role=Role.LEADER, sealer=Sealer(bytes(32)), migrate=True
        )
        with database.write() as connection:
            connection.exec_driver_sql("DELETE FROM properties")
        database.close()

    def copy(self, path: Path) -> str:
        shutil.copyfile(self.path, path)
        return f"sqlite:///{path}"
