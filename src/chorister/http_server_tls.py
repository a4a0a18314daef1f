"""TLS handshakes of a server: each takes a place among its connections, and has a deadline.

An event loop's own TLS servers report a connection only when its handshake has ended. Clients that
connect and stay silent would then use up the process's file descriptors, because they hold no place
that they could lose; devices and the server's own database would get none.
"""

from __future__ import annotations

import asyncio
import ssl
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

from chorister.http_server import GuardedConnection

T = TypeVar("T")


class Handshake(asyncio.Protocol):
    """A connection whose TLS handshake has not ended yet."""

    def __init__(
        self, connection: GuardedConnection, context: ssl.SSLContext, seconds: float
    ) -> None:
        self._connection = connection
        self.connections: set[Any] = connection.connections
        self._context = context
        self._seconds = seconds
        self._early = bytearray()  # what the client sent together with the end of the handshake
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if not self._connection.addresses.admit(self):
            self.transport.abort()
            return
        self.connections.add(self)
        self._connection.make_room()
        self._connection.waiting[self] = None
        loop = asyncio.get_running_loop()
        encrypting = loop.start_tls(
            self.transport,
            self,
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._seconds,
        )
        # Take its first step now: from here on the transport's bytes are TLS, and none is missed.
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
        self.connections.discard(self)
        self._connection.waiting.pop(self, None)
        self._connection.addresses.release(self)

    async def _hand_over(
        self, encrypting: Coroutine[Any, Any, asyncio.Transport | None], waiter: object
    ) -> None:
        try:
            encrypted = await _resume(encrypting, waiter)
        except OSError:  # it took too long, or was not TLS
            self.transport.abort()
            return
        finally:
            self._leave()
        # If the connection ended earlier, the loop may not say so.
        if encrypted is None or self._lost or self.transport.is_closing():
            self.transport.abort()
            return
        encrypted.set_protocol(self._connection)
        self._connection.connection_made(encrypted)
        if self._early:
            self._connection.data_received(bytes(self._early))


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, T], waiter: object) -> Generator[Any, Any, T]:
    """Continue a coroutine that was started by hand and waits for a future."""
    try:
        yield waiter
    except BaseException as error:  # what the future holds instead of a result
        coroutine.throw(error)
        raise
    return (yield from coroutine.__await__())


def limit_handshakes(seconds: float) -> None:
    """Limit the TLS handshakes of servers that the running event loop starts from now on.

    A connection in its handshake takes a place, and makes room for others like a silent one.
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
            return Handshake(factory(), ssl, seconds)

        server: asyncio.Server = await create(
            factory if ssl is None else handshake, *given, **options
        )
        return server

    loop.create_server = create_server
