"""The log's files, in a folder or at a URL, and how to add to a log.

    checkpoint            the newest checkpoint with all its cosignatures
    candidate             the checkpoint that waits for cosignatures
    list/HEX              a current list, by its digest
    entry/HEX             an entry's body, by its leaf hash
    tile/0/NNN            256 leaf hashes; tile/0/NNN.p/W the first W of a tile that is not full yet
    policy/HEX.toml       a policy that the registry serves, by its digest
    about.json            the log's name and the digests of its policies

Tiles are those of c2sp.org/tlog-tiles at level 0. Files whose names contain a digest or a number
never change. A file is trusted for its digest or its signatures, never for where it came from. If
it is missing or too long, `LogWithheld` is raised.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol

import httpx2

from chorister.closing import Closing
from chorister.errors import LogWithheld, ServiceError, SubmissionRefused, Unreachable
from chorister.http_client import TooLong, WebClient, printable
from chorister.transparency.checkpoint import SignatureLine
from chorister.transparency.entries import MAX_ENTRY, Entry
from chorister.transparency.tree import HASH_SIZE, leaf_hash

CHECKPOINT: Final = "checkpoint"
CANDIDATE: Final = "candidate"
ABOUT: Final = "about.json"
TILE_WIDTH: Final = 256
_MAX_ANSWER_BYTES: Final = 65_536


class Source(Protocol):
    """Anything that can read a log's files."""

    def read(self, path: str, *, limit: int) -> bytes:
        """Return a file of at most `limit` bytes; raises `LogWithheld`."""
        ...


class FolderSource:
    """A log in a folder: the registry's own, or a copy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, path: str, *, limit: int) -> bytes:
        try:
            with (self._folder / path).open("rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise LogWithheld(f"{path} can't be read: {error.strerror}", path=path) from error
        if len(data) > limit:
            raise _too_long(path, limit)
        return data


class HTTPSource(Closing):
    """A log at a URL. Sends nothing that distinguishes one reader from another.

    No cookies, redirects, proxies or credentials from the environment, a constant User-Agent, and
    no conditional requests: an ETag that the server chose would identify whoever sends it back.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        ca_bundle: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """`timeout` is for one request; `ca_bundle` has the only authorities to trust.

        `transport` replaces the network, for a registry in the same process.
        """
        self._base = url.rstrip("/")
        self._web = WebClient(
            timeout=timeout, ca_bundle=ca_bundle, transport=transport, keep_alive=True
        )

    def close(self) -> None:
        self._web.close()

    def read(self, path: str, *, limit: int) -> bytes:
        try:
            answer = self._web.exchange("GET", f"{self._base}/{path}", limit=limit)
        except TooLong:
            raise _too_long(path, limit) from None
        except Unreachable as error:
            raise LogWithheld(f"{path} can't be fetched: {error}", path=path) from error
        if answer.status != HTTPStatus.OK:
            raise LogWithheld(f"{path}: the server answers {answer.status}", path=path)
        return answer.body


class RegistryClient(HTTPSource):
    """A registry to write to. Repeating a call changes nothing."""

    def submit(self, entry: Entry) -> int:
        """Add an entry to the log; return its index. The next checkpoint makes it public."""
        index = self._post("entries", entry.encode()).get("index")
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ServiceError("the registry's answer has no index; is this a registry?")
        return index

    def cosign(self, line: SignatureLine) -> tuple[str, ...]:
        """Deliver a cosignature; return the cosigners that are still missing."""
        waiting_for = self._post("cosignatures", f"{line.encode()}\n".encode()).get("waiting_for")
        if not isinstance(waiting_for, list):
            raise ServiceError("the registry does not say who is missing; is this a registry?")
        return tuple(printable(str(name)) for name in waiting_for)

    def _post(self, path: str, body: bytes) -> dict[str, Any]:
        url = f"{self._base}/{path}"
        try:
            answer = self._web.exchange("POST", url, body=body, limit=_MAX_ANSWER_BYTES)
            document = json.loads(answer.body)
        except Unreachable as error:
            raise ServiceError(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{url} does not answer like a registry") from error
        if not isinstance(document, dict) or 300 <= answer.status < 400:
            raise ServiceError(f"{url} does not answer like a registry")
        if answer.status >= HTTPStatus.BAD_REQUEST:
            detail = printable(str(document.get("detail", answer.status)))
            if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise ServiceError(f"the registry can't take it now: {detail}")
            raise SubmissionRefused(
                f"the registry refuses it: {detail}",
                problem=printable(str(document.get("type", "about:blank"))),
            )
        return document


def entry_path(address: bytes) -> str:
    return f"entry/{address.hex()}"


def list_path(digest: bytes) -> str:
    return f"list/{digest.hex()}"


def policy_path(digest: bytes) -> str:
    return f"policy/{digest.hex()}.toml"


def tile_path(number: int, width: int) -> str:
    """Return a tile's path: its number in groups of three digits, all but the last after an x."""
    groups = [f"{number % 1000:03}"]
    while number := number // 1000:
        groups.insert(0, f"x{number % 1000:03}")
    full = "tile/0/" + "/".join(groups)
    return full if width == TILE_WIDTH else f"{full}.p/{width}"


def read_leaves(source: Source, start: int, size: int) -> Iterator[bytes]:
    """Yield the leaf hashes of entries `start` to `size` - 1, from the tiles of a log of `size`."""
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
    """Return an entry's body, which must hash to its address."""
    path = entry_path(address)
    data = source.read(path, limit=limit)
    if not hmac.compare_digest(leaf_hash(data), address):
        raise LogWithheld(f"{path} is not the entry with that hash", path=path)
    return data


def _too_long(path: str, limit: int) -> LogWithheld:
    return LogWithheld(f"{path} is longer than the {limit} bytes that it may have", path=path)
