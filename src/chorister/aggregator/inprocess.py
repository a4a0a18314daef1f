"""The same applications without sockets: for rehearsals with real devices, and for tests.

`InProcessNetwork` runs ASGI applications on one event loop in its own thread and finds them by URL.
It is an httpx transport, so every client of ours can use it in place of a network.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Self, TypeVar

import httpx2
from starlette.applications import Starlette

from chorister.errors import InvalidInput

_START_TIMEOUT_SECONDS: Final = 60.0
_RESPONSE_TIMEOUT_SECONDS: Final = 600.0

T = TypeVar("T")


class InProcessNetwork(httpx2.BaseTransport):
    """Applications by the prefix of their URLs. Threads may share it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="in-process network", daemon=True
        )
        self._thread.start()
        self._apps: dict[str, tuple[httpx2.ASGITransport, AbstractAsyncContextManager[Any]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def serve(self, url: str, app: Starlette) -> None:
        """Start an application and route everything below `url` to it."""
        if url in self._apps:
            raise InvalidInput(f"{url} is already served")
        lifespan = app.router.lifespan_context(app)
        self._call(lifespan.__aenter__(), _START_TIMEOUT_SECONDS)
        # As over a socket: an application that crashes sends no exception.
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        self._apps[url] = (transport, lifespan)

    def withdraw(self, url: str) -> None:
        """Stop one application as a server would, after its requests."""
        _, lifespan = self._apps.pop(url)
        self._call(lifespan.__aexit__(None, None, None), _START_TIMEOUT_SECONDS)

    def shut_down(self) -> None:
        """Stop all applications and the loop."""
        try:
            for url in list(self._apps):
                self.withdraw(url)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def close(self) -> None:
        """Do nothing: clients call this when they close, but the network stays."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request; the interface of an httpx transport."""
        url = str(request.url)
        matching = [prefix for prefix in self._apps if url.startswith(prefix)]
        if not matching:
            raise httpx2.ConnectError("no application is served there", request=request)
        transport, _ = self._apps[max(matching, key=len)]
        request.read()
        try:
            return self._call(_exchange(transport, request), _RESPONSE_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise httpx2.ReadTimeout("no answer", request=request) from error

    def _call(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise


async def _exchange(transport: httpx2.ASGITransport, request: httpx2.Request) -> httpx2.Response:
    response = await transport.handle_async_request(request)
    if not isinstance(response.stream, httpx2.AsyncByteStream):
        raise TypeError("an asynchronous transport answers with an asynchronous stream")
    body = b"".join([part async for part in response.stream])  # raw, as from a socket
    return httpx2.Response(
        response.status_code,
        headers=response.headers,
        stream=httpx2.ByteStream(body),
        request=request,
    )
