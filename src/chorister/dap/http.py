"""Requests between servers, and of a collector: a bearer token, limits, and nothing else.

A request has one connection and one time for all of it. Redirects are not followed, for the token
is meant for one server; cookies, proxies and credentials of the environment don't exist here.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, cast

import httpcore2
import httpx2

from chorister.clock import Clock
from chorister.dap.problems import parse_problem
from chorister.dap.urls import check_url
from chorister.dap.watch import FAILURES, Watch, WatchedNetwork, timeouts
from chorister.errors import InvalidInput, Unreachable

__all__ = ["MIN_LIMIT", "HTTPClient", "Response"]

MIN_LIMIT: Final = 65_536
"""What is always read of an answer, as it may be a problem document."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""RFC 6750, section 2.1."""
_AGAIN: Final = frozenset((408, 425, 429))
"""Client errors by number, but "try again" by meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A successful answer."""

    status: int  # 200 to 299
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def content_type(self) -> str:
        """Its media type, as sent."""
        return self.headers.get("content-type", "")

    def retry_after(self, clock: Clock) -> int | None:
        """The seconds of `Retry-After`, be it a number or a date; None if it says neither."""
        value = self.headers.get("retry-after", "").strip()
        if re.fullmatch(r"[0-9]{1,9}", value):
            return int(value)
        try:
            date = parsedate_to_datetime(value)
            return max(0, int(date.timestamp()) - clock.now())
        except (ValueError, OverflowError, OSError):
            return None


class HTTPClient:
    """Whoever speaks to an aggregator with a credential. Safe to share between threads."""

    def __init__(
        self,
        *,
        token: str | None = None,
        timeout: float = 60.0,
        ca_file: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
        answered: Callable[[Mapping[str, str]], None] = lambda _headers: None,
    ) -> None:
        """`timeout` is for a whole exchange; `ca_file` names the only authorities to be believed.

        `transport` replaces the network, for applications in the same process. `answered` is told
        the header fields of every answer, whatever its status.
        """
        if token is not None and not _TOKEN.fullmatch(token):
            raise InvalidInput("a bearer token has letters, digits and -._~+/ only")
        self._headers = {
            "User-Agent": "chorister",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout = timeout
        self._transport = transport
        self._answered = answered
        # Loading the authorities takes a while, so once; and not where there is no network.
        self._tls = _tls(ca_file) if transport is None else None

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: int = MIN_LIMIT,
    ) -> Response:
        """The answer of at most `limit` bytes, if it is a success.

        Raises `ProblemError` for a refusal, and `Unreachable` for all that may be otherwise next
        time: no connection, an answer that is late or too long, a redirect, a server's error.
        """
        check_url(url)
        limit = max(limit, MIN_LIMIT)
        watch = Watch(self._timeout)
        late = f"{url} takes more than {self._timeout:g} s to answer"
        try:
            with watch if self._transport is None else nullcontext():
                status, fields, data = self._exchange(watch, method, url, headers, body, limit)
                # A connection that the watch ended looks like an answer that ended.
                if watch.left() <= 0:
                    raise Unreachable(late)
        except (*FAILURES, httpx2.HTTPError, httpx2.StreamError) as error:
            if watch.left() <= 0:
                raise Unreachable(late) from error
            raise Unreachable(f"{url} can't be reached: {type(error).__name__}") from error
        self._answered(fields)
        response = Response(status=status, headers=fields, body=data)
        if 200 <= status < 300:
            return response
        refusal = parse_problem(status, response.content_type, data)
        if not 400 <= status < 500 or status in _AGAIN:
            raise Unreachable(f"{url} answers {status}: {refusal.detail}")
        raise refusal

    def _exchange(
        self,
        watch: Watch,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: bytes | None,
        limit: int,
    ) -> tuple[int, dict[str, str], bytes]:
        request = httpx2.Request(
            method,
            url,
            headers={**self._headers, **(headers or {})},
            content=body,
        )
        if self._transport is not None:
            return self._through(self._transport, request, limit)
        with (
            httpcore2.ConnectionPool(
                ssl_context=self._tls if url.startswith("https:") else None,
                network_backend=WatchedNetwork(watch),
            ) as pool,
            pool.stream(
                method,
                url,
                headers=request.headers.raw,
                content=body,
                extensions=timeouts(self._timeout),
            ) as response,
        ):
            data = _read(response.iter_stream(), url, limit)
        return response.status, _fields(response.headers), data

    def _through(
        self, transport: httpx2.BaseTransport, request: httpx2.Request, limit: int
    ) -> tuple[int, dict[str, str], bytes]:
        response = transport.handle_request(request)
        try:
            # Not `iter_raw`: a transport may hand over an answer that it has read.
            stream = cast("httpx2.SyncByteStream", response.stream)
            data = _read(stream, str(request.url), limit)
        finally:
            response.close()
        return response.status_code, _fields(response.headers.raw), data


def _read(chunks: Iterable[bytes], url: str, limit: int) -> bytes:
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > limit:
            raise Unreachable(f"{url} answers with more than {limit} bytes")
    return bytes(data)


def _fields(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Header fields by name in lower case, those of one name joined (RFC 9110, section 5.3)."""
    fields: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    if ca_file is None:
        return httpx2.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise InvalidInput(f"{ca_file} holds no certificates of authorities: {error}") from None
