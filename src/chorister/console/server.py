"""The console on the network, until told to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from chorister.clock import Clock
from chorister.console.app import build_app
from chorister.console.config import ConsoleConfig
from chorister.console.guard import origins_of
from chorister.console.workspace import Workspace
from chorister.errors import ServiceError

__all__ = ["serve"]


def serve(config: ConsoleConfig, clock: Clock, *, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is told where browsers find it.

    Rounds that wait are on disk: the next start goes on waiting for them.
    """
    with _listen(config.host, config.port) as listener, Workspace.open(config) as workspace:
        port = listener.getsockname()[1]
        origins = origins_of(config.host, port, config.url)
        name = f"[{config.host}]" if ":" in config.host else config.host
        server = uvicorn.Server(
            uvicorn.Config(
                build_app(workspace, clock, origins=origins),
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                limit_concurrency=512,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=2,  # streams stay open until then
                ws="none",
            )
        )
        ready(config.url or f"http://{name}:{port}")
        server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise ServiceError(f"can't listen on {host}:{port}: {error}") from error
