"""Uploads of single reports, durable when acknowledged, beside a bare web server.

The bare server is the same uvicorn with a handler that reads the body and answers. Both get the
same requests, of 1,000 bins, from the same client over as many kept-alive connections, turn by
turn; each figure is the best of its turns, because the machine has other work too. The leader runs
no jobs meanwhile; its database is SQLite or, with `--database postgres`, a PostgreSQL beside it.
Every report has an id of its own (nothing else matters before verification).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import secrets
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

from _pair import MeasuredPair, cpu_seconds, free_port
from _postgres import postgres
from _uploads import exchange, request_head

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
def bare_server() -> Iterator[tuple[int, int]]:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", BARE, str(port)])
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port, server.pid
    finally:
        server.terminate()
        server.wait(10)


class Requests:
    """The same request again and again, but for the report's id."""

    def __init__(self, pair: MeasuredPair) -> None:
        ((report, *_),) = pair.seal(1)
        self.head = request_head(pair.task, report)
        self.tail = report[16:]
        self.bytes = len(report)

    def make(self, number: int) -> Iterator[bytes]:
        for _ in range(number):
            yield b"".join((self.head, secrets.token_bytes(16), self.tail))


def send(requests: Requests, port: int, number: int, connections: int) -> None:
    assert exchange(requests.make(number), port, connections) == number


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
    parser.add_argument("--connections", type=int, default=512, help="kept alive, all busy")
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    options = parser.parse_args()

    with (
        tempfile.TemporaryDirectory(prefix="chorister-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        databases = None
        if options.database == "postgres":
            databases = stack.enter_context(postgres(["leader", "helper"]))
        pair = MeasuredPair(Path(folder), databases=databases, settings={"run_jobs": False})
        requests = Requests(pair)
        bare_port, bare = stack.enter_context(bare_server())
        leader = stack.enter_context(pair.serving("leader")).pid
        port = urlsplit(pair.operators.at.leader).port
        assert port is not None
        sides: dict[str, list[float]] = {"bare server": [], "leader": []}
        used = {"bare server": -cpu_seconds(bare), "leader": -cpu_seconds(leader)}
        for _ in range(options.turns):
            for name, at in (("bare server", bare_port), ("leader", port)):
                sides[name].append(rate(requests, at, options.requests, options.connections))
        used["bare server"] += cpu_seconds(bare)
        used["leader"] += cpu_seconds(leader)
    each = 1e6 / (options.turns * options.requests)
    best = {name: max(turns) for name, turns in sides.items()}
    ratio = best["leader"] / best["bare server"]
    what = f"single reports of {requests.bytes:,} bytes into {options.database}, uploads per second"
    table = Table(title=what)
    for title in ("", "best of turns", "median", "CPU microseconds each"):
        table.add_column(title, justify="right" if title else "left")
    for name, turns in sides.items():
        table.add_row(
            name,
            f"{max(turns):,.0f}",
            f"{sorted(turns)[len(turns) // 2]:,.0f}",
            f"{used[name] * each:,.0f}",
        )
    Console().print(table)
    wanted = {"sqlite": ".6", "postgres": ".4"}[options.database]
    print(f"durable uploads reach {ratio:.2f} of the bare server (at least {wanted} wanted)")
    if options.json:
        results = {
            "upload_over_bare_server": round(ratio, 4),
            "uploads_per_second": round(best["leader"]),
            "bare_uploads_per_second": round(best["bare server"]),
            "upload_cpu_over_bare_server": round(used["leader"] / used["bare server"], 4),
        }
        print(json.dumps(results))


if __name__ == "__main__":
    main()
