"""What leader and helper share over HTTP: responses, error handling, and two resources.

    GET  {url}hpke_config     the HPKE configurations, with caching headers
    GET  /healthz             whether the database answers

`leader_routes` and `helper_routes` add the rest. Every refusal is an RFC 9457 problem document,
even if the cause is a bug: never a traceback, and no detail of what went wrong inside.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, TypeAlias

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from chorister.aggregator.operations.logs import log_failure
from chorister.aggregator.operations.metrics import Metrics
from chorister.aggregator.storage.database import Database
from chorister.aggregator.storage.hpke_keys import KeyRing
from chorister.dap.draft import HPKE_CONFIG_LIST, HPKE_CONFIG_PATH, PROBLEM
from chorister.dap.http import problem_document
from chorister.dap.messages import HpkeConfigList
from chorister.errors import ProblemError, ServiceError
from chorister.http_server import RawResponse

Lifespan: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[None]]
"""What runs as long as an application does."""

_CONFIG_CACHE_SECONDS: Final = 2.0
_NO_STORE: Final = (b"cache-control", b"no-store")
# After these the rest of the body is not worth reading.
_CLOSING: Final = frozenset((408, 413))
_BUSY: Final = frozenset((429, 503))


# --- responses ----------------------------------------------------------------------------------

ACCEPTED: Final = RawResponse(200, ((b"content-length", b"0"), _NO_STORE))
"""The response to an upload whose reports were all stored."""


def success(
    body: bytes = b"",
    *,
    status: int = 200,
    media_type: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> RawResponse:
    """Return a successful response; not cacheable unless `headers` allow it."""
    fields = [(b"content-length", str(len(body)).encode())]
    if media_type is not None:
        fields.append((b"content-type", media_type.encode()))
    named = {"cache-control": "no-store"} | {
        name.lower(): value for name, value in (headers or {}).items()
    }
    fields += [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
    return RawResponse(status, tuple(fields), body)


def json_response(value: Mapping[str, object]) -> RawResponse:
    """Return one JSON object."""
    return success(json.dumps(value).encode(), media_type="application/json")


def refusal(error: ProblemError, headers: Mapping[str, str] | None = None) -> RawResponse:
    """Return a problem document."""
    if error.problem is None and "title" not in error.extra:
        error.extra["title"] = HTTPStatus(error.status).phrase
    named = dict(headers or {})
    if error.status == HTTPStatus.UNAUTHORIZED:
        named["www-authenticate"] = "Bearer"
    if error.status in _CLOSING:
        named["connection"] = "close"
    if error.status in _BUSY:
        named.setdefault("retry-after", "1")
    return success(problem_document(error), status=error.status, media_type=PROBLEM, headers=named)


def failure(error: BaseException, route: str) -> RawResponse:
    """Return the response to any error; bugs are logged and not explained."""
    if isinstance(error, ProblemError):
        return refusal(error)
    log_failure("a request failed", error, route=route)
    if isinstance(error, ServiceError):
        return refusal(ProblemError(None, "try again later", status=503))
    return refusal(ProblemError(None, "the request can't be served", status=500))


# --- the application ----------------------------------------------------------------------------


def make_route(
    metrics: Metrics,
    name: str,
    path: str,
    handler: Callable[[Request], Awaitable[RawResponse]],
    *methods: str,
) -> Route:
    """Return a route whose requests are counted under `name`, and always get a response."""

    async def call(request: Request) -> ASGIApp:
        try:
            response = await handler(request)
        except ClientDisconnect:
            metrics.requests.labels(name, "499").inc()
            return _send_nothing
        except Exception as error:
            response = failure(error, name)
        metrics.requests.labels(name, str(response.status)).inc()
        return response

    return Route(path, call, methods=methods)


async def _send_nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Stands in for a response that nobody would read."""


def base_routes(
    prefix: str,
    *,
    role: str,
    database: Database,
    keys: KeyRing,
    metrics: Metrics,
    cache_seconds: int,
) -> list[Route]:
    """Return the routes that both roles serve."""
    cached: tuple[float, bytes] = (0.0, b"")

    async def hpke_config(_: Request) -> RawResponse:
        nonlocal cached
        if time.monotonic() > cached[0] + _CONFIG_CACHE_SECONDS or not cached[1]:
            configs = await anyio.to_thread.run_sync(keys.published)
            if not configs:
                raise ProblemError(None, "no key is in the public log yet", status=503)
            cached = (time.monotonic(), HpkeConfigList(tuple(configs)).encode())
        caching = {"cache-control": f"public, max-age={cache_seconds}"}
        return success(cached[1], media_type=HPKE_CONFIG_LIST, headers=caching)

    async def healthz(_: Request) -> RawResponse:
        await anyio.to_thread.run_sync(database.ping)
        return json_response({"ok": True, "role": role})

    return [
        make_route(metrics, "hpke_config", prefix + HPKE_CONFIG_PATH, hpke_config, "GET"),
        make_route(metrics, "healthz", "/healthz", healthz, "GET"),
    ]


def build_starlette(routes: Sequence[Route], metrics: Metrics, lifespan: Lifespan) -> Starlette:
    """Build the application around some routes."""

    async def no_such_request(request: Request, error: Exception) -> RawResponse:
        """Answer what the router refuses before any of our handlers is called."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = error.headers if isinstance(error, HTTPException) else None
        metrics.requests.labels("none", str(status)).inc()
        phrase = HTTPStatus(status).phrase.lower()
        problem = ProblemError(None, f"{phrase}: {request.method}", status=status)
        return refusal(problem, headers)

    @contextlib.asynccontextmanager
    async def whole_life(_: Starlette) -> AsyncIterator[None]:
        async with lifespan():
            yield

    app = Starlette(
        routes=list(routes),
        exception_handlers={HTTPException: no_such_request},  # type: ignore[dict-item]
        lifespan=whole_life,
    )
    # A redirect would send clients to the host they name, without TLS behind a proxy.
    app.router.redirect_slashes = False
    return app
