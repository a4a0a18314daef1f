"""An aggregator over HTTP: what leader and helper have in common.

    GET  {url}hpke_config     the HPKE configurations, with caching headers
    GET  /healthz             whether the database answers

`routes_leader` and `routes_helper` add the rest. Every refusal is a problem document, a bug among
them too: never a traceback, and no detail of what went wrong inside.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorister.aggregator.answers import Answer, made, refusal
from chorister.aggregator.logs import get_logger
from chorister.aggregator.metrics import Metrics
from chorister.dap.draft import HPKE_CONFIG_LIST, HPKE_CONFIG_PATH
from chorister.dap.messages import HpkeConfigList
from chorister.errors import ChoristerError, ProblemError, ServiceError

__all__ = ["Endpoint", "Published", "base_routes", "build_starlette", "endpoint", "failure"]

Endpoint = Callable[[Request], Awaitable[Answer]]
_FRESH: Final = 2.0


class Published(Protocol):
    """Where the HPKE configurations come from (`hpke_keys.KeyRing`)."""

    def published(self) -> list[bytes]:
        """Encoded configurations, the preferred one first."""
        ...


def failure(error: Exception, route: str) -> Answer:
    """The answer to whatever went wrong; bugs are logged and not explained."""
    if isinstance(error, ProblemError):
        return refusal(error)
    if isinstance(error, ServiceError):
        get_logger().error("a request failed", route=route, error=str(error))
        return refusal(ProblemError(None, "try again later", status=503))
    if isinstance(error, ChoristerError):
        get_logger().error(
            "a request failed", route=route, kind=type(error).__name__, error=str(error)
        )
    else:
        get_logger().error("a request failed, by a bug in Chorister", route=route, exc_info=error)
    return refusal(ProblemError(None, "the request can't be served", status=500))


def endpoint(route: str, handler: Endpoint, metrics: Metrics) -> Callable[..., Any]:
    """A handler as Starlette wants it: counted, and always with an answer."""

    async def call(request: Request) -> Response:
        try:
            answer = await handler(request)
        except Exception as error:
            answer = failure(error, route)
        metrics.requests.labels(route, str(answer.status)).inc()
        return answer.response()

    return call


def base_routes(
    prefix: str,
    *,
    keys: Published,
    alive: Callable[[], Mapping[str, object]],
    metrics: Metrics,
    cache_seconds: int,
) -> list[Route]:
    """What both roles serve. `alive` asks the database something, in a thread."""
    kept: tuple[float, bytes] = (0.0, b"")

    async def hpke_config(_: Request) -> Answer:
        nonlocal kept
        if time.monotonic() > kept[0] + _FRESH or not kept[1]:
            configs = await anyio.to_thread.run_sync(keys.published)
            if not configs:
                raise ProblemError(None, "no key is in the public log yet", status=503)
            kept = (time.monotonic(), HpkeConfigList(tuple(configs)).encode())
        caching = {"cache-control": f"public, max-age={cache_seconds}"}
        return made(kept[1], media_type=HPKE_CONFIG_LIST, headers=caching)

    async def healthz(_: Request) -> Answer:
        found = await anyio.to_thread.run_sync(alive)
        return json_answer(found)

    return [
        Route(
            prefix + HPKE_CONFIG_PATH,
            endpoint("hpke_config", hpke_config, metrics),
            methods=["GET"],
        ),
        Route("/healthz", endpoint("healthz", healthz, metrics), methods=["GET"]),
    ]


def json_answer(value: Mapping[str, object]) -> Answer:
    """One JSON object."""
    return made(json.dumps(value).encode(), media_type="application/json")


def build_starlette(
    routes: Sequence[Route],
    metrics: Metrics,
    lifespan: Callable[[], contextlib.AbstractAsyncContextManager[None]],
) -> Starlette:
    """The application around some routes; `lifespan` is what runs as long as it does."""

    async def no_such_request(request: Request, error: Exception) -> Response:
        """What the router refuses before any of ours is called."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = error.headers if isinstance(error, HTTPException) else None
        metrics.requests.labels("none", str(status)).inc()
        what = HTTPStatus(status).phrase.lower()
        answer = refusal(ProblemError(None, f"{what}: {request.method}", status=status), headers)
        return answer.response()

    @contextlib.asynccontextmanager
    async def whole_life(_: Starlette) -> AsyncIterator[None]:
        async with lifespan():
            yield

    app = Starlette(
        routes=list(routes),
        exception_handlers={HTTPException: no_such_request},
        lifespan=whole_life,
    )
    # It would send clients to whatever host they say they asked, without TLS behind a proxy.
    app.router.redirect_slashes = False
    return app
