"""Starts a zygote, or one sandbox: a script for an interpreter that imports nothing on its own.

The packages around the few modules that a sandbox needs are replaced by empty ones. Their own code
would import pydantic and more, with threads that do not survive a fork, and memory that a query
could look into.
"""

from __future__ import annotations

import os.path
import sys
from importlib import import_module
from types import ModuleType


def boot(descriptor: int, facilities: str, path: list[str]) -> None:
    """Import from `path`, then serve, with these facilities at most."""
    sys.path[:] = path
    # As text: `pathlib` would take a tenth of the whole start.
    root = os.path.abspath(__file__).rsplit(os.sep, 3)[0]  # noqa: PTH100
    for name in ("", ".device", ".device.sandbox", ".encoding"):
        package = ModuleType(f"chorister{name}")
        package.__path__ = [root + name.replace(".", os.sep)]
        sys.modules[package.__name__] = package
    import_module("chorister.device.sandbox.zygote").main(descriptor, facilities.split())


if __name__ == "__main__":
    boot(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
