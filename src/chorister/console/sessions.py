"""Who is signed in: random session ids, kept in memory alone.

A token is hashed, compared with every analyst's digest, and forgotten. Signing in always makes a
new session, so an id that somebody planted beforehand is worth nothing; a restart ends them all.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from chorister.clock import Clock
from chorister.console.config import AnalystConfig

__all__ = ["Session", "Sessions"]

_LONGEST_TOKEN: Final = 4096
_MOST_EACH: Final = 20  # sessions of one analyst; the oldest ends first


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Somebody who is signed in."""

    id: str
    analyst: str
    csrf: str  # what every form of this session carries
    ends: int  # POSIX seconds

    def __repr__(self) -> str:
        return f"<Session of {self.analyst}>"


class Sessions:
    """All sessions. Thread-safe."""

    def __init__(self, analysts: Iterable[AnalystConfig], clock: Clock, *, seconds: int) -> None:
        self._analysts = tuple((bytes.fromhex(each.token_digest), each.name) for each in analysts)
        self._clock = clock
        self._seconds = seconds
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def sign_in(self, token: str) -> Session | None:
        """A new session for whoever has this token; None if nobody does."""
        text = token.strip()[:_LONGEST_TOKEN].encode("utf-8", "replace")
        digest = hashlib.sha256(text).digest()
        found = None
        for known, name in self._analysts:  # all of them: how long it takes says nothing
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
        for key in own[: max(0, len(own) - _MOST_EACH + 1)]:
            del self._sessions[key]

    def find(self, session_id: str | None) -> Session | None:
        """The session with this id, unless it is over."""
        if not session_id:
            return None
        with self._lock:
            session = self._sessions.get(_key(session_id))
        return session if session is not None and session.ends > self._clock.now() else None

    def sign_out(self, session: Session) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(_key(session.id), None)


def _key(session_id: str) -> str:
    """Looked up by its hash, so that a lookup's time tells nothing about an id."""
    return hashlib.sha256(session_id.encode("utf-8", "replace")).hexdigest()
