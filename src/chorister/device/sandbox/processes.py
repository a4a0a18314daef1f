"""The processes of sandboxes, seen from the device: how they start, and that they end.

A zygote forks them. Where nothing can be forked, each is an interpreter of its own, started ahead
of time so that nobody waits for it. Either way, a process runs one query and is then killed, at its
deadline at the latest.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from chorister.device.sandbox import confinement
from chorister.device.sandbox.wire import COMMAND, END, RUN, TRY, receive_frame, waits
from chorister.errors import DecodeError, SandboxUnavailable

_BOOT: Final = Path(__file__).with_name("boot.py")


class Processes(Protocol):
    """Starts one sandbox after the other."""

    def greet(self, until: float) -> tuple[str, ...]:
        """Wait until it has started; return which protections its sandboxes lack."""
        ...

    def is_lost(self) -> bool:
        """Return whether it ended, or belongs to the process that this one was forked from."""
        ...

    def start(self, until: float) -> tuple[int, socket.socket]:
        """Start a sandbox; return its process id and the socket to it."""
        ...

    def end(self, process: int) -> None:
        """Kill a sandbox, without waiting."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


def start_processes(until: float | None) -> Processes:
    """Start what this system supports. Waits for its greeting, unless `until` is None."""
    return (Zygote if confinement.FORK in confinement.FACILITIES else Interpreters)(until)


class Zygote:
    """The zygote's process and the socket to it. Waits for its greeting, unless `until` is None."""

    def __init__(self, until: float | None) -> None:
        self._process, self._socket = _start_interpreter(confinement.FACILITIES)
        self._owner = os.getpid()
        self._sending = threading.Lock()
        self._greeting = threading.Lock()
        self._weaknesses: tuple[str, ...] | None = None
        self._finalizer = weakref.finalize(self, _end, self._socket, self._process, self._owner)
        if until is not None:
            self.greet(until)

    def greet(self, until: float) -> tuple[str, ...]:
        """Wait until it has started; return which protections its sandboxes lack."""
        with self._greeting:
            if self._weaknesses is None:
                try:
                    self._weaknesses = _receive_greeting(self._socket, until)
                except SandboxUnavailable:
                    self.close()
                    raise
            return self._weaknesses

    def is_lost(self) -> bool:
        """Return whether it ended, or belongs to the process that this one was forked from."""
        return os.getpid() != self._owner or self._process.poll() is not None

    def start(self, until: float) -> tuple[int, socket.socket]:
        """Have a sandbox forked; return its process id and the socket to it."""
        self.greet(until)
        try:
            self._send(RUN, 0)
            for timeout in waits(until):
                self._socket.settimeout(timeout)
                with suppress(TimeoutError):
                    message, sockets, _, _ = socket.recv_fds(self._socket, COMMAND.size, 1)
                    break
        except OSError:
            # Stopped, stuck or gone. A late answer would be taken for the next one's, so this
            # zygote ends, and the next query starts another.
            self.close()
            raise
        if len(message) != COMMAND.size or len(sockets) != 1:
            self.close()
            raise EOFError("the zygote is gone")
        os.set_inheritable(sockets[0], False)
        return COMMAND.unpack(message)[1], socket.socket(fileno=sockets[0])

    def end(self, process: int) -> None:
        """Kill a sandbox, without waiting: the zygote does it before anything else."""
        self._send(END, process)

    def close(self) -> None:
        with self._sending:
            self._finalizer()

    def _send(self, command: bytes, process: int) -> None:
        # Straight to the descriptor, which does not block, because the socket has a timeout. If
        # there is no room for five bytes, nobody reads them.
        with self._sending:
            os.write(self._socket.fileno(), COMMAND.pack(command, process))


def _end(peer: socket.socket | None, process: subprocess.Popen[bytes], owner: int) -> None:
    if peer is not None:
        peer.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # the parent's: there is nothing to warn about when this one exits


class Interpreters:
    """One interpreter for each sandbox; a spare one waits for the next query."""

    def __init__(self, until: float | None) -> None:
        self._owner = os.getpid()
        self._facilities = confinement.FACILITIES
        self._lock = threading.Lock()
        self._greeting = threading.Lock()
        self._weaknesses: tuple[str, ...] | None = None
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._spare = [_start_interpreter(self._facilities)]  # one, or none
        self._finalizer = weakref.finalize(self, _end_all, self._spare, self._running, self._owner)
        if until is not None:
            self.greet(until)

    def greet(self, until: float) -> tuple[str, ...]:
        """Let one interpreter confine itself; return which protections it lacks."""
        with self._greeting:
            if self._weaknesses is None:
                with self._lock:
                    process, peer = self._take()
                try:
                    peer.sendall(COMMAND.pack(TRY, 0))
                    self._weaknesses = _receive_greeting(peer, until)
                except OSError:
                    raise SandboxUnavailable("its process did not start") from None
                finally:
                    _end(peer, process, self._owner)
            return self._weaknesses

    def is_lost(self) -> bool:
        """Return whether it was closed, or belongs to the process that this one was forked from."""
        return os.getpid() != self._owner or not self._finalizer.alive

    def start(self, until: float) -> tuple[int, socket.socket]:
        """Give the spare interpreter a job, and start the next one."""
        self.greet(until)
        with self._lock:
            process, peer = self._take()
            self._running[process.pid] = process
            self._spare.append(_start_interpreter(self._facilities))
        try:
            peer.sendall(COMMAND.pack(RUN, 0))
        except OSError:
            peer.close()
            self.end(process.pid)
            raise
        return process.pid, peer

    def end(self, process: int) -> None:
        """Kill a sandbox, without waiting: its memory, and so its end, may depend on the data."""
        with self._lock:
            if found := self._running.get(process):
                found.kill()
            ended = [number for number, each in self._running.items() if each.poll() is not None]
            for number in ended:
                del self._running[number]

    def close(self) -> None:
        with self._lock:
            self._finalizer()

    def _take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return the spare interpreter, or a new one if it has ended."""
        while self._spare:
            process, peer = self._spare.pop()
            if process.poll() is None:
                return process, peer
            peer.close()
        return _start_interpreter(self._facilities)


def _end_all(
    spare: list[tuple[subprocess.Popen[bytes], socket.socket]],
    running: dict[int, subprocess.Popen[bytes]],
    owner: int,
) -> None:
    for process, peer in spare:
        _end(peer, process, owner)
    for process in running.values():
        _end(None, process, owner)


def _start_interpreter(
    facilities: frozenset[str],
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `boot.py`; return the process and the socket to it."""
    ours, theirs = socket.socketpair()
    path = [str(Path(entry).absolute()) for entry in sys.path]
    command = [
        # Isolated, also from PYTHONHASHSEED: its tables rely on a random one.
        *(sys.executable, "-I", "-S", "-X", "utf8", str(_BOOT)),
        *(str(theirs.fileno()), " ".join(sorted(facilities)), *path),
    ]
    # It must not learn where the person is, or what is in the app's environment.
    environment = {"TZ": "UTC0"}
    with theirs:
        try:
            if sys.platform == "win32":
                # The socket is shared with one process; Windows' sockets need this variable.
                environment["SYSTEMROOT"] = os.environ.get("SYSTEMROOT", "")
                process = subprocess.Popen(  # noqa: S603 (this interpreter, our own script)
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    creationflags=subprocess.CREATE_NO_WINDOW,
                )
                process.stdin.write(theirs.share(process.pid))
                process.stdin.close()
            else:
                process = subprocess.Popen(  # noqa: S603 (this interpreter, our own script)
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise SandboxUnavailable(str(error.strerror)) from None
    return process, ours


def _receive_greeting(peer: socket.socket, until: float) -> tuple[str, ...]:
    try:
        head, _ = receive_frame(peer, until=until)
        return tuple(map(str, json.loads(head)["weaknesses"]))
    except (OSError, EOFError, DecodeError, ValueError, KeyError, TypeError):
        raise SandboxUnavailable("its process did not start") from None
