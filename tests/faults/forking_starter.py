"""Starts `chorister` processes by forking: everything is imported once, and a restart is quick.

A program of its own, told by lines of JSON what to start; it answers with the process's id. When
its input ends it kills all that it started, so nothing outlives the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class ForkingStarter:
    """The tests' side."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forking_starter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )

    def start(self, arguments: list[str], *, log: Path, env: dict[str, str], skew: int) -> int:
        """Start `chorister` with these arguments; its process id."""
        asked = {"arguments": arguments, "log": str(log), "env": env, "skew": skew}
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(asked) + "\n")
        self._program.stdin.flush()
        return int(self._program.stdout.readline())

    def close(self) -> None:
        self._program.communicate(timeout=30)


def _child(asked: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, number)
    os.environ.update(asked["env"])
    if asked["skew"]:
        real, ahead = time.time_ns, asked["skew"] * 1_000_000_000
        time.time_ns = lambda: real() + ahead
    sys.argv = ["chorister", *asked["arguments"]]
    from chorister.cli import app

    app()


def main() -> None:
    import chorister.aggregator.jobs.worker
    import chorister.aggregator.server
    import chorister.cli  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they need not be waited for
    started = []
    for line in sys.stdin:
        process = os.fork()
        if not process:
            code = 1
            try:
                _child(json.loads(line))
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdout.flush()
                os._exit(code)
        started.append(process)
        print(process, flush=True)
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
