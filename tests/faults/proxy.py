"""A bad line to the helper: slow, cut short, half open, gone, or delivering twice.

One thread a connection; the leader makes a connection for every request. What happens to a
connection is decided when it is made, by `mode`.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from typing import Final

MODES: Final = ("gone", "hang", "slow", "truncate", "twice", "late", "deaf")
_LONGEST: Final = 30


class Proxy:
    """Listens on a port, and passes on to another."""

    def __init__(self, port: int, target: int, seed: int) -> None:
        self.mode: str | None = None
        self.seen: dict[str, int] = dict.fromkeys(MODES, 0)
        self._target = target
        self._random = random.Random(seed)
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client, self.mode), daemon=True).start()

    def _serve(self, client: socket.socket, mode: str | None) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(_LONGEST)
            if mode is not None:
                self.seen[mode] += 1
            match mode:
                case "gone":
                    return
                case "hang":  # half open: taken, never answered
                    while not self._closed and self.mode == "hang" and client.recv(65_536):
                        pass
                case "deaf":  # the request arrives, its answer does not
                    self._exchange(client, keep=0)
                case "truncate":
                    self._exchange(client, keep=self._random.randrange(1, 400))
                case "late":  # overtaken by those that come after it
                    self._exchange(client, delay=self._random.uniform(0.2, 1.5))
                case "slow":
                    self._exchange(client, trickle=True)
                case "twice":
                    request = self._exchange(client)
                    with socket.create_connection(("127.0.0.1", self._target), _LONGEST) as again:
                        again.sendall(request)
                        while again.recv(65_536):
                            pass
                case _:
                    self._exchange(client)

    def _exchange(
        self,
        client: socket.socket,
        *,
        keep: int | None = None,
        delay: float = 0,
        trickle: bool = False,
    ) -> bytes:
        """One request and its answer; what was asked."""
        request = _request(client)
        time.sleep(delay)
        with socket.create_connection(("127.0.0.1", self._target), _LONGEST) as server:
            server.sendall(request)
            left = keep
            while data := server.recv(65_536):
                if left is not None:
                    data, left = data[:left], left - len(data[:left])
                if trickle:
                    for start in range(0, len(data), 4096):
                        client.sendall(data[start : start + 4096])
                        time.sleep(0.02)
                elif data:
                    client.sendall(data)
        return request


def _request(client: socket.socket) -> bytes:
    """A whole HTTP/1.1 request with a length."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        part = client.recv(65_536)
        if not part:
            return bytes(data)
        data += part
    head = bytes(data[: data.index(b"\r\n\r\n")]).lower()
    length = 0
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    wanted = len(head) + 4 + length
    while len(data) < wanted:
        part = client.recv(65_536)
        if not part:
            break
        data += part
    return bytes(data)
