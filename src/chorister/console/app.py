"""The console as an ASGI application: every route, and what stands before them."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from importlib import resources
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from chorister.clock import Clock
from chorister.console import (
    pages_ask,
    pages_devices,
    pages_privacy,
    pages_results,
    pages_runs,
    pages_sign_in,
    pages_studies,
)
from chorister.console.guard import Guard
from chorister.console.live import Streams
from chorister.console.sessions import Sessions
from chorister.console.web import Handler, Web
from chorister.console.workspace import Workspace

__all__ = ["build_app"]

_STUDY: Final = "/studies/{connection}/{owner}/{study}"
_PAGES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("GET", "/", pages_studies.list_studies),
    ("POST", "/sign-out", pages_sign_in.sign_out),
    ("POST", "/studies", pages_studies.begin_study),
    ("GET", _STUDY, pages_studies.show_study),
    ("POST", _STUDY + "/share", pages_studies.share_study),
    ("GET", _STUDY + "/ask", pages_ask.show_ask),
    ("POST", _STUDY + "/ask", pages_ask.ask),
    ("POST", _STUDY + "/ask/cost", pages_ask.price),
    ("GET", _STUDY + "/rounds/{number}", pages_results.show_round),
    ("GET", _STUDY + "/rounds/{number}/chart.svg", pages_results.round_chart),
    ("GET", _STUDY + "/rounds/{number}/result.csv", pages_results.result_csv),
    ("GET", _STUDY + "/rounds/{number}/recipe.json", pages_results.show_recipe),
    ("POST", _STUDY + "/rounds/{number}/cancel", pages_studies.cancel_round),
    ("POST", _STUDY + "/rounds/{number}/wait", pages_studies.wait_again),
    ("GET", _STUDY + "/run/{algorithm}", pages_runs.show_form),
    ("POST", _STUDY + "/run/{algorithm}", pages_runs.start),
    ("POST", _STUDY + "/run/{algorithm}/plan", pages_runs.plan),
    ("GET", _STUDY + "/runs/{number}", pages_runs.show_run),
    ("GET", _STUDY + "/runs/{number}/picture.svg", pages_runs.run_picture),
    ("POST", _STUDY + "/runs/{number}/go-on", pages_runs.go_on),
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
    workspace: Workspace, clock: Clock, *, origins: Iterable[str], warm: bool = True
) -> ASGIApp:
    """The application around a workspace, for browsers that find it at these origins."""
    hours = workspace.config.session_hours
    sessions = Sessions(workspace.config.analysts, clock, seconds=hours * 3600)
    web = Web(workspace, sessions, clock)
    streams = Streams(web)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if warm:
            threading.Thread(target=web.charts.warm_up, daemon=True, name="warm up").start()
        yield
        streams.closing = True

    async def show_sign_in(request: Request) -> Response:
        return await web.answered(request, lambda: pages_sign_in.show_sign_in(web, request))

    async def sign_in(request: Request) -> Response:
        return await web.answered(request, lambda: pages_sign_in.sign_in(web, request))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    routes = [
        Route("/sign-in", show_sign_in, methods=["GET"]),
        Route("/sign-in", sign_in, methods=["POST"]),
        Route("/healthz", health, methods=["GET"]),
        Route("/static/{name}", _static(), methods=["GET"]),
        Route(_STUDY + "/events", streams.study, methods=["GET"]),
        *(Route(path, web.endpoint(handler), methods=[method]) for method, path, handler in _PAGES),
    ]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: web.no_such_request}, lifespan=lifespan
    )
    return Guard(app, origins)


def _static() -> Callable[[Request], Awaitable[Response]]:
    """The files that pages load; there are no others."""
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
        # Asked for at every page, so that an upgrade shows at once, but sent only if it changed.
        headers = {"cache-control": "no-cache", "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], headers={**headers, "content-type": _STATIC[name]})

    return serve
