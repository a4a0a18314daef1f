"""The registry's files, written so that no checkpoint ever covers an entry that could be lost.

    FOLDER/leaves          the leaf hashes of all entries in the log's order, 32 bytes each
    FOLDER/lock            held by the one process that writes
    FOLDER/public/         what everybody can see (for the paths, see `transparency.client`)

An append is durable step by step: the body, then its name, then its hash at the end of `leaves`. A
checkpoint is written last, after its tiles and its list. So a crash between any two steps leaves at
most a body or tiles that nothing refers to, or a hash whose entry was never acknowledged. A hash of
32 bytes never crosses a sector; a torn or empty one at the end is cut off when the folder is
opened. Anything else that does not fit is damage that a person has to look at, and the registry
does not start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from chorister.errors import DecodeError, LogError, ServiceError, StorageDamaged
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.client import (
    CANDIDATE,
    CHECKPOINT,
    TILE_WIDTH,
    FolderSource,
    entry_path,
    read_entry,
    tile_path,
)
from chorister.transparency.disk import Disk, locked
from chorister.transparency.state import LogState
from chorister.transparency.tree import HASH_SIZE, leaf_hash, root_hash


class LogFolder:
    """A log on disk, used by one process at a time."""

    def __init__(self, folder: Path, disk: Disk, lock: ExitStack) -> None:
        self.public = folder / "public"
        self._leaves_path = folder / "leaves"
        self._disk = disk
        self._lock = lock
        self._broken = False
        self._leaves: list[bytes] = []
        # The number of entries that the tiles on disk cover.
        self._tiled = 0

    def __repr__(self) -> str:
        return f"LogFolder({str(self.public.parent)!r}, size={len(self._leaves)})"

    @classmethod
    def create(cls, folder: Path, *, disk: Disk | None = None) -> Self:
        """Create a new, empty log."""
        disk = disk or Disk()
        if (folder / "leaves").exists():
            raise ServiceError(f"{folder} already holds a log; start without creating one")
        disk.make_folder(folder)
        disk.make_folder(folder / "public")
        for name in ("entry", "list", "policy", "tile", "tile/0"):
            disk.make_folder(folder / "public" / name)
        disk.replace(folder / "leaves", b"")
        return cls.open(folder, disk=disk)

    @classmethod
    def open(cls, folder: Path, *, disk: Disk | None = None) -> Self:
        """Open a log, finishing or undoing what a crash interrupted."""
        disk = disk or Disk()
        if not (folder / "leaves").is_file():
            raise ServiceError(
                f"{folder} holds no log. If this is the first start, create one; otherwise "
                "restore it: cosigners refuse a log that starts over."
            )
        with ExitStack() as stack:
            stack.enter_context(locked(folder / "lock"))
            self = cls(folder, disk, stack)
            self._recover()
            self._lock = stack.pop_all()
            return self

    def close(self) -> None:
        self._lock.close()

    @property
    def leaves(self) -> tuple[bytes, ...]:
        return tuple(self._leaves)

    def load(self) -> LogState:
        """Read every entry, apply the log's rules, and check what the checkpoints cover."""
        source, state = FolderSource(self.public), LogState()
        for index, leaf in enumerate(self._leaves):
            try:
                state.append(read_entry(source, leaf))
            except LogError as error:
                raise StorageDamaged(
                    f"entry {index} is damaged ({error}); restore it from a copy of the log"
                ) from error
        for name in (CHECKPOINT, CANDIDATE):
            signed = self.read_checkpoint(name)
            if signed is not None:
                self._check_covered(name, signed)
        return state

    def read_checkpoint(self, name: str) -> SignedCheckpoint | None:
        """Return the published checkpoint or the candidate, if there is one yet."""
        path = self.public / name
        if not path.exists():
            return None
        try:
            return SignedCheckpoint.parse(path.read_bytes())
        except (DecodeError, OSError) as error:
            raise StorageDamaged(
                f"{path} is damaged ({error}); restore it from a copy of the log"
            ) from error

    def append(self, data: bytes) -> None:
        """Add an entry. Durable when this returns."""
        leaf = leaf_hash(data)

        def steps() -> None:
            self._disk.replace(self.public / entry_path(leaf), data)
            self._disk.append(self._leaves_path, leaf)
            self._disk.sync(self._leaves_path)

        self._durably(steps)
        self._leaves.append(leaf)

    def publish_tiles(self) -> None:
        """Publish the tiles that are not published yet."""

        def steps() -> None:
            size = len(self._leaves)
            for number in range(self._tiled // TILE_WIDTH, -(-size // TILE_WIDTH)):
                tile = self._leaves[number * TILE_WIDTH : (number + 1) * TILE_WIDTH]
                path = self.public / tile_path(number, len(tile))
                self._make_folders(path.parent)
                self._disk.replace(path, b"".join(tile))
            self._tiled = size

        self._durably(steps)

    def publish(self, name: str, data: bytes) -> None:
        """Publish a file, replacing any earlier one at its path."""
        self._durably(lambda: self._disk.replace(self.public / name, data))

    def _durably(self, steps: Callable[[], None]) -> None:
        """Run steps that write. After a failed one, nothing more is written until a restart.

        After a failed sync nobody knows what is on disk, and a second one may falsely succeed.
        """
        if self._broken:
            raise ServiceError("an earlier write failed; restart the registry to recover")
        try:
            steps()
        except OSError as error:
            self._broken = True
            raise ServiceError(f"{self.public.parent} can't be written: {error}") from error

    def _make_folders(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make_folders(path.parent)
        self._disk.make_folder(path)

    def _recover(self) -> None:
        data = self._leaves_path.read_bytes()
        whole = len(data) - len(data) % HASH_SIZE
        leaves = [data[at : at + HASH_SIZE] for at in range(0, whole, HASH_SIZE)]
        # After a crash of the machine, a file may have grown without getting its bytes.
        while leaves and leaves[-1] == bytes(HASH_SIZE):
            leaves.pop()
        if len(leaves) * HASH_SIZE != len(data):
            self._disk.truncate(self._leaves_path, len(leaves) * HASH_SIZE)
        # What a killed process wrote may not be durable yet, and from here on we rely on it.
        self._disk.sync(self._leaves_path)
        self._leaves = leaves

    def _check_covered(self, name: str, signed: SignedCheckpoint) -> None:
        checkpoint = signed.checkpoint
        if checkpoint.size > len(self._leaves):
            raise StorageDamaged(
                f"the {name} covers {checkpoint.size} entries, of which "
                f"{checkpoint.size - len(self._leaves)} are lost: restore {self._leaves_path}"
            )
        if root_hash(self._leaves[: checkpoint.size]) != checkpoint.root:
            raise StorageDamaged(
                f"the {name} is not of the entries in {self._leaves_path}; restore both from a "
                "copy of the log"
            )
