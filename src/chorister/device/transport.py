"""How a device talks to servers, so that none of them can recognise it the next time.

Every request stands alone: a connection, a TLS context and a client of its own, closed with the
answer, over httpcore, which knows neither cookies nor redirects (a target could be a name) nor
anything of the environment (proxies, credentials). So there is no connection or TLS session that a
poll could share with an upload, and nothing that comes back. All devices send the same header
fields in the same order.
`Retry-After` and validators (`ETag`, `Last-Modified`) are ignored: a server could choose a value
for each device and know it by what comes back. Files of the log need no validator: they are named
by their digest, and a poll fetches all that it needs of them or none (`transparency.reader`).

What is left is the network address. A host app hides it with a `proxy`, or with a transport of its
own.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

import httpcore2
import httpx2

from chorister.dap.http import check_url
from chorister.errors import InvalidInput, LogWithheld, Unreachable
from chorister.http_client import FAILURES, Watch, WatchedNetwork, timeouts

__all__ = ["USER_AGENT", "Answer", "HTTPTransport", "LogSource", "Transport"]

USER_AGENT: Final = "chorister"
"""The same for every version: a rare version would be a name."""

_HEADERS: Final = {
    "User-Agent": USER_AGENT,
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What of an answer counts; all other header fields are dropped unread."""

    status: int
    content_type: str
    body: bytes


class Transport(Protocol):
    """Whatever can carry a request. Raises `Unreachable` where there is no answer to read."""

    def get(self, url: str, *, limit: int) -> Answer:
        """Fetch a file; an answer longer than `limit` bytes counts as none."""
        ...

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, limit: int) -> Answer:
        """Send a message."""
        ...


class HTTPTransport:
    """The transport over HTTP/1.1 and TLS."""

    def __init__(
        self,
        *,
        timeout: float = 30.0,
        proxy: str | None = None,
        tls: Callable[[], ssl.SSLContext] = httpx2.create_ssl_context,
    ) -> None:
        """`tls` makes the context of one request: an app with authorities of its own names them."""
        self._timeout = timeout
        self._proxy = None if proxy is None else _parse_proxy(proxy)
        self._tls = tls

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
        data = bytearray()
        watch = Watch(self._timeout)
        late = f"{url} takes more than {self._timeout:g} s to answer"
        try:
            with (
                watch,
                self._pool(url, watch) as pool,
                pool.stream(
                    method,
                    url,
                    headers=[*_HEADERS.items(), *headers.items()],
                    content=body,
                    extensions=timeouts(self._timeout),
                ) as response,
            ):
                for chunk in response.iter_stream():
                    data += chunk
                    if len(data) > limit:
                        raise Unreachable(f"{url} answers with more than {limit} bytes")
                # A connection that the watch ended looks like an answer that ended.
                if watch.left() <= 0:
                    raise Unreachable(late)
                return Answer(
                    status=response.status,
                    content_type=_content_type(response.headers),
                    body=bytes(data),
                )
        except FAILURES as error:
            if watch.left() <= 0:
                raise Unreachable(late) from error
            raise Unreachable(f"{url} can't be reached: {type(error).__name__}") from error

    def _pool(self, url: str, watch: Watch) -> httpcore2.ConnectionPool:
        # On this machine nothing is encrypted, so there is nothing to load.
        context = self._tls() if url.startswith("https:") else None
        return httpcore2.ConnectionPool(
            ssl_context=context, proxy=self._proxy, network_backend=WatchedNetwork(watch)
        )


def _parse_proxy(url: str) -> httpcore2.Proxy:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidInput("a proxy has a URL with http or https")
    who = None
    if parts.username is not None:
        who = (unquote(parts.username), unquote(parts.password or ""))
    bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return httpcore2.Proxy(bare, auth=who)


def _content_type(headers: Iterable[tuple[bytes, bytes]]) -> str:
    found = [value for name, value in headers if name.lower() == b"content-type"]
    return b", ".join(found).decode("latin-1")


class LogSource:
    """The public log at a URL, read through a `Transport` (`transparency.client.Source`)."""

    def __init__(self, transport: Transport, url: str) -> None:
        check_url(url)
        self._transport = transport
        self._base = url.rstrip("/")

    def read(self, path: str, *, limit: int) -> bytes:
        """The file, of at most `limit` bytes; raises `LogWithheld`."""
        try:
            answer = self._transport.get(f"{self._base}/{path}", limit=limit)
        except Unreachable as error:
            raise LogWithheld(str(error), path=path) from error
        if answer.status != 200:
            raise LogWithheld(f"{path}: the server answers {answer.status}", path=path)
        return answer.body
