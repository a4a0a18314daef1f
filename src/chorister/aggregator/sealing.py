"""Secrets at rest: AES-256-GCM under a key that is not in the database.

The associated data names the table and the row, so that a value can't be moved to another place.
Nonces are random: one key is good for 2^32 values, which is that many aggregation jobs.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from chorister.canonical import b64url_decode
from chorister.dap.codec import vector
from chorister.errors import DecodeError, KeyUnavailable, StorageDamaged

__all__ = ["KEY_BYTES", "Sealer"]

KEY_BYTES: Final = 32
_NONCE: Final = 12


class Sealer:
    """Seals and opens values of one database. Never prints its key."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise KeyUnavailable(f"the at-rest key has {len(key)} bytes; it must have {KEY_BYTES}")
        self._cipher = AESGCM(key)

    @classmethod
    def from_text(cls, text: str) -> Sealer:
        """From base64url, as in an environment variable."""
        try:
            key = b64url_decode(text.strip())
        except DecodeError:
            raise KeyUnavailable("the at-rest key is not base64url; make one anew") from None
        return cls(key)

    @classmethod
    def from_file(cls, path: Path) -> Sealer:
        """From a file that holds base64url."""
        try:
            text = path.read_text("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise KeyUnavailable(f"the at-rest key {path} can't be read: {error}") from None
        return cls.from_text(text)

    def seal(self, value: bytes, *place: bytes) -> bytes:
        """Seal a value for one place: the table's name, then the row's key."""
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher.encrypt(nonce, value, _associated(place))

    def open(self, sealed: bytes, *place: bytes) -> bytes:
        """Open a value of this place; raises `StorageDamaged` for one of another place or key."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], _associated(place))
        except (InvalidTag, ValueError):
            raise StorageDamaged(
                f"a sealed value of {place[0].decode()} does not open: it was altered or moved, or "
                "the at-rest key is another one"
            ) from None


def _associated(place: tuple[bytes, ...]) -> bytes:
    return b"".join(vector(part, prefix=2) for part in place)
