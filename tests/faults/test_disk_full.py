"""A full disk: nothing is acknowledged that is not kept, and it goes on when there is room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event

from chorister.aggregator.known_tasks import KnownTask
from chorister.dap.messages import CollectionJobResp
from chorister.errors import ServiceError
from tests.aggregator.apps import Apps
from tests.aggregator.world import Pair, one_bit, opened, small_recipe
from tests.faults.postgres_servers import WAL_SEGMENT, MortalPostgres, mortal_servers


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
    assert apps.leader.leader.aggregation.create_jobs(10) == []
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


@pytest.fixture(scope="module")
def servers() -> Iterator[list[MortalPostgres]]:
    with mortal_servers(2) as made:
        yield made


@pytest.fixture(scope="module")
def pair(servers: list[MortalPostgres]) -> Iterator[Pair]:
    made = Pair((servers[0].url, servers[1].url))
    yield made
    made.stop()


MANY = 3_000
"""Reports of some 500 bytes: more than fit into a file of `WAL_SEGMENT`."""
FILLER = """
    INSERT INTO report_ids
    SELECT decode(repeat('00', 32), 'hex'), decode(md5(CAST(each AS text)), 'hex')
    FROM generate_series(1, 12500) AS each RETURNING 1
"""
"""Ids of an older task, which nearly fill the helper's file."""


def sealed(pair: Pair, task: KnownTask) -> list[list[bytes]]:
    reports = pair.reports(task, one_bit(4, [0] * MANY))
    return [reports[start : start + 100] for start in range(0, MANY, 100)]


def upload_all(pair: Pair, task: KnownTask, waiting: list[list[bytes]]) -> None:
    """Until none waits, or the leader fails."""
    while waiting:
        assert not pair.upload(task, *waiting[-1]).statuses
        waiting.pop()


def exact(pair: Pair, task: KnownTask) -> None:
    """All of them in the batch, once; nothing is left but what protects against replays."""
    while pair.work():
        pass
    pair.collect(task)
    pair.work()
    found = pair.result(task)
    assert found is not None
    leaders, helpers = (side.draws.pop() for side in pair.noise)
    assert found[0] == MANY
    assert (found[1] - leaders - helpers).tolist() == [MANY, 0, 0, 0]
    for rows in pair.row_counts():
        for table in ("segments", "report_blobs", "aggregation_jobs", "accumulators"):
            assert not rows[table], table


def test_postgresql_without_room_takes_nothing_that_it_does_not_keep(
    pair: Pair, servers: list[MortalPostgres]
) -> None:
    leader, _ = servers
    (task,) = pair.accept(small_recipe())
    waiting = sealed(pair, task)
    leader.limit_files(WAL_SEGMENT)
    with pytest.raises(ServiceError, match="File too large"):
        upload_all(pair, task, waiting)
    assert 1 < len(waiting) < MANY // 100
    leader.limit_files()
    upload_all(pair, task, waiting)  # the one that did not fit is new to it
    exact(pair, task)


def test_postgresql_without_room_at_the_helper_delays_jobs(
    pair: Pair, servers: list[MortalPostgres]
) -> None:
    _, helper = servers
    (task,) = pair.accept(small_recipe(id="another"))
    upload_all(pair, task, sealed(pair, task))
    with pair.databases[1].write() as connection:
        connection.exec_driver_sql(FILLER)
    helper.limit_files(WAL_SEGMENT)
    with pytest.raises(ServiceError, match="File too large"):
        pair.work()
    assert all(pair.row_counts()[0][table] for table in ("report_blobs", "aggregation_jobs"))
    helper.limit_files()
    exact(pair, task)
