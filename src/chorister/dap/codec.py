"""TLS presentation language (RFC 8446, section 3): big-endian integers, length-prefixed vectors.

Messages are written by joining the results of these functions and read with a `Reader`, whose
every complaint is a `DecodeError` that names the place.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from chorister.errors import DecodeError, InvalidInput

__all__ = ["Reader", "uint8", "uint16", "uint32", "uint64", "vector"]

_SIZES: Final = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def _uint(value: int, size: int) -> bytes:
    if not 0 <= value < 256**size:
        raise InvalidInput(f"{value} does not fit into a {_SIZES[size]}")
    return value.to_bytes(size, "big")


def uint8(value: int) -> bytes:
    """One byte."""
    return _uint(value, 1)


def uint16(value: int) -> bytes:
    """Two bytes."""
    return _uint(value, 2)


def uint32(value: int) -> bytes:
    """Four bytes."""
    return _uint(value, 4)


def uint64(value: int) -> bytes:
    """Eight bytes."""
    return _uint(value, 8)


def vector(data: bytes, *, prefix: int, least: int = 0) -> bytes:
    """`opaque data<least..2^(8 prefix)-1>`: its length in `prefix` bytes, then itself."""
    if not least <= len(data) < 256**prefix:
        raise InvalidInput(f"{len(data)} bytes, where {least} to {256**prefix - 1} are allowed")
    return _uint(len(data), prefix) + data


class Reader:
    """Reads a message from front to back; as a context manager, insists on its end."""

    def __init__(self, data: bytes, message: str) -> None:
        self._data = data
        self._at = 0
        self._message = message

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self.remaining:
            raise self.error(f"{self.remaining} bytes too many")

    @property
    def remaining(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._at

    def error(self, why: str) -> DecodeError:
        """A complaint about this message at this place."""
        return DecodeError(f"{self._message} at byte {self._at}: {why}")

    def opaque(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > self.remaining:
            raise self.error(f"{size} bytes expected, {self.remaining} left")
        self._at += size
        return self._data[self._at - size : self._at]

    def uint8(self) -> int:
        """One byte."""
        return int.from_bytes(self.opaque(1), "big")

    def uint16(self) -> int:
        """Two bytes."""
        return int.from_bytes(self.opaque(2), "big")

    def uint32(self) -> int:
        """Four bytes."""
        return int.from_bytes(self.opaque(4), "big")

    def uint64(self) -> int:
        """Eight bytes."""
        return int.from_bytes(self.opaque(8), "big")

    def vector(self, *, prefix: int, least: int = 0) -> bytes:
        """A vector with its length in `prefix` bytes."""
        size = int.from_bytes(self.opaque(prefix), "big")
        if size < least:
            raise self.error(f"a vector of {size} bytes, where at least {least} are required")
        return self.opaque(size)
