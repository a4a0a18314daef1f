"""Where a log is read from: a folder or a URL, one file at a time, by the paths below.

    checkpoint            the newest checkpoint with all its cosignatures
    candidate             the checkpoint that waits for cosignatures
    list/HEX              a current list, by its digest
    entry/HEX             an entry's body, by its leaf hash
    tile/0/NNN            256 leaf hashes; tile/0/NNN.p/W the first W of a tile not yet full
    policy/HEX.toml       a policy that the registry serves, by its digest
    about.json            the log's name and the digests of its policies

Tiles are those of c2sp.org/tlog-tiles at level 0. Every file but the first two and the last never
changes, whatever else happens. A file is believed for its digest or its signatures, never for
where it came from; a file that is missing or longer than it may be is `LogWithheld`.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Final, Protocol

import httpx2

from chorister.closing import Closing
from chorister.errors import LogWithheld, Unreachable
from chorister.http_client import TooLong, WebClient
from chorister.transparency.entries import MAX_ENTRY
from chorister.transparency.tree import HASH_SIZE, leaf_hash

__all__ = [
    "ABOUT",
    "CANDIDATE",
    "CHECKPOINT",
    "TILE_WIDTH",
    "FolderSource",
    "HTTPSource",
    "Source",
    "entry_path",
    "list_path",
    "policy_path",
    "read_entry",
    "read_leaves",
    "tile_path",
]

CHECKPOINT: Final = "checkpoint"
CANDIDATE: Final = "candidate"
ABOUT: Final = "about.json"
TILE_WIDTH: Final = 256


class Source(Protocol):
    """Whatever can hand out a log's files."""

    def read(self, path: str, *, limit: int) -> bytes:
        """The file, of at most `limit` bytes; raises `LogWithheld`."""
        ...


class FolderSource:
    """A log in a folder: the registry's own, or a copy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, path: str, *, limit: int) -> bytes:
        """The file, of at most `limit` bytes."""
        try:
            with (self._folder / path).open("rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise LogWithheld(f"{path} can't be read: {error.strerror}", path=path) from error
        if len(data) > limit:
            raise _too_long(path, limit)
        return data


class HTTPSource(Closing):
    """A log at a URL. Sends nothing by which one reader could be told from another.

    No cookies, redirects, proxies or credentials from the environment; one constant User-Agent;
    no conditional requests: a validator that a server chose would come back to it as a name.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        ca_bundle: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """`timeout` is for one file, `ca_bundle` names the only authorities to believe.

        `transport` replaces the network, for a registry in the same process.
        """
        self._base = url.rstrip("/")
        self._web = WebClient(
            timeout=timeout, ca_bundle=ca_bundle, transport=transport, keep_alive=True
        )

    def close(self) -> None:
        """Give the connection back."""
        self._web.close()

    def read(self, path: str, *, limit: int) -> bytes:
        """The file, of at most `limit` bytes."""
        try:
            answer = self._web.exchange("GET", f"{self._base}/{path}", limit=limit)
        except TooLong:
            raise _too_long(path, limit) from None
        except Unreachable as error:
            raise LogWithheld(f"{path} can't be fetched: {error}", path=path) from error
        if answer.status != HTTPStatus.OK:
            raise LogWithheld(f"{path}: the server answers {answer.status}", path=path)
        return answer.body


def entry_path(address: bytes) -> str:
    """Where an entry's body is."""
    return f"entry/{address.hex()}"


def list_path(digest: bytes) -> str:
    """Where a current list is."""
    return f"list/{digest.hex()}"


def policy_path(digest: bytes) -> str:
    """Where a policy is."""
    return f"policy/{digest.hex()}.toml"


def tile_path(number: int, width: int) -> str:
    """Where a tile is: the number in groups of three digits, all but the last marked with x."""
    groups = [f"{number % 1000:03}"]
    while number := number // 1000:
        groups.insert(0, f"x{number % 1000:03}")
    full = "tile/0/" + "/".join(groups)
    return full if width == TILE_WIDTH else f"{full}.p/{width}"


def read_leaves(source: Source, start: int, size: int) -> Iterator[bytes]:
    """The leaf hashes of entries `start` to `size` - 1, from the tiles of a log of `size`."""
    for number in range(start // TILE_WIDTH, -(-size // TILE_WIDTH)):
        first = number * TILE_WIDTH
        width = min(TILE_WIDTH, size - first)
        path = tile_path(number, width)
        tile = source.read(path, limit=width * HASH_SIZE)
        if len(tile) != width * HASH_SIZE:
            raise LogWithheld(f"{path} has {len(tile)} bytes, not {width * HASH_SIZE}", path=path)
        for index in range(max(start, first), first + width):
            at = (index - first) * HASH_SIZE
            yield tile[at : at + HASH_SIZE]


def read_entry(source: Source, address: bytes, *, limit: int = MAX_ENTRY) -> bytes:
    """An entry's body, which has to hash to its address."""
    path = entry_path(address)
    data = source.read(path, limit=limit)
    if not hmac.compare_digest(leaf_hash(data), address):
        raise LogWithheld(f"{path} is not the entry with that hash", path=path)
    return data


def _too_long(path: str, limit: int) -> LogWithheld:
    return LogWithheld(f"{path} is longer than the {limit} bytes that it may have", path=path)
