"""What the operator's metrics show of the database and of the other's clock."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import httpx2
import pytest

from chorister.aggregator.operations.metrics import DatabaseMetrics
from tests.aggregator.apps import Answer, Apps


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[Apps]:
    made = Apps(tmp_path)
    yield made
    made.close()


def shown(apps: Apps) -> str:
    service = apps.leader
    DatabaseMetrics(service.core.database, apps.clock, service.metrics).update()
    return service.metrics.text().decode()


def test_stuck_jobs_and_rejections_are_shown(apps: Apps) -> None:
    assert "chorister_oldest_job_seconds 0.0" in shown(apps)
    task = apps.task()
    reports = apps.reports(task, 3)
    assert apps.upload(task, *reports).status_code == 200
    apps.upload(task, reports[0])
    assert len(apps.leader.leader.aggregation.create_jobs(10)) == 1
    apps.clock.advance(100)
    text = shown(apps)
    assert "chorister_unfinished_jobs 1.0" in text
    assert "chorister_oldest_job_seconds 100.0" in text
    assert 'chorister_task_reports{outcome="uploaded",reason=""} 3.0' in text
    rejected = 'outcome="rejected by upload",reason="report_replayed"'
    assert f"chorister_task_reports{{{rejected}}} 1.0" in text
    assert apps.work(task) == []
    text = shown(apps)
    assert "chorister_unfinished_jobs 0.0" in text
    assert "chorister_oldest_job_seconds 0.0" in text
    assert 'chorister_task_reports{outcome="verified",reason=""} 3.0' in text


@pytest.mark.parametrize("ahead", [-400, 0, 75])
def test_the_helpers_clock_is_compared_with_ours(apps: Apps, ahead: int) -> None:
    def dated(request: httpx2.Request, honest: Answer) -> httpx2.Response:
        answer = honest(request)
        theirs = datetime.fromtimestamp(apps.clock.now() + ahead, UTC)
        answer.headers["date"] = format_datetime(theirs, usegmt=True)
        return answer

    task = apps.task()
    apps.upload(task, *apps.reports(task))
    with apps.tampered(dated):
        apps.work(task)
    wanted = f'chorister_clock_skew_seconds{{peer="helper"}} {float(ahead)}'
    assert wanted in apps.leader.metrics.text().decode()


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Nov 2026 99:00:00 GMT"])
def test_a_date_that_is_none_is_passed_over(apps: Apps, date: str) -> None:
    def dated(request: httpx2.Request, honest: Answer) -> httpx2.Response:
        answer = honest(request)
        answer.headers["date"] = date
        return answer

    task = apps.task()
    apps.upload(task, *apps.reports(task))
    with apps.tampered(dated):
        assert apps.work(task) == []
    assert "chorister_clock_skew_seconds{" not in apps.leader.metrics.text().decode()
