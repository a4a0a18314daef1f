"""The registry's files, written so that no checkpoint ever covers an entry that could be lost.

    FOLDER/entries         all entries in the log's order, each after its length in two bytes
    FOLDER/leaves          their leaf hashes, 32 bytes each
    FOLDER/lock            held by the one process that writes
    FOLDER/public/         what everybody can see (for the paths, see `transparency.client`)

An append is durable step by step: the entry and the file that it names, a body or a list, then the
name of that file, then the entry's hash at the end of `leaves`. A checkpoint is written last, after
its tiles and bundles. So a crash between any two steps leaves at most a body, an entry or tiles
that nothing refers to, or a hash whose entry was never acknowledged. A hash of 32 bytes never
crosses a sector; a torn or empty one at the end is cut off when the folder is opened, and so are
entries without a hash. Anything else that does not fit is damage that a person has to look at, and
the registry does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from chorister.errors import DecodeError, LogError, LogOutdated, ServiceError, StorageDamaged
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.client import CANDIDATE, CHECKPOINT
from chorister.transparency.disk import Disk, locked
from chorister.transparency.state import LogState
from chorister.transparency.tiles import TILE_WIDTH, TileTree, bundle_path, encode_bundle
from chorister.transparency.tree import HASH_SIZE, leaf_hash, root_hash

_LENGTH_BYTES: Final = 2


class LogFolder:
    """A log on disk, used by one process at a time."""

    def __init__(self, folder: Path, disk: Disk, lock: ExitStack) -> None:
        self.public = folder / "public"
        self._entries_path = folder / "entries"
        self._leaves_path = folder / "leaves"
        self._disk = disk
        self._lock = lock
        self._broken = False
        self._tree = TileTree()
        # The entries of the bundle that is not full yet, and of full ones not published yet.
        self._unbundled: list[bytes] = []
        # The number of entries that the tiles and bundles on disk cover.
        self._tiled = 0

    def __repr__(self) -> str:
        return f"LogFolder({str(self.public.parent)!r}, size={len(self.leaves)})"

    @classmethod
    def create(cls, folder: Path, *, disk: Disk | None = None) -> Self:
        """Create a new, empty log."""
        disk = disk or Disk()
        if (folder / "leaves").exists():
            raise ServiceError(f"{folder} already holds a log; start without creating one")
        disk.make_folder(folder)
        disk.make_folder(folder / "public")
        for name in ("body", "list", "policy", "tile", "tile/0", "tile/entries"):
            disk.make_folder(folder / "public" / name)
        disk.replace(folder / "entries", b"")
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
        if is_outdated(folder):
            raise LogOutdated(
                f"{folder} holds a log by an earlier version of Chorister, in a format that this "
                "version can't continue: docs/howto/upgrade-the-log.md explains how to start again"
            )
        with ExitStack() as stack:
            stack.enter_context(locked(folder / "lock"))
            self = cls(folder, disk, stack)
            self._recover_leaves()
            self._lock = stack.pop_all()
            return self

    def close(self) -> None:
        self._lock.close()

    @property
    def leaves(self) -> Sequence[bytes]:
        """The leaf hashes of all entries; it grows with the log."""
        return self._tree.leaves

    def load(self) -> LogState:
        """Read every entry, apply the log's rules, and check what the checkpoints cover."""
        signed = {name: self.read_checkpoint(name) for name in (CHECKPOINT, CANDIDATE)}
        # Tiles and bundles are written before the checkpoint that needs them.
        self._tiled = max((each.checkpoint.size for each in signed.values() if each), default=0)
        state = LogState()
        for entry in self._recover_entries():
            try:
                state.append(entry)
            except LogError as error:
                raise StorageDamaged(
                    f"entry {state.size} is damaged ({error}); restore it from a copy of the log"
                ) from error
        for name, each in signed.items():
            if each is not None:
                self._check_covered(name, each)
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

    def append(self, entry: bytes, files: Mapping[str, bytes]) -> None:
        """Add an entry, and the files that it names. Durable when this returns."""
        self.append_all([entry], files)

    def append_all(self, entries: Sequence[bytes], files: Mapping[str, bytes]) -> None:
        """Add entries in bulk, and the files that they name. Durable when this returns."""
        leaves = [leaf_hash(entry) for entry in entries]

        def steps() -> None:
            self._disk.append(self._entries_path, encode_bundle(entries))
            self._disk.replace_all(self._paths(files), appended=[self._entries_path])
            self._disk.append(self._leaves_path, b"".join(leaves))
            self._disk.sync(self._leaves_path)

        self._durably(steps)
        self._tree.extend(leaves)
        self._unbundled += entries

    def publish_tiles(self) -> None:
        """Publish the tiles and bundles that are not published yet."""

        def steps() -> None:
            size = len(self.leaves)
            files = dict(self._tree.files(since=self._tiled))
            first = (size - len(self._unbundled)) // TILE_WIDTH
            for at in range(0, len(self._unbundled), TILE_WIDTH):
                bundle = self._unbundled[at : at + TILE_WIDTH]
                number = first + at // TILE_WIDTH
                if number * TILE_WIDTH + len(bundle) > self._tiled:
                    files[bundle_path(number, len(bundle))] = encode_bundle(bundle)
            paths = self._paths(files)
            for folder in {path.parent for path in paths}:
                self._make_folders(folder)
            self._disk.replace_all(paths)
            self._tiled = size
            full = len(self._unbundled) // TILE_WIDTH * TILE_WIDTH
            del self._unbundled[:full]

        self._durably(steps)

    def publish(self, files: Mapping[str, bytes], *, lasting: bool = True) -> None:
        """Publish files in folders that exist, replacing any earlier ones.

        If not `lasting`, a crash of the machine may bring the earlier ones back.
        """
        self._durably(lambda: self._disk.replace_all(self._paths(files), lasting=lasting))

    def _paths(self, files: Mapping[str, bytes]) -> dict[Path, bytes]:
        return {self.public / name: data for name, data in files.items()}

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

    def _recover_leaves(self) -> None:
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
        self._tree.extend(leaves)

    def _recover_entries(self) -> Iterator[bytes]:
        """Yield the entries; cut off what follows them, which no hash vouches for."""
        end = 0
        with self._entries_path.open("rb") as file:
            for index, leaf in enumerate(self.leaves):
                prefix = file.read(_LENGTH_BYTES)
                entry = file.read(int.from_bytes(prefix))
                if leaf_hash(entry) != leaf:
                    raise StorageDamaged(
                        f"entry {index} in {self._entries_path} is damaged; restore it from a "
                        "copy of the log"
                    )
                if index // TILE_WIDTH >= self._tiled // TILE_WIDTH:
                    self._unbundled.append(entry)
                end += len(prefix) + len(entry)
                yield entry
            surplus = file.read(1)
        if surplus:
            self._disk.truncate(self._entries_path, end)
        self._disk.sync(self._entries_path)

    def _check_covered(self, name: str, signed: SignedCheckpoint) -> None:
        checkpoint = signed.checkpoint
        if checkpoint.size > len(self.leaves):
            raise StorageDamaged(
                f"the {name} covers {checkpoint.size} entries, of which "
                f"{checkpoint.size - len(self.leaves)} are lost: restore {self._leaves_path}"
            )
        if root_hash(self.leaves[: checkpoint.size]) != checkpoint.root:
            raise StorageDamaged(
                f"the {name} is not of the entries in {self._leaves_path}; restore both from a "
                "copy of the log"
            )


def is_outdated(folder: Path) -> bool:
    """Whether a folder holds a log of the former format, whose entries were files of their own."""
    return (folder / "public" / "entry").is_dir()
