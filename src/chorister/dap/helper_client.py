"""The leader's view of the helper: it asks, waits for as long as it may, and reads the answer.

`ProblemError` is the helper's refusal. `Unreachable` says to send the same bytes again later: the
helper recognises them and answers as it did the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from chorister.clock import Clock, SystemClock
from chorister.dap.draft import (
    AGGREGATE_SHARE,
    AGGREGATE_SHARE_REQUEST,
    AGGREGATION_JOB_INIT_REQUEST,
    AGGREGATION_JOB_RESPONSE,
    aggregate_shares_path,
    aggregation_jobs_path,
)
from chorister.dap.http import MIN_LIMIT, HTTPClient, Response
from chorister.dap.media import is_media_type
from chorister.dap.taskprov import AdvertisedTask, advertise
from chorister.dap.urls import created_resource, resource_url
from chorister.errors import Unreachable

__all__ = ["HelperClient"]

_LONGEST_PAUSE: Final = 30
_PAUSE: Final = 1
"""Seconds between two looks at a job, unless the helper asks for more."""


class HelperClient:
    """One helper, or several: each task names its own. Safe to share between threads."""

    def __init__(
        self,
        http: HTTPClient,
        *,
        patience: float = 300.0,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience` is how many seconds a helper may take that answers later."""
        self._http = http
        self._patience = patience
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._monotonic = monotonic

    def create_aggregation_job(self, task: AdvertisedTask, request: bytes) -> bytes:
        """Send an `AggregationJobInitReq`; returns the `AggregationJobResp`."""
        return self._create(
            task,
            aggregation_jobs_path(task.task_id),
            request,
            asks=AGGREGATION_JOB_INIT_REQUEST,
            answers=AGGREGATION_JOB_RESPONSE,
            limit=len(request),  # a response has less to say about each report
        )

    def aggregate_share(self, task: AdvertisedTask, request: bytes) -> bytes:
        """Send an `AggregateShareReq`; returns the `AggregateShare`."""
        return self._create(
            task,
            aggregate_shares_path(task.task_id),
            request,
            asks=AGGREGATE_SHARE_REQUEST,
            answers=AGGREGATE_SHARE,
            limit=MIN_LIMIT + 16 * task.configuration.vdaf.length,
        )

    def _create(
        self,
        task: AdvertisedTask,
        path: str,
        request: bytes,
        *,
        asks: str,
        answers: str,
        limit: int,
    ) -> bytes:
        url = self._url(task, path)
        deadline = self._monotonic() + self._patience
        response = self._send(task, "POST", url, request, asks, limit=limit)
        location: str | None = None
        while not response.body:
            if location is None or "location" in response.headers:
                location = created_resource(url, response.headers.get("location", ""))
            asked = response.retry_after(self._clock)
            pause = min(_PAUSE if asked is None else max(asked, _PAUSE), _LONGEST_PAUSE)
            if self._monotonic() + pause > deadline:
                raise Unreachable(f"{location} is not ready after {self._patience:g} s")
            self._sleep(pause)
            response = self._send(task, "GET", location, limit=limit)
        if not is_media_type(response.content_type, answers):
            raise Unreachable(f"{url} answers with {response.content_type!r}, not {answers}")
        return response.body

    def _send(
        self,
        task: AdvertisedTask,
        method: str,
        url: str,
        body: bytes | None = None,
        content_type: str | None = None,
        *,
        limit: int,
    ) -> Response:
        headers = advertise(task.configuration.encode())
        if content_type is not None:
            headers["Content-Type"] = content_type
        return self._http.request(method, url, headers=headers, body=body, limit=limit)

    @staticmethod
    def _url(task: AdvertisedTask, path: str) -> str:
        return resource_url(task.configuration.helper_aggregator_endpoint, path)
