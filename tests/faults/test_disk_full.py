"""A full disk: nothing is acknowledged that is not kept, and it goes on when there is room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event

from chorister.aggregator.tasks import KnownTask
from chorister.dap.messages import CollectionJobResp
from chorister.errors import ServiceError
from tests.aggregator.apps import Apps
from tests.aggregator.world import opened


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[Apps]:
    made = Apps(tmp_path)
    yield made
    made.close()


class SmallDisk:
    """SQLite refuses to grow beyond what it has, on every connection."""

    def __init__(self, apps: Apps, role: str) -> None:
        service = apps.leader if role == "leader" else apps.helper
        self._engine = service.core.database.engine
        self.full = False
        event.listen(self._engine, "checkout", self._limit)

    def _limit(self, connection: object, *_: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]
        # A limit below the file's size means its size; with no free page left nothing fits.
        cursor.execute(f"PRAGMA max_page_count = {1 if self.full else 1_000_000}")
        cursor.close()


def test_uploads_that_do_not_fit_are_not_acknowledged(apps: Apps) -> None:
    task = apps.task()
    disk = SmallDisk(apps, "leader")
    # Many, so that no page that happens to be free can take them.
    reports = apps.reports(task, 600)
    disk.full = True
    refused = apps.upload(task, *reports)
    assert refused.status_code >= 500
    assert apps.leader.leader.create_aggregation_jobs(10) == []
    disk.full = False
    assert apps.upload(task, *reports).status_code == 200
    assert result(apps, task) == len(reports)


def result(apps: Apps, task: KnownTask) -> int:
    """The number of reports in a batch, whose first bin must be exactly that."""
    answer = apps.collected(task)
    assert answer.status_code == 200
    number, counts = opened(task, CollectionJobResp.decode(answer.content))
    assert counts.tolist() == [number, 0, 0, 0]
    return number


def test_jobs_wait_for_room_at_the_helper(apps: Apps) -> None:
    """600 ids do not fit; the job stays, and is done when they do."""
    task = apps.task()
    reports = apps.reports(task, 600)
    assert apps.upload(task, *reports).status_code == 200
    disk = SmallDisk(apps, "helper")
    disk.full = True
    with contextlib.suppress(ServiceError):
        apps.work(task)
    leader, helper = apps.verified(task)
    assert leader <= helper
    assert leader < len(reports)
    disk.full = False
    apps.work(task)
    assert apps.verified(task) == (len(reports), len(reports))
    assert result(apps, task) == len(reports)
