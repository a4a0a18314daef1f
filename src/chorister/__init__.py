"""Private federated statistics, asked interactively: you hear the choir, never a chorister."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
