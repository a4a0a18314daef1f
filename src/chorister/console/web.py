"""From a request to a page: who asks, with which form, and what to answer when it goes wrong."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from chorister.clock import Clock
from chorister.console.charts import Charts, Look, as_look
from chorister.console.errors import Forbidden, NotFound, SignInNeeded, TooLarge
from chorister.console.filters import FILTERS
from chorister.console.forms import Form, read_form
from chorister.console.sessions import Session, Sessions
from chorister.console.workspace import Workspace
from chorister.errors import ChoristerError

__all__ = ["Handler", "Visit", "Web"]

_log = logging.getLogger("chorister.console")
_COOKIE: Final = "chorister_console"
_THREADS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One request of somebody who is signed in."""

    web: Web
    request: Request
    session: Session
    form: Form  # what was posted; empty for a GET

    @property
    def analyst(self) -> str:
        """Who."""
        return self.session.analyst

    @property
    def workspace(self) -> Workspace:
        """Everything behind the pages."""
        return self.web.workspace

    @property
    def look(self) -> Look:
        """How a picture is to look."""
        query = self.request.query_params
        return as_look(query.get("theme"), query.get("width"))

    def at(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params.get(name, ""))

    def number(self, name: str = "number") -> int:
        """A part of the path that counts something."""
        text = self.at(name)
        if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 6):
            raise NotFound
        return int(text)

    def page(self, template: str, *, status: int = 200, **context: Any) -> Response:  # noqa: ANN401
        """A page, or a part of one."""
        return self.web.page(self.request, template, self.session, status=status, **context)

    def svg(self, drawn: str) -> Response:
        """A picture."""
        return Response(drawn, media_type="image/svg+xml")

    def go_to(self, path: str) -> Response:
        """Another page, also for htmx."""
        if self.request.headers.get("hx-request") == "true":
            return Response(status_code=204, headers={"HX-Redirect": path})
        return RedirectResponse(path, status_code=303)


Handler = Callable[[Visit], Response]
_Endpoint = Callable[[Request], Awaitable[Response]]


class Web:
    """What all pages share."""

    def __init__(self, workspace: Workspace, sessions: Sessions, clock: Clock) -> None:
        self.workspace = workspace
        self.sessions = sessions
        self.clock = clock
        self.charts = Charts()
        self.threads = anyio.CapacityLimiter(_THREADS)
        self.templates = Environment(
            loader=PackageLoader("chorister.console"),
            autoescape=True,  # everything, whatever a file is called
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.filters.update(FILTERS)

    # --- Pages ----------------------------------------------------------------------------------

    def page(
        self, request: Request, template: str, session: Session | None, *, status: int = 200,
        **context: Any,  # noqa: ANN401 (whatever a template shows)
    ) -> Response:  # fmt: skip
        """A rendered template."""
        return HTMLResponse(self.render(request, template, session, **context), status_code=status)

    def render(
        self, request: Request, template: str, session: Session | None, **context: Any  # noqa: ANN401
    ) -> str:  # fmt: skip
        """The same as text."""
        return self.templates.get_template(template).render(
            path=request.url.path,
            session=session,
            csrf="" if session is None else session.csrf,
            has_fleet=self.workspace.config.fleet is not None,
            now=self.clock.now(),
            **context,
        )

    def session_of(self, request: Request) -> Session | None:
        """Who is signed in."""
        return self.sessions.find(request.cookies.get(_COOKIE))

    def signed_in(self, response: Response, session: Session) -> Response:
        """With the cookie of a new session."""
        response.set_cookie(
            _COOKIE, session.id, httponly=True, samesite="strict", path="/",
            secure=self.workspace.config.secure, max_age=session.ends - self.clock.now(),
        )  # fmt: skip
        return response

    def signed_out(self, response: Response) -> Response:
        """Without any cookie."""
        response.delete_cookie(_COOKIE, path="/", httponly=True, samesite="strict")
        return response

    # --- Requests -------------------------------------------------------------------------------

    def endpoint(self, handler: Handler) -> _Endpoint:
        """A handler as Starlette wants it: for those who are signed in, in a thread of its own."""

        async def call(request: Request) -> Response:
            return await self.answered(request, lambda: self._visit(request, handler))

        return call

    async def _visit(self, request: Request, handler: Handler) -> Response:
        session = self.session_of(request)
        if session is None:
            raise SignInNeeded
        form = Form([])
        if request.method == "POST":
            form = await read_form(request)
            if not hmac.compare_digest(form.get("csrf").encode(), session.csrf.encode()):
                raise Forbidden("This form is not of your present session: reload the page.")
        visit = Visit(web=self, request=request, session=session, form=form)
        return await anyio.to_thread.run_sync(lambda: handler(visit), limiter=self.threads)

    async def answered(self, request: Request, call: Callable[[], Awaitable[Response]]) -> Response:
        """Whatever goes wrong has a page, too."""
        try:
            return await call()
        except SignInNeeded:
            return self._to_sign_in(request)
        except NotFound:
            return self._problem(request, 404, "There is no such page", _NOT_FOUND)
        except Forbidden as error:
            return self._problem(request, 403, "That was not accepted", str(error))
        except TooLarge:
            return self._problem(request, 413, "That is too much", "A form has at most 2 MB.")
        except ChoristerError as error:
            return self._problem(request, 422, "That can't be done", str(error))
        except Exception:
            _log.exception("a page failed, by a bug in Chorister")
            return self._problem(request, 500, "A bug in Chorister", _BUG)

    def _to_sign_in(self, request: Request) -> Response:
        if request.headers.get("hx-request") == "true":
            return Response(status_code=401, headers={"HX-Redirect": "/sign-in"})
        return RedirectResponse("/sign-in", status_code=303)

    def _problem(self, request: Request, status: int, title: str, why: str) -> Response:
        part = request.headers.get("hx-request") == "true"
        template = "_problem.html" if part else "problem.html"
        session = self.session_of(request)
        return self.page(request, template, session, status=status, title=title, why=why)

    async def no_such_request(self, request: Request, error: Exception) -> Response:
        """What the router refuses before any page is called."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers: Mapping[str, str] = getattr(error, "headers", None) or {}
        response = self._problem(request, status, "There is no such page", _NOT_FOUND)
        response.headers.update(headers)
        return response


_NOT_FOUND: Final = "Perhaps it moved, or somebody no longer shares it with you."
_BUG: Final = "The server's log has the details. Nothing more was asked of any device."
