"""PostgreSQL servers that can be killed and come back: one for each operator."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.aggregator.postgres import binaries, unprivileged

_SECONDS = 60
WAL_SEGMENT = 1 << 20


class MortalPostgres:
    """One server with one database, on a socket file in a folder of its own."""

    def __init__(self, folder: Path, common: dict[str, Any], programs: Path) -> None:
        self.folder = folder
        self._common = common
        self._programs = programs
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://chorister@/postgres?host={self.folder}"

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        address = f"postgresql://chorister@/postgres?host={self.folder}"
        with psycopg.connect(address, autocommit=True, connect_timeout=30) as connection:
            return connection.execute(statement.encode()).fetchall()

    def start(self) -> None:
        """Start, and wait until it answers; what died before may still hold on to its memory."""
        deadline = time.monotonic() + _SECONDS
        while True:
            if self._server is None or self._server.poll() is not None:
                with (self.folder / "log").open("ab") as log:
                    self._server = subprocess.Popen(
                        [self._programs / "postgres", "-D", self.folder / "data", "-k", self.folder,
                         "-h", "", "-c", "max_connections=60", "-c", "shared_buffers=32MB"],
                        stdout=log, stderr=log, **self._common,
                    )  # fmt: skip
            with contextlib.suppress(psycopg.OperationalError):
                self.query("SELECT 1")
                return
            if time.monotonic() > deadline:
                pytest.fail((self.folder / "log").read_text()[-5000:])
            time.sleep(0.1)

    def limit_files(self, size: int | None = None) -> None:
        """Let no file grow beyond so many bytes, as a full disk would not; no size: as before.

        A segment of the write-ahead log is a file of `WAL_SEGMENT`: a limit below that would stop
        the server altogether, as `kill` does.
        """
        assert self._server is not None
        first = self._server.pid  # which starts the others
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        limit = f"--fsize={'unlimited' if size is None else size}:unlimited"
        for each in (str(first), *children):
            # By its own user: not every root may touch the limits of others.
            done = subprocess.run(
                ["/usr/bin/prlimit", "--pid", each, limit], capture_output=True, **self._common
            )
            assert not done.returncode or not Path("/proc", each).exists(), done.stderr

    def kill(self) -> None:
        """-9, the server and so all its children: what was not durable is lost."""
        if self._server is not None:
            self._server.kill()
            self._server.wait(_SECONDS)

    def stop(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)
            try:
                self._server.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


@contextlib.contextmanager
def mortal_servers(number: int) -> Iterator[list[MortalPostgres]]:
    """Started servers, copies of one empty cluster."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL here: the test dependencies bring one")
    root = Path(tempfile.mkdtemp(prefix="chorister-storm-pg-"))
    who = unprivileged()
    if who:
        os.chown(root, who["user"], who["group"])
    surroundings = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(root)}
    common: dict[str, Any] = {"cwd": root, "env": surroundings, **who}
    servers: list[MortalPostgres] = []
    try:
        subprocess.run(
            [programs / "initdb", "-D", root / "empty", "-U", "chorister", "--auth=trust",
             "--no-sync", "--encoding=UTF8", "--locale=C",
             f"--wal-segsize={WAL_SEGMENT >> 20}"],
            check=True, capture_output=True, **common,
        )  # fmt: skip
        for place in range(number):
            folder = root / str(place)
            copy = f"mkdir {folder} && cp -a {root}/empty {folder}/data"
            subprocess.run(["/bin/sh", "-c", copy], check=True, **common)
            server = MortalPostgres(folder, common, programs)
            servers.append(server)
            server.start()
        yield servers
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(root, ignore_errors=True)
