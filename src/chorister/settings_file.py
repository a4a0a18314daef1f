"""A server's settings in TOML, with errors in one line that name the file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from chorister.canonical import first_error
from chorister.errors import InvalidInput, ServiceError


@contextmanager
def read_settings(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's values; validation errors in the block become `ServiceError`s."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
        yield values
    except OSError as error:
        raise ServiceError(f"can't read {path}: {error.strerror}") from error
    except ValidationError as error:
        field, message = first_error(error)
        raise ServiceError(f"{path}: {field}: {message}") from error
    except UnicodeDecodeError as error:
        raise ServiceError(f"{path} is not UTF-8: {error}") from error
    except (InvalidInput, ValueError) as error:
        raise ServiceError(f"{path}: {error}") from error
    except RecursionError:
        raise ServiceError(f"{path} is nested too deeply: use fewer levels") from None
