"""Starts a zygote: a script for a fresh interpreter that imports nothing by itself.

The packages around the few modules that a sandbox needs are replaced by empty ones. Their own code
would import pydantic and more, with threads that do not survive a fork, and memory that a query
could look into.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def boot(descriptor: int, path: list[str]) -> None:
    """Import from `path`, then serve."""
    sys.path[:] = path
    root = Path(__file__).parents[2]
    for name in ("", ".device", ".device.sandbox", ".encoding"):
        package = ModuleType(f"chorister{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    import_module("chorister.device.sandbox.zygote").main(descriptor)


if __name__ == "__main__":
    boot(int(sys.argv[1]), sys.argv[2:])
