"""A warm process that never holds data, and forks a sandbox for each query.

It is told two things, in five bytes: `r` (run; a socket comes with it) is answered by the new
process' id; `e` and an id (end) kills and reaps that process. Queries, data and answers go over
the socket, between the device and the sandbox.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
from typing import Final

import apsw

from chorister.device.sandbox.confinement import confine, die_with_parent, leave_network
from chorister.device.sandbox.query import answer, explain
from chorister.device.sandbox.wire import (
    MAX_BODY_BYTES,
    decode_job,
    receive,
    receive_frame,
    send_frame,
)

__all__ = ["COMMAND", "END", "RUN", "main"]

COMMAND: Final = struct.Struct("!ci")
RUN: Final = b"r"
END: Final = b"e"
_MEMORY: Final = 256 * 2**20
_MAX_DESCRIPTORS: Final = 4096


def main(descriptor: int) -> None:
    """Serve the device at the other end of `descriptor` until it closes it."""
    os.environ.clear()
    device = socket.socket(fileno=descriptor)
    weaknesses = leave_network() + _try_confinement()
    # Collecting garbage would copy pages that sandboxes could share.
    gc.disable()
    gc.freeze()
    send_frame(device, json.dumps({"weaknesses": weaknesses}).encode())
    while True:
        message, sockets, _, _ = socket.recv_fds(device, COMMAND.size, 1)
        if len(message) != COMMAND.size:
            return  # the device is gone, and with this process go all sandboxes
        command, number = COMMAND.unpack(message)
        if command == RUN:
            device.sendall(COMMAND.pack(RUN, _fork(sockets[0])))
            os.close(sockets[0])
        else:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            device.sendall(message)


def _fork(descriptor: int) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        os.closerange(0, descriptor)
        os.closerange(descriptor + 1, _MAX_DESCRIPTORS)
        _serve(socket.socket(fileno=descriptor))
    finally:
        # Without a word: what went wrong may depend on the data.
        os._exit(1)


def _serve(device: socket.socket) -> None:
    head, size = receive_frame(device, max_body=MAX_BODY_BYTES)
    job = decode_job(head)
    # From here on its randomness is its own, not a copy of the zygote's.
    apsw.randomness(0)
    apsw.randomness(1)
    confine(seconds=job.seconds, memory=_MEMORY + 4 * size)
    image = bytes(receive(device, size))
    if job.compile_only:
        outcome = explain(job, image)
        tree = {"refused": outcome} if isinstance(outcome, str) else {"names": outcome}
        send_frame(device, json.dumps(tree).encode())
    else:
        send_frame(device, b"{}", answer(job, image))
    os._exit(0)


def _try_confinement() -> list[str]:
    """What every sandbox will lack, found out by one that does nothing else."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(confine(seconds=1, memory=_MEMORY)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        weaknesses = json.loads(pipe.read())
    os.waitpid(child, 0)
    return list(map(str, weaknesses))
