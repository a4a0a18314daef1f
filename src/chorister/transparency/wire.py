"""Bytes in the presentation language of RFC 8446, section 3: integers and length-prefixed strings.

Strict both ways: a reader never reads past its end and refuses what is left over.
"""

from __future__ import annotations

from chorister.errors import DecodeError

__all__ = ["Reader", "opaque"]


def opaque(data: bytes, width: int) -> bytes:
    """A byte string with its length before it, in `width` bytes."""
    return len(data).to_bytes(width) + data


class Reader:
    """Takes bytes from the front of a message."""

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._at = 0
        self._what = what

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self._at + count
        if end > len(self._data):
            raise DecodeError(
                f"{self._what}: ends at byte {len(self._data)}, {count} more expected "
                f"from byte {self._at}"
            )
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def integer(self, width: int) -> int:
        """An unsigned big-endian integer."""
        return int.from_bytes(self.take(width))

    def opaque(self, width: int) -> bytes:
        """A byte string with its length before it."""
        return self.take(self.integer(width))

    def finish(self) -> None:
        """Refuse what is left over."""
        if self._at != len(self._data):
            raise DecodeError(f"{self._what}: {len(self._data) - self._at} bytes too many")
