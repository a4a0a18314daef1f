"""The log's tiles and entry bundles, as c2sp.org/tlog-tiles defines them.

    tile/L/NNN              256 hashes of level L; at level 0 they are leaf hashes, above it each
                            is the root of one full tile of the level below
    tile/entries/NNN        256 entries, each after its length in two bytes
    ….p/W                   the first W of a tile or bundle that is not full yet

A number has groups of three digits, all but the last after an x. All of these never change. Partial
ones exist for every size that has a checkpoint. `TileTree` says which files a log of a size
consists of; `read_entries` is how cosigners and auditors read them: entries alone determine leaves,
tree and root, so nobody needs more than the bundles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from chorister.errors import LogWithheld
from chorister.transparency.entries import MAX_ENTRY
from chorister.transparency.tree import HASH_SIZE, root_hash

TILE_WIDTH: Final = 256
_LENGTH_BYTES: Final = 2


class Source(Protocol):
    """Anything that can read a log's files."""

    def read(self, path: str, *, limit: int) -> bytes:
        """Return a file of at most `limit` bytes; raises `LogWithheld`."""
        ...


def tile_path(level: int, number: int, width: int) -> str:
    return _path(f"tile/{level}", number, width)


def bundle_path(number: int, width: int) -> str:
    return _path("tile/entries", number, width)


def _path(folder: str, number: int, width: int) -> str:
    groups = [f"{number % 1000:03}"]
    while number := number // 1000:
        groups.insert(0, f"x{number % 1000:03}")
    full = f"{folder}/{'/'.join(groups)}"
    return full if width == TILE_WIDTH else f"{full}.p/{width}"


class TileTree:
    """The hashes of every level of a growing log."""

    def __init__(self) -> None:
        # levels[0] are the leaves; levels[n + 1][i] is the root of the i-th full tile of level n.
        self._levels: list[list[bytes]] = [[]]

    def extend(self, leaves: Iterable[bytes]) -> None:
        self._levels[0].extend(leaves)
        level = 0
        while len(self._levels[level]) >= TILE_WIDTH:
            if len(self._levels) == level + 1:
                self._levels.append([])
            below, above = self._levels[level], self._levels[level + 1]
            for number in range(len(above), len(below) // TILE_WIDTH):
                above.append(root_hash(below[number * TILE_WIDTH : (number + 1) * TILE_WIDTH]))
            level += 1

    @property
    def leaves(self) -> Sequence[bytes]:
        return self._levels[0]

    def files(self, since: int = 0) -> Iterator[tuple[str, bytes]]:
        """Yield the tiles that a log of this size has and one of `since` entries did not have."""
        for level, hashes in enumerate(self._levels):
            before = since // TILE_WIDTH**level
            if len(hashes) == before:
                continue
            for number in range(before // TILE_WIDTH, -(-len(hashes) // TILE_WIDTH)):
                tile = hashes[number * TILE_WIDTH : (number + 1) * TILE_WIDTH]
                yield tile_path(level, number, len(tile)), b"".join(tile)


def encode_bundle(entries: Iterable[bytes]) -> bytes:
    return b"".join(len(entry).to_bytes(_LENGTH_BYTES) + entry for entry in entries)


def read_entries(source: Source, start: int, size: int) -> Iterator[bytes]:
    """Yield entries `start` to `size` - 1 from the bundles of a log of `size`."""
    if start >= size:
        return  # rather than fetch a bundle of which nothing is new
    for number in range(start // TILE_WIDTH, -(-size // TILE_WIDTH)):
        first = number * TILE_WIDTH
        width = min(TILE_WIDTH, size - first)
        path = bundle_path(number, width)
        bundle = source.read(path, limit=width * (_LENGTH_BYTES + MAX_ENTRY))
        entries = list(_split(bundle, path))
        if len(entries) != width:
            raise LogWithheld(f"{path} has {len(entries)} entries, not {width}", path=path)
        yield from entries[max(start - first, 0) :]


def _split(bundle: bytes, path: str) -> Iterator[bytes]:
    at = 0
    while at < len(bundle):
        end = at + _LENGTH_BYTES
        size = int.from_bytes(bundle[at:end])
        at = end + size
        if at > len(bundle) or end > len(bundle):
            raise LogWithheld(f"{path} ends in the middle of an entry", path=path)
        yield bundle[end:at]


def check_tiles(source: Source, tree: TileTree) -> None:
    """Require that every tile of a log is served, and is what its entries make it."""
    for path, expected in tree.files():
        if source.read(path, limit=TILE_WIDTH * HASH_SIZE) != expected:
            raise LogWithheld(f"{path} is not the tile of the log's entries", path=path)
