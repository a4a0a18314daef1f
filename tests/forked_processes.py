"""Real processes for tests, forked from a server that has imported everything once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final

FORKS: Final[ForkServerContext] = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.device.ledgers"])


def started(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A process that runs `target`, a function of a test's module."""
    process = FORKS.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def ended(process: ForkServerProcess) -> int:
    """How it ended: 0, or minus the signal that killed it."""
    process.join(60)
    code = process.exitcode
    if code is None:
        process.kill()
        raise TimeoutError("the process did not end within a minute")
    return code
