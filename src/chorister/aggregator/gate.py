"""What every request has to pass: whose token it carries, which task it is for, how long it is.

A task is found by the id in the URL. If the request advertises a configuration (taskprov), the id
must be its hash; if this aggregator does not take part in the task, the answer is `invalidTask`
where it was advertised, `unrecognizedTask` where it was not. Nothing is written down either way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

import anyio
from starlette.requests import ClientDisconnect, Request

from chorister.aggregator.tasks import KnownTask, TaskRegister
from chorister.canonical import b64url_decode
from chorister.clock import Clock
from chorister.dap.draft import TASK_ID_BYTES, TASKPROV_HEADER, Problem
from chorister.dap.media import is_media_type
from chorister.dap.task import TaskConfiguration, task_id
from chorister.dap.taskprov import advertise, advertised
from chorister.errors import DecodeError, ProblemError

__all__ = ["Gate", "Heads", "check_media_type", "identifier", "read_body", "read_heads"]

_ADVERTISED: Final = TASKPROV_HEADER.lower().encode()
_REMEMBERED: Final = 4096
_ID_BYTES: Final = 16


class Heads(NamedTuple):
    """The header fields that count."""

    content_type: bytes
    length: int | None  # None if it is not declared
    authorization: bytes | None
    advertised: bytes | None
    credential: bytes | None


def read_heads(headers: Iterable[tuple[bytes, bytes]], credential: bytes) -> Heads:
    """Pick out the fields that count, in one pass."""
    content_type = b""
    length = authorization = task = given = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value) if value.isdigit() and len(value) < 20 else 1 << 62
        elif name == b"content-type":
            content_type = value
        elif name == _ADVERTISED:
            # Two lines are one field (RFC 9110), which then is no byte sequence.
            task = value if task is None else task + b", " + value
        elif name == b"authorization":
            authorization = value
        elif name == credential:
            given = value
    return Heads(content_type, length, authorization, task, given)


class Gate:
    """Finds tasks, and remembers those that were found."""

    def __init__(self, register: TaskRegister, clock: Clock) -> None:
        self._register = register
        self._clock = clock
        self._found: OrderedDict[tuple[str, bytes | None], KnownTask] = OrderedDict()

    def remembered(self, text: str, advertisement: bytes | None) -> KnownTask | None:
        """The task, if the same words led to it before and it has not ended."""
        task = self._found.get((text, advertisement))
        return task if task is not None and self._clock.now() < task.ends else None

    async def task(self, text: str, advertisement: bytes | None) -> KnownTask:
        """The task of an id in a URL; raises `ProblemError`."""
        known = self.remembered(text, advertisement)
        if known is not None:
            return known
        configuration = advertised(
            None if advertisement is None else advertisement.decode("latin-1")
        )
        identity = _task_id(text)
        if configuration is not None and task_id(configuration) != identity:
            raise ProblemError(
                Problem.UNRECOGNIZED_TASK,
                "the task's id is not that of the configuration which is advertised",
                task_id=identity,
            )
        task = await anyio.to_thread.run_sync(self._register.find, identity)
        if task is None or self._clock.now() >= task.ends:
            advertises = configuration is not None
            raise ProblemError(
                Problem.INVALID_TASK if advertises else Problem.UNRECOGNIZED_TASK,
                "no recipe in the log that this aggregator serves has this task, or it has ended",
                task_id=identity,
            )
        if advertisement is None or advertisement == _as_devices_do(configuration):
            self._found[text, advertisement] = task
            while len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        return task


def _as_devices_do(configuration: TaskConfiguration | None) -> bytes | None:
    """The one spelling that is remembered: whoever varies it fills nobody's memory."""
    if configuration is None:
        return None
    return advertise(configuration.encode())[TASKPROV_HEADER].encode()


def _task_id(text: str) -> bytes:
    try:
        found = b64url_decode(text)
    except DecodeError:
        found = b""
    if len(found) != TASK_ID_BYTES:
        raise ProblemError(
            Problem.UNRECOGNIZED_TASK, "a task's id is 32 bytes in base64url without padding"
        )
    return found


def identifier(text: str, problem: Problem | None, task: KnownTask) -> bytes:
    """A job's or a share's id in a URL; raises if it can't be one of ours."""
    try:
        found = b64url_decode(text)
    except DecodeError:
        found = b""
    if len(found) != _ID_BYTES:
        raise ProblemError(problem, "there is no such resource", status=404, task_id=task.task_id)
    return found


def check_media_type(given: bytes, wanted: str) -> None:
    """Raise unless the body is what the resource takes."""
    if given != wanted.encode() and not is_media_type(given.decode("latin-1"), wanted):
        raise ProblemError(None, f"the body must be {wanted}", status=415)


async def read_body(request: Request, limit: int, length: int | None) -> bytes:
    """The body, if it is no longer than it may be. Slow ones are cut off by the connection."""
    too_long = ProblemError(None, f"at most {limit} bytes are accepted", status=413)
    if length is not None and length > limit:
        raise too_long
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise too_long
    except ClientDisconnect:
        raise ProblemError(None, "the sender went away", status=400) from None
    return bytes(data)
