"""Durable writes: what was written survives a crash of the process or the machine.

POSIX promises little: a file's bytes survive once the file was synced, a new name once its folder
was. `Disk` has exactly these steps, so that tests can lose every step that was not synced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Final

from chorister.errors import ServiceError

_MAX_SYNCS: Final = 8
"""At the same time."""


class Disk:
    """The steps of durable writing."""

    def write(self, path: Path, data: bytes) -> None:
        """Create or overwrite a file; not yet durable."""
        path.write_bytes(data)

    def append(self, path: Path, data: bytes) -> None:
        """Append to a file; not yet durable."""
        with path.open("ab") as file:
            file.write(data)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file; not yet durable."""
        os.truncate(path, size)

    def sync(self, path: Path) -> None:
        """Make the bytes of a file durable, or the names in a folder."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file, replacing any file of that name; not yet durable."""
        old.replace(new)

    def make_folder(self, path: Path) -> None:
        """Create a folder unless it exists, durably.

        An existing folder is synced, too: whoever created it may have crashed before that.
        """
        path.mkdir(exist_ok=True)
        self.sync(path.parent)

    def sync_all(self, paths: Collection[Path]) -> None:
        """Make one or more files or folders durable, at the same time.

        A disk takes about as long for several as for one, which is most of what publishing costs.
        """
        first, *others = paths
        waiting = [self._threads.submit(self.sync, path) for path in others]
        self.sync(first)
        for each in waiting:
            each.result()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_MAX_SYNCS - 1, thread_name_prefix="sync")

    def replace(self, path: Path, data: bytes) -> None:
        """Replace a file durably: readers see the old file or the new one, never a part."""
        self.replace_all({path: data})

    def replace_all(
        self, files: Mapping[Path, bytes], *, appended: Collection[Path] = (), lasting: bool = True
    ) -> None:
        """Replace files durably, each as `replace` does; after a crash, some may be the old ones.

        What was `appended` to others is durable before any of them is replaced. If not `lasting`,
        all of them may be the old ones after a crash, but still none is a part.
        """
        renamed = {path.with_name(f".{path.name}.new"): path for path in files}
        for temporary, path in renamed.items():
            self.write(temporary, files[path])
        if renamed or appended:
            self.sync_all([*renamed, *appended])
        for temporary, path in renamed.items():
            self.rename(temporary, path)
        if lasting and files:
            self.sync_all({path.parent for path in files})


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder for this process; the system unlocks it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ServiceError(f"another process is using {path.parent}; stop it first") from error
        yield
    finally:
        os.close(descriptor)
