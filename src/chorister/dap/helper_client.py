"""The leader's client of the helper: it sends a request and polls until the answer is ready.

`ProblemError` is the helper's refusal. `Unreachable` means: send the same bytes again later. The
helper recognizes them and answers as it did the first time.
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
from chorister.dap.http import (
    MIN_LIMIT,
    HTTPClient,
    created_resource,
    is_media_type,
    poll_delay,
    resource_url,
)
from chorister.dap.task import AdvertisedTask, advertise
from chorister.errors import Unreachable
from chorister.http_client import Response

_MAX_POLL_SECONDS: Final = 30


class HelperClient:
    """Talks to the helper that a task names. Safe to share between threads."""

    def __init__(
        self,
        http: Callable[[str], HTTPClient],
        *,
        max_wait: float = 300.0,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`http` maps a helper's URL to a client that has the token for that helper alone.

        A helper that does not answer at once has `max_wait` seconds to finish.
        """
        self._http = http
        self._max_wait = max_wait
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._monotonic = monotonic

    def create_aggregation_job(self, task: AdvertisedTask, request: bytes) -> bytes:
        """Send an `AggregationJobInitReq`; return the `AggregationJobResp`."""
        return self._create(
            task,
            aggregation_jobs_path(task.task_id),
            request,
            asks=AGGREGATION_JOB_INIT_REQUEST,
            answers=AGGREGATION_JOB_RESPONSE,
            limit=len(request),  # a response is shorter
        )

    def aggregate_share(self, task: AdvertisedTask, request: bytes) -> bytes:
        """Send an `AggregateShareReq`; return the `AggregateShare`."""
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
        url = resource_url(task.configuration.helper_aggregator_endpoint, path)
        deadline = self._monotonic() + self._max_wait
        response = self._send(task, "POST", url, request, asks, limit=limit)
        location: str | None = None
        while not response.body:
            if location is None or "location" in response.headers:
                location = created_resource(url, response.headers.get("location", ""))
            delay = poll_delay(response, self._clock, longest=_MAX_POLL_SECONDS)
            if self._monotonic() + delay > deadline:
                raise Unreachable(f"{location} is not ready after {self._max_wait:g} s")
            self._sleep(delay)
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
        http = self._http(task.configuration.helper_aggregator_endpoint)
        return http.request(method, url, headers=headers, body=body, limit=limit)
