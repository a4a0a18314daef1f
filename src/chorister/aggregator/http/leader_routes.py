"""The leader over HTTP.

    POST {url}tasks/ID/collection_jobs          collect; the recipe's collector only
    GET, DELETE {url}tasks/ID/collection_jobs/ID
    GET  {url}chorister/recipes/DIGEST          a recipe's progress; its collector only

`upload_route` handles uploads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio
from starlette.requests import Request
from starlette.routing import Route

from chorister.aggregator.http.app import json_response, make_route, success
from chorister.aggregator.http.request_checks import (
    BearerTokens,
    RequestHeaders,
    TaskLookup,
    check_media_type,
    read_body,
    read_headers,
    resource_id,
)
from chorister.aggregator.jobs.collection_job_driver import CollectionJobDriver
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.operations.metrics import Metrics
from chorister.aggregator.storage.counters import TaskStatus, task_status
from chorister.aggregator.storage.database import Database
from chorister.aggregator.storage.schema import BatchState
from chorister.aggregator.storage.tasks import TaskStore
from chorister.clock import Clock
from chorister.dap.draft import (
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    collection_jobs_path,
)
from chorister.errors import ProblemError
from chorister.http_server import RawResponse

_MAX_REQUEST_BYTES: Final = 65_536
# A result follows the last report within two seconds, so clients should poll every second.
_RETRY_AFTER: Final = "1"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_TIME: Final = re.compile(r"[0-9]{1,15}")


@dataclass(kw_only=True)
class LeaderRoutes:
    """The handlers and what they need."""

    collection: CollectionJobDriver
    database: Database
    tasks: TaskStore
    clock: Clock
    lookup: TaskLookup
    collectors: BearerTokens[bytes]  # the digest of each owner's HPKE configuration
    metrics: Metrics
    prefix: str
    on_collection: Callable[[], None] = lambda: None  # called when a collection was created

    def routes(self) -> Sequence[Route]:
        path = f"{self.prefix}tasks/{{task}}/collection_jobs"
        recipe = f"{self.prefix}chorister/recipes/{{digest}}"
        jobs = partial(make_route, self.metrics, "collection_jobs")
        return [
            jobs(path, self.create, "POST"),
            jobs(f"{path}/{{job}}", self.one, "GET", "DELETE"),
            make_route(self.metrics, "recipes", recipe, self.progress, "GET"),
        ]

    # --- collection -----------------------------------------------------------------------------

    def _collector(self, headers: RequestHeaders) -> bytes:
        collector = self.collectors.owner(headers.authorization)
        if collector is None:
            raise ProblemError(None, "a collector's bearer token is required", status=401)
        return collector

    async def _enter(self, request: Request) -> tuple[RequestHeaders, bytes, KnownTask]:
        """Check the collector's token, then find the task."""
        headers = read_headers(request.headers.raw)
        collector = self._collector(headers)
        task = await self.lookup.find(request.path_params["task"], headers.advertised)
        return headers, collector, task

    async def create(self, request: Request) -> RawResponse:
        headers, collector, task = await self._enter(request)
        check_media_type(headers.content_type, COLLECTION_JOB_REQUEST)
        body = await read_body(request, _MAX_REQUEST_BYTES, headers.length)
        ref = await anyio.to_thread.run_sync(self.collection.create, task, body, collector)
        self.on_collection()
        location = self.prefix + collection_jobs_path(task.task_id, ref.collection_id)
        return await self._result(task, ref.collection_id, collector, {"location": location})

    async def one(self, request: Request) -> RawResponse:
        _, collector, task = await self._enter(request)
        job = resource_id(request.path_params["job"], None, task)
        if request.method == "DELETE":
            await anyio.to_thread.run_sync(self.collection.delete, task, job, collector)
            return success()
        return await self._result(task, job, collector, {})

    async def _result(
        self, task: KnownTask, job: bytes, collector: bytes, headers: dict[str, str]
    ) -> RawResponse:
        found = await anyio.to_thread.run_sync(self.collection.result, task, job, collector)
        if found is None:
            return success(status=202, headers={**headers, "retry-after": _RETRY_AFTER})
        return success(found.encode(), media_type=COLLECTION_JOB_RESPONSE, headers=headers)

    async def progress(self, request: Request) -> RawResponse:
        collector = self._collector(read_headers(request.headers.raw))
        text = request.path_params["digest"]
        if not _DIGEST.fullmatch(text):
            raise ProblemError(None, "a recipe digest has 64 hexadecimal digits", status=404)
        opens = request.query_params.get("opens")
        if opens is not None and not _TIME.fullmatch(opens):
            raise ProblemError(None, "opens is a time in POSIX seconds")
        time = None if opens is None else int(opens)
        digest = bytes.fromhex(text)
        found = await anyio.to_thread.run_sync(self._progress, digest, time, collector)
        return json_response(found)

    def _progress(self, digest: bytes, opens: int | None, collector: bytes) -> dict[str, object]:
        tasks = self.tasks.of_recipe(digest)
        # Only its own collector may know whether the recipe exists.
        if not tasks or tasks[0].collector != collector:
            raise ProblemError(None, "this collector has no such recipe", status=404)
        now = self.clock.now()
        if opens is None:  # the newest window that has opened
            opened = (task.opens for task in tasks if task.opens <= now)
            opens = max(opened, default=tasks[0].opens)
        tasks = [task for task in tasks if task.opens == opens]
        if not tasks:
            raise ProblemError(None, "no window of this recipe opens then", status=404)
        return recipe_progress(task_status(self.database, tasks), now)


# --- progress -----------------------------------------------------------------------------------


def recipe_progress(statuses: Sequence[TaskStatus], now: int) -> dict[str, object]:
    """Return what an analyst sees of a recipe.

    Below the minimum: tenths of it, over all tasks together, and no text of a failure, which may
    name a group's task. That keeps counts off screens and out of logs, but hides nothing: with
    uploads of their own, an analyst can find exact counts, group by group. Participation is public.
    """
    minimum = statuses[0].task.min_batch_size
    verified = [status.verified for status in statuses]
    filled = sum(min(each, minimum) for each in verified)
    full = filled == minimum * len(statuses)
    shown: dict[str, object] = {
        "tasks": len(statuses),
        "state": _state(statuses, now, full=full),
        "filled": 10 * filled // (minimum * len(statuses)) / 10,
        "waiting_for": _waiting(statuses, now, full=full),
        "finished": _finished(statuses, now),
        "rejected": {
            "leader": _rounded(statuses, ("upload", "leader"), minimum),
            "helper": _rounded(statuses, ("helper",), minimum),
        },
        "closes": statuses[0].task.closes,
        "ends": statuses[0].task.ends,
    }
    if full:
        shown["reports"] = _down(min(verified), minimum)
    return shown


def _down(number: int, minimum: int) -> int:
    """Round down to tenths of the minimum."""
    return minimum * (10 * number // minimum) // 10


def _rounded(statuses: Sequence[TaskStatus], whose: Iterable[str], minimum: int) -> dict[str, int]:
    total: Counter[str] = Counter()
    for status in statuses:
        for who in whose:
            total.update(status.rejected(who))
    return {reason: _down(number, minimum) for reason, number in sorted(total.items())}


def _state(statuses: Sequence[TaskStatus], now: int, *, full: bool) -> str:
    if now >= statuses[0].task.ends:
        return "expired"
    if all(status.state >= BatchState.COLLECTED for status in statuses):
        return "collected"
    return "ready" if full else "collecting"


def _finished(statuses: Sequence[TaskStatus], now: int) -> bool:
    """Whether nothing more will be released: each batch is collected, or stays too small."""
    return now >= statuses[0].task.closes and all(map(_settled, statuses))


def _settled(status: TaskStatus) -> bool:
    if status.state >= BatchState.COLLECTED:
        return True
    rejected = (status.rejected(who) for who in ("leader", "helper", "disputed"))
    seen = status.verified + sum(sum(reasons.values()) for reasons in rejected)
    waiting = status.unfinished_jobs > 0 or status.uploaded > seen
    return not waiting and status.verified < status.task.min_batch_size


def _waiting(statuses: Sequence[TaskStatus], now: int, *, full: bool) -> str | None:
    match _state(statuses, now, full=full):
        case "expired" | "collected":
            return None
        case "ready":
            if any(status.unfinished_jobs for status in statuses):
                return "the last reports are being verified"
            return "a collector"
    if now >= statuses[0].task.closes:
        if not _finished(statuses, now):
            return "the last reports are being verified"
        return "nothing: the window is closed and too few reports were verified"
    if any(status.failures and status.unfinished_jobs for status in statuses):
        return "the helper, to verify reports"
    return "more reports"
