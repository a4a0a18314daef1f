"""One process that keeps a local deployment running: servers, console, and the simulated fleet.

Of one folder one supervisor runs at a time: it holds a lock, beside which it writes its process id.
A server that ends is started again, after a pause. SIGTERM and SIGINT stop everything in order.
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

__all__ = ["Supervisor", "is_ready", "running_pid", "stop_running"]

_LOCK: Final = "lock"
_READY: Final = "ready"
_LOOK: Final = 0.5
_PAUSE: Final = 3.0


def running_pid(deployment: Deployment) -> int | None:
    """The supervisor's process id, if one runs; whoever holds the lock is alive."""
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
    """Whether everything of a running deployment came up."""
    return (deployment.folder / "run" / _READY).exists()


def stop_running(deployment: Deployment, *, patience: float = 90.0) -> bool:
    """Stop the supervisor and all its processes; False if none runs."""
    pid = running_pid(deployment)
    if pid is None:
        return False
    if pid == 0:
        raise ServiceError("it is just being started, or the lock file is damaged: try again")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while running_pid(deployment) is not None:
        if time.monotonic() > deadline:
            raise ServiceError(
                f"process {pid} does not end within {patience:g} s; see {deployment.log('up')}"
            )
        time.sleep(0.1)
    return True


@dataclass(kw_only=True)
class Supervisor:
    """Runs a deployment until it is told to stop."""

    deployment: Deployment
    fleet: int = 0
    """Simulated devices; 0 for none."""
    tell: Callable[[str], None] = print

    def run(self) -> None:
        """Start everything, keep it running, stop it in order."""
        stop = threading.Event()
        with self._alone(), _signals(stop):
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
                self.tell("stopped")

    def _start(self, servers: list[Server], stop: threading.Event) -> None:
        for server in servers:
            server.start()
        for server in servers:
            if not stop.is_set():
                self.deployment.await_health(server.name, server)
                self.tell(f"{server.name} runs")
        if not stop.is_set():
            self.deployment.await_checkpoint(servers)

    def _watch(self, servers: list[Server], stop: threading.Event) -> None:
        again: dict[str, float] = {}
        while not stop.wait(_LOOK):
            for server in servers:
                if server.alive:
                    continue
                now = time.monotonic()
                if server.name not in again:
                    again[server.name] = now + _PAUSE
                    self.tell(f"{server.name} ended: {server.last_words()}")
                elif now >= again[server.name]:
                    del again[server.name]
                    # What the first start was told (`--create`) is not told again.
                    fresh = {each.name: each for each in self.deployment.servers()}
                    server.arguments = fresh.get(server.name, server).arguments
                    server.start()
                    self.tell(f"{server.name} was started again")

    def _fleet(self) -> Server:
        arguments = ("fleet", str(self.deployment.folder), "--devices", str(self.fleet))
        return Server(name="fleet", arguments=arguments, log=self.deployment.log("fleet"))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        path = self.deployment.folder / "run" / _LOCK
        file: IO[str] = path.open("a+", encoding="ascii")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInput(
                    f"{self.deployment.folder} runs already; `chorister down` stops it"
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
