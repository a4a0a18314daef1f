"""A disk that forgets what was not synced, as POSIX permits it to when the machine fails.

Every write is done for real, so that code under test reads its own writes, and also noted in a
model: bytes of a file are durable once the file was synced, names once their folder was. A sync
only changes the model, because the real one would take most of a test's time. `crash` puts the
folder into one of the states that a failing machine could leave, the chooser deciding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from chorister.transparency.disk import Disk


class Crash(BaseException):
    """The process is gone. Not an Exception: nothing may catch it."""


@dataclass
class Inode:
    """A file's bytes: as written, and as they are certain to survive."""

    written: bytes
    durable: bytes = b""


class SimulatedDisk(Disk):
    """Fails after a given number of steps, and forgets."""

    def __init__(self, root: Path, *, steps: int | None = None) -> None:
        self._root = root
        self.steps = steps
        self.taken = 0
        self._names: dict[Path, Inode] = {}
        self._durable_names: dict[Path, Inode] = {}
        self._folders: set[Path] = {root}

    def _step(self) -> None:
        if self.steps is not None:
            if self.steps == 0:
                raise Crash
            self.steps -= 1
        self.taken += 1

    def write(self, path: Path, data: bytes) -> None:
        self._step()
        super().write(path, data)
        self._names[path] = Inode(written=data)

    def append(self, path: Path, data: bytes) -> None:
        self._step()
        super().append(path, data)
        self._names[path].written += data

    def truncate(self, path: Path, size: int) -> None:
        self._step()
        super().truncate(path, size)
        self._names[path].written = self._names[path].written[:size]

    def sync(self, path: Path) -> None:
        self._step()
        path.stat()  # what does not exist can't be synced
        if path in self._names:
            self._names[path].durable = self._names[path].written
        for known in self._names.keys() | self._durable_names.keys():
            if known.parent == path:
                if known in self._names:
                    self._durable_names[known] = self._names[known]
                else:
                    self._durable_names.pop(known, None)

    def sync_all(self, paths: Collection[Path]) -> None:
        """One after the other, so that a crash can come between any two."""
        for path in sorted(paths):
            self.sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)
        self._names[new] = self._names.pop(old)

    def make_folder(self, path: Path) -> None:
        self._step()
        super().make_folder(path)
        self._folders.add(path)

    def kill(self) -> None:
        """End the process only: the system still writes everything that it was given."""
        self.steps = None

    def crash(self, choose: Callable[[int], int]) -> None:
        """End the machine: whatever was not synced may or may not be there, in any mixture."""
        survivors: dict[Path, bytes] = {}
        for path in sorted(self._names.keys() | self._durable_names.keys()):
            before, after = self._durable_names.get(path), self._names.get(path)
            inode = after if before is after or choose(2) else before
            if inode is not None:
                survivors[path] = self._content(inode, choose)
        for path in [*self._root.rglob("*")]:
            if path.is_file() and path.name != "lock":
                path.unlink()
        self._names = {}
        for path, data in survivors.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            self._names[path] = Inode(written=data, durable=data)
        self._durable_names = dict(self._names)
        self.steps = None

    def _content(self, inode: Inode, choose: Callable[[int], int]) -> bytes:
        if inode.written == inode.durable:
            return inode.durable
        if not inode.written.startswith(inode.durable):
            return inode.written if choose(2) else inode.durable
        # A longer file: all of the rest, a part of it, or its length without its bytes.
        rest = inode.written[len(inode.durable) :]
        kept = choose(len(rest) + 1)
        match choose(3):
            case 0:
                return inode.durable
            case 1:
                return inode.durable + rest[:kept]
            case _:
                return inode.durable + bytes(len(rest)) if choose(2) else inode.written
