"""One process runs a device at a time; others may donate and look meanwhile."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chorister.errors import DeviceBusy

__all__ = ["held"]


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock, or raise `DeviceBusy`. It goes with the process, however that ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeviceBusy(
                "another process runs this device at the moment: let it finish, or stop it"
            ) from None
        try:
            yield
        finally:
            # Closing it is not enough: a process that the app forked meanwhile has it open, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
