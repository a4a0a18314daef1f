"""Uploads over HTTP: POST {url}tasks/ID/reports.

An upload does almost nothing in Python: its task is a dictionary's answer, one native call reads
the headers of its reports, and it waits in the queue for the next transaction. Even so there are
two ways to there, for the web server's own work is most of an upload's. The plain case (a task that
was asked for before, a short body of declared length, a credential that is checked at once) is
answered by the connection itself (`connections.Direct`). All else, and every refusal of a head, is
an ASGI application's, without Starlette.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from chorister.aggregator.answers import ACCEPTED, Answer, made, refusal
from chorister.aggregator.app import failure
from chorister.aggregator.asgi import Receive, Scope, Send
from chorister.aggregator.auth import CREDENTIAL_HEADER, UploadCredential
from chorister.aggregator.gate import Gate, Heads, check_media_type, read_heads
from chorister.aggregator.leader import Leader, UploadPlan
from chorister.aggregator.metrics import Metrics
from chorister.aggregator.tasks import KnownTask
from chorister.aggregator.upload_queue import QueueFull, UploadQueue
from chorister.dap.draft import UPLOAD_ERRORS, UPLOAD_REQUEST
from chorister.dap.messages import UploadErrors
from chorister.errors import ProblemError

__all__ = ["UploadRoute"]

_UPLOAD_TYPE: Final = UPLOAD_REQUEST.encode()
_LARGE: Final = 1 << 17
_LARGE_AT_ONCE: Final = 2
_GONE: Final = Answer(499, ())  # the sender went away: nobody reads it


@dataclass(kw_only=True)
class UploadRoute:
    """What uploads need."""

    leader: Leader
    gate: Gate
    queue: UploadQueue[UploadPlan, UploadErrors]
    metrics: Metrics
    prefix: str
    upload_bytes: int
    held_bytes: int
    # How an upload's credential is checked: at once, or in a thread; neither, if none is needed.
    credential: UploadCredential | None = None
    slow_credential: UploadCredential | None = None
    held: int = 0  # bytes of bodies that are arriving
    _path: re.Pattern[str] = field(init=False)
    _url: re.Pattern[bytes] = field(init=False)
    _threads: anyio.CapacityLimiter = field(init=False)

    def __post_init__(self) -> None:
        # Of their own, so that large uploads take no thread from other requests.
        self._threads = anyio.CapacityLimiter(_LARGE_AT_ONCE)
        path = re.escape(self.prefix) + r"tasks/([^/]+)/reports"
        self._path = re.compile(path)
        self._url = re.compile(path.replace("[^/]", r"[\w-]").encode())
        self._short = min(_LARGE - 1, self.upload_bytes)
        self._accepted = self.metrics.requests.labels("reports", "200")
        self._stored = self.metrics.reports.labels("stored")
        self._refused = self.metrics.reports.labels("refused")

    def task_of(self, path: str) -> str | None:
        """The task's id, as it stands in the URL, if it is the URL of uploads."""
        found = self._path.fullmatch(path)
        return None if found is None else found[1]

    # --- the plain case -------------------------------------------------------------------------

    def begin(self, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> _Upload | None:
        """An upload that needs nothing but to be stored; None for any other request."""
        found = self._url.fullmatch(url)
        if found is None or self.slow_credential is not None:
            return None
        heads = read_heads(headers, CREDENTIAL_HEADER)
        if (
            heads.content_type != _UPLOAD_TYPE
            or heads.length is None
            or heads.length > self._short
            or (self.credential is not None and not _good(self.credential, heads.credential))
        ):
            return None
        task = self.gate.remembered(found[1].decode(), heads.advertised)
        return None if task is None else _Upload(self, task)

    def store(self, task: KnownTask, body: bytes, answer: Callable[[Answer], None]) -> None:
        """Store a short body; `answer` is told when it is durable."""
        try:
            plan = self.leader.check_upload(task, body)
            future = self.queue.put(plan, len(body))
        except Exception as error:
            answer(self._failed(error))
            return

        def stored(future: asyncio.Future[UploadErrors]) -> None:
            try:
                outcome = self._outcome(plan, future.result())
            except Exception as error:
                outcome = self._failed(error)
            answer(outcome)  # outside: a connection that fails here must not be answered twice

        future.add_done_callback(stored)

    def full(self) -> Answer:
        """The answer to a body for which there is no room."""
        return self._failed(QueueFull())

    # --- the long way ---------------------------------------------------------------------------

    async def upload(self, text: str, scope: Scope, receive: Receive, send: Send) -> None:
        """One upload, from its head to its answer."""
        if scope["method"] != "POST":
            error = ProblemError(None, f"method not allowed: {scope['method']}", status=405)
            await self._counted(refusal(error, {"allow": "POST"})).send(send)
            return
        heads = read_heads(scope["headers"], CREDENTIAL_HEADER)
        try:
            answer = await self._upload(text, heads, receive)
        except Exception as error:
            answer = self._failed(error)
        if answer is _GONE:
            self._counted(answer)
        else:
            await answer.send(send)

    async def _upload(self, text: str, heads: Heads, receive: Receive) -> Answer:
        if self.credential is not None or self.slow_credential is not None:
            await self._check_credential(heads.credential)
        task = await self.gate.task(text, heads.advertised)
        check_media_type(heads.content_type, UPLOAD_REQUEST)
        if heads.length is not None and heads.length > self.upload_bytes:
            raise self._too_long()
        body = await self._body(receive)
        if body is None:
            return _GONE
        if len(body) < _LARGE:
            plan = self.leader.check_upload(task, body)
        else:  # many reports: the look takes its time, and the body counts until it is queued
            self.held += len(body)
            try:
                plan = await anyio.to_thread.run_sync(
                    self.leader.check_upload, task, body, limiter=self._threads
                )
            finally:
                self.held -= len(body)
        return self._outcome(plan, await self.queue.put(plan, len(body)))

    async def _body(self, receive: Receive) -> bytes | None:
        """The body; None if its sender went away.

        What all of them hold together is bounded, by what has arrived and not by what was
        announced: whoever trickles takes no room from others.
        """
        parts, size, more = [], 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(parts[-1])
                self.held += len(parts[-1])
                if size > self.upload_bytes:
                    raise self._too_long()
                if more and self.held > self.held_bytes:
                    raise QueueFull
        finally:
            self.held -= size
        return b"".join(parts)

    def _too_long(self) -> ProblemError:
        return ProblemError(None, f"at most {self.upload_bytes} bytes are accepted", status=413)

    async def _check_credential(self, given: bytes | None) -> None:
        if self.credential is not None:
            good = _good(self.credential, given)
        else:
            good = await anyio.to_thread.run_sync(_good, self.slow_credential, given)
        if not good:
            raise ProblemError(None, "uploads need a credential of the host app", status=403)

    # --- answers --------------------------------------------------------------------------------

    def _outcome(self, plan: UploadPlan, errors: UploadErrors) -> Answer:
        refused = len(errors.statuses)
        self._stored.inc(len(plan.ids) - refused)
        if not refused:
            self._accepted.inc()
            return ACCEPTED
        self._refused.inc(refused)
        return self._counted(made(errors.encode(), media_type=UPLOAD_ERRORS))

    def _failed(self, error: Exception) -> Answer:
        if isinstance(error, QueueFull):
            error = ProblemError(None, "too many uploads wait for the disk; come back", status=503)
        return self._counted(failure(error, "reports"))

    def _counted(self, answer: Answer) -> Answer:
        self.metrics.requests.labels("reports", str(answer.status)).inc()
        return answer


class _Upload:
    """A plain upload while it arrives (`connections.Incoming`)."""

    __slots__ = ("_parts", "_route", "_size", "_task")

    def __init__(self, route: UploadRoute, task: KnownTask) -> None:
        self._route = route
        self._task = task
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, part: bytes) -> Answer | None:
        """A part of the body."""
        self._parts.append(part)
        self._size += len(part)
        self._route.held += len(part)
        if self._route.held <= self._route.held_bytes:
            return None
        self.gone()
        return self._route.full()

    def complete(self, answer: Callable[[Answer], None]) -> None:
        """Store it."""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self.gone()
        self._route.store(self._task, body, answer)

    def gone(self) -> None:
        """Nothing of it is held any more."""
        self._route.held -= self._size
        self._size = 0
        self._parts = []


def _good(check: UploadCredential | None, given: bytes | None) -> bool:
    return check is not None and given is not None and check(given.decode("latin-1"))
