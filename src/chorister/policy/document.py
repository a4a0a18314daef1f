"""A policy's document: TOML, read within limits, and completed for a rehearsal."""

from __future__ import annotations

import os
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from chorister.canonical import b64url_encode, sha256
from chorister.errors import PolicyError

MAX_POLICY_BYTES: Final = 1_000_000
# Keys like a.a.a.a take tomllib quadratic time; no policy is nested a hundredth as deep.
_MAX_DOTS: Final = 200


def read_document(source: bytes | str | os.PathLike[str]) -> bytes:
    """Return a document, or read the file at a path."""
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str | os.PathLike):
        raise PolicyError(f"a policy is a TOML file, given by its path or content, not {source!r}")
    path = Path(source)
    try:
        return path.read_bytes()
    except OSError as error:
        raise PolicyError(f"can't read {path}: {error.strerror}") from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """Parse TOML, with floats as exact decimals."""
    if len(data) > MAX_POLICY_BYTES:
        raise PolicyError(f"{len(data)} bytes: a policy has at most {MAX_POLICY_BYTES}")
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
        raise ValueError(f"{text} is not a decimal") from None


def with_stand_ins(tree: dict[str, Any]) -> dict[str, Any]:
    """Add what is missing for a rehearsal; the reserved domain `invalid` reaches nobody."""

    def key(name: str) -> str:
        return b64url_encode(sha256(f"rehearsal {name}".encode()))

    def aggregator(role: str) -> dict[str, Any]:
        return {"url": f"https://{role}.rehearsal.invalid/dap/", "cosigning_keys": [key(role)]}

    log = {"origin": "rehearsal.invalid/log", "keys": [key("log")], "checkpoint_max_age": "1d"}
    pair = {"name": "rehearsal", "leader": aggregator("leader"), "helper": aggregator("helper")}
    filled = {"version": 1, "name": "rehearsal", "log": log, "aggregators": [pair], **tree}
    analyses = filled.get("analyses")
    if isinstance(analyses, dict):
        who = {"author_keys": [key("author")], "collectors": [sha256(b"rehearsal").hex()]}
        filled["analyses"] = {
            name: {**who, **each} if isinstance(each, dict) else each
            for name, each in analyses.items()
        }
    return filled
