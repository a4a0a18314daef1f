"""Packages of the extra `analyst`: `pip install chorister` alone works without them."""

from __future__ import annotations

import importlib
from typing import Any

from chorister.errors import InvalidInput

__all__ = ["needed"]


def needed(name: str) -> Any:  # noqa: ANN401 (a module)
    """Import a package that only some results need."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name:
            raise
        extra = "pip install pandas" if name == "pandas" else 'pip install "chorister[analyst]"'
        raise InvalidInput(f"this needs {name}, which is not installed: {extra}") from None
