"""The HTTP client: requests to servers that may be hostile, with one deadline and a size limit.

A deadline covers a whole exchange, from resolving the name to the last byte of the response. A
response is cut off at its limit as it arrives, and never decompressed: nobody asked for
compression. Redirects are not followed and cookies not kept, and the environment's proxies,
credentials and certificate authorities are ignored.

A device uses the strictest profile of this client (`chorister.device.transport`).
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote, urlsplit

from chorister.closing import Closing
from chorister.errors import InvalidInput, Unreachable

if TYPE_CHECKING:
    # Three megabytes, for whoever calls a server in the same process. A device does not.
    import httpx2

    # Imported with the first request, or by `prepare`.
    from chorister.http_network import Network, ReadResponse

ERROR_BYTES: Final = 65_536
"""How much of a refusal is read at least, because it may say why."""
_MAX_PRINTED_CHARACTERS: Final = 500
# The same for every version: to a server, a rare version would identify a device.
_HEADERS: Final = {"User-Agent": "chorister", "Accept": "*/*", "Accept-Encoding": "identity"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What a server answered, whatever its status."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")


class TooLong(Unreachable):
    """A response with more bytes than the limit."""


class WebClient(Closing):
    """Sends HTTP requests. Safe to share between threads."""

    def __init__(
        self,
        *,
        timeout: float,
        ca_bundle: Path | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        proxy: str | None = None,
        transport: httpx2.BaseTransport | None = None,
        keep_alive: bool = False,
        error_bytes: int = ERROR_BYTES,
    ) -> None:
        """`timeout` covers a whole exchange; `ca_bundle` has the only authorities to trust.

        `tls` creates a context for every connection; without it, one context serves all of them.
        `transport` replaces the network, for applications in the same process. A client with
        `keep_alive` is for one server: it reuses its connection, and sends one request at a time.
        `error_bytes` is how much of a refusal is read even if the limit is lower.
        """
        self._timeout = timeout
        self._tls = _shared_context(ca_bundle) if tls is None else tls
        self._proxy = None if proxy is None else _parse_proxy(proxy)
        self._transport = transport
        self._keep_alive = keep_alive
        self._error_bytes = error_bytes
        self._opening = threading.Lock()
        self._network: Network | None = None

    def prepare(self) -> None:
        """Import, while there is time, what the first request needs."""
        if self._transport is None:
            self._open()

    def close(self) -> None:
        """Close the connection that is kept, if any."""
        if self._network is not None:
            self._network.close()

    def exchange(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: int,
    ) -> Response:
        """Send a request; return the response, of at most `limit` bytes if it is a success.

        Raises `Unreachable` if there is no such response: `TooLong` if it was longer.
        """
        connection = "keep-alive" if self._keep_alive else "close"
        fields = {**_HEADERS, "Connection": connection, **(headers or {})}
        ends = time.monotonic() + self._timeout
        read = partial(self._read, url, limit)
        if self._transport is not None:
            return self._call(self._transport, method, url, fields, body, read)
        network = self._open()
        try:
            return network.exchange(method, url, fields, body, read, ends)
        except network.FAILURES as error:
            raise self._unreachable(url, error, ends) from error

    def _open(self) -> Network:
        from chorister.http_network import Network

        with self._opening:
            if self._network is None:
                self._network = Network(
                    timeout=self._timeout,
                    tls=self._tls,
                    proxy=self._proxy,
                    keep_alive=self._keep_alive,
                )
            return self._network

    def _unreachable(self, url: str, error: Exception, ends: float) -> Unreachable:
        if time.monotonic() >= ends:
            return Unreachable(f"{url} takes more than {self._timeout:g} s to answer")
        return Unreachable(f"{url} can't be reached: {type(error).__name__}")

    def _call(
        self,
        transport: httpx2.BaseTransport,
        method: str,
        url: str,
        fields: Mapping[str, str],
        body: bytes | None,
        read: ReadResponse[Response],
    ) -> Response:
        """Send a request to an application in the same process."""
        import httpx2  # see above

        ends = time.monotonic() + self._timeout
        try:
            request = httpx2.Request(method, url, headers=fields, content=body)
        except httpx2.InvalidURL as error:
            raise Unreachable(f"{url} is not a URL") from error
        try:
            response = transport.handle_request(request)
            try:
                # Not `iter_raw`: the transport may have read the response already.
                stream = cast("httpx2.SyncByteStream", response.stream)
                return read(response.status_code, response.headers.raw, stream)
            finally:
                response.close()
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise self._unreachable(url, error, ends) from error

    def _read(
        self,
        url: str,
        limit: int,
        status: int,
        headers: Iterable[tuple[bytes, bytes]],
        chunks: Iterable[bytes],
    ) -> Response:
        allowed = limit if 200 <= status < 300 else max(limit, self._error_bytes)
        data = bytearray()
        for chunk in chunks:
            data += chunk
            if len(data) > allowed:
                raise TooLong(f"{url} answers with more than {allowed} bytes")
        return Response(status=status, headers=_fields(headers), body=bytes(data))


def _fields(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return header fields by name, those with the same name joined (RFC 9110, section 5.3)."""
    fields: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def printable(text: str) -> str:
    """Return a stranger's text, shortened, without what could disturb a terminal or a log."""
    return "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for c in text[:_MAX_PRINTED_CHARACTERS]
    )


def authorities(ca_bundle: Path) -> ssl.SSLContext:
    """Return a context that trusts these certificate authorities and no others."""
    try:
        return ssl.create_default_context(cafile=str(ca_bundle))
    except OSError as error:
        raise InvalidInput(f"{ca_bundle} has no certificates of authorities: {error}") from None


def default_authorities() -> ssl.SSLContext:
    """Return a new context that trusts the usual authorities, whatever the environment says."""
    import httpcore2  # with the first connection

    return httpcore2.default_ssl_context(_trust_env=False)


def _shared_context(ca_bundle: Path | None) -> Callable[[], ssl.SSLContext]:
    if ca_bundle is None:
        return cache(default_authorities)
    context = authorities(ca_bundle)
    return lambda: context


def _parse_proxy(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return the URL of a proxy without, and apart from it, the name and the password in it."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidInput("the URL of a proxy starts with http:// or https://")
    auth = None
    if parts.username is not None:
        auth = (unquote(parts.username), unquote(parts.password or ""))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", auth
