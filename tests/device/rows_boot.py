"""Starts a zygote as `boot.py` does, whose sandboxes answer with all rows: for tests only.

What a query can read is best seen by looking; production code sends nothing but a bin.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def boot(descriptor: int, facilities: str, path: list[str]) -> None:
    sys.path[:] = path
    root = next(Path(entry) / "chorister" for entry in path if Path(entry, "chorister").is_dir())
    for name in ("", ".device", ".device.sandbox", ".encoding"):
        package = ModuleType(f"chorister{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    zygote = import_module("chorister.device.sandbox.zygote")
    query, wire = (import_module(f"chorister.device.sandbox.{name}") for name in ("query", "wire"))

    def serve(device: socket.socket, connection: object) -> None:
        job = wire.decode_job(wire.receive_frame(device)[0])
        _, size = wire.receive_frame(device, max_body=wire.MAX_BODY_BYTES)
        zygote.confine(seconds=job.seconds, memory=2**28)
        names, rows = query.rows(connection, job, wire.receive(device, size))
        device.sendall(pickle.dumps((names, list(rows))))
        device.close()
        os._exit(0)

    setattr(zygote, "_serve", serve)  # noqa: B010 (a module has no such attribute, for mypy)
    zygote.main(descriptor, facilities.split())


if __name__ == "__main__":
    boot(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
