"""Keys, secrets and tokens of operators and analysts: created once, readable only by their owner.

A *secret* is 32 bytes in base64url on one line. A *token* is the same text, sent as it stands;
those who accept it only know the SHA-256 of the text. A *signing key* is an Ed25519 key in PEM. A
*collector key* is an HPKE key pair in JSON. Secrets and tokens may also come from the environment.
No error message and no traceback quotes a secret.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from chorister._native import HPKEKeypair
from chorister.canonical import FieldError, b64url_decode, b64url_encode
from chorister.errors import ChoristerError, DecodeError, HPKEError, ServiceError

SECRET_BYTES: Final = 32
_ENV: Final = "env:"
_ENV_REFERENCE: Final = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{20,512}=*")
_MAX_BYTES: Final = 100_000


# --- Secrets and tokens -------------------------------------------------------------------------


def check_reference(field: str, text: str) -> None:
    """Raise unless this is a path, or `env:` and the name of a variable."""
    if text.startswith(_ENV) and not _ENV_REFERENCE.fullmatch(text):
        raise FieldError(field, "`env:` must be followed by the name of an environment variable")


def new_secret() -> str:
    """Draw a secret or token from the operating system's generator."""
    return b64url_encode(secrets.token_bytes(SECRET_BYTES))


def token_digest(token: bytes) -> bytes:
    """What is configured where a token is accepted."""
    return hashlib.sha256(token).digest()


def read_secret(reference: str, environ: Mapping[str, str] | None = None) -> bytes:
    """Read 32 bytes from a file, or from `env:NAME`."""
    text, where = _read_reference(reference, environ)
    try:
        secret = b64url_decode(text)
    except DecodeError:
        secret = b""  # the cause would quote the secret
    if len(secret) != SECRET_BYTES:
        raise ServiceError(
            f"{where} is not 32 bytes in base64url; create one with `chorister keygen secret`"
        )
    return secret


def read_token(reference: str) -> str:
    """Read a bearer token from a file, or from `env:NAME`."""
    text, where = _read_reference(reference)
    if not _TOKEN.fullmatch(text):
        raise ServiceError(
            f"{where} is not a bearer token of 20 characters or more; "
            "create one with `chorister keygen token`"
        )
    return text


def _read_reference(reference: str, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    if reference.startswith(_ENV):
        name = reference.removeprefix(_ENV)
        text = (os.environ if environ is None else environ).get(name)
        if text is None:
            raise ServiceError(f"the environment variable {name} is not set")
        return text.strip(), f"the environment variable {name}"
    return read_private(Path(reference)).decode("ascii", "replace").strip(), reference


# --- Key pairs ----------------------------------------------------------------------------------


def write_signing_key(path: Path) -> str:
    """Create an Ed25519 key in a new PEM file; return its public half in base64url."""
    key = Ed25519PrivateKey.generate()
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return b64url_encode(key.public_key().public_bytes_raw())


def read_signing_key(path: Path, *, owner_only: bool = True) -> Ed25519PrivateKey:
    """Read an Ed25519 private key from a PEM file, by default one that only its owner can read."""
    data = read_private(path, owner_only=owner_only)
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The cause could quote the file.
        raise ServiceError(f"{path} is not an unencrypted private key in PEM") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ServiceError(f"{path} is not an Ed25519 key")
    return key


def write_collector_key(path: Path, config_id: int = 1) -> bytes:
    """Create an HPKE key pair in a new JSON file; return its public configuration."""
    keys = HPKEKeypair.generate(config_id)
    document = {
        "config": b64url_encode(keys.config),
        "config_id": config_id,
        "public_key": b64url_encode(keys.public_key),
        "private_key": b64url_encode(keys.private_key()),
    }
    write_private(path, json.dumps(document, indent=1).encode() + b"\n")
    return keys.config


def read_collector_key(path: Path) -> HPKEKeypair:
    """Read an HPKE key pair from a JSON file."""
    data = read_private(path)
    try:
        document = json.loads(data)
        return HPKEKeypair.from_bytes(
            int(document["config_id"]),
            b64url_decode(document["public_key"]),
            b64url_decode(document["private_key"]),
        )
    except (ChoristerError, HPKEError, ValueError, TypeError, KeyError, OverflowError):
        # The cause could quote the key.
        raise ServiceError(f"{path} is not a key pair of `chorister keygen collector`") from None


# --- Private files ------------------------------------------------------------------------------


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read. Never replaces an existing file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ServiceError(
            f"{path} already exists, and keys are never overwritten: move it elsewhere"
        ) from None
    except OSError as error:
        raise ServiceError(f"can't write {path}: {error.strerror}") from error


def read_private(path: Path, *, owner_only: bool = True) -> bytes:
    """Read a file; raise if anybody but its owner can read it."""
    try:
        if owner_only and path.stat().st_mode & 0o077:
            raise ServiceError(f"others can read {path}: chmod 600 it, or create a new one")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ServiceError(
            f"can't read {path}: {error.strerror}. `chorister keygen` creates such files"
        ) from error
