"""What an operator watches: Prometheus metrics, one registry per process.

Counts over all tasks, for the operator's own listener. `chorister tasks` shows counts by task: a
label per task would grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorister.aggregator.storage.counters import (
    UPLOADED,
    VERIFIED,
    total_counts,
    unfinished_summary,
)
from chorister.aggregator.storage.database import Database
from chorister.clock import Clock

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """All metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "chorister_requests", "Requests, by route and status.", ["route", "status"]
        )
        self.reports = counter("chorister_reports", "Uploaded reports, by outcome.", ["outcome"])
        self.waiting = gauge("chorister_uploads_waiting", "Uploads that wait to be written.")
        self.commit_seconds = histogram(
            "chorister_upload_commit_seconds",
            "How long one transaction of uploads took.",
            buckets=_SECONDS,
        )
        self.commit_uploads = histogram(
            "chorister_upload_commit_uploads",
            "Uploads in one transaction.",
            buckets=(1, 3, 10, 30, 100, 300),
        )
        self.jobs = counter(
            "chorister_jobs", "Runs of a job, by kind and outcome.", ["kind", "outcome"]
        )
        self.job_seconds = histogram(
            "chorister_job_seconds", "How long one run of a job took.", ["kind"], buckets=_SECONDS
        )
        self.cosigned = gauge(
            "chorister_cosigned_checkpoint_time_seconds",
            "The time of the last cosigned checkpoint.",
        )
        self.cosigning_failures = counter(
            "chorister_cosigning_failures",
            "Attempts to cosign that failed, by the error's name.",
            ["error"],
        )
        self.key_expires = gauge(
            "chorister_hpke_key_not_after_seconds",
            "When the HPKE key that devices use now expires.",
        )
        self.unfinished = gauge(
            "chorister_unfinished_jobs", "Aggregation jobs that are not finished."
        )
        self.oldest = gauge(
            "chorister_oldest_job_seconds",
            "The age of the oldest unfinished aggregation job; 0 if there is none.",
        )
        self.dead = gauge(
            "chorister_dead_jobs", "Jobs that workers gave up on: see `chorister jobs list`."
        )
        self.decided = gauge(
            "chorister_task_reports",
            "Reports of current tasks, by outcome and reason.",
            ["outcome", "reason"],
        )
        self.skew = gauge(
            "chorister_clock_skew_seconds",
            "The peer's clock minus ours, as of its last response.",
            ["peer"],
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class DatabaseMetrics:
    """Reads figures from the database: stuck jobs, rejected reports.

    Every process of an aggregator reads the same database and shows the same figures, so alerts
    use their maximum.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        metrics: Metrics,
        *,
        dead_jobs: Callable[[], int] | None = None,
    ) -> None:
        """`dead_jobs` counts the jobs that workers gave up on, if there are workers."""
        self._database = database
        self._clock = clock
        self._metrics = metrics
        self._dead_jobs = dead_jobs

    def update(self) -> None:
        with self._database.read() as tx:
            unfinished, oldest = unfinished_summary(tx)
            counted = total_counts(tx)
        age = 0 if oldest is None else max(0, self._clock.now() - oldest)
        self._metrics.unfinished.set(unfinished)
        self._metrics.oldest.set(age)
        for name, value in counted.items():
            outcome, _, reason = name.partition(":")
            accepted = name in (UPLOADED, VERIFIED)
            labels = (outcome, "") if accepted else (f"rejected by {outcome}", reason)
            self._metrics.decided.labels(*labels).set(value)
        if self._dead_jobs is not None:
            self._metrics.dead.set(self._dead_jobs())


def metrics_app(metrics: Metrics) -> Starlette:
    """Return the application with `GET /metrics`, for the operator's own listener."""

    async def show(_: Request) -> Response:
        return Response(
            metrics.text(),
            headers={"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"},
        )

    return Starlette(routes=[Route("/metrics", show, methods=["GET"])])
