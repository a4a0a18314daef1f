"""The console as a web application: all routes, signing in and out, and the server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from importlib import resources
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from chorister.clock import Clock
from chorister.console import (
    pages_ask,
    pages_devices,
    pages_privacy,
    pages_results,
    pages_series,
    pages_studies,
)
from chorister.console.access import RequestGuard, Sessions, cookie_name, origins_of
from chorister.console.config import ConsoleConfig
from chorister.console.forms import read_form
from chorister.console.pages_studies import EventStreams
from chorister.console.web import Handler, Visit, Web
from chorister.console.workspace import Workspace
from chorister.http_server import Deadlines, listen, server_config, server_url

_CONNECTIONS: Final = 512
_WRONG_TOKEN_SECONDS: Final = 0.3
_SIGN_IN_BYTES: Final = 16_384  # anybody may send this form, on every connection there is


async def show_sign_in(web: Web, request: Request) -> Response:
    if web.session_of(request) is not None:
        return RedirectResponse("/", status_code=303)
    return web.page(request, "sign_in.html", None, wrong=False)


async def sign_in(web: Web, request: Request) -> Response:
    """Exchange a token for a new session; this browser's previous session ends."""
    form = await read_form(request, limit=_SIGN_IN_BYTES)
    session = web.sessions.sign_in(form.get("token"))
    if session is None:
        await asyncio.sleep(_WRONG_TOKEN_SECONDS)
        return web.page(request, "sign_in.html", None, status=403, wrong=True)
    before = web.session_of(request)
    if before is not None:
        web.sessions.sign_out(before)
    return web.signed_in(RedirectResponse("/", status_code=303), session)


def sign_out(visit: Visit) -> Response:
    visit.web.sessions.sign_out(visit.session)
    return visit.web.signed_out(visit.go_to("/sign-in"))


_STUDY: Final = "/studies/{connection}/{owner}/{study}"
_PAGES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("GET", "/", pages_studies.list_studies),
    ("POST", "/sign-out", sign_out),
    ("POST", "/studies", pages_studies.begin_study),
    ("GET", _STUDY, pages_studies.show_study),
    ("POST", _STUDY + "/share", pages_studies.share_study),
    ("POST", _STUDY + "/about", pages_studies.describe_study),
    ("GET", _STUDY + "/ask", pages_ask.show_ask),
    ("POST", _STUDY + "/ask", pages_ask.ask),
    ("POST", _STUDY + "/ask/cost", pages_ask.price),
    ("GET", _STUDY + "/rounds/{number}", pages_results.show_round),
    ("GET", _STUDY + "/rounds/{number}/chart.svg", pages_results.round_chart),
    ("GET", _STUDY + "/rounds/{number}/compare", pages_results.compare_results),
    ("GET", _STUDY + "/rounds/{number}/compare.svg", pages_results.comparison_chart),
    ("GET", _STUDY + "/rounds/{number}/result.{format}", pages_results.export_result),
    ("GET", _STUDY + "/rounds/{number}/recipe.json", pages_results.show_recipe),
    ("POST", _STUDY + "/rounds/{number}/cancel", pages_studies.cancel_round),
    ("POST", _STUDY + "/rounds/{number}/wait", pages_studies.wait_again),
    ("GET", _STUDY + "/run/{algorithm}", pages_ask.show_form),
    ("POST", _STUDY + "/run/{algorithm}", pages_ask.start),
    ("POST", _STUDY + "/run/{algorithm}/plan", pages_ask.plan),
    ("GET", _STUDY + "/runs/{number}", pages_ask.show_run),
    ("GET", _STUDY + "/runs/{number}/picture.svg", pages_ask.run_picture),
    ("GET", _STUDY + "/runs/{number}/result.{format}", pages_results.export_run),
    ("POST", _STUDY + "/runs/{number}/go-on", pages_ask.go_on),
    ("GET", _STUDY + "/series/{number}", pages_series.show_series),
    ("GET", _STUDY + "/series/{number}/chart.svg", pages_series.series_chart),
    ("GET", _STUDY + "/series/{number}/result.{format}", pages_series.export_series),
    ("POST", _STUDY + "/series/{number}/pause", pages_series.pause_series),
    ("POST", _STUDY + "/series/{number}/resume", pages_series.resume_series),
    ("POST", _STUDY + "/series/{number}/end", pages_series.end_series),
    ("GET", "/recipes", pages_results.list_recipes),
    ("GET", "/privacy", pages_privacy.show_privacy),
    ("GET", "/privacy/curve.svg", pages_privacy.curve),
    ("GET", "/devices", pages_devices.list_devices),
    ("GET", "/devices/find", pages_devices.find_device),
    ("GET", "/devices/{number}", pages_devices.show_device),
)
_STATIC: Final = {
    "console.css": "text/css; charset=utf-8",
    "htmx.min.js": "text/javascript; charset=utf-8",
    "hx-sse.min.js": "text/javascript; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "LICENSE-htmx.txt": "text/plain; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def build_app(
    workspace: Workspace, clock: Clock, *, origins: Collection[str], warm: bool = True
) -> ASGIApp:
    """Build the application; browsers reach it at these origins."""
    hours = workspace.config.session_hours
    sessions = Sessions(workspace.config.analysts, clock, seconds=hours * 3600)
    web = Web(workspace, sessions, clock, cookie=cookie_name(origins))
    streams = EventStreams(web)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if warm:
            threading.Thread(target=web.charts.warm_up, daemon=True, name="warm up").start()
        yield
        streams.closing = True

    async def sign_in_form(request: Request) -> Response:
        return await web.answered(request, lambda: show_sign_in(web, request))

    async def signing_in(request: Request) -> Response:
        return await web.answered(request, lambda: sign_in(web, request))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    routes = [
        Route("/sign-in", sign_in_form, methods=["GET"]),
        Route("/sign-in", signing_in, methods=["POST"]),
        Route("/healthz", health, methods=["GET"]),
        Route("/static/{name}", _static(), methods=["GET"]),
        Route(_STUDY + "/events", streams.study, methods=["GET"]),
        *(Route(path, web.endpoint(handler), methods=[method]) for method, path, handler in _PAGES),
    ]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: web.no_such_request}, lifespan=lifespan
    )
    app.router.redirect_slashes = False  # a page has one address
    return RequestGuard(app, origins)


def _static() -> Callable[[Request], Awaitable[Response]]:
    """Serve the files that pages load."""
    folder = resources.files("chorister.console") / "static"
    files = {
        name: ((folder if (folder / name).is_file() else folder / "vendor") / name).read_bytes()
        for name in _STATIC
    }

    tags = {name: f'"{hashlib.sha256(data).hexdigest()[:32]}"' for name, data in files.items()}

    async def serve(request: Request) -> Response:
        name = str(request.path_params["name"])
        if name not in files:
            raise HTTPException(404)
        # Checked on every page, so that an upgrade shows at once, but sent only if changed.
        headers = {"cache-control": "no-cache", "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], headers={**headers, "content-type": _STATIC[name]})

    return serve


def serve(config: ConsoleConfig, clock: Clock, *, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is called with the URL.

    Open rounds are on disk: the next start waits for them again.
    """
    with listen(config.host, config.port) as listener, Workspace.open(config) as workspace:
        port = listener.getsockname()[1]
        origins = origins_of(config.host, port, config.url)
        server = uvicorn.Server(
            server_config(
                build_app(workspace, clock, origins=origins),
                connections=_CONNECTIONS,
                # Pages that follow a round stay open; browsers reconnect after a day.
                deadlines=Deadlines(answer=86_400.0),
                log_level="warning",
                timeout_graceful_shutdown=2,  # event streams stay open until then
            )
        )
        ready(config.url or server_url("http", config.host, listener))
        server.run(sockets=[listener])
