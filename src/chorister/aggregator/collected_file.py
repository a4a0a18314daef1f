"""Which batches were released, outside the database: so that a backup can't release them again.

A database that is restored from a backup has forgotten that a batch was collected, and would
release it anew under other noise; the mean of several such releases has less noise than one. That
holds for each aggregator, whatever the other one does, so each has such a file. It is written after
the transaction that marks the batch and before the share leaves: whoever dies in between has given
nothing away, finds the share in the database, and writes then. One task id a line, between line
ends: a line that was cut off spoils no other.

It is only ever added to. A task that has ended could be left out, for it is refused anyway; but
that would hang on the clock, which may be wrong just when a machine was restored, and on a rewrite
that survives any crash. A thousand releases a day make 24 MB a year.
"""

from __future__ import annotations

import threading
from pathlib import Path

from chorister.aggregator.tasks import KnownTask
from chorister.dap.draft import Problem
from chorister.errors import ProblemError, ServiceError
from chorister.transparency.disk import Disk

__all__ = ["CollectedFile", "restored"]


def restored(task: KnownTask, role: str) -> ProblemError:
    """What to say where the file knows of a release and the database does not."""
    return ProblemError(
        Problem.BATCH_OVERLAP,
        f"the batch was collected before this {role}'s database was restored",
        task_id=task.task_id,
    )


class CollectedFile:
    """Task ids that were released. Threads and processes share it."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self._path = path
        self._disk = disk or Disk()
        self._lock = threading.Lock()
        self._size = -1
        self._known: set[bytes] = set()

    def __contains__(self, task_id: bytes) -> bool:
        with self._lock:
            self._read()
            return task_id.hex().encode() in self._known

    def add(self, task_id: bytes) -> None:
        """Remember a release. Durable when this returns."""
        line = task_id.hex().encode()
        with self._lock:
            self._read()
            if line in self._known:
                return
            try:
                new = not self._path.exists()
                self._disk.append(self._path, b"\n" + line + b"\n")
                self._disk.sync(self._path)
                if new:
                    self._disk.sync(self._path.parent)
            except OSError as error:
                raise ServiceError(f"can't write {self._path}: {error.strerror}") from error
            self._known.add(line)

    def _read(self) -> None:
        """Look again if another process has added something."""
        try:
            if not self._path.exists() or self._path.stat().st_size == self._size:
                return
            data = self._path.read_bytes()
        except OSError as error:
            raise ServiceError(f"can't read {self._path}: {error.strerror}") from error
        self._known.update(data.split(b"\n"))
        self._size = len(data)
