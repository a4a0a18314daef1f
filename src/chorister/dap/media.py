"""Media types, compared as HTTP does: case, space, quotes and further parameters don't count."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

__all__ = ["is_media_type"]

_LONGEST: Final = 200
"""Of a `Content-Type` that is read at all: DAP's own have 60 characters, parameters included."""
# Up to the next semicolon that is in no quotes. Each character is matched in one way only, and
# the whole always matches, so that the time is linear in the text whatever it says.
_PART: Final = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.?)*"?)*', re.DOTALL)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_SPACE: Final = " \t"


def is_media_type(content_type: str, expected: str) -> bool:
    """Whether a `Content-Type` is the expected one; one that is far too long never is.

    Parameters that `expected` does not name are ignored: the draft lets a peer add `version`.
    """
    if len(content_type) > _LONGEST:
        return False
    given_type, given = _parse(content_type)
    expected_type, wanted = _parse_expected(expected)
    return given_type == expected_type and all(
        given.get(name) == value for name, value in wanted.items()
    )


def _parse(text: str) -> tuple[str, dict[str, str]]:
    kind, *parameters = (part.strip(_SPACE) for part in _parts(text))
    found: dict[str, str] = {}
    for parameter in parameters:
        name, equals, value = parameter.partition("=")
        if equals:  # a name given twice counts as it came first
            found.setdefault(name.rstrip(_SPACE).lower(), _plain(value.lstrip(_SPACE)).lower())
    return kind.lower(), found


_parse_expected = lru_cache(maxsize=32)(_parse)


def _parts(text: str) -> list[str]:
    parts, start = [], 0
    while start <= len(text):
        found = _PART.match(text, start)
        end = len(text) if found is None else found.end()
        parts.append(text[start:end])
        start = end + 1
    return parts


def _plain(value: str) -> str:
    quoted = _QUOTED.fullmatch(value)
    return value if quoted is None else _ESCAPED.sub(r"\1", quoted[1])
