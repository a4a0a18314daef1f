"""How a device talks to servers, so that none of them can recognize it the next time.

This is the strictest profile of the one HTTP client (`chorister.http_client`), which has no
cookies, follows no redirects (the target could be a name) and ignores the environment. The requests
of one poll, which follow each other at once, share a connection; every upload has its own. No two
of these share a TLS context or session, and nothing that a server sends ever comes back to it. All
devices send the same header fields in the same order.

`Retry-After` and validators (`ETag`, `Last-Modified`) are ignored: a server could choose a
different value for each device, and recognize it later. Files of the log need no validator: they
are named by their digest, and a poll fetches all that it needs of them or none
(`transparency.reader`).

What remains is the network address. A host app can hide it behind a `proxy`, or bring its own
transport.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from chorister.closing import Closing
from chorister.dap.http import check_url
from chorister.errors import LogWithheld, Unreachable
from chorister.http_client import WebClient, default_authorities

if TYPE_CHECKING:
    import httpx2


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The only parts of a response that matter; all other header fields are dropped unread."""

    status: int
    content_type: str
    body: bytes


class Transport(Protocol):
    """Anything that can send a request. Raises `Unreachable` if there is no answer to read."""

    def get(self, url: str, *, limit: int) -> Answer:
        """Fetch a file; an answer longer than `limit` bytes counts as none."""
        ...

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, limit: int) -> Answer:
        """Send a message."""
        ...


class HTTPTransport(Closing):
    """The transport over HTTP/1.1 and TLS."""

    def __init__(
        self,
        *,
        timeout: float = 30.0,
        proxy: str | None = None,
        tls: Callable[[], ssl.SSLContext] = default_authorities,
        network: httpx2.BaseTransport | None = None,
    ) -> None:
        """`timeout` covers a whole exchange; `tls` creates the context of each connection.

        An app with its own certificate authorities passes its own `tls`. `network` replaces the
        network, for servers in the same process.
        """
        self._connect = partial(
            WebClient, timeout=timeout, proxy=proxy, tls=tls, transport=network, error_bytes=0
        )
        self._web = self._connect()

    def one_poll(self) -> HTTPTransport:
        """Return a transport that keeps its connection, until `close`, for one poll."""
        poll = copy(self)
        poll._web = self._connect(keep_alive=True)
        return poll

    def prepare(self) -> None:
        """Import, while there is time, what the first request needs."""
        self._web.prepare()

    def close(self) -> None:
        """Close the connection that is kept, if any."""
        self._web.close()

    def get(self, url: str, *, limit: int) -> Answer:
        """Fetch a file."""
        return self._exchange("GET", url, {}, None, limit)

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, limit: int) -> Answer:
        """Send a message."""
        return self._exchange("POST", url, headers, body, limit)

    def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, limit: int
    ) -> Answer:
        check_url(url)
        response = self._web.exchange(method, url, headers=headers, body=body, limit=limit)
        return Answer(
            status=response.status, content_type=response.content_type, body=response.body
        )


class LogSource(Closing):
    """The public log at a URL, read through a `Transport` (`transparency.client.Source`)."""

    def __init__(self, transport: Transport, url: str) -> None:
        check_url(url)
        self._transport = transport
        self._url = url

    def prepare(self) -> None:
        """Let the transport get ready, if it can."""
        if isinstance(self._transport, HTTPTransport):
            self._transport.prepare()

    def one_poll(self) -> LogSource:
        """Return the log for one poll: over one connection, if the transport can keep it."""
        if isinstance(self._transport, HTTPTransport):
            return LogSource(self._transport.one_poll(), self._url)
        return self

    def close(self) -> None:
        if isinstance(self._transport, HTTPTransport):
            self._transport.close()

    def read(self, path: str, *, limit: int) -> bytes:
        """Return the file, of at most `limit` bytes; raise `LogWithheld` if there is none."""
        try:
            answer = self._transport.get(f"{self._url.rstrip('/')}/{path}", limit=limit)
        except Unreachable as error:
            raise LogWithheld(str(error), path=path) from error
        if answer.status != 200:
            raise LogWithheld(f"{path}: the server answers {answer.status}", path=path)
        return answer.body
