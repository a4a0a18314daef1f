"""A warm process that never holds data, and forks a sandbox for each query.

It accepts two commands of five bytes: `r` (run) is answered with the id of a new process and a
socket to it; `e` and an id (end) kills and reaps that process, without an answer. Queries, data and
answers go over that socket, between the device and the sandbox. The next sandbox is forked ahead of
time, so that nobody waits for it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from dataclasses import dataclass
from typing import Final

from chorister.device.sandbox.confinement import (
    build_filter,
    confine,
    die_with_parent,
    go_first,
    leave_network,
)
from chorister.device.sandbox.query import choose, explain, rehearse
from chorister.device.sandbox.wire import (
    ANSWER,
    COMMAND,
    END,
    MAX_BODY_BYTES,
    MAX_ENCODING_BYTES,
    RUN,
    decode_job,
    receive,
    receive_frame,
    send_frame,
)
from chorister.encoding.encoder import Encoder

_MEMORY_BYTES: Final = 256 * 2**20
_MAX_DESCRIPTORS: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spare:
    """A sandbox that waits for its job."""

    process: int
    socket: socket.socket

    def is_alive(self) -> bool:
        return os.waitpid(self.process, os.WNOHANG) == (0, 0)


def main(descriptor: int) -> None:
    """Serve the device at the other end of `descriptor` until it closes it."""
    os.environ.clear()
    device = socket.socket(fileno=descriptor)
    build_filter()
    weaknesses = leave_network() + go_first() + _try_confinement()
    # Collecting garbage would copy pages that sandboxes share.
    gc.disable()
    gc.freeze()
    send_frame(device, json.dumps({"weaknesses": weaknesses}).encode())
    spare = _fork()
    while True:
        message = device.recv(COMMAND.size, socket.MSG_WAITALL)
        if len(message) != COMMAND.size:
            return  # the device is gone; all sandboxes end with this process
        command, number = COMMAND.unpack(message)
        if command == END:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
        else:
            if not spare.is_alive():
                spare = _fork()
            socket.send_fds(device, [COMMAND.pack(RUN, spare.process)], [spare.socket.fileno()])
            spare.socket.close()
            spare = _fork()


def _fork() -> _Spare:
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    process = os.fork()
    if process:
        theirs.close()
        return _Spare(process=process, socket=ours)
    try:
        die_with_parent(parent)
        rehearse()
        # After the rehearsal, because SQLite reopens closed standard streams.
        keep = theirs.detach()
        os.closerange(0, keep)
        os.closerange(keep + 1, _MAX_DESCRIPTORS)
        _serve(socket.socket(fileno=keep))
    finally:
        # Silently: what went wrong may depend on the data.
        os._exit(1)


def _serve(device: socket.socket) -> None:
    head, _ = receive_frame(device)
    job = decode_job(head)
    encoding, size = receive_frame(device, max_head=MAX_ENCODING_BYTES, max_body=MAX_BODY_BYTES)
    confine(seconds=job.seconds, memory=_MEMORY_BYTES + 4 * size)
    if job.selection is None:
        outcome = explain(job, receive(device, size))
        tree = {"refused": outcome} if isinstance(outcome, str) else {"columns": outcome}
        send_frame(device, json.dumps(tree).encode())
    else:
        # Before there is any data, so that it takes the same time whatever the data.
        encoder = Encoder.parse(encoding)
        device.sendall(ANSWER.pack(choose(job, encoder, receive(device, size))))
    # At once: an orderly exit takes longer.
    device.close()
    os._exit(0)


def _try_confinement() -> list[str]:
    """Return which protections every sandbox will lack, as found by one that does nothing else."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(confine(seconds=1, memory=_MEMORY_BYTES)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        weaknesses = json.loads(pipe.read())
    os.waitpid(child, 0)
    return list(map(str, weaknesses))
