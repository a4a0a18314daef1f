"""What every request must pass: whose token it carries, which task it is for, how long it is.

**Tokens.** Only SHA-256 digests are configured, so a settings file gives nobody access. A token is
hashed, compared with every digest in constant time, and forgotten: neither stored nor logged.

**Tasks** are found by the id in the URL. If the request advertises a configuration (taskprov), the
id must be its hash. If this aggregator does not serve the task, the problem is `invalidTask` if it
was advertised, `unrecognizedTask` if not. Nothing is stored either way.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

import anyio
from starlette.requests import Request

from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage.tasks import TaskStore
from chorister.canonical import b64url_decode
from chorister.clock import Clock
from chorister.dap.draft import TASK_ID_BYTES, TASKPROV_HEADER, Problem
from chorister.dap.http import is_media_type
from chorister.dap.task import TaskConfiguration, advertise, advertised, task_id
from chorister.errors import DecodeError, ProblemError, ServiceError

T = TypeVar("T")

CREDENTIAL_HEADER: Final = b"chorister-upload-credential"
"""Carries the host app's credential in an upload; in lower case, as in ASGI."""

UploadCredential = Callable[[str], bool]
"""Says whether a credential is valid; may take its time, because it runs in a thread."""

_BEARER: Final = b"bearer "
_MAX_CREDENTIAL_CHARACTERS: Final = 4096
_TASKPROV_HEADER: Final = TASKPROV_HEADER.lower().encode()
_CACHED_TASKS: Final = 4096
_ID_BYTES: Final = 16


# --- tokens -------------------------------------------------------------------------------------


class BearerTokens(Generic[T]):
    """The accepted tokens, and whose they are."""

    def __init__(self, owners: Mapping[bytes, T]) -> None:
        """`owners` by the SHA-256 digest of their token."""
        self._owners = tuple(owners.items())

    def __repr__(self) -> str:
        return f"BearerTokens({len(self._owners)} tokens)"

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, authorization: bytes | None) -> T | None:
        """Return whose token an `Authorization` header carries; None if it is nobody's."""
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        return self.owner_of(authorization[len(_BEARER) :].strip())

    def owner_of(self, token: bytes) -> T | None:
        """Return whose token this is; None if it is nobody's."""
        digest = hashlib.sha256(token).digest()
        found = None
        for known, owner in self._owners:  # all of them: the time taken reveals nothing
            if hmac.compare_digest(known, digest):
                found = owner
        return found


def upload_credential_checks(
    hook: str | None, digests: Iterable[str]
) -> tuple[UploadCredential | None, UploadCredential | None]:
    """Return the required check of upload credentials: (a fast one, one to run in a thread)."""
    if hook is not None:
        return None, _load_hook(hook)
    accepted = BearerTokens({bytes.fromhex(digest): True for digest in digests})
    if not len(accepted):
        return None, None
    return lambda text: bool(accepted.owner_of(text.encode("latin-1").strip())), None


def _load_hook(hook: str) -> UploadCredential:
    module, _, name = hook.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ServiceError(f"upload_credential: can't load {hook}: {error}") from error
    if not callable(function):
        raise ServiceError(f"upload_credential: {hook} is not a function")

    def check(text: str) -> bool:
        # Only True lets an upload through: a coroutine or a forgotten return does not.
        return function(text[:_MAX_CREDENTIAL_CHARACTERS]) is True

    return check


# --- headers and bodies -------------------------------------------------------------------------


class RequestHeaders(NamedTuple):
    """The header fields that matter."""

    content_type: bytes
    length: int | None  # None if it is not declared
    authorization: bytes | None
    advertised: bytes | None
    credential: bytes | None


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
    """Pick the fields that matter, in one pass."""
    content_type = b""
    length = authorization = task = credential = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value) if value.isdigit() and len(value) < 20 else 1 << 62
        elif name == b"content-type":
            content_type = value
        elif name == _TASKPROV_HEADER:
            # Two lines are one field (RFC 9110), which then is not a byte sequence.
            task = value if task is None else task + b", " + value
        elif name == b"authorization":
            authorization = value
        elif name == CREDENTIAL_HEADER:
            credential = value
    return RequestHeaders(content_type, length, authorization, task, credential)


def check_media_type(given: bytes, wanted: str) -> None:
    """Raise unless the body has the resource's media type."""
    if given != wanted.encode() and not is_media_type(given.decode("latin-1"), wanted):
        raise ProblemError(None, f"the body must be {wanted}", status=415)


async def body_parts(request: Request, limit: int, length: int | None) -> AsyncIterator[bytes]:
    """Read a body of at most `limit` bytes as it arrives. The connection cuts off slow ones."""
    too_long = ProblemError(None, f"at most {limit} bytes are accepted", status=413)
    if length is not None and length > limit:
        raise too_long
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_long
        yield part


async def read_body(request: Request, limit: int, length: int | None) -> bytes:
    """Read a whole body of at most `limit` bytes."""
    return b"".join([part async for part in body_parts(request, limit, length)])


# --- tasks --------------------------------------------------------------------------------------


class TaskLookup:
    """Finds the task of a request, and caches what it found."""

    def __init__(self, tasks: TaskStore, clock: Clock) -> None:
        self._tasks = tasks
        self._clock = clock
        self._cache: OrderedDict[tuple[str, bytes | None], KnownTask] = OrderedDict()

    def cached(self, text: str, advertisement: bytes | None) -> KnownTask | None:
        """Return the task if the same request found it before and it has not ended."""
        task = self._cache.get((text, advertisement))
        return task if task is not None and self._clock.now() < task.ends else None

    async def find(self, text: str, advertisement: bytes | None) -> KnownTask:
        """Find the task of an id in a URL; raises `ProblemError`."""
        known = self.cached(text, advertisement)
        if known is not None:
            return known
        configuration = advertised(
            None if advertisement is None else advertisement.decode("latin-1")
        )
        identity = _task_id(text)
        if configuration is not None and task_id(configuration) != identity:
            raise ProblemError(
                Problem.UNRECOGNIZED_TASK,
                "the task id is not that of the advertised configuration",
                task_id=identity,
            )
        task = await anyio.to_thread.run_sync(self._tasks.find, identity)
        if task is None or self._clock.now() >= task.ends:
            advertises = configuration is not None
            raise ProblemError(
                Problem.INVALID_TASK if advertises else Problem.UNRECOGNIZED_TASK,
                "this aggregator serves no logged recipe with this task, or the task has ended",
                task_id=identity,
            )
        if advertisement is None or advertisement == _usual_spelling(configuration):
            self._cache[text, advertisement] = task
            while len(self._cache) > _CACHED_TASKS:
                self._cache.popitem(last=False)
        return task


def _usual_spelling(configuration: TaskConfiguration | None) -> bytes | None:
    """Return the only spelling that is cached, so that variants can't fill the cache."""
    if configuration is None:
        return None
    return advertise(configuration.encode())[TASKPROV_HEADER].encode()


def _task_id(text: str) -> bytes:
    found = _decoded(text)
    if len(found) != TASK_ID_BYTES:
        raise ProblemError(
            Problem.UNRECOGNIZED_TASK, "a task id is 32 bytes in base64url without padding"
        )
    return found


def resource_id(text: str, problem: Problem | None, task: KnownTask) -> bytes:
    """Return a job's or a share's id in a URL; raises if it can't be one of ours."""
    found = _decoded(text)
    if len(found) != _ID_BYTES:
        raise task.refusal(problem, "there is no such resource", status=404)
    return found


def _decoded(text: str) -> bytes:
    try:
        return b64url_decode(text)
    except DecodeError:
        return b""
