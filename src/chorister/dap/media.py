"""Media types, compared as HTTP does: case, space, quotes and further parameters don't count."""

from __future__ import annotations

from email.message import Message

__all__ = ["is_media_type"]


def is_media_type(content_type: str, expected: str) -> bool:
    """Whether a `Content-Type` is the expected one.

    Parameters that `expected` does not name are ignored: the draft lets a peer add `version`.
    """
    given_type, given = _parse(content_type)
    expected_type, wanted = _parse(expected)
    return given_type == expected_type and all(
        given.get(name) == value for name, value in wanted.items()
    )


def _parse(text: str) -> tuple[str, dict[str, str]]:
    message = Message()
    message["Content-Type"] = text
    parameters = message.get_params(failobj=[])
    # The first pair is the type itself; a name given twice counts as it came first.
    kind = parameters[0][0].lower() if parameters else ""
    found: dict[str, str] = {}
    for name, value in parameters[1:]:
        if isinstance(value, str):  # RFC 2231's encodings are for mail
            found.setdefault(name.lower(), value.lower())
    return kind, found
