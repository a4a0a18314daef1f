"""Who may look at, or ask in, whose study: one small file, replaced as a whole."""

from __future__ import annotations

import json
import threading
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from chorister.analyst.files import require_format, write_atomically
from chorister.errors import ServiceError

__all__ = ["Permission", "Shares"]

_FORMAT: Final = "chorister-shares-1"


class Permission(StrEnum):
    """What somebody may do in another's study."""

    LOOK = "look"
    ASK = "ask"


class Shares:
    """The permission lists of all studies. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._lists: dict[str, dict[str, Permission]] = {}
        if path.exists():
            self._lists = _read(path)

    def of(self, connection: str, study: str) -> dict[str, Permission]:
        """Who may do what, by name."""
        with self._lock:
            return dict(self._lists.get(f"{connection}/{study}", {}))

    def give(self, connection: str, study: str, analyst: str, permission: Permission) -> None:
        """Let somebody look, or ask."""
        with self._lock:
            self._lists.setdefault(f"{connection}/{study}", {})[analyst] = permission
            self._write()

    def take(self, connection: str, study: str, analyst: str) -> None:
        """No longer."""
        with self._lock:
            self._lists.get(f"{connection}/{study}", {}).pop(analyst, None)
            self._write()

    def _write(self) -> None:
        document = {"format": _FORMAT, "studies": self._lists}
        write_atomically(self._path, json.dumps(document, indent=1).encode())


def _read(path: Path) -> dict[str, dict[str, Permission]]:
    try:
        tree: Any = json.loads(path.read_bytes())
        require_format(tree, _FORMAT)
        return {
            str(study): {str(name): Permission(each) for name, each in people.items()}
            for study, people in tree["studies"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"{path} can't be read ({error}): restore it") from None
