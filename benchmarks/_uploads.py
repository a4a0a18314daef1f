"""A client that uploads single reports over many kept-alive connections."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from chorister.dap.task import Task
from chorister.dap.upload_client import upload


def request_head(task: Task, report: bytes) -> bytes:
    """All of an upload but its body."""
    request = upload(task.configuration.encode(), report)
    fields = {"Host": "127.0.0.1", **request.headers, "Content-Length": str(len(report))}
    lines = [f"POST {urlsplit(request.url).path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def exchange(requests: Iterator[bytes], port: int, connections: int) -> int:
    """Send every request, keeping all connections busy; how many were answered with 200."""
    selector = selectors.DefaultSelector()
    answered = 0
    for _, request in zip(range(connections), requests, strict=False):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        selector.register(connection, selectors.EVENT_READ, connection)
        connection.sendall(request)
    while selector.get_map():
        for key, _ in selector.select():
            connection = key.data
            answer = connection.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert b"content-length: 0" in answer, answer
            answered += 1
            following = next(requests, None)
            if following is None:
                selector.unregister(connection)
                connection.close()
            else:
                connection.sendall(following)
    return answered


def send_reports(task: Task, reports: Sequence[bytes], port: int, connections: int = 64) -> None:
    """Upload reports that were sealed before."""
    head = request_head(task, reports[0])
    assert exchange((head + report for report in reports), port, connections) == len(reports)
