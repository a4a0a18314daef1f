"""Writing to a registry over HTTP: what authors submit and what cosigners sign.

Reading is `sources`, which a device uses; nothing here is for devices.
"""

from __future__ import annotations

import json
from typing import Any, Final

import httpx2

from chorister.closing import Closing
from chorister.errors import ServiceError, SubmissionRefused
from chorister.transparency.entries import Entry
from chorister.transparency.note import SignatureLine

__all__ = ["RegistryClient"]

_MAX_ANSWER: Final = 65_536


class RegistryClient(Closing):
    """A registry that one may write to. Every call may be repeated: it then changes nothing."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """`transport` replaces the network: other authorities, or the same process."""
        self._base = url.rstrip("/")
        self._client = httpx2.Client(
            headers={"User-Agent": "chorister"},
            follow_redirects=False,
            timeout=timeout,
            transport=transport,
        )

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def submit(self, entry: Entry) -> int:
        """Add an entry to the log; returns its index. It is public with the next checkpoint."""
        answer = self._post("entries", entry.encode())
        if not isinstance(answer.get("index"), int):
            raise ServiceError("the registry's answer names no index; is this a registry?")
        return int(answer["index"])

    def cosign(self, line: SignatureLine) -> tuple[str, ...]:
        """Deliver a cosignature; returns the cosigners that are still missing."""
        answer = self._post("cosignatures", f"{line.encode()}\n".encode())
        return tuple(str(name) for name in answer.get("waiting_for", ()))

    def _post(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            response = self._client.post(f"{self._base}/{path}", content=body)
            text = response.content[:_MAX_ANSWER]
            answer = json.loads(text)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ServiceError(f"{self._base} can't be reached: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self._base}/{path} does not answer as a registry does") from error
        if not isinstance(answer, dict):
            raise ServiceError(f"{self._base}/{path} does not answer as a registry does")
        if response.status_code >= httpx2.codes.BAD_REQUEST:
            detail = str(answer.get("detail", response.status_code))
            if response.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
                raise ServiceError(f"the registry can't take it now: {detail}")
            raise SubmissionRefused(
                f"the registry refuses it: {detail}",
                problem=str(answer.get("type", "about:blank")),
            )
        return answer
