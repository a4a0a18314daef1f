"""The same applications without sockets: for tests, the demo and `chorister up`.

`InProcessNetwork` runs ASGI applications on one event loop in its own thread and finds them by URL.
It is an httpx transport, so `dap.http`, `transparency.HTTPSource` and `RegistryClient` use it
directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Any, Final, Self

import httpx2

from chorister.aggregator.http.app import ASGIApp, Message
from chorister.errors import InvalidInput, ServiceError

_START_TIMEOUT_SECONDS: Final = 60.0
_RESPONSE_TIMEOUT_SECONDS: Final = 600.0


class _Lifespan:
    """Starts and stops one application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())
        await self._send("startup")

    async def stop(self) -> None:
        if self._task is not None and not self._task.done():
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
        self._apps: dict[str, tuple[ASGIApp, _Lifespan]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.shut_down()

    def serve(self, url: str, app: ASGIApp) -> None:
        """Start an application and route everything below `url` to it."""
        if url in self._apps:
            raise InvalidInput(f"{url} is already served")
        lifespan = _Lifespan(app)
        self._call(lifespan.start(), _START_TIMEOUT_SECONDS)
        self._apps[url] = (app, lifespan)

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
        """Do nothing: clients call this when they close, and the network goes on."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request; the interface of an httpx transport."""
        url = str(request.url)
        matching = [prefix for prefix in self._apps if url.startswith(prefix)]
        if not matching:
            raise httpx2.ConnectError("no application is served there", request=request)
        app, _ = self._apps[max(matching, key=len)]
        body = request.read()
        try:
            status, headers, data = self._call(
                _exchange(app, request, body), _RESPONSE_TIMEOUT_SECONDS
            )
        except TimeoutError as error:
            raise httpx2.ReadTimeout("no answer", request=request) from error
        stream = httpx2.ByteStream(data)  # to be read raw, as from a socket
        return httpx2.Response(status, headers=headers, stream=stream, request=request)

    def _call(self, coroutine: Any, seconds: float) -> Any:  # noqa: ANN401
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise


async def _exchange(
    app: ASGIApp, request: httpx2.Request, body: bytes
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    target = request.url.raw_path
    path, _, query = target.partition(b"?")
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (request.url.host, request.url.port),
        "client": None,
        "state": {},
    }
    asked = False
    answered = asyncio.Event()
    status, headers, data = 500, [], bytearray()

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            data.extend(message.get("body", b""))
            if not message.get("more_body", False):
                answered.set()

    with contextlib.suppress(Exception):  # as over a socket: a crash is a response cut short
        await app(scope, receive, send)
    if not answered.is_set():
        return 500, [], b""
    return status, headers, bytes(data)
