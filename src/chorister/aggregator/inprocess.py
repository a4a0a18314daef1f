"""The same applications without sockets: for rehearsals with real devices, and for tests.

`InProcessNetwork` runs ASGI applications on one event loop in its own thread and finds them by URL.
It is an httpx transport, so every client of ours can use it in place of a network.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Final, Self, TypeVar

import httpx2
from starlette.types import ASGIApp, Message

from chorister.errors import InvalidInput, ServiceError

_START_TIMEOUT_SECONDS: Final = 60.0
_RESPONSE_TIMEOUT_SECONDS: Final = 600.0

T = TypeVar("T")


class _Lifespan:
    """Starts and stops one application, as an ASGI server does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        await self._send("startup")

    async def stop(self) -> None:
        if not self._task.done():
            await self._send("shutdown")
            await self._task

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        try:
            await self._app(scope, self._inbox.get, self._outbox.put)
        except Exception as error:
            await self._outbox.put({"type": "lifespan.failed", "message": repr(error)})

    async def _send(self, what: str) -> None:
        await self._inbox.put({"type": f"lifespan.{what}"})
        answer = await self._outbox.get()
        if not str(answer["type"]).endswith(".complete"):
            raise ServiceError(f"an application's {what} failed: {answer.get('message', '')}")


class InProcessNetwork(httpx2.BaseTransport):
    """Applications by the prefix of their URLs. Threads may share it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="in-process network", daemon=True
        )
        self._thread.start()
        self._apps: dict[str, tuple[httpx2.ASGITransport, _Lifespan]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def serve(self, url: str, app: ASGIApp) -> None:
        """Start an application and route everything below `url` to it."""
        if url in self._apps:
            raise InvalidInput(f"{url} is already served")
        lifespan = _Lifespan(app)
        self._call(lifespan.start(), _START_TIMEOUT_SECONDS)
        # As over a socket: an application that crashes sends no exception.
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        self._apps[url] = (transport, lifespan)

    def withdraw(self, url: str) -> None:
        """Stop one application as a server would, after its requests."""
        _, lifespan = self._apps.pop(url)
        self._call(lifespan.stop(), _START_TIMEOUT_SECONDS)

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
        apps = self._apps.copy()  # other threads serve and withdraw meanwhile
        matching = [prefix for prefix in apps if url.startswith(prefix)]
        if not matching:
            raise httpx2.ConnectError("no application is served there", request=request)
        transport, _ = apps[max(matching, key=len)]
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
