"""DAP over HTTP: URLs, media types, problem documents (RFC 9457), and a client with a credential.

A request has one connection and one deadline for all of it. Redirects are not followed, because the
token is meant for one server. Cookies, and the environment's proxies and credentials, are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from chorister.canonical import b64url_decode, b64url_encode
from chorister.clock import Clock
from chorister.dap.draft import ERROR_PREFIX, PROBLEM, TITLES, Problem
from chorister.errors import DecodeError, InvalidInput, ProblemError, Unreachable
from chorister.http_client import ERROR_BYTES, Response, WebClient, printable

if TYPE_CHECKING:
    import httpx2

MIN_LIMIT: Final = ERROR_BYTES
"""Bytes of an answer that are always read, because it may be a problem document."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""RFC 6750, section 2.1."""
_RETRY_STATUSES: Final = frozenset((408, 425, 429))
"""Client errors by number that mean "try again"."""
_POLL_SECONDS: Final = 1
"""Time between two polls, unless the server asks for more."""


def retry_after(response: Response, clock: Clock) -> int | None:
    """Return the seconds of `Retry-After`, a number or a date; None if it is neither."""
    value = response.headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    try:
        date = parsedate_to_datetime(value)
        return max(0, int(date.timestamp()) - clock.now())
    except (ValueError, OverflowError, OSError):
        return None


def poll_delay(response: Response, clock: Clock, *, longest: int) -> int:
    """Return how many seconds to wait before polling again."""
    asked = retry_after(response, clock)
    return min(_POLL_SECONDS if asked is None else max(asked, _POLL_SECONDS), longest)


class HTTPClient:
    """Sends requests to an aggregator, with a credential. Safe to share between threads."""

    def __init__(
        self,
        *,
        token: str | None = None,
        timeout: float = 60.0,
        ca_bundle: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
        answered: Callable[[Mapping[str, str]], None] = lambda _headers: None,
    ) -> None:
        """`timeout` covers a whole exchange; `ca_bundle` has the only authorities to trust.

        `transport` replaces the network, for applications in the same process. `answered` is called
        with the header fields of every answer, whatever its status.
        """
        if token is not None and not _TOKEN.fullmatch(token):
            raise InvalidInput("a bearer token has letters, digits and -._~+/ only")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._web = WebClient(timeout=timeout, ca_bundle=ca_bundle, transport=transport)
        self._answered = answered

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: int = MIN_LIMIT,
    ) -> Response:
        """Return the answer, of at most `limit` bytes, if it is a success.

        Raises `ProblemError` for a refusal, and `Unreachable` for whatever may be different next
        time: no connection, an answer that is late or too long, a redirect, a server error.
        """
        check_url(url)
        response = self._web.exchange(
            method,
            url,
            headers={**self._headers, **(headers or {})},
            body=body,
            limit=max(limit, MIN_LIMIT),
        )
        self._answered(response.headers)
        if 200 <= response.status < 300:
            return response
        refusal = parse_problem(response.status, response.content_type, response.body)
        if not 400 <= response.status < 500 or response.status in _RETRY_STATUSES:
            raise Unreachable(f"{url} answers {response.status}: {refusal.detail}")
        raise refusal


# --- URLs ---------------------------------------------------------------------------------------


_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def check_url(url: str) -> None:
    """Raise `InvalidInput` unless `url` is https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise InvalidInput(f"{url!r} is not a URL") from None
    if not all("!" <= char <= "~" for char in url):
        raise InvalidInput(f"{url!r} has characters that a URL must escape with %")
    if not host or (parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK)):
        raise InvalidInput(f"{url!r} must start with https:// (http:// for this machine only)")


def resource_url(endpoint: str, path: str) -> str:
    """Return a resource below an aggregator's endpoint, which is used exactly as spelled."""
    return f"{endpoint.removesuffix('/')}/{path}"


def created_resource(creation_url: str, location: str) -> str:
    """Return the URL of a resource that a POST to `creation_url` created, from its `Location`.

    Only the identifier and the query are taken from there. A server must not be able to redirect a
    credential, and a server behind a proxy may not know its own address.
    """
    collection = "/".join(creation_url.rsplit("/", 3)[1:])
    found = re.search(
        rf"(?:^|/){re.escape(collection)}/([A-Za-z0-9_-]{{1,200}}(?:\?[!-\"$-~]{{0,200}})?)\Z",
        location,
    )
    if found is None:
        raise Unreachable(f"{creation_url} answers without the location of what it created")
    return f"{creation_url}/{found[1]}"


# --- Problem documents --------------------------------------------------------------------------


_BLANK: Final = "about:blank"
"""RFC 9457's type for a problem that its status describes."""
_KNOWN_MEMBERS: Final = frozenset(("type", "title", "status", "detail", "taskid"))


def invalid_message(error: DecodeError, *, task_id: bytes | None = None) -> ProblemError:
    """Return the refusal of a message that does not decode."""
    return ProblemError(Problem.INVALID_MESSAGE, str(error), task_id=task_id)


def problem_document(error: ProblemError) -> bytes:
    """Return the body for a refusal; its media type is `draft.PROBLEM`."""
    document: dict[str, object] = dict(error.extra)
    document |= {"status": error.status, "detail": error.detail, "type": _BLANK}
    if error.problem is not None:
        problem = Problem(error.problem)
        document |= {"type": ERROR_PREFIX + problem, "title": TITLES[problem]}
    if error.task_id is not None:
        document["taskid"] = b64url_encode(error.task_id)
    return json.dumps(document, ensure_ascii=False).encode()


def parse_problem(status: int, content_type: str, body: bytes) -> ProblemError:
    """Return a peer's refusal as an error, without whatever can't be understood.

    `problem` is None unless the document names a type that DAP defines.
    """
    document = _parse_document(content_type, body)
    kind, detail, task = (document.get(name) for name in ("type", "detail", "taskid"))
    return ProblemError(
        _parse_type(kind),
        printable(detail) if isinstance(detail, str) and detail else "no reason is given",
        status=status,
        task_id=_parse_task_id(task),
        extra={name: value for name, value in document.items() if name not in _KNOWN_MEMBERS},
    )


def _parse_document(content_type: str, body: bytes) -> dict[str, object]:
    if not is_media_type(content_type, PROBLEM):
        return {}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _parse_type(kind: object) -> Problem | None:
    if not isinstance(kind, str) or not kind.startswith(ERROR_PREFIX):
        return None
    try:
        return Problem(kind.removeprefix(ERROR_PREFIX))
    except ValueError:
        return None


def _parse_task_id(text: object) -> bytes | None:
    try:
        return b64url_decode(text) if isinstance(text, str) else None
    except DecodeError:
        return None


# --- Media types --------------------------------------------------------------------------------


_MAX_MEDIA_TYPE_CHARACTERS: Final = 200
"""A longer `Content-Type` is not read: DAP's own have 60 characters, parameters included."""
# Up to the next semicolon outside quotes. Each character is matched in one way only, and the whole
# always matches, so the time is linear in the text, whatever it is.
_PART: Final = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.?)*"?)*', re.DOTALL)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_SPACE: Final = " \t"


def is_media_type(content_type: str, expected: str) -> bool:
    """Compare media types as HTTP does: case, space, quotes and other parameters don't matter.

    The draft lets a peer add parameters such as `version`. Overlong types never match.
    """
    if len(content_type) > _MAX_MEDIA_TYPE_CHARACTERS:
        return False
    given_type, given = _parse_media_type(content_type)
    expected_type, wanted = _parse_expected(expected)
    return given_type == expected_type and all(
        given.get(name) == value for name, value in wanted.items()
    )


def _parse_media_type(text: str) -> tuple[str, dict[str, str]]:
    kind, *parameters = (part.strip(_SPACE) for part in _split_parameters(text))
    found: dict[str, str] = {}
    for parameter in parameters:
        name, equals, value = parameter.partition("=")
        if equals:  # of a name given twice, the first counts
            found.setdefault(name.rstrip(_SPACE).lower(), _unquote(value.lstrip(_SPACE)).lower())
    return kind.lower(), found


_parse_expected = lru_cache(maxsize=32)(_parse_media_type)


def _split_parameters(text: str) -> list[str]:
    parts, start = [], 0
    while start <= len(text):
        found = _PART.match(text, start)
        end = len(text) if found is None else found.end()
        parts.append(text[start:end])
        start = end + 1
    return parts


def _unquote(value: str) -> str:
    quoted = _QUOTED.fullmatch(value)
    return value if quoted is None else _ESCAPED.sub(r"\1", quoted[1])
