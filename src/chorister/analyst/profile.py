"""How an analyst reaches a fleet: one TOML file, documented in docs/reference/analyst.md."""

from __future__ import annotations

import json
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, StringConstraints, ValidationError

from chorister._native import HPKEKeypair
from chorister.aggregator.secret_files import read_token
from chorister.canonical import Int, Model, Number, b64url_decode, culprit
from chorister.errors import ChoristerError, HPKEError, InvalidInput
from chorister.policy import Policy
from chorister.policy.values import URL
from chorister.transparency.key_file import load_key

__all__ = ["Profile"]

_Path = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000, strict=True)
]
_FILES = ("policy", "author_key", "collector_key", "token", "folder", "ca_bundle")


class Profile(Model):
    """Registry, keys and tokens. Paths are relative to the file."""

    policy: _Path
    """The policy that the devices have."""
    registry: URL
    """Where recipes are published."""
    author_key: _Path
    """The Ed25519 private key that signs recipes, PEM; the policy lists its public half."""
    collector_key: _Path
    """The HPKE key pair that results are sealed to: a file of `chorister keygen collector`."""
    token: _Path
    """What proves us to the leader: a file of `chorister keygen token`, or `env:NAME`."""
    folder: _Path = "studies"
    """Where studies are kept."""
    devices: Annotated[Int, Field(ge=1)] | None = None
    """About how many devices may answer, for planning."""
    margin: Number = Decimal("0.8")
    """The share of the expected reports that a minimum cohort relies on."""
    ca_bundle: _Path | None = None
    """The only certificate authorities to believe, PEM; the system's if left out."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a profile; its paths come back absolute."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path}: {error}") from None
        try:
            profile = cls.model_validate(values)
        except ValidationError as error:
            field, message = culprit(error)
            raise InvalidInput(f"{path}: {field}: {message}") from None
        base = path.resolve().parent
        found = {name: getattr(profile, name) for name in _FILES}
        moved = {
            name: str(base / value)
            for name, value in found.items()
            if value is not None and not value.startswith("env:")
        }
        return profile.model_copy(update=moved)

    def read_policy(self) -> Policy:
        """The policy."""
        return Policy.load(Path(self.policy))

    def read_author_key(self) -> Ed25519PrivateKey:
        """The key that signs recipes."""
        return load_key(Path(self.author_key))

    def read_token(self) -> str:
        """The bearer token."""
        return read_token(self.token)

    def read_collector_key(self) -> HPKEKeypair:
        """The key pair that results are sealed to."""
        path = Path(self.collector_key)
        try:
            others_read = path.stat().st_mode & 0o077
            data = path.read_bytes()[:100_000]
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
        if others_read:
            raise InvalidInput(f"others can read {path}: chmod 600 it, or make a new key")
        try:
            document = json.loads(data)
            return HPKEKeypair.from_bytes(
                int(document["config_id"]),
                b64url_decode(document["public_key"]),
                b64url_decode(document["private_key"]),
            )
        except (ChoristerError, HPKEError, ValueError, TypeError, KeyError, OverflowError):
            # The cause could quote the key.
            raise InvalidInput(
                f"{path} is not a key pair of `chorister keygen collector`"
            ) from None
