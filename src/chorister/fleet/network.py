"""A device's transport to servers in the same process."""

from __future__ import annotations

from collections.abc import Mapping

import httpx2

from chorister.device.transport import USER_AGENT, Answer
from chorister.errors import Unreachable

__all__ = ["InProcessTransport"]


class InProcessTransport:
    """`device.transport.Transport` over any httpx transport, such as `InProcessNetwork`."""

    def __init__(self, network: httpx2.BaseTransport) -> None:
        self._network = network

    def get(self, url: str, *, limit: int) -> Answer:
        """Fetch a file."""
        return self._exchange(httpx2.Request("GET", url, headers=self._headers({})), limit)

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, limit: int) -> Answer:
        """Send a message."""
        request = httpx2.Request("POST", url, headers=self._headers(headers), content=body)
        return self._exchange(request, limit)

    @staticmethod
    def _headers(headers: Mapping[str, str]) -> dict[str, str]:
        return {"User-Agent": USER_AGENT, "Accept": "*/*", **headers}

    def _exchange(self, request: httpx2.Request, limit: int) -> Answer:
        try:
            response = self._network.handle_request(request)
            body = response.read()
        except httpx2.HTTPError as error:
            raise Unreachable(f"{request.url}: {type(error).__name__}") from error
        if len(body) > limit:
            raise Unreachable(f"{request.url} answers with more than {limit} bytes")
        return Answer(
            status=response.status_code,
            content_type=response.headers.get("content-type", ""),
            body=body,
        )
