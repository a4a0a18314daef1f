"""A server's settings in TOML: what is wrong with the file is said in one line, with its name."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from chorister.canonical import culprit
from chorister.errors import InvalidInput, ServiceError

__all__ = ["read_settings"]


@contextmanager
def read_settings(path: Path) -> Iterator[dict[str, Any]]:
    """What the file says; complaints of the block about it are raised as `ServiceError`."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
        yield values
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
