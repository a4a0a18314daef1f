"""Files of an analyst: written whole or not at all."""

from __future__ import annotations

import base64
import binascii
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chorister.errors import DecodeError

__all__ = ["pack", "require_format", "unpack", "write_atomically"]

_MAX_RAW = 800_000_000


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write `data` to `path`: after a crash there is the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)  # noqa: PTH101 (the descriptor's name)
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def require_format(tree: Any, wanted: str) -> None:  # noqa: ANN401 (any JSON)
    """Raise unless a document says that it is of this format."""
    found = tree.get("format") if isinstance(tree, dict) else None
    if found != wanted:
        raise DecodeError(f"{str(found)[:40]!r}, where {wanted!r} is read", field="format")


def pack(sums: NDArray[np.uint64]) -> str:
    """An array as text: little-endian, deflated, base64."""
    raw = np.ascontiguousarray(sums, dtype="<u8").tobytes()
    return base64.b64encode(zlib.compress(raw, 1)).decode("ascii")


def unpack(text: str) -> NDArray[np.uint64]:
    """The inverse of `pack`."""
    try:
        unzipper = zlib.decompressobj()
        raw = unzipper.decompress(base64.b64decode(text, validate=True), _MAX_RAW)
    except (binascii.Error, zlib.error, ValueError, TypeError) as error:
        raise DecodeError(f"not packed sums: {error}") from None
    if unzipper.unconsumed_tail or not unzipper.eof or len(raw) % 8:
        raise DecodeError("not packed sums: cut off, or too long")
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64)
