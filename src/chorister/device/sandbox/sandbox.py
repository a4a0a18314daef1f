"""The device's side: start the zygote, hand queries over, kill what takes too long."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from chorister.closing import Closing
from chorister.device.sandbox.functions import known_functions
from chorister.device.sandbox.wire import (
    LAST,
    MAX_ANSWER_BYTES,
    MAX_BODY_BYTES,
    MAX_COLUMNS,
    Job,
    Result,
    Value,
    encode_job,
    receive,
    receive_frame,
    send_frame,
)
from chorister.device.sandbox.zygote import COMMAND, END, RUN
from chorister.device.store import Snapshot
from chorister.errors import (
    DecodeError,
    InvalidInput,
    QueryRefused,
    SandboxFailed,
    SandboxUnavailable,
)

__all__ = ["Answer", "Sandbox"]

_BOOT: Final = Path(__file__).with_name("boot.py")
_START_SECONDS: Final = 60.0
_COMPILE_SECONDS: Final = 10.0
_EMPTY: Final = Snapshot.empty({"t": {"a": "text"}})
_TRIAL: Final = "SELECT word, position FROM words('It works!') LEFT JOIN t"
_MAX_COMPILED: Final = 64
_INNER_SHARE: Final = 0.9  # of the deadline is the query's; then SQLite stops it, then we kill


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A query's result."""

    names: tuple[str, ...]
    values: tuple[list[Value], ...]  # column by column

    @property
    def columns(self) -> dict[str, list[Value]]:
        """The columns by name, as `Encoding.find` takes them; of two with one name, the first."""
        return dict(zip(reversed(self.names), reversed(self.values), strict=True))

    @property
    def rows(self) -> list[tuple[Value, ...]]:
        """The rows."""
        return list(zip(*self.values, strict=True))


class Sandbox(Closing):
    """Runs queries, each in a process of its own. Threads may share one.

    Start it early: it takes a fraction of a second, a query then about two milliseconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Queries that compiled: a recipe is listed for days, and many devices may share a sandbox.
        self._compiled: dict[tuple[str, bytes, tuple[str, ...]], tuple[str, ...]] = {}
        self._zygote = _Zygote()
        # A sandbox that always fails would turn every charge into an OOV: found out now.
        try:
            words = self.run(_TRIAL, _EMPTY, functions=["words"], deadline=_START_SECONDS).rows
        except SandboxFailed:
            words = []
        if words != [("it", 0), ("works", 1)]:
            self.close()
            raise SandboxUnavailable("a query that should be answered is not")

    def close(self) -> None:
        """End the zygote, and with it everything that still runs."""
        with self._lock:
            self._zygote.close()

    def weaknesses(self) -> tuple[str, ...]:
        """What this system did not let us take away from a query, in words; empty is best."""
        return self._zygote.weaknesses

    def run(
        self,
        query: str,
        snapshot: Snapshot,
        *,
        functions: Collection[str],
        deadline: float,
        columns: Sequence[str] | None = None,
    ) -> Answer:
        """The query's result on the snapshot, within `deadline` seconds.

        Of its columns only the named ones come back, the first of each name; all if None.
        Raises `SandboxFailed`, always the same, whatever went wrong.
        """
        job = _job(query, snapshot, functions, deadline, columns=columns)
        answer = None
        with suppress(OSError, EOFError, DecodeError, MemoryError, SandboxUnavailable):
            answer = self._answer(job, snapshot.image, time.monotonic() + deadline)
        if answer is None:
            # Raised out here, it has neither cause nor context: both may depend on the data.
            raise SandboxFailed
        return answer

    def _answer(self, job: Job, image: bytes, until: float) -> Answer:
        if len(image) > MAX_BODY_BYTES:
            raise DecodeError("more data than a sandbox takes")
        with self._process() as peer:
            peer.settimeout(max(until - time.monotonic(), 1e-6))
            send_frame(peer, encode_job(job), image)
            head, _ = receive_frame(peer, max_body=0, until=until)
            result, room = Result(head), MAX_ANSWER_BYTES
            if job.columns is not None and result.names != job.columns:
                raise DecodeError("the sandbox's answer has other columns than were asked for")
            while True:
                head, size = receive_frame(peer, max_body=room, until=until)
                if head == LAST:
                    return Answer(names=result.names, values=tuple(result.columns))
                room -= len(head) + size
                if room < 0:
                    raise DecodeError("the sandbox's answer is too long")
                result.add(head, receive(peer, size, until))

    def compile(
        self, query: str, snapshot: Snapshot, *, functions: Collection[str]
    ) -> tuple[str, ...]:
        """The names of the query's columns, found on tables without rows (`Snapshot.empty`).

        Raises `QueryRefused` with SQLite's words: nothing that they could depend on is here.
        """
        job = _job(query, snapshot, functions, _COMPILE_SECONDS, compile_only=True)
        known = (query, snapshot.image, job.functions)
        with self._lock:
            if known in self._compiled:
                return self._compiled[known]
        until = time.monotonic() + _COMPILE_SECONDS
        outcome: object = None
        try:
            with self._process() as peer:
                peer.settimeout(_COMPILE_SECONDS)
                send_frame(peer, encode_job(job), snapshot.image)
                head, _ = receive_frame(peer, max_body=0, until=until)
                outcome = json.loads(head)
        except (OSError, EOFError, DecodeError, ValueError, RecursionError):
            outcome = {"refused": "it takes too much time or memory to be read"}
        match outcome:
            case {"names": [*names]} if all(isinstance(name, str) for name in names):
                with self._lock:
                    while len(self._compiled) >= _MAX_COMPILED:
                        del self._compiled[next(iter(self._compiled))]
                    self._compiled[known] = tuple(names)
                return tuple(names)
            case {"refused": str(why)}:
                raise QueryRefused(check="query", why=why[:500], field="query")
        raise QueryRefused(check="query", why="it makes the sandbox fail", field="query")

    @contextmanager
    def _process(self) -> Iterator[socket.socket]:
        """The socket to a new sandbox, which is killed at the end."""
        with self._lock:
            if self._zygote.is_lost():
                # It was killed for lack of memory, say; or this is a fork of the host app, and
                # must not speak over the other's socket.
                self._zygote.close()
                self._zygote = _Zygote()
            zygote = self._zygote
            process, peer = zygote.fork()
        with peer:
            try:
                yield peer
            finally:
                # If the zygote is gone, so is the sandbox.
                with suppress(OSError), self._lock:
                    zygote.end(process)


class _Zygote:
    """The zygote's process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                path = [str(Path(entry).absolute()) for entry in sys.path]
                process = subprocess.Popen(  # noqa: S603 (this interpreter, our own script)
                    [
                        *(sys.executable, "-I", "-S", "-X", "utf8", str(_BOOT)),
                        *(str(theirs.fileno()), *path),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # Neither where the person is nor what the app keeps in its environment.
                    env={"TZ": "UTC0"},
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise SandboxUnavailable(str(error.strerror)) from None
        self._owner = os.getpid()
        self._socket = ours
        self._process = process
        self._finalizer = weakref.finalize(self, _end, ours, process, self._owner)
        try:
            head, _ = receive_frame(ours, max_body=0, until=time.monotonic() + _START_SECONDS)
            tree: Mapping[str, Any] = json.loads(head)
            self.weaknesses = tuple(map(str, tree["weaknesses"]))
        except (OSError, EOFError, DecodeError, ValueError, KeyError):
            self._finalizer()
            raise SandboxUnavailable("its process did not start") from None
        ours.settimeout(_START_SECONDS)

    def is_lost(self) -> bool:
        """Whether it ended, or belongs to the process that this one was forked from."""
        return os.getpid() != self._owner or self._process.poll() is not None

    def fork(self) -> tuple[int, socket.socket]:
        """A new sandbox: its process' id and the socket to it."""
        self._socket.sendall(COMMAND.pack(RUN, 0))
        message, sockets, _, _ = socket.recv_fds(self._socket, COMMAND.size, 1)
        if len(message) != COMMAND.size or len(sockets) != 1:
            raise EOFError("the zygote is gone")
        os.set_inheritable(sockets[0], False)
        _, process = COMMAND.unpack(message)
        return process, socket.socket(fileno=sockets[0])

    def end(self, process: int) -> None:
        """Kill a sandbox. Nobody waits for that: the zygote does it before anything else."""
        self._socket.sendall(COMMAND.pack(END, process))

    def close(self) -> None:
        self._finalizer()


def _end(peer: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    peer.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _job(
    query: str,
    snapshot: Snapshot,
    functions: Collection[str],
    seconds: float,
    *,
    columns: Sequence[str] | None = None,
    compile_only: bool = False,
) -> Job:
    unknown = set(functions) - known_functions()
    if unknown:
        raise InvalidInput(f"the sandbox has no function {min(unknown)}")
    if columns is not None and not 1 <= len(columns) <= MAX_COLUMNS:
        raise InvalidInput(f"a query's answer has 1 to {MAX_COLUMNS} columns")
    if not 0 < seconds <= 3600:
        raise InvalidInput(f"a deadline is above 0 and at most 3600 seconds, not {seconds}")
    return Job(
        query=query,
        tables=tuple(snapshot.tables),
        functions=tuple(sorted(functions)),
        columns=None if columns is None else tuple(columns),
        seconds=seconds * _INNER_SHARE,
        compile_only=compile_only,
    )
