"""The server that publishes recipes and keeps the log.

`Registry` is the log that can be written, `LogFolder` its files. `server` and `app` put them on
the network and need the extra `server`.
"""

from __future__ import annotations

from chorister.registry.folder import LogFolder
from chorister.registry.log import Receipt, Registry, Status

__all__ = ["LogFolder", "Receipt", "Registry", "Status"]
