"""What a cosigner signed last, and every entry it saw: kept so that a crash can't rewind it.

A folder with two files. `head` is the last checkpoint with the cosigner's own cosignature,
replaced as a whole. `entries` holds the entries that it covers, each after its length in four
bytes; entries beyond the head were fetched for a checkpoint that was never cosigned and are cut
off. The entries are synced before the head, the head before the cosignature is given away.

A folder without a head is not an empty log but a lost memory: `Head.open` raises `HeadLost`, and
only the operator's `Head.create` makes a new one. A cosigner that silently began anew would sign
the second half of a fork.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from chorister.errors import DecodeError, HeadLost, LogError, StorageDamaged
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.disk import Disk, locked
from chorister.transparency.state import LogState

__all__ = ["Head"]

_LENGTH = 4


class Head:
    """A cosigner's memory on disk, held by one process at a time."""

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        lock: ExitStack,
        last: SignedCheckpoint,
        state: LogState,
        end: int,
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._lock = lock
        # Where the entries of `last` end in their file.
        self._end = end
        self._broken = False
        self.last = last
        self.state = state

    def __repr__(self) -> str:
        return f"Head({str(self._folder)!r}, size={self.last.checkpoint.size})"

    @classmethod
    def create(
        cls,
        folder: Path,
        first: SignedCheckpoint,
        entries: Sequence[bytes] = (),
        *,
        disk: Disk | None = None,
    ) -> Self:
        """Begin a memory with this checkpoint and its entries. Only an operator decides this."""
        disk = disk or Disk()
        disk.make_folder(folder)
        if (folder / "head").exists():
            raise HeadLost(f"{folder} already holds a head; it is not replaced")
        # The head comes last: interrupted before it, the memory still counts as lost.
        disk.replace(folder / "entries", _framed(entries))
        disk.replace(folder / "head", first.encode())
        return cls.open(folder, disk=disk)

    @classmethod
    def open(cls, folder: Path, *, disk: Disk | None = None) -> Self:
        """Load what was signed last; verifies that the entries are those that it covers."""
        disk = disk or Disk()
        if not (folder / "head").is_file():
            raise HeadLost(
                f"{folder} holds no head: this cosigner does not know what it signed last. "
                "Create one for a log that it never cosigned; otherwise adopt the newest "
                "checkpoint known to carry its cosignature."
            )
        with ExitStack() as stack:
            stack.enter_context(locked(folder / "lock"))
            try:
                last = SignedCheckpoint.parse((folder / "head").read_bytes())
            except (DecodeError, OSError) as error:
                raise StorageDamaged(
                    f"{folder / 'head'} is damaged ({error}); restore the folder, or have the "
                    "operator adopt a checkpoint"
                ) from error
            state, end = _replay(folder / "entries", last, disk)
            return cls(folder, disk, stack.pop_all(), last, state, end)

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def entries(self) -> Iterator[bytes]:
        """The entries that the head covers, in the log's order."""
        return _frames(self._folder / "entries", self.last.checkpoint.size)

    def commit(self, last: SignedCheckpoint, entries: Sequence[bytes], state: LogState) -> None:
        """Remember a checkpoint and its new entries. Durable when this returns."""
        if self._broken:
            raise StorageDamaged("an earlier write failed; restart the cosigner to recover")
        framed = _framed(entries)
        try:
            self._write(framed, last)
        except OSError as error:
            # What is on disk now is unknown, and signing on would be a guess.
            self._broken = True
            raise StorageDamaged(f"{self._folder} can't be written: {error}") from error
        self._end += len(framed)
        self.last = last
        self.state = state

    def _write(self, framed: bytes, last: SignedCheckpoint) -> None:
        if framed:
            path = self._folder / "entries"
            # Whatever an interrupted commit left behind goes first: its entries never counted.
            self._disk.truncate(path, self._end)
            self._disk.append(path, framed)
            self._disk.sync(path)
        self._disk.replace(self._folder / "head", last.encode())


def _replay(path: Path, last: SignedCheckpoint, disk: Disk) -> tuple[LogState, int]:
    """The state after the head's entries, and where they end; cuts off what lies beyond."""
    state, end = LogState(), 0
    try:
        for entry in _frames(path, last.checkpoint.size):
            state.append(entry)
            end += _LENGTH + len(entry)
    except (OSError, LogError) as error:
        raise StorageDamaged(
            f"{path} is damaged ({error}); restore the folder, or have the operator adopt a "
            "checkpoint"
        ) from error
    if (state.size, state.frontier.root) != (last.checkpoint.size, last.checkpoint.root):
        raise StorageDamaged(
            f"{path} holds {state.size} entries that are not the {last.checkpoint.size} of the "
            "head; restore both files, or have the operator adopt a checkpoint"
        )
    disk.truncate(path, end)
    disk.sync(path)
    return state, end


def _frames(path: Path, count: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for _ in range(count):
            prefix = file.read(_LENGTH)
            size = int.from_bytes(prefix)
            entry = file.read(size)
            if len(prefix) != _LENGTH or len(entry) != size:
                return
            yield entry


def _framed(entries: Sequence[bytes]) -> bytes:
    return b"".join(len(entry).to_bytes(_LENGTH) + entry for entry in entries)
