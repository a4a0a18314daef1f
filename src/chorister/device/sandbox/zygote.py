"""A warm process that never holds data, and forks a sandbox for each query.

It accepts two commands of five bytes: `r` (run) is answered with the id of a new process and a
socket to it; `e` and an id (end) kills and reaps that process, without an answer. Queries, data and
answers go over that socket, between the device and the sandbox. Two sandboxes are forked ahead of
time, while nothing else is to do, so that nobody waits for one.

Where nothing can be forked, this process is itself the sandbox: of one query (`r`), which comes
over the same socket, or of none (`t`, try), to see which protections it lacks.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Final, NamedTuple, NoReturn

import apsw

from chorister.device.sandbox import confinement
from chorister.device.sandbox.confinement import (
    FORK,
    build_filter,
    confine,
    die_with_parent,
    go_first,
    is_forked,
    leave_network,
    prepare,
    restrict,
)
from chorister.device.sandbox.query import choose, connect, explain, rehearse
from chorister.device.sandbox.wire import (
    ANSWER,
    COMMAND,
    END,
    MAX_BODY_BYTES,
    MAX_ENCODING_BYTES,
    RUN,
    TRY,
    decode_job,
    receive,
    receive_frame,
    send_frame,
)
from chorister.encoding.encoder import Encoder

_MEMORY_BYTES: Final = 256 * 2**20
_MAX_DESCRIPTORS: Final = 4096
_SPARES: Final = 2
"""A recipe takes two at once: one compiles its query, and one runs it."""
_IDLE_SECONDS: Final = 0.002
"""After so long without a command one is forked: earlier it would take a core from a query."""
_REHEARSALS: Final = 30
"""After so many, Python runs the code of a query in the form that it keeps."""


class _Spare(NamedTuple):
    """A sandbox that waits for its job."""

    process: int
    socket: socket.socket

    def is_alive(self) -> bool:
        return os.waitpid(self.process, os.WNOHANG) == (0, 0)


def main(descriptor: int, facilities: Iterable[str]) -> None:
    """Serve the device at the other end of `descriptor` until it closes it."""
    os.environ.clear()
    restrict(frozenset(facilities))
    device = _inherit(descriptor)
    build_filter()
    weaknesses = is_forked() + leave_network() + go_first()
    if FORK not in confinement.FACILITIES:
        _serve_alone(device, weaknesses)
    weaknesses += _try_confinement()
    # Collecting garbage would copy pages that sandboxes share.
    gc.disable()
    gc.freeze()
    _greet(device, weaknesses)
    spares = [_fork()]
    rehearsals = _REHEARSALS
    while True:
        while len(spares) < _SPARES and not _is_asked(device, _IDLE_SECONDS):
            if spares and rehearsals:
                # What this process has learnt, its sandboxes need not learn again.
                rehearse()
                rehearsals -= 1
            else:
                spares.append(_fork())
        message = device.recv(COMMAND.size, socket.MSG_WAITALL)
        if len(message) != COMMAND.size:
            return  # the device is gone; all sandboxes end with this process
        command, number = COMMAND.unpack(message)
        if command == END:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
        else:
            while spares and not spares[0].is_alive():
                spares.pop(0).socket.close()
            spare = spares.pop(0) if spares else _fork()
            socket.send_fds(device, [COMMAND.pack(RUN, spare.process)], [spare.socket.fileno()])
            spare.socket.close()


def _is_asked(device: socket.socket, seconds: float) -> bool:
    """Wait for a command of the device; return whether there is one."""
    return bool(select.select([device], [], [], seconds)[0])


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
        _serve(_keep_only(theirs), _get_ready())
    finally:
        # Silently: what went wrong may depend on the data.
        os._exit(1)


def _serve_alone(device: socket.socket, weaknesses: list[str]) -> NoReturn:
    """Be the sandbox of one job, or try how confined one would be."""
    try:
        rehearse()
        device = _keep_only(device)
        command, _ = COMMAND.unpack(receive(device, COMMAND.size))
        if command == RUN:
            _serve(device, _get_ready())
        elif command == TRY:
            _greet(device, weaknesses + confine(seconds=1, memory=_MEMORY_BYTES))
    finally:
        os._exit(1)


def _keep_only(device: socket.socket) -> socket.socket:
    """Close everything else; after the rehearsal, as SQLite reopens closed standard streams."""
    if sys.platform == "win32":  # nothing was inherited
        return device
    keep = device.detach()
    os.closerange(0, keep)
    os.closerange(keep + 1, _MAX_DESCRIPTORS)
    return socket.socket(fileno=keep)


def _inherit(descriptor: int) -> socket.socket:
    """Return the socket that the device gave to this process."""
    if sys.platform == "win32":
        return socket.fromshare(sys.stdin.buffer.read())
    return socket.socket(fileno=descriptor)


def _greet(device: socket.socket, weaknesses: list[str]) -> None:
    send_frame(device, json.dumps({"weaknesses": weaknesses}).encode())


def _get_ready() -> apsw.Connection:
    """Do, before there is a job, what any job needs."""
    prepare()
    return connect()


def _serve(device: socket.socket, connection: apsw.Connection) -> None:
    head, _ = receive_frame(device)
    job = decode_job(head)
    encoding, size = receive_frame(device, max_head=MAX_ENCODING_BYTES, max_body=MAX_BODY_BYTES)
    confine(seconds=job.seconds, memory=_MEMORY_BYTES + 4 * size)
    if job.selection is None:
        outcome = explain(connection, job, receive(device, size))
        tree = {"refused": outcome} if isinstance(outcome, str) else {"columns": outcome}
        send_frame(device, json.dumps(tree).encode())
    else:
        # Before there is any data, so that it takes the same time whatever the data.
        encoder = Encoder.parse(encoding)
        device.sendall(ANSWER.pack(choose(connection, job, encoder, receive(device, size))))
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
