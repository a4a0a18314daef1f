"""Problem documents (RFC 9457), both ways: `ProblemError` <-> `application/problem+json`."""

from __future__ import annotations

import json
from typing import Final

from chorister.canonical import b64url_decode, b64url_encode
from chorister.dap.draft import ERROR_PREFIX, PROBLEM, TITLES, Problem
from chorister.dap.media import is_media_type
from chorister.errors import DecodeError, ProblemError

__all__ = ["invalid_message", "parse_problem", "problem_document"]

_BLANK: Final = "about:blank"
"""RFC 9457's type for a problem that its status describes."""
_MEMBERS: Final = frozenset(("type", "title", "status", "detail", "taskid"))
_MAX_DETAIL: Final = 500


def invalid_message(error: DecodeError, *, task_id: bytes | None = None) -> ProblemError:
    """The refusal of a message that does not decode."""
    return ProblemError(Problem.INVALID_MESSAGE, str(error), task_id=task_id)


def problem_document(error: ProblemError) -> bytes:
    """The body that tells of a refusal; its media type is `draft.PROBLEM`."""
    document: dict[str, object] = dict(error.extra)
    document |= {"status": error.status, "detail": error.detail, "type": _BLANK}
    if error.problem is not None:
        problem = Problem(error.problem)
        document |= {"type": ERROR_PREFIX + problem, "title": TITLES[problem]}
    if error.task_id is not None:
        document["taskid"] = b64url_encode(error.task_id)
    return json.dumps(document, ensure_ascii=False).encode()


def parse_problem(status: int, content_type: str, body: bytes) -> ProblemError:
    """What a peer's refusal says; whatever can't be understood is left out.

    `problem` is None unless the document names a type that DAP defines.
    """
    document = _document(content_type, body)
    kind, detail, task = (document.get(name) for name in ("type", "detail", "taskid"))
    return ProblemError(
        _problem(kind),
        _printable(detail) if isinstance(detail, str) and detail else "no reason is given",
        status=status,
        task_id=_task_id(task),
        extra={name: value for name, value in document.items() if name not in _MEMBERS},
    )


def _document(content_type: str, body: bytes) -> dict[str, object]:
    if not is_media_type(content_type, PROBLEM):
        return {}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _problem(kind: object) -> Problem | None:
    if not isinstance(kind, str) or not kind.startswith(ERROR_PREFIX):
        return None
    try:
        return Problem(kind.removeprefix(ERROR_PREFIX))
    except ValueError:
        return None


def _task_id(text: object) -> bytes | None:
    try:
        return b64url_decode(text) if isinstance(text, str) else None
    except DecodeError:
        return None


def _printable(text: str) -> str:
    """A stranger's text, fit for a terminal and a log."""
    return "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_DETAIL]
    )
