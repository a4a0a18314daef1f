"""Who may call the console: checks of Host and Origin, sessions, and refusals.

Any web page in the browser can reach a server on the loopback interface, and so can any name that
an attacker's DNS points to it. So every request has to name one of our own hosts, and a request
that changes something has to come from one of our own origins.

Sessions have random ids and live in memory only. A token is hashed, compared with the digests of
all analysts, and forgotten. Signing in always creates a new session, so an id that somebody planted
beforehand is worthless; a restart ends all sessions.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chorister.clock import Clock
from chorister.console.config import AnalystConfig

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
    """The origins at which browsers may reach this server."""
    if url is not None:
        return frozenset({url})
    hosts = {f"[{host}]" if ":" in host else host}
    if host in ("127.0.0.1", "localhost", "::1"):
        hosts |= {"127.0.0.1", "localhost", "[::1]"}
    suffix = "" if port == 80 else f":{port}"
    return frozenset(f"http://{name}{suffix}" for name in hosts)


def cookie_name(origins: Iterable[str]) -> str:
    """Name the session cookie by port, because browsers share cookies between ports of a host.

    Behind TLS, no other host or path can set a cookie of this name (`__Host-`).
    """
    found = urlsplit(min(origins))
    secure = found.scheme == "https"
    port = found.port or (443 if secure else 80)
    return f"{'__Host-' if secure else ''}chorister_console_{port}"


class RequestGuard:
    """ASGI middleware that checks every request and adds security headers."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = frozenset(urlsplit(origin).netloc for origin in self._origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (*HEADERS.items(), ("cache-control", "no-store")):
                    headers.setdefault(name, value)
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
            return 421, "This server has another name; see `url` in its settings.\n"
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


_MAX_TOKEN_CHARACTERS: Final = 4096
_MAX_SESSIONS: Final = 20  # per analyst; the oldest ends first


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A signed-in analyst."""

    id: str
    analyst: str
    csrf: str  # included in every form of this session
    ends: int  # POSIX seconds

    def __repr__(self) -> str:
        return f"<Session of {self.analyst}>"


class Sessions:
    """All current sessions. Thread-safe."""

    def __init__(self, analysts: Iterable[AnalystConfig], clock: Clock, *, seconds: int) -> None:
        self._analysts = tuple((bytes.fromhex(each.token_digest), each.name) for each in analysts)
        self._clock = clock
        self._seconds = seconds
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def sign_in(self, token: str) -> Session | None:
        """Create a session for the analyst with this token; None if there is none."""
        text = token.strip()[:_MAX_TOKEN_CHARACTERS].encode("utf-8", "replace")
        digest = hashlib.sha256(text).digest()
        found = None
        for known, name in self._analysts:  # compare all, so that timing reveals nothing
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            return None
        session = Session(
            id=secrets.token_urlsafe(32),
            analyst=found,
            csrf=secrets.token_urlsafe(32),
            ends=self._clock.now() + self._seconds,
        )
        with self._lock:
            self._forget_old(found)
            self._sessions[_key(session.id)] = session
        return session

    def _forget_old(self, analyst: str) -> None:
        now = self._clock.now()
        self._sessions = {key: each for key, each in self._sessions.items() if each.ends > now}
        own = [key for key, each in self._sessions.items() if each.analyst == analyst]
        for key in own[: max(0, len(own) - _MAX_SESSIONS + 1)]:
            del self._sessions[key]

    def find(self, session_id: str | None) -> Session | None:
        """Return the session with this id, unless it has expired."""
        if not session_id:
            return None
        with self._lock:
            session = self._sessions.get(_key(session_id))
        return session if session is not None and session.ends > self._clock.now() else None

    def sign_out(self, session: Session) -> None:
        with self._lock:
            self._sessions.pop(_key(session.id), None)


def _key(session_id: str) -> str:
    """Hash an id, so that the time of a lookup reveals nothing about it."""
    return hashlib.sha256(session_id.encode("utf-8", "replace")).hexdigest()


class NotFound(Exception):
    """There is no such page for this analyst. Other people's studies look just the same."""


class Forbidden(Exception):
    """The request is not permitted; the message says why."""


class SignInNeeded(Exception):
    """Nobody is signed in."""


class TooLarge(Exception):
    """The form exceeds a limit."""
