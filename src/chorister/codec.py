"""TLS presentation language (RFC 8446, section 3): big-endian integers, length-prefixed vectors.

DAP's messages and the log's entries are written by joining the results of these functions, and read
with a `Reader`, whose `DecodeError`s name the message and the position.
"""

from __future__ import annotations

from types import TracebackType

from chorister.errors import DecodeError, InvalidInput


def _uint(value: int, size: int) -> bytes:
    if not 0 <= value < 256**size:
        raise InvalidInput(f"{value} does not fit into a uint{8 * size}")
    return value.to_bytes(size, "big")


def uint8(value: int) -> bytes:
    return _uint(value, 1)


def uint16(value: int) -> bytes:
    return _uint(value, 2)


def uint32(value: int) -> bytes:
    return _uint(value, 4)


def uint64(value: int) -> bytes:
    return _uint(value, 8)


def vector(data: bytes, *, prefix: int, least: int = 0) -> bytes:
    """Encode `opaque data<least..2^(8 prefix)-1>`: the length in `prefix` bytes, then the data."""
    if not least <= len(data) < 256**prefix:
        raise InvalidInput(f"{len(data)} bytes, where {least} to {256**prefix - 1} are allowed")
    return _uint(len(data), prefix) + data


class Reader:
    """Reads a message from front to back. As a context manager, it refuses leftover bytes."""

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
        """The number of bytes not yet read."""
        return len(self._data) - self._at

    def error(self, why: str) -> DecodeError:
        """Return the error to raise about this message at this position."""
        return DecodeError(f"{self._message} at byte {self._at}: {why}")

    def opaque(self, size: int) -> bytes:
        """Read `size` bytes."""
        if size > self.remaining:
            raise self.error(f"{size} bytes expected, {self.remaining} left")
        self._at += size
        return self._data[self._at - size : self._at]

    def _uint(self, size: int) -> int:
        return int.from_bytes(self.opaque(size), "big")

    def uint8(self) -> int:
        return self._uint(1)

    def uint16(self) -> int:
        return self._uint(2)

    def uint32(self) -> int:
        return self._uint(4)

    def uint64(self) -> int:
        return self._uint(8)

    def vector(self, *, prefix: int, least: int = 0) -> bytes:
        """Read a vector whose length takes `prefix` bytes."""
        size = self._uint(prefix)
        if size < least:
            raise self.error(f"a vector of {size} bytes, where at least {least} are required")
        return self.opaque(size)
