"""`chorister serve` as real processes, with their files in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from chorister.transparency.client import RegistryClient
from tests.aggregator.operators import Operators

COMMAND = [sys.executable, "-c", "from chorister.cli import app; app()"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200", **more}


@contextlib.contextmanager
def process(
    role: str, settings: Path, log: Path, *options: str, **more: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address once it listens; what it logs goes into a file."""
    with log.open("a") as stderr:
        server = subprocess.Popen(
            [*COMMAND, "serve", role, "--config", str(settings), *options],
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            assert server.stdout is not None
            found = re.search(r"https?://\S+$", server.stdout.readline().strip())
            if found is None:
                server.wait(10)
                raise AssertionError(log.read_text())
            yield found[0], server
        finally:
            if server.poll() is None:
                server.kill()
            server.communicate(timeout=10)


def stop(server: subprocess.Popen[str]) -> int:
    """End it as an operator would."""
    server.send_signal(signal.SIGTERM)
    return server.wait(40)


class ServerProcesses:
    """A registry, a leader and a helper, each a process with a database of its own."""

    def __init__(self, operators: Operators, stack: contextlib.ExitStack) -> None:
        self.operators = operators
        self._stack = stack
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.begin("registry", "--create", "--port", str(urlsplit(operators.at.registry).port))
        self.begin("leader", "--begin-log")
        self.begin("helper", "--begin-log")

    def log(self, role: str) -> Path:
        return self.operators.folder / f"{role}.log"

    def begin(self, role: str, *options: str) -> None:
        settings = self.operators.settings(role)
        serving = process(role, settings, self.log(role), *options)
        _, self.running[role] = self._stack.enter_context(serving)

    def registry(self) -> RegistryClient:
        return RegistryClient(self.operators.at.registry)


@contextlib.contextmanager
def server_processes(operators: Operators) -> Iterator[ServerProcesses]:
    with contextlib.ExitStack() as stack:
        yield ServerProcesses(operators, stack)
