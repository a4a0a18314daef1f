"""The log's files, in a folder or at a URL, and how to add to a log.

    checkpoint            the newest checkpoint with all its cosignatures
    list.tlog-proof       the same checkpoint, with the proof that its last entry is a list
    candidate             the checkpoint that waits for cosignatures
    list/HEX              a current list, by its digest
    body/HEX              a recipe's body or an HPKE config's entry, by its SHA-256
    tile/...              tiles and entry bundles, see `tiles`
    policy/HEX.toml       a policy that the registry serves, by its digest
    about.json            the log's name and the digests of its policies

Files whose names contain a digest or a number never change. A file is trusted for its digest or its
signatures, never for where it came from. If it is missing or too long, `LogWithheld` is raised.
"""

from __future__ import annotations

import hmac
import json
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chorister.canonical import sha256
from chorister.closing import Closing
from chorister.errors import LogWithheld, ServiceError, SubmissionRefused, Unreachable
from chorister.http_client import TooLong, WebClient, printable
from chorister.transparency.entries import SignedEntry, Submission
from chorister.transparency.note import SignatureLine
from chorister.transparency.tiles import Source

if TYPE_CHECKING:
    import httpx2

CHECKPOINT: Final = "checkpoint"
PROOF: Final = "list.tlog-proof"
CANDIDATE: Final = "candidate"
ABOUT: Final = "about.json"
_MAX_ANSWER_BYTES: Final = 65_536


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

    def submit(self, entry: SignedEntry, body: bytes = b"") -> int:
        """Add an entry to the log; return its index. The next checkpoint makes it public."""
        index = self._post("entries", Submission.of(entry, body).encode()).get("index")
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


def body_path(digest: bytes) -> str:
    return f"body/{digest.hex()}"


def list_path(digest: bytes) -> str:
    return f"list/{digest.hex()}"


def policy_path(digest: bytes) -> str:
    return f"policy/{digest.hex()}.toml"


def read_body(source: Source, digest: bytes, *, limit: int) -> bytes:
    """Return the body with this SHA-256."""
    path = body_path(digest)
    data = source.read(path, limit=limit)
    if not hmac.compare_digest(sha256(data), digest):
        raise LogWithheld(f"{path} is not the body with that digest", path=path)
    return data


def _too_long(path: str, limit: int) -> LogWithheld:
    return LogWithheld(f"{path} is longer than the {limit} bytes that it may have", path=path)
