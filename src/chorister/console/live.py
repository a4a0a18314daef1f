"""Server-sent events: a study's rounds as they run."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from chorister.console.errors import NotFound, SignInNeeded
from chorister.console.forms import Form
from chorister.console.pages_studies import LiveStudy, find_study
from chorister.console.sessions import Session
from chorister.console.web import Visit, Web
from chorister.errors import ChoristerError

__all__ = ["Streams", "message"]

T = TypeVar("T")
_log = logging.getLogger("chorister.console")

_TICK: Final = 0.25  # seconds between two looks while something is open
_IDLE: Final = 1.0  # and while nothing is
_BEAT: Final = 15.0  # seconds after which a silent stream shows that it lives
_LONGEST: Final = 600.0  # then the browser connects anew
_MOST: Final = 200  # streams in all
_LATER: Final = 10_000  # milliseconds until a page asks again that was one too many
_STREAM: Final = "text/event-stream"


class Streams:
    """All open streams."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self._open = 0
        self.closing = False

    async def study(self, request: Request) -> Response:
        """The stream of one study's page."""

        async def begin() -> Response:
            session = self._web.session_of(request)
            if session is None:
                raise SignInNeeded
            await self._run(lambda: self._state(request, session))  # there is such a study
            if self._open >= _MOST:
                # A stream that ends: the page stays as it is, and asks again later.
                return Response(f"event: busy\nretry: {_LATER}\n\n", media_type=_STREAM)
            return StreamingResponse(
                self._messages(request, session),
                media_type=_STREAM,
                headers={"x-accel-buffering": "no"},
            )

        return await self._web.answered(request, begin)

    async def _messages(self, request: Request, session: Session) -> AsyncIterator[str]:
        self._open += 1
        try:
            last: object = None
            since_beat, total = 0.0, 0.0
            while total < _LONGEST and not self.closing:
                if self._web.session_of(request) is None:
                    return  # signed out, or the session is over
                try:
                    state, html = await self._run(partial(self._look, request, session, last))
                    if html is not None:
                        last, since_beat = state.fingerprint, 0.0
                        yield message(html)
                except (NotFound, ChoristerError):
                    return  # no longer shared
                except Exception:
                    _log.exception("a stream failed, by a bug in Chorister")
                    return
                pause = _TICK if state.waiting or any(r.running for r in state.runs) else _IDLE
                await anyio.sleep(pause)
                total, since_beat = total + pause, since_beat + pause
                if since_beat >= _BEAT:
                    yield ": still here\n\n"
                    since_beat = 0.0
        finally:
            self._open -= 1

    def _state(self, request: Request, session: Session) -> LiveStudy:
        visit = Visit(web=self._web, request=request, session=session, form=Form([]))
        return LiveStudy.of(self._web.workspace, find_study(visit))

    def _look(
        self, request: Request, session: Session, last: object
    ) -> tuple[LiveStudy, str | None]:
        """The present state, and its HTML if there is something new."""
        state = self._state(request, session)
        if state.fingerprint == last:
            return state, None
        return state, self._web.render(request, "_live.html", session, **state.context())

    async def _run(self, call: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(call, limiter=self._web.threads)


def message(html: str) -> str:
    """An event without a name, which htmx swaps in."""
    lines = re.split(r"\r\n|\r|\n", html)
    return "".join(f"data: {line}\n" for line in lines if line.strip()) + "\n"
