"""From a request to a page: sessions, forms, templates with their number formats, and errors."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Final

import anyio
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from chorister.analyst.spending import new_to_study
from chorister.clock import Clock, utc_minute
from chorister.console.access import Forbidden, NotFound, Session, Sessions, SignInNeeded, TooLarge
from chorister.console.background import unexpected
from chorister.console.charts import Charts, ChartStyle, chart_style
from chorister.console.forms import Form, read_form
from chorister.console.workspace import Workspace
from chorister.errors import ChoristerError
from chorister.policy.values import duration_text, legible, number_text, visible

_THREADS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One request of a signed-in analyst."""

    web: Web
    request: Request
    session: Session
    form: Form  # what was posted; empty for a GET

    @property
    def analyst(self) -> str:
        return self.session.analyst

    @property
    def workspace(self) -> Workspace:
        return self.web.workspace

    @property
    def chart_style(self) -> ChartStyle:
        query = self.request.query_params
        return chart_style(query.get("theme"), query.get("width"))

    @property
    def by_htmx(self) -> bool:
        """Whether htmx asks, for a part of a page."""
        return _by_htmx(self.request)

    def at(self, name: str) -> str:
        return str(self.request.path_params.get(name, ""))

    def number(self, name: str = "number") -> int:
        """A part of the path that is a number."""
        text = self.at(name)
        if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 6):
            raise NotFound
        return int(text)

    def page(self, template: str, *, status: int = 200, **context: Any) -> Response:  # noqa: ANN401
        """Render a page, or a part of one."""
        return self.web.page(self.request, template, self.session, status=status, **context)

    def svg(self, drawn: str) -> Response:
        return Response(drawn, media_type="image/svg+xml")

    def go_to(self, path: str) -> Response:
        """Redirect to another page, also for htmx."""
        if self.by_htmx:
            return Response(status_code=204, headers={"HX-Redirect": path})
        return RedirectResponse(path, status_code=303)


def _by_htmx(request: Request) -> bool:
    return request.headers.get("hx-request") == "true"


Handler = Callable[[Visit], Response]
_Endpoint = Callable[[Request], Awaitable[Response]]


class Web:
    """What all pages share."""

    def __init__(
        self, workspace: Workspace, sessions: Sessions, clock: Clock, *, cookie: str
    ) -> None:
        self.workspace = workspace
        self.sessions = sessions
        self.clock = clock
        self.cookie = cookie
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
        return HTMLResponse(self.render(request, template, session, **context), status_code=status)

    def render(
        self, request: Request, template: str, session: Session | None, **context: Any  # noqa: ANN401
    ) -> str:  # fmt: skip
        return self.templates.get_template(template).render(
            path=request.url.path,
            session=session,
            csrf="" if session is None else session.csrf,
            has_fleet=self.workspace.config.fleet is not None,
            now=self.clock.now(),
            **context,
        )

    def session_of(self, request: Request) -> Session | None:
        return self.sessions.find(request.cookies.get(self.cookie))

    def signed_in(self, response: Response, session: Session) -> Response:
        """Set the cookie of a new session."""
        response.set_cookie(
            self.cookie, session.id, httponly=True, samesite="strict", path="/",
            secure=self.workspace.config.secure, max_age=session.ends - self.clock.now(),
        )  # fmt: skip
        return response

    def signed_out(self, response: Response) -> Response:
        """Delete the cookie."""
        response.delete_cookie(
            self.cookie, path="/", httponly=True, samesite="strict",
            secure=self.workspace.config.secure,
        )  # fmt: skip
        return response

    # --- Requests -------------------------------------------------------------------------------

    def endpoint(self, handler: Handler) -> _Endpoint:
        """Wrap a handler for Starlette: requires a session, and runs in a thread."""

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
                raise Forbidden("This form belongs to an earlier session: reload the page.")
        visit = Visit(web=self, request=request, session=session, form=form)
        return await anyio.to_thread.run_sync(lambda: handler(visit), limiter=self.threads)

    async def answered(self, request: Request, call: Callable[[], Awaitable[Response]]) -> Response:
        """Answer a request; errors get a page, too."""
        try:
            return await call()
        except SignInNeeded:
            return self._to_sign_in(request)
        except NotFound:
            return self._problem(request, 404, "Page not found", _NOT_FOUND)
        except Forbidden as error:
            return self._problem(request, 403, "Not permitted", str(error))
        except TooLarge:
            return self._problem(request, 413, "Too large", "The form is too long.")
        except ChoristerError as error:
            return self._problem(request, 422, "This can't be done", str(error))
        except Exception as error:  # the edge: whatever happens gets an answer
            words = unexpected("a page", error)
            why = f"{words[0].upper()}{words[1:]}. No further question was asked."
            return self._problem(request, 500, "Something went wrong", why)

    def _to_sign_in(self, request: Request) -> Response:
        if _by_htmx(request):
            return Response(status_code=401, headers={"HX-Redirect": "/sign-in"})
        return RedirectResponse("/sign-in", status_code=303)

    def notice(self, request: Request, title: str, why: str) -> str:
        """Return the HTML of a problem, for a part of a page."""
        session = self.session_of(request)
        return self.render(request, "_problem.html", session, title=title, why=why)

    def _problem(self, request: Request, status: int, title: str, why: str) -> Response:
        template = "_problem.html" if _by_htmx(request) else "problem.html"
        session = self.session_of(request)
        return self.page(request, template, session, status=status, title=title, why=why)

    async def no_such_request(self, request: Request, error: Exception) -> Response:
        """Answer requests that match no route."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers: Mapping[str, str] = getattr(error, "headers", None) or {}
        response = self._problem(request, status, "Page not found", _NOT_FOUND)
        response.headers.update(headers)
        return response


_NOT_FOUND: Final = "It may have moved, or it is no longer shared with you."


def count(value: float) -> str:
    """A count, with separators."""
    return f"{value:,.0f}"


def rounded(value: float) -> str:
    """An estimate: one decimal below ten, and a real minus sign."""
    text = f"{value:,.0f}" if abs(value) >= 10 else f"{value:,.1f}"
    return text.replace("-", "−")


def decimal(value: Decimal) -> str:
    """A limit as in the policy; tiny ones as powers of ten."""
    return number_text(value) if value > 0 else "0"


def brief(value: Decimal) -> str:
    """Three digits, rounded up: never less than what was spent."""
    return decimal(Context(prec=3, rounding=ROUND_CEILING).plus(value))


def counted(number: int, thing: str) -> str:
    """A count with its noun: 1 round, 2 rounds."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def percent(value: float) -> str:
    """A share for a column of a table; it may be negative."""
    return f"{100.0 * value:.2f}%".replace("-", "−")


def share(value: float) -> str:
    """A share for a sentence."""
    percent = 100.0 * value
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


FILTERS: Final[dict[str, Callable[..., str]]] = {
    "brief": brief,
    "new_to_study": new_to_study,
    "count": count,
    "counted": counted,
    "decimal": decimal,
    "duration": duration_text,
    "legible": legible,
    "percent": percent,
    "rounded": rounded,
    "share": share,
    "time": utc_minute,
    "visible": visible,
}
"""Template filters by name."""
