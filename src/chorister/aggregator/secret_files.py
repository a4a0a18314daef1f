"""Secrets of an operator: made once, kept in files that only their owner can read, or passed in
the environment.

A secret is 32 bytes in base64url on one line. A token is the same text, sent as it stands; whoever
accepts it knows the SHA-256 of the text alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from chorister.canonical import Complaint, b64url_decode, b64url_encode
from chorister.errors import DecodeError, ServiceError

__all__ = [
    "check_reference",
    "new_secret",
    "read_secret",
    "read_token",
    "token_digest",
    "write_private",
]

SECRET_BYTES: Final = 32
_ENV: Final = "env:"
_NAME: Final = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{20,512}=*")
_LONGEST: Final = 4096


def check_reference(field: str, text: str) -> None:
    """Raise unless this is a path, or `env:` and a variable's name."""
    if text.startswith(_ENV) and not _NAME.fullmatch(text):
        raise Complaint(field, "after env: comes the name of an environment variable")


def new_secret() -> str:
    """A secret or token from the operating system's generator."""
    return b64url_encode(secrets.token_bytes(SECRET_BYTES))


def token_digest(token: bytes) -> bytes:
    """What is configured where a token is accepted."""
    return hashlib.sha256(token).digest()


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; one that exists is never replaced."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ServiceError(f"{path} exists, and a key is not replaced: move it away") from None
    except OSError as error:
        raise ServiceError(f"can't write {path}: {error.strerror}") from error


def read_secret(reference: str, environ: Mapping[str, str] | None = None) -> bytes:
    """32 bytes from a file, or from `env:NAME`."""
    text, where = _read(reference, environ)
    try:
        secret = b64url_decode(text)
    except DecodeError:
        secret = b""  # the cause would quote the secret
    if len(secret) != SECRET_BYTES:
        raise ServiceError(
            f"{where} is not 32 bytes in base64url; make one with `chorister keygen secret`"
        )
    return secret


def read_token(reference: str, environ: Mapping[str, str] | None = None) -> str:
    """A bearer token from a file, or from `env:NAME`."""
    text, where = _read(reference, environ)
    if not _TOKEN.fullmatch(text):
        raise ServiceError(
            f"{where} is no bearer token of 20 characters or more; "
            "make one with `chorister keygen token`"
        )
    return text


def _read(reference: str, environ: Mapping[str, str] | None) -> tuple[str, str]:
    if reference.startswith(_ENV):
        name = reference.removeprefix(_ENV)
        text = (os.environ if environ is None else environ).get(name)
        if text is None:
            raise ServiceError(f"the environment variable {name} is not set")
        return text.strip(), f"the environment variable {name}"
    path = Path(reference)
    try:
        if path.stat().st_mode & 0o077:
            raise ServiceError(f"others can read {path}: chmod 600 it, or make a new secret")
        with path.open("rb") as file:
            return file.read(_LONGEST).decode("ascii", "replace").strip(), str(path)
    except OSError as error:
        raise ServiceError(
            f"can't read {path}: {error.strerror}. `chorister keygen` makes such files"
        ) from error
