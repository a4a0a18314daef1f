"""The registry's settings: one TOML file, documented in docs/reference/registry.md."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, ValidationError

from chorister.canonical import Int, Model, culprit
from chorister.errors import ChoristerError, InvalidInput, ServiceError
from chorister.policy import Policy
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
        try:
            with path.open("rb") as file:
                values = tomllib.load(file)
            config = cls.model_validate(values)
            check_key_name(config.origin)
        except OSError as error:
            raise ServiceError(f"can't read {path}: {error.strerror}") from error
        except ValidationError as error:
            field, message = culprit(error)
            raise ServiceError(f"{path}: {field}: {message}") from error
        except UnicodeDecodeError as error:
            raise ServiceError(f"{path} is not UTF-8: {error}") from error
        except (InvalidInput, ValueError) as error:
            raise ServiceError(f"{path}: {error}") from error
        except RecursionError:
            raise ServiceError(f"{path} is nested too deeply") from None
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
