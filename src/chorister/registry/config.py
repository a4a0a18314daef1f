"""The registry's settings: one TOML file, documented in docs/reference/registry.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints

from chorister.canonical import Int, Model
from chorister.errors import ChoristerError, ServiceError
from chorister.policy import Policy
from chorister.settings_file import read_settings
from chorister.transparency.note import check_key_name

__all__ = ["RegistryConfig"]

# Without control characters, which no file's name needs and the system may not take.
Text = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000, strict=True)
]


class RegistryConfig(Model):
    """What `chorister serve registry` needs to know. Paths are relative to the file."""

    origin: Text
    """The log's name: a URL without its scheme, and for ever."""
    folder: Text
    """Where the log is kept."""
    key: Text
    """The log's Ed25519 private key, PEM (PKCS #8)."""
    policies: Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]
    """The policies whose authors may submit and whose aggregators cosign."""
    interval: Annotated[Int, Field(ge=1, le=3600)] = 60
    """Seconds between checkpoints."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a settings file; its paths come back absolute."""
        with read_settings(path) as values:
            config = cls.model_validate(values)
            check_key_name(config.origin)
        base = path.resolve().parent
        return config.model_copy(
            update={
                "folder": str(base / config.folder),
                "key": str(base / config.key),
                "policies": tuple(str(base / policy) for policy in config.policies),
            }
        )

    def read_policies(self) -> dict[bytes, Policy]:
        """The policies' documents, as they are published, and what they mean."""
        policies = {}
        for name in self.policies:
            try:
                data = Path(name).read_bytes()
                policies[data] = Policy.load(data)
            except OSError as error:
                raise ServiceError(f"can't read {name}: {error.strerror}") from error
            except ChoristerError as error:
                raise ServiceError(f"{name}: {error}") from error
        return policies
