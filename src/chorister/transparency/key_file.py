"""The Ed25519 keys of the log and of cosigners, in PEM files of their owners."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from chorister.errors import ServiceError

__all__ = ["load_key"]


def load_key(path: Path) -> Ed25519PrivateKey:
    """An Ed25519 private key from a PEM file that only its owner can read."""
    try:
        if path.stat().st_mode & 0o077:
            raise ServiceError(f"others can read {path}: chmod 600 it, or make a new key")
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ServiceError(
            f"can't read {path}: {error.strerror}. "
            f"To make a key: openssl genpkey -algorithm ed25519 -out {path}"
        ) from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The cause could quote the file: it stays out of the trace.
        raise ServiceError(f"{path} is not an unencrypted private key in PEM") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ServiceError(f"{path} is not an Ed25519 key")
    return key
