"""A device's files on any system: private, durable by name, and locked while the device runs.

Flags that a system lacks are left out (Windows has few of them), and so is what it can't do.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import apsw

from chorister.errors import DeviceBusy

try:
    import fcntl
except ImportError:  # Windows
    _HAS_FLOCK = False
else:
    _HAS_FLOCK = True


def _flags(*names: str) -> int:
    found = 0
    for name in names:
        found |= getattr(os, name, 0)
    return found


# Not blocking: somebody may have put a pipe there.
READ: Final = _flags("O_RDONLY", "O_BINARY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK")
CREATE: Final = _flags("O_WRONLY", "O_BINARY", "O_CLOEXEC", "O_CREAT", "O_EXCL")
KEEP: Final = _flags("O_RDWR", "O_BINARY", "O_CLOEXEC", "O_CREAT", "O_NOFOLLOW")
_BUSY: Final = "another process runs this device: let it finish, or stop it"


def is_private(status: os.stat_result) -> bool:
    """Return whether a file is its owner's alone, and ours; Windows shows no such thing."""
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path leads into a folder, resolved now: a link may have been created."""
    # As text: `Path` objects would take most of the time.
    inner, outer = os.path.realpath(path), os.path.realpath(folder)
    return inner == outer or inner.startswith(os.path.join(outer, ""))  # noqa: PTH118


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where folders can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, _flags("O_RDONLY", "O_DIRECTORY", "O_CLOEXEC"))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Let one process at a time run the device, or raise `DeviceBusy`.

    Other processes may donate and look meanwhile. The lock ends with its process, however that
    ends.
    """
    with (_lock_file if _HAS_FLOCK else _lock_in_database)(folder):
        yield


@contextmanager
def _lock_file(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / "lock", KEEP, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeviceBusy(_BUSY) from None
        try:
            yield
        finally:
            # Closing is not enough: a process that the app forked meanwhile has it open, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def _lock_in_database(folder: Path) -> Iterator[None]:
    """Lock as SQLite does on this system, with a transaction that writes nothing."""
    connection = apsw.Connection(os.fspath(folder / "lock.db"))
    try:
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except apsw.BusyError:
            raise DeviceBusy(_BUSY) from None
        yield
    finally:
        connection.close()
