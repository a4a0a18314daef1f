"""The registry's files, written so that no checkpoint ever covers an entry that could be lost.

    FOLDER/leaves          the leaf hashes of all entries, 32 bytes each: the order of the log
    FOLDER/lock            held by the one process that writes
    FOLDER/public/         what the world sees (paths as in `transparency.sources`)

An append is durable step by step: the body, then its name, then its hash at the end of `leaves`.
A checkpoint is written last, after the tiles and the list that it needs. So a crash between any
two steps leaves at most a body that nothing refers to, a record that was never acknowledged, or
tiles that nobody was told about. A record of 32 bytes never crosses a sector; a torn or empty one
at the end is cut off when the folder is opened. Anything else that does not fit is damage, which
a person has to look at: the registry does not start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from chorister.errors import DecodeError, LogError, ServiceError, StorageDamaged
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.disk import Disk, locked
from chorister.transparency.sources import (
    CANDIDATE,
    CHECKPOINT,
    TILE_WIDTH,
    FolderSource,
    entry_path,
    list_path,
    read_entry,
    tile_path,
)
from chorister.transparency.state import LogState
from chorister.transparency.tree import HASH_SIZE, leaf_hash, root_hash

__all__ = ["LogFolder"]


class LogFolder:
    """A log on disk, held by one process at a time."""

    def __init__(self, folder: Path, disk: Disk, lock: ExitStack) -> None:
        self.public = folder / "public"
        self._leaves_path = folder / "leaves"
        self._disk = disk
        self._lock = lock
        self._broken = False
        self._leaves: list[bytes] = []
        # How many entries the tiles on disk cover.
        self._tiled = 0

    def __repr__(self) -> str:
        return f"LogFolder({str(self.public.parent)!r}, size={len(self._leaves)})"

    @classmethod
    def create(cls, folder: Path, *, disk: Disk | None = None) -> Self:
        """Begin a new, empty log in a folder that holds none."""
        disk = disk or Disk()
        if (folder / "leaves").exists():
            raise ServiceError(f"{folder} holds a log already; start without creating one")
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
                f"{folder} holds no log. If this is the first start, create one; "
                "if it is not, restore it: cosigners refuse a log that begins anew."
            )
        with ExitStack() as stack:
            stack.enter_context(locked(folder / "lock"))
            self = cls(folder, disk, stack)
            self._recover()
            self._lock = stack.pop_all()
            return self

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    @property
    def leaves(self) -> tuple[bytes, ...]:
        """The leaf hashes of all entries."""
        return tuple(self._leaves)

    def load(self) -> LogState:
        """Read every entry and apply the log's rules; verifies what the checkpoints cover."""
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
        """The published checkpoint or the candidate, if there is one yet."""
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

    def publish_list(self, digest: bytes, data: bytes) -> None:
        """Publish a current list."""
        self._durably(lambda: self._disk.replace(self.public / list_path(digest), data))

    def publish_tiles(self) -> None:
        """Publish the tiles of all entries, as far as they are not published yet."""

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
        """Publish a file under a path, replacing an earlier one."""
        self._durably(lambda: self._disk.replace(self.public / name, data))

    def _durably(self, steps: Callable[[], None]) -> None:
        """Run steps that write; after a failed one nothing more is written until a restart.

        A failed sync says nothing about what is on disk, and a second one may succeed falsely.
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
        # A crash of the machine may leave the length of a write without its bytes.
        while leaves and leaves[-1] == bytes(HASH_SIZE):
            leaves.pop()
        if len(leaves) * HASH_SIZE != len(data):
            self._disk.truncate(self._leaves_path, len(leaves) * HASH_SIZE)
        # A record that a killed process wrote may not be durable yet, and is relied on from here.
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
