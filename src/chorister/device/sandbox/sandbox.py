"""The device's side: starts the zygote, hands queries over, kills what takes too long."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from chorister.clock import uptime
from chorister.closing import Closing
from chorister.device.sandbox.functions import known_functions
from chorister.device.sandbox.wire import (
    COMMAND,
    END,
    MAX_BODY_BYTES,
    MAX_ENCODING_BYTES,
    RUN,
    Job,
    encode_job,
    receive_answer,
    receive_frame,
    send_frame,
    waits,
)
from chorister.device.schema import FieldType
from chorister.device.store import Snapshot
from chorister.encoding import Encoding, Selection
from chorister.errors import (
    DecodeError,
    InvalidInput,
    QueryRefused,
    SandboxFailed,
    SandboxUnavailable,
)

_BOOT: Final = Path(__file__).with_name("boot.py")
_START_SECONDS: Final = 60.0
_COMPILE_SECONDS: Final = 10.0
_MAX_SECONDS: Final = 3600.0
_TRIAL: Final = "SELECT word FROM words('Works!') LEFT JOIN t"
# A prefix tree whose only word is "works", in canonical form: an app need not wait for its model.
TRIAL_ENCODING: Final = (
    b'{"deny":[],"features":[{"column":"word","kind":"prefix_tree","prefixes":[""],'
    b'"tokenisation":1,"vocabulary":["works"]}]}'
)
TRIAL_BINS: Final = 4
TRIAL_BIN: Final = 3
_MAX_COMPILED: Final = 64
_TYPES: Final[Mapping[str, FieldType]] = {"integer": "integer", "real": "real", "text": "text"}

ResultColumns: TypeAlias = tuple[tuple[str, FieldType | None], ...]
"""The columns of a query's result: each a name, and a field's type or None if it is computed."""


class Sandbox(Closing):
    """Runs queries, each in its own process. Threads may share one sandbox.

    Start it early: that takes a fraction of a second, and a query then about two milliseconds. With
    `wait=False` the constructor returns meanwhile, and the first query waits.
    """

    _untried = False

    def __init__(self, *, wait: bool = True) -> None:
        self._lock = threading.Lock()
        self._untried = True
        # Queries that compile: a recipe is listed for days, and many devices may share a sandbox.
        self._compiled: dict[tuple[str, bytes, tuple[str, ...]], ResultColumns] = {}
        self._zygote = _Zygote(until=None)
        if wait:
            self._try()

    def _try(self) -> None:
        """Run a test query: a sandbox that always fails would turn every charge into an OOV."""
        until = uptime() + _START_SECONDS
        try:
            with self._lock:
                self._restart_if_lost(until)
            self._zygote.greet(until)
            snapshot = Snapshot.empty({"t": {"a": "text"}})
            job = _job(_TRIAL, snapshot, ["words"], "first", until)
            found = self._choose(job, snapshot, TRIAL_ENCODING, TRIAL_BINS, until)
        except SandboxFailed:
            found = 0
        if found != TRIAL_BIN:
            self.close()
            raise SandboxUnavailable("it does not answer a test query")
        self._untried = False

    def close(self) -> None:
        """End the zygote and all running queries."""
        with self._lock:
            self._zygote.close()

    def weaknesses(self) -> tuple[str, ...]:
        """Return, in words, the protections that this system does not support; empty is best."""
        return self._zygote.greet(uptime() + _START_SECONDS)

    def choose(
        self,
        query: str,
        snapshot: Snapshot,
        *,
        functions: Collection[str],
        encoding: Encoding,
        selection: Selection,
        until: float,
    ) -> int:
        """Return the bin to report, from the rows that the query returns on the snapshot.

        Everything that touches data happens in the sandbox's process. This one learns only the bin,
        before `chorister.clock.uptime` reaches `until`. Raises `SandboxFailed`, always the same
        error, whatever went wrong.
        """
        job = _job(query, snapshot, functions, selection, until)
        return self._choose(job, snapshot, encoding.canonical, encoding.size, until)

    def _choose(
        self, job: Job, snapshot: Snapshot, encoding: bytes, bins: int, until: float
    ) -> int:
        found = None
        with (
            suppress(OSError, EOFError, DecodeError, MemoryError, SandboxUnavailable),
            self._process(until) as peer,
        ):
            _send_job(peer, job, encoding, snapshot.image, until)
            found = receive_answer(peer, bins=bins, until=until)
        if found is None:
            # Raised here, it has neither cause nor context: both may depend on the data.
            raise SandboxFailed
        return found

    def compile(
        self, query: str, snapshot: Snapshot, *, functions: Collection[str]
    ) -> tuple[str, ...]:
        """Return the names of the query's columns, compiled on empty tables (`Snapshot.empty`).

        Raises `QueryRefused` with SQLite's message, which can't depend on data here.
        """
        return tuple(name for name, _ in self.columns(query, snapshot, functions=functions))

    def columns(
        self, query: str, snapshot: Snapshot, *, functions: Collection[str]
    ) -> ResultColumns:
        """Return the same with the type of each column, where it is that of a declared field."""
        if self._untried:
            self._try()
        until = uptime() + _COMPILE_SECONDS
        job = _job(query, snapshot, functions, None, until)
        known = (query, snapshot.image, job.functions)
        with self._lock:
            if known in self._compiled:
                return self._compiled[known]
        outcome: object = None
        try:
            with self._process(until) as peer:
                _send_job(peer, job, b"", snapshot.image, until)
                head, _ = receive_frame(peer, until=until)
                outcome = json.loads(head)
        except (OSError, EOFError, DecodeError, ValueError, RecursionError):
            outcome = {"refused": "it takes too much time or memory to compile"}
        match outcome:
            case {"columns": [*found]}:
                columns = tuple(_column(each) for each in found)
                with self._lock:
                    while len(self._compiled) >= _MAX_COMPILED:
                        del self._compiled[next(iter(self._compiled))]
                    self._compiled[known] = columns
                return columns
            case {"refused": str(why)}:
                raise QueryRefused(check="query", why=why[:500], field="query")
        raise QueryRefused(check="query", why="it makes the sandbox fail", field="query")

    def revive(self) -> None:
        """Restart a lost zygote, and wait for a new one, before it is needed."""
        with self._lock:
            self._restart_if_lost(uptime() + _START_SECONDS)
        if self._untried:
            self._try()

    def _restart_if_lost(self, until: float) -> None:
        if self._zygote.is_lost():
            # It was killed for lack of memory, for example; or this is a fork of the host app,
            # which must not use the other process' socket.
            self._zygote.close()
            self._zygote = _Zygote(until)

    @contextmanager
    def _process(self, until: float) -> Iterator[socket.socket]:
        """Provide the socket to a new sandbox process, which is killed at the end."""
        for timeout in waits(until):
            if self._lock.acquire(timeout=timeout):
                break
        try:
            self._restart_if_lost(until)
            zygote = self._zygote
            process, peer = zygote.fork(until)
        finally:
            self._lock.release()
        with peer:
            try:
                yield peer
            finally:
                # If the zygote is gone, so is the sandbox.
                with suppress(OSError):
                    zygote.end(process)


class _Zygote:
    """The zygote's process and the socket to it. Waits for its greeting, unless `until` is None."""

    def __init__(self, until: float | None) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                path = [str(Path(entry).absolute()) for entry in sys.path]
                process = subprocess.Popen(  # noqa: S603 (this interpreter, our own script)
                    [
                        # Isolated, also from PYTHONHASHSEED: its tables rely on a random one.
                        *(sys.executable, "-I", "-S", "-X", "utf8", str(_BOOT)),
                        *(str(theirs.fileno()), *path),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # It must not learn where the person is, or what is in the app's environment.
                    env={"TZ": "UTC0"},
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise SandboxUnavailable(str(error.strerror)) from None
        self._owner = os.getpid()
        self._socket = ours
        self._sending = threading.Lock()
        self._greeting = threading.Lock()
        self._weaknesses: tuple[str, ...] | None = None
        self._process = process
        self._finalizer = weakref.finalize(self, _end, ours, process, self._owner)
        if until is not None:
            self.greet(until)

    def greet(self, until: float) -> tuple[str, ...]:
        """Wait until it has started; return which protections its sandboxes lack."""
        with self._greeting:
            if self._weaknesses is None:
                try:
                    head, _ = receive_frame(self._socket, until=until)
                    tree: Mapping[str, Any] = json.loads(head)
                    self._weaknesses = tuple(map(str, tree["weaknesses"]))
                except (OSError, EOFError, DecodeError, ValueError, KeyError):
                    self.close()
                    raise SandboxUnavailable("its process did not start") from None
            return self._weaknesses

    def is_lost(self) -> bool:
        """Return whether it ended, or belongs to the process that this one was forked from."""
        return os.getpid() != self._owner or self._process.poll() is not None

    def fork(self, until: float) -> tuple[int, socket.socket]:
        """Fork a sandbox; return its process id and the socket to it."""
        self.greet(until)
        try:
            self._tell(RUN, 0)
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
        self._tell(END, process)

    def close(self) -> None:
        with self._sending:
            self._finalizer()

    def _tell(self, command: bytes, process: int) -> None:
        # Straight to the descriptor, which does not block, because the socket has a timeout. If
        # there is no room for five bytes, nobody reads them.
        with self._sending:
            os.write(self._socket.fileno(), COMMAND.pack(command, process))


def _end(peer: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    peer.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # the parent's: there is nothing to warn about when this one exits


def _column(found: object) -> tuple[str, FieldType | None]:
    match found:
        case [str(name), None]:
            return name, None
        case [str(name), str(declared)]:
            return name, _TYPES.get(declared.lower())
    raise QueryRefused(check="query", why="it makes the sandbox fail", field="query")


def _job(
    query: str,
    snapshot: Snapshot,
    functions: Collection[str],
    selection: Selection | None,
    until: float,
) -> Job:
    unknown = set(functions) - known_functions()
    if unknown:
        raise InvalidInput(f"the sandbox has no function {min(unknown)}")
    seconds = until - uptime()
    if not seconds <= _MAX_SECONDS:
        raise InvalidInput(f"a deadline must be at most {_MAX_SECONDS:g} s of uptime() away")
    return Job(
        query=query,
        tables=tuple(snapshot.tables),
        functions=tuple(sorted(functions)),
        seconds=seconds,
        selection=selection,
    )


def _send_job(peer: socket.socket, job: Job, encoding: bytes, image: bytes, until: float) -> None:
    if len(encoding) > MAX_ENCODING_BYTES or len(image) > MAX_BODY_BYTES:
        raise DecodeError("more than a sandbox accepts")
    # The time that is left now: getting here may have taken a while.
    job = replace(job, seconds=until - uptime())
    send_frame(peer, encode_job(job), until=until)
    send_frame(peer, encoding, image, until=until)
