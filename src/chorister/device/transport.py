"""How a device talks to servers, so that none of them can recognise it the next time.

Every request stands alone: a connection, a TLS context and a client of its own, closed with the
answer. So there is no connection or TLS session that a poll could share with an upload, no cookie
that comes back, no redirect that is followed (its target could be a name), and nothing from the
environment (proxies, credentials). All devices send the same header fields in the same order.
`Retry-After` and validators (`ETag`, `Last-Modified`) are ignored: a server could choose a value
for each device and know it by what comes back. Files of the log need no validator, for they are
named by their digest and a device keeps them (`device.bodies`).

What is left is the network address. A host app hides it with a `proxy`, or with a transport of its
own.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final, Protocol

import httpx2

from chorister.dap.urls import check_url
from chorister.dap.watch import Watch, WatchedNetwork
from chorister.errors import LogWithheld, Unreachable

__all__ = ["USER_AGENT", "Answer", "HTTPTransport", "LogSource", "Transport"]

USER_AGENT: Final = "chorister"
"""The same for every version: a rare version would be a name."""


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
        self._proxy = proxy
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
                self._client(url, watch) as client,
                client.stream(method, url, headers=dict(headers), content=body) as response,
            ):
                for chunk in response.iter_raw():
                    data += chunk
                    if len(data) > limit:
                        raise Unreachable(f"{url} answers with more than {limit} bytes")
                # A connection that the watch ended looks like an answer that ended.
                if watch.left() <= 0:
                    raise Unreachable(late)
                return Answer(
                    status=response.status_code,
                    content_type=response.headers.get("content-type", ""),
                    body=bytes(data),
                )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            if watch.left() <= 0:
                raise Unreachable(late) from error
            raise Unreachable(f"{url} can't be reached: {type(error).__name__}") from error

    def _client(self, url: str, watch: Watch) -> httpx2.Client:
        transport = httpx2.HTTPTransport(
            # On this machine nothing is encrypted, so there is nothing to load.
            verify=self._tls() if url.startswith("https:") else False,
            trust_env=False,
            proxy=self._proxy,
        )
        WatchedNetwork(watch).serve(transport)
        return httpx2.Client(
            transport=transport,
            headers={
                "User-Agent": USER_AGENT,
                "Accept": "*/*",
                "Accept-Encoding": "identity",
                "Connection": "close",
            },
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            follow_redirects=False,
            trust_env=False,
            timeout=self._timeout,
        )


class LogSource:
    """The public log at a URL, read through a `Transport` (`transparency.sources.Source`)."""

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
