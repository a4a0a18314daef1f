"""Secrets at rest: AES-256-GCM under a key that is not in the database.

The associated data names the table and the row, so that a value can't be moved to another place.
Nonces are random: one key is good for 2^32 values, which is that many aggregation jobs.
"""

from __future__ import annotations

import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from chorister.dap.codec import vector
from chorister.errors import KeyUnavailable, StorageDamaged

__all__ = ["KEY_BYTES", "Sealer"]

KEY_BYTES: Final = 32
_NONCE: Final = 12


class Sealer:
    """Seals and opens values of one database. Never prints its key."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise KeyUnavailable(f"the at-rest key has {len(key)} bytes; it must have {KEY_BYTES}")
        self._cipher = AESGCM(key)

    def seal(self, value: bytes, table: str, *row: bytes) -> bytes:
        """Seal a value for one place: a table, and the key of a row in it."""
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher.encrypt(nonce, value, _associated(table, row))

    def open(self, sealed: bytes, table: str, *row: bytes) -> bytes:
        """Open a value of this place; raises `StorageDamaged` for one of another place or key."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], _associated(table, row))
        except (InvalidTag, ValueError):
            raise StorageDamaged(
                f"a sealed value of {table} does not open: it was altered or moved, or "
                "the at-rest key is another one"
            ) from None


def _associated(table: str, row: tuple[bytes, ...]) -> bytes:
    return b"".join(vector(part, prefix=2) for part in (table.encode(), *row))
