"""The process that keeps a local deployment running: servers, console and simulated devices.

Each folder has at most one supervisor: it holds a lock file with its process id. A server that ends
is restarted after a pause. SIGTERM and SIGINT stop everything in order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Final

from chorister.errors import InvalidInput, ServiceError
from chorister.fleet.deployment import Deployment, Server

_LOCK: Final = "lock"
_READY: Final = "ready"
_POLL_SECONDS: Final = 0.5
_RESTART_SECONDS: Final = 3.0
_STOP_TIMEOUT_SECONDS: Final = 90.0


def running_pid(deployment: Deployment) -> int | None:
    """The process id of the supervisor, or None if none holds the lock."""
    try:
        file = (deployment.folder / "run" / _LOCK).open("r", encoding="ascii")
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = file.read(20).strip()
            return int(text) if text.isdigit() else 0
    return None


def is_ready(deployment: Deployment) -> bool:
    """Whether all processes of a running deployment have started."""
    return (deployment.folder / "run" / _READY).exists()


def stop_running(deployment: Deployment) -> bool:
    """Stop the supervisor and all its processes. Returns False if none is running."""
    pid = running_pid(deployment)
    if pid is None:
        return False
    if pid == 0:
        raise ServiceError("it is just starting, or the lock file is damaged: try again")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
    while running_pid(deployment) is not None:
        if time.monotonic() > deadline:
            raise ServiceError(
                f"process {pid} did not stop within {_STOP_TIMEOUT_SECONDS:g} s; "
                f"see {deployment.log('up')}"
            )
        time.sleep(0.1)
    return True


@dataclass(kw_only=True)
class Supervisor:
    """Runs a deployment until told to stop."""

    deployment: Deployment
    fleet: int = 0
    """The number of simulated devices."""
    say: Callable[[str], None] = print

    def run(self) -> None:
        """Start everything, keep it running, stop it in order."""
        stop = threading.Event()
        with self._locked(), _signals(stop):
            ready = self.deployment.folder / "run" / _READY
            servers = [*self.deployment.servers(), self.deployment.console()]
            if self.fleet:
                self.deployment.expect_devices(self.fleet)  # before the console reads it
            try:
                self._start(servers, stop)
                if self.fleet and not stop.is_set():
                    servers.append(self._fleet())
                    servers[-1].start()
                if not stop.is_set():
                    ready.touch(mode=0o600)
                self._watch(servers, stop)
            finally:
                ready.unlink(missing_ok=True)
                for server in reversed(servers):
                    server.stop()
                self.say("stopped")

    def _start(self, servers: list[Server], stop: threading.Event) -> None:
        for server in servers:
            server.start()
        for server in servers:
            if not stop.is_set():
                self.deployment.await_health(server.name, server)
                self.say(f"{server.name} is running")
        if not stop.is_set():
            self.deployment.await_checkpoint(servers)

    def _watch(self, servers: list[Server], stop: threading.Event) -> None:
        again: dict[str, float] = {}
        while not stop.wait(_POLL_SECONDS):
            for server in servers:
                if server.alive:
                    continue
                now = time.monotonic()
                if server.name not in again:
                    again[server.name] = now + _RESTART_SECONDS
                    self.say(f"{server.name} ended: {server.last_line()}")
                elif now >= again[server.name]:
                    del again[server.name]
                    # Options of the very first start, such as `--create`, are not repeated.
                    fresh = {each.name: each for each in self.deployment.servers()}
                    server.arguments = fresh.get(server.name, server).arguments
                    server.start()
                    self.say(f"{server.name} was restarted")

    def _fleet(self) -> Server:
        arguments = ("fleet", str(self.deployment.folder), "--devices", str(self.fleet))
        return Server(name="fleet", arguments=arguments, log=self.deployment.log("fleet"))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.deployment.folder / "run" / _LOCK
        file: IO[str] = path.open("a+", encoding="ascii")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInput(
                    f"{self.deployment.folder} is already running; `chorister down` stops it"
                ) from None
            file.seek(0)
            file.truncate()
            file.write(f"{os.getpid()}\n")
            file.flush()
            (path.parent / _READY).unlink(missing_ok=True)
            yield


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    before = {
        number: signal.signal(number, lambda _number, _frame: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
