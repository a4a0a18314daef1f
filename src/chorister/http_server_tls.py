"""TLS handshakes of a server: each has a place among its connections, and a deadline.

An event loop's own TLS servers tell nobody of a connection before its handshake has ended: without
a place that it could lose, whoever connects and says nothing would take all descriptors of the
process, from devices and from the server's own database alike.
"""

from __future__ import annotations

import asyncio
import ssl
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar, cast

__all__ = ["limit_handshakes"]

T = TypeVar("T")


class _Guarded(Protocol):
    """What a connection of `http_server.guarded_protocol` can do before it is one."""

    connections: set[Any]
    waiting: dict[Any, None]

    def make_room(self) -> bool: ...

    def connection_made(self, transport: asyncio.Transport) -> None: ...

    def data_received(self, data: bytes) -> None: ...


class _Handshake(asyncio.Protocol):
    """A connection whose TLS handshake has yet to end."""

    def __init__(self, protocol: _Guarded, context: ssl.SSLContext, seconds: float) -> None:
        self._protocol = protocol
        self._context = context
        self._seconds = seconds
        self._early = bytearray()  # what the client said in one breath with the handshake
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._protocol.connections.add(self)
        self._protocol.make_room()
        self._protocol.waiting[self] = None
        loop = asyncio.get_running_loop()
        encrypting = loop.start_tls(
            self.transport,
            self,
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._seconds,
        )
        # Its first step, now: from here on the transport's bytes are TLS, and none is missed.
        waiter = encrypting.send(None)
        self._task = loop.create_task(self._hand_over(encrypting, waiter))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._lost = True
        self._leave()

    def shutdown(self) -> None:
        """Called by uvicorn when the server ends."""
        self.transport.abort()

    def _leave(self) -> None:
        self._protocol.connections.discard(self)
        self._protocol.waiting.pop(self, None)

    async def _hand_over(
        self, encrypting: Coroutine[Any, Any, asyncio.Transport | None], waiter: object
    ) -> None:
        try:
            encrypted = await _resume(encrypting, waiter)
        except OSError:  # whatever the client did instead
            self.transport.abort()
            return
        finally:
            self._leave()
        # Where the connection ended before, the loop may say nothing of it.
        if encrypted is None or self._lost or self.transport.is_closing():
            self.transport.abort()
            return
        encrypted.set_protocol(cast("asyncio.Protocol", self._protocol))
        self._protocol.connection_made(encrypted)
        if self._early:
            self._protocol.data_received(bytes(self._early))


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, T], waiter: object) -> Generator[Any, Any, T]:
    """Go on with a coroutine that was begun by hand and waits for a future."""
    try:
        yield waiter
    except BaseException as error:  # what the future has in place of a result
        coroutine.throw(error)
        raise
    return (yield from coroutine.__await__())


def limit_handshakes(seconds: float) -> None:
    """Give the TLS handshakes of servers that the running event loop starts a limit and a place.

    A connection that still shakes hands counts as one, and makes room as one that is silent.
    """
    loop: Any = asyncio.get_running_loop()
    create = loop.create_server

    async def create_server(
        factory: Callable[[], Any],
        *given: Any,  # noqa: ANN401 (asyncio's own)
        ssl: Any = None,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> asyncio.Server:
        def handshake() -> asyncio.Protocol:
            return _Handshake(factory(), ssl, seconds)

        server: asyncio.Server = await create(
            factory if ssl is None else handshake, *given, **options
        )
        return server

    loop.create_server = create_server
