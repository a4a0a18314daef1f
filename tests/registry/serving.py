"""A registry on a real socket."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from chorister.http_server import Deadlines
from chorister.registry.app import Limits, build_app
from chorister.registry.server import uvicorn_config
from tests.logworld import World


@contextlib.contextmanager
def serving(
    world: World, *, limits: Limits | None = None, deadlines: Deadlines | None = None
) -> Iterator[int]:
    """The world's registry on a port that the system chose."""
    app = build_app(world.registry, world.public, interval=0.02, limits=limits)
    server = uvicorn.Server(uvicorn_config(app, deadlines or Deadlines()))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)


def ask(
    port: int, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(asked) as connection:
        connection.request(method, path, body=body or None, headers=sent)
        response = connection.getresponse()
        data = response.read()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, data
