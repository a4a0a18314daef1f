"""Starts a zygote whose sandboxes were taken over: the query says what they do instead."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def misbehave(how: str, device: socket.socket, wire: Any) -> None:
    if how == "does not read":
        time.sleep(1000)
    _, size = wire.receive_frame(device, max_head=10**9, max_body=2**30)
    wire.receive(device, size)
    if how == "says nothing":
        time.sleep(1000)
    elif how == "dribbles":
        while True:  # a byte after the other; the fifth is one too many, so it ends before
            device.sendall(b"\0")
            time.sleep(0.3)
    elif how == "does not close":
        device.sendall(wire.ANSWER.pack(1))
        time.sleep(1000)
    elif how == "ignores the alarm":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        time.sleep(1000)
    elif how == "says too much":
        device.sendall(wire.ANSWER.pack(1) + bytes(100_000))
    elif how == "says too little":
        device.sendall(b"\0\0\1")
    elif how == "names no bin":
        device.sendall(wire.ANSWER.pack(2**32 - 1))
    elif how == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "is honest":
        device.sendall(wire.ANSWER.pack(1))
    device.close()
    os._exit(0)


def boot(descriptor: int, facilities: str, path: list[str]) -> None:
    sys.path[:] = path
    root = next(Path(entry) / "chorister" for entry in path if Path(entry, "chorister").is_dir())
    for name in ("", ".device", ".device.sandbox", ".encoding"):
        package = ModuleType(f"chorister{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    zygote = import_module("chorister.device.sandbox.zygote")
    wire = import_module("chorister.device.sandbox.wire")

    def serve(device: socket.socket, _connection: object) -> None:
        job = wire.decode_job(wire.receive_frame(device)[0])
        misbehave(job.query, device, wire)

    setattr(zygote, "_serve", serve)  # noqa: B010 (a module has no such attribute, for mypy)
    zygote.main(descriptor, facilities.split())


if __name__ == "__main__":
    boot(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
