"""What an operator watches: Prometheus metrics, one registry a server.

Counts over all tasks, for the operator's own listener. Counts by task are `chorister tasks`: they
need the database, and a label for each task would grow without end.
"""

from __future__ import annotations

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

__all__ = ["Metrics", "metrics_app"]

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """All that is counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "chorister_requests",
            "Requests, by what was asked for and how it was answered.",
            ["route", "status"],
            registry=self.registry,
        )
        self.reports = Counter(
            "chorister_reports",
            "Reports that were uploaded, by what became of them.",
            ["outcome"],
            registry=self.registry,
        )
        self.waiting = Gauge(
            "chorister_uploads_waiting",
            "Uploads that wait for the disk.",
            registry=self.registry,
        )
        self.commit_seconds = Histogram(
            "chorister_upload_commit_seconds",
            "How long one transaction of uploads took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.commit_uploads = Histogram(
            "chorister_upload_commit_uploads",
            "Uploads in one transaction.",
            buckets=(1, 3, 10, 30, 100, 300),
            registry=self.registry,
        )
        self.jobs = Counter(
            "chorister_jobs",
            "Runs of a job, by kind and outcome.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.job_seconds = Histogram(
            "chorister_job_seconds",
            "How long one run of a job took.",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.cosigned = Gauge(
            "chorister_cosigned_checkpoint_time_seconds",
            "The time of the checkpoint that was cosigned last.",
            registry=self.registry,
        )
        self.cosigning_failures = Counter(
            "chorister_cosigning_failures",
            "Looks at the log that did not end in a cosignature, by the error's name.",
            ["error"],
            registry=self.registry,
        )
        self.key_expires = Gauge(
            "chorister_hpke_key_not_after_seconds",
            "When the HPKE key that devices seal to now ceases to be valid.",
            registry=self.registry,
        )

        self.unfinished = Gauge(
            "chorister_unfinished_jobs",
            "Aggregation jobs that were made and not finished.",
            registry=self.registry,
        )
        self.oldest = Gauge(
            "chorister_oldest_job_seconds",
            "How long ago the oldest of them was made; 0 if there is none.",
            registry=self.registry,
        )
        self.dead = Gauge(
            "chorister_dead_jobs",
            "Jobs that workers gave up: see `chorister jobs list`.",
            registry=self.registry,
        )
        self.decided = Gauge(
            "chorister_task_reports",
            "Reports of the tasks that are not over, by what became of them.",
            ["outcome", "reason"],
            registry=self.registry,
        )
        self.skew = Gauge(
            "chorister_clock_skew_seconds",
            "The other's clock minus ours, as its last answer said.",
            ["peer"],
            registry=self.registry,
        )

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


def metrics_app(metrics: Metrics) -> Starlette:
    """`GET /metrics`, for a listener that only the operator reaches."""

    async def show(_: Request) -> Response:
        return Response(
            metrics.text(),
            headers={"Content-Type": CONTENT_TYPE_LATEST, "Cache-Control": "no-store"},
        )

    return Starlette(routes=[Route("/metrics", show, methods=["GET"])])
