"""The device's side: hands queries to sandboxes, and ends what takes too long."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, TypeAlias

from chorister.clock import uptime
from chorister.closing import Closing
from chorister.device.sandbox.functions import known_functions
from chorister.device.sandbox.processes import Processes, start_processes
from chorister.device.sandbox.wire import (
    MAX_BODY_BYTES,
    MAX_ENCODING_BYTES,
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
_Compiled: TypeAlias = tuple[str, bytes, tuple[str, ...]]
"""What a query's columns depend on: the query, the empty tables, and the functions."""


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
        self._compiled: dict[_Compiled, ResultColumns] = {}
        self._zygote: Processes = start_processes(until=None)
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
        with self.compiling(query, snapshot, functions=functions) as columns:
            return columns()

    @contextmanager
    def compiling(
        self, query: str, snapshot: Snapshot, *, functions: Collection[str]
    ) -> Iterator[Callable[[], ResultColumns]]:
        """Compile a query in its process while this one goes on; call what is provided to wait."""
        if self._untried:
            self._try()
        until = uptime() + _COMPILE_SECONDS
        job = _job(query, snapshot, functions, None, until)
        known = (query, snapshot.image, job.functions)
        with self._lock:
            columns = self._compiled.get(known)
        if columns is not None:
            yield lambda: columns
            return
        with ExitStack() as stack:
            peer = None
            with suppress(OSError, EOFError, DecodeError):
                peer = stack.enter_context(self._process(until))
                _send_job(peer, job, b"", snapshot.image, until)
            yield lambda: self._receive_columns(known, peer, until)

    def _receive_columns(
        self, known: _Compiled, peer: socket.socket | None, until: float
    ) -> ResultColumns:
        outcome: object = {"refused": "it takes too much time or memory to compile"}
        with suppress(OSError, EOFError, DecodeError, ValueError, RecursionError):
            if peer is not None:
                outcome = json.loads(receive_frame(peer, until=until)[0])
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
            self._zygote = start_processes(until)

    @contextmanager
    def _process(self, until: float) -> Iterator[socket.socket]:
        """Provide the socket to a new sandbox process, which is killed at the end."""
        for timeout in waits(until):
            if self._lock.acquire(timeout=timeout):
                break
        try:
            self._restart_if_lost(until)
            zygote = self._zygote
            process, peer = zygote.start(until)
        finally:
            self._lock.release()
        with peer:
            try:
                yield peer
            finally:
                # If the zygote is gone, so is the sandbox.
                with suppress(OSError):
                    zygote.end(process)


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
    job = job._replace(seconds=until - uptime())
    send_frame(peer, encode_job(job), until=until)
    send_frame(peer, encoding, image, until=until)
