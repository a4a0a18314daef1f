"""The accountant's answers, cached on disk for planning.

The key holds the accountant's version, the versions of numpy and scipy, and every parameter, so
that no answer outlives the code that gave it. Files are written whole and renamed into place:
concurrent writers cannot mix, and a file that does not read back as expected is computed again.

**Nothing that enforces reads this.** Whoever can write to a user's cache folder could otherwise
raise what a device believes to be safe. Enforcing code calls
:mod:`chorister.privacy.amplification`, whose cache is its own process only; this module is for the
command line and for analysts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import scipy

ACCOUNTANT_VERSION: Final = 3  # raise it with every change that may change an answer
DISABLING_VARIABLE: Final = "CHORISTER_NO_CACHE"


def cache_folder() -> Path | None:
    """Where answers are kept; None if the environment turns the cache off."""
    if os.environ.get(DISABLING_VARIABLE):
        return None
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        base = Path(chosen)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "chorister" / "accountant"


def remember(
    name: str, parameters: dict[str, str], compute: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Return the answer from disk if it is there; otherwise compute it and keep it."""
    folder = cache_folder()
    if folder is None:
        return compute()
    key = {
        "name": name,
        "accountant": ACCOUNTANT_VERSION,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "parameters": parameters,
    }
    text = json.dumps(key, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    found = _read(path, text)
    if found is None:
        found = compute()
        _write(path, {"key": text, "answer": found})
    return found


def _read(path: Path, key: str) -> dict[str, float] | None:
    """Return a file's answer; None if the file is missing, damaged or about something else."""
    try:
        stored: Any = json.loads(path.read_bytes())
        answer = stored["answer"]
        if stored["key"] != key or not isinstance(answer, dict) or not answer:
            return None
        numbers = {str(name): float(value) for name, value in answer.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return numbers if all(math.isfinite(value) for value in numbers.values()) else None


def _write(path: Path, content: dict[str, object]) -> None:
    """Write a new file and rename it. A cache that can't be written is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
            json.dump(content, file)
        Path(file.name).replace(path)
    except OSError:
        return
