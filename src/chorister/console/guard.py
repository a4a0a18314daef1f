"""What every request passes: Host, Origin, and the headers that keep a page to itself.

A server on the loopback interface can be reached by any web page in the browser, and by any name
that an attacker's DNS points at it. So a request has to name one of our own hosts; and one that
changes something has to come from one of our own origins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["HEADERS", "Guard", "origins_of"]

_SAFE: Final = ("GET", "HEAD")
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # With no-referrer a form would be sent with the origin "null".
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def origins_of(host: str, port: int, url: str | None) -> frozenset[str]:
    """The origins under which browsers may find this server."""
    if url is not None:
        return frozenset({url})
    hosts = {f"[{host}]" if ":" in host else host}
    if host in ("127.0.0.1", "localhost", "::1"):
        hosts |= {"127.0.0.1", "localhost", "[::1]"}
    suffix = "" if port == 80 else f":{port}"
    return frozenset(f"http://{name}{suffix}" for name in hosts)


class Guard:
    """ASGI middleware around the whole console."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = frozenset(urlsplit(origin).netloc for origin in self._origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on and add the headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in HEADERS.items()
                        if name.encode() not in present
                    ),
                ]
                if b"cache-control" not in present:
                    message["headers"].append((b"cache-control", b"no-store"))
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            status, why = refused
            await PlainTextResponse(why, status_code=status)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self._hosts:
            return 421, "This server does not go by that name; see `url` in its settings.\n"
        origins = [value.decode("latin-1") for value in headers.get(b"origin", [])]
        if any(origin not in self._origins for origin in origins):
            return 403, "Only pages of this console may call it.\n"
        sites = headers.get(b"sec-fetch-site", [])
        foreign = any(site not in (b"same-origin", b"none") for site in sites)
        if scope["method"] in _SAFE:
            return None
        if foreign or (not origins and sites != [b"same-origin"]):
            return 403, "Only pages of this console may change anything here.\n"
        return None
