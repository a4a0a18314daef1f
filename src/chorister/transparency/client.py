"""Writing to a registry over HTTP: what authors submit and what cosigners sign.

Reading is `sources`, which a device uses; nothing here is for devices.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx2

from chorister.closing import Closing
from chorister.errors import ServiceError, SubmissionRefused, Unreachable
from chorister.http_client import WebClient, printable
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
        ca_bundle: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """`timeout` is for a whole exchange, `ca_bundle` names the only authorities to believe.

        `transport` replaces the network, for a registry in the same process.
        """
        self._base = url.rstrip("/")
        self._web = WebClient(
            timeout=timeout, ca_bundle=ca_bundle, transport=transport, keep_alive=True
        )

    def close(self) -> None:
        """Give the connection back."""
        self._web.close()

    def submit(self, entry: Entry) -> int:
        """Add an entry to the log; returns its index. It is public with the next checkpoint."""
        index = self._post("entries", entry.encode()).get("index")
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ServiceError("the registry's answer names no index; is this a registry?")
        return index

    def cosign(self, line: SignatureLine) -> tuple[str, ...]:
        """Deliver a cosignature; returns the cosigners that are still missing."""
        waiting_for = self._post("cosignatures", f"{line.encode()}\n".encode()).get("waiting_for")
        if not isinstance(waiting_for, list):
            raise ServiceError("the registry does not say who is missing; is this a registry?")
        return tuple(printable(str(name)) for name in waiting_for)

    def _post(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            answer = self._web.exchange(
                "POST", f"{self._base}/{path}", body=body, limit=_MAX_ANSWER
            )
            document = json.loads(answer.body)
        except Unreachable as error:
            raise ServiceError(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self._base}/{path} does not answer as a registry does") from error
        if not isinstance(document, dict) or 300 <= answer.status < 400:
            raise ServiceError(f"{self._base}/{path} does not answer as a registry does")
        if answer.status >= HTTPStatus.BAD_REQUEST:
            detail = printable(str(document.get("detail", answer.status)))
            if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise ServiceError(f"the registry can't take it now: {detail}")
            raise SubmissionRefused(
                f"the registry refuses it: {detail}",
                problem=printable(str(document.get("type", "about:blank"))),
            )
        return document
