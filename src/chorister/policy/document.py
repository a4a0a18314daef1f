"""Reading TOML without losing a digit."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from typing import Any, Final

from chorister.errors import PolicyError

__all__ = ["MAX_BYTES", "parse"]

MAX_BYTES: Final = 1_000_000
# Keys like a.a.a.a cost tomllib the square of their depth; no policy nests a hundredth as deep.
_MAX_DOTS: Final = 200


def parse(data: bytes) -> dict[str, Any]:
    """A TOML document as dictionaries; its floats as exact decimals."""
    if len(data) > MAX_BYTES:
        raise PolicyError(f"{len(data)} bytes, where a policy has at most {MAX_BYTES}")
    if any(line.count(b".") > _MAX_DOTS for line in data.splitlines()):
        raise PolicyError(f"a line with more than {_MAX_DOTS} dots: break it, or nest less")
    try:
        return tomllib.loads(data.decode("utf-8"), parse_float=_decimal)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"not TOML: {error}") from None


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError:
        raise ValueError(f"{text} is no decimal") from None
