"""A server on this machine that does what a server must not: to see what comes back to it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Seen:
    """One request as the server saw it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: tuple[str, int]
    resumed: bool | None  # whether a TLS session was resumed


@dataclass
class Reply:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Loopback:
    url: str
    seen: list[Seen]


@contextmanager
def serve(
    answer: Callable[[Seen], Reply], *, tls: ssl.SSLContext | None = None
) -> Iterator[Loopback]:
    seen: list[Seen] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            request = Seen(
                method=self.command,
                path=self.path,
                headers=list(self.headers.items()),
                body=self.rfile.read(length),
                connection=self.client_address,
                resumed=getattr(self.connection, "session_reused", None),
            )
            seen.append(request)
            reply = answer(request)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_POST = do_GET  # noqa: N815 (the name that http.server looks for)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    class LoopbackServer(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up is what some tests are about."""

    server = LoopbackServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        scheme = "http://127.0.0.1" if tls is None else "https://localhost"
        yield Loopback(url=f"{scheme}:{server.server_port}", seen=seen)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
