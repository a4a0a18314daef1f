"""Uploads of single reports, durable when acknowledged, beside a bare web server.

The bare server is the same uvicorn with a handler that reads the body and answers. Both get the
same requests, of 1,000 bins, from the same client over as many kept-alive connections, turn by
turn; each figure is the best of its turns, because the machine has other work too. The leader runs
no jobs meanwhile. Every report has an id of its own (nothing else matters before verification).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from _pair import Pair, free_port
from chorister.dap.client import upload

BARE = """
import sys, uvicorn

async def app(scope, receive, send):
    more, body = True, b""
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"content-length", b"0"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False,
            lifespan="off", server_header=False, proxy_headers=False, ws="none", backlog=2048)
"""


@contextlib.contextmanager
def bare_server() -> Iterator[int]:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", BARE, str(port)])
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(10)


class Requests:
    """The same request again and again, but for the report's id."""

    def __init__(self, pair: Pair) -> None:
        ((report, *_),) = pair.seal(1)
        request = upload(pair.task.configuration.encode(), report)
        fields = {"Host": "127.0.0.1", **request.headers, "Content-Length": str(len(report))}
        lines = [f"POST {urlsplit(request.url).path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        self.head = "\r\n".join([*lines, "", ""]).encode()
        self.tail = report[16:]
        self.bytes = len(report)

    def make(self) -> bytes:
        return b"".join((self.head, secrets.token_bytes(16), self.tail))


def send(requests: Requests, port: int, number: int, connections: int) -> None:
    """Keep every connection busy until all requests are answered."""
    selector = selectors.DefaultSelector()
    sent = answered = 0
    for _ in range(connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        selector.register(connection, selectors.EVENT_READ)
        connection.sendall(requests.make())
        sent += 1
    while answered < number:
        for key, _ in selector.select():
            connection = key.fileobj  # type: ignore[assignment]
            answer = connection.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert b"content-length: 0" in answer, answer
            answered += 1
            if sent < number:
                connection.sendall(requests.make())
                sent += 1
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]


def rate(requests: Requests, port: int, number: int, connections: int) -> float:
    """Requests answered a second, the client in a process of its own."""
    client = multiprocessing.get_context("fork").Process(
        target=send, args=(requests, port, number, connections)
    )
    begun = time.perf_counter()
    client.start()
    client.join()
    assert client.exitcode == 0
    return number / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--turns", type=int, default=7, help="turns a side, best one counts")
    parser.add_argument("--requests", type=int, default=6_000, help="requests a turn")
    parser.add_argument("--connections", type=int, default=96)
    options = parser.parse_args()

    with (
        tempfile.TemporaryDirectory(prefix="chorister-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        pair = Pair(Path(folder), settings={"run_jobs": False})
        requests = Requests(pair)
        bare_port = stack.enter_context(bare_server())
        stack.enter_context(pair.serving("leader"))
        port = urlsplit(pair.operators.at.leader).port
        assert port is not None
        sides: dict[str, list[float]] = {"bare server": [], "leader": []}
        for _ in range(options.turns):
            for name, at in (("bare server", bare_port), ("leader", port)):
                sides[name].append(rate(requests, at, options.requests, options.connections))
    best = {name: max(turns) for name, turns in sides.items()}
    ratio = best["leader"] / best["bare server"]
    table = Table(title=f"single reports of {requests.bytes:,} bytes, uploads a second")
    for title in ("", "best of turns", "median"):
        table.add_column(title, justify="right" if title else "left")
    for name, turns in sides.items():
        table.add_row(name, f"{max(turns):,.0f}", f"{sorted(turns)[len(turns) // 2]:,.0f}")
    Console().print(table)
    print(f"durable uploads reach {ratio:.2f} of the bare server (at least .5 wanted)")
    if options.json:
        results = {
            "upload_over_bare_server": round(ratio, 4),
            "uploads_per_second": round(best["leader"]),
            "bare_uploads_per_second": round(best["bare server"]),
        }
        print(json.dumps(results))


if __name__ == "__main__":
    main()
