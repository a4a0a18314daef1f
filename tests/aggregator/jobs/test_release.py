"""What an operator can mend, and what a restored backup must not undo."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from chorister.aggregator.jobs.release import CollectedFile
from chorister.aggregator.service import Service
from chorister.aggregator.storage.batches import batch_total
from chorister.dap.draft import Problem
from chorister.errors import ProblemError
from tests.aggregator.apps import Apps, collection_request, share_request


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[Apps]:
    made = Apps(tmp_path)
    yield made
    made.close()


def backed_up(folder: Path, role: str) -> dict[str, str]:
    """Copy a database as it is now; the setting that puts the copy in its place."""
    with (
        closing(sqlite3.connect(folder / "backup.db")) as backup,
        closing(sqlite3.connect(folder / f"{role}.db")) as source,
    ):
        source.backup(backup)
    return {"database": f"sqlite:///{folder}/backup.db"}


def test_a_restored_helper_does_not_release_again(apps: Apps, tmp_path: Path) -> None:
    task = apps.task(crowd="noised")
    apps.upload(task, *apps.reports(task, 5))
    apps.work(task)
    changed = backed_up(tmp_path, "helper")
    database = apps.leader.core.database
    with database.read() as connection:
        total = batch_total(database, connection, task)
    request = share_request(task, report_count=total.reports, checksum=total.checksum).encode()
    first = apps.helper.helper.create_share(task, request)
    assert apps.helper.helper.create_share(task, request) == first
    restored = Service(apps.helper.config.model_copy(update=changed), apps.clock)
    with pytest.raises(ProblemError, match="restored") as caught:
        restored.helper.create_share(task, request)
    restored.close()
    assert caught.value.problem == Problem.BATCH_OVERLAP


def test_a_restored_leader_does_not_release_again(apps: Apps, tmp_path: Path) -> None:
    """The helper would answer the same request again, and the leader's noise would be redrawn."""
    task = apps.task(crowd="noised")
    apps.upload(task, *apps.reports(task, 5))
    apps.work(task)
    changed = backed_up(tmp_path, "leader")
    leader = apps.leader.leader
    request = collection_request(task).encode()
    ref = leader.collection.create(task, request, task.collector)
    apps.work(task)
    first = leader.collection.result(task, ref.collection_id, task.collector)
    assert first is not None
    restored = Service(
        apps.leader.config.model_copy(update=changed), apps.clock, transport=apps.wire
    )
    again = restored.leader.collection.create(task, request, task.collector)
    assert restored.leader.collection.step(again).done
    with pytest.raises(ProblemError, match="restored") as caught:
        restored.leader.collection.result(task, again.collection_id, task.collector)
    restored.close()
    assert caught.value.problem == Problem.BATCH_OVERLAP
    assert leader.collection.result(task, ref.collection_id, task.collector) == first


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "collected"
    first, second = os.urandom(32), os.urandom(32)
    path.write_bytes(b"\n" + first.hex().encode()[:20])
    file = CollectedFile(path)
    assert first not in file
    other = CollectedFile(path)
    for task_id in (first, second, second):
        file.add(task_id)
    assert first in other
    assert second in other
    assert path.read_bytes().count(second.hex().encode()) == 1


def test_a_forgotten_collector_is_waited_for(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task, 3))
    apps.work(task)
    helper = apps.helper.helper
    known, helper._collectors = helper._collectors, {}
    answer = apps.collected(task)
    assert answer.status_code == 202
    helper._collectors = known
    answer = apps.collected(task)
    assert answer.status_code == 200
    assert answer.content


def test_an_id_is_kept_while_the_clock_is_far_ahead(apps: Apps) -> None:
    task = apps.task()
    database = apps.leader.core.database
    far = task.bucket_end + 3 * 366 * 86_400
    for _ in range(3):
        apps.clock.set(far)
        apps.leader.garbage_collector.run()
    with database.read() as connection:
        rows = connection.exec_driver_sql("SELECT task_id FROM swept_tasks").scalars().all()
    assert bytes(task.task_id) in [bytes(row) for row in rows]


def test_a_password_does_not_print(apps: Apps) -> None:
    url = "postgresql+psycopg://user:secret@host/name"
    config = apps.helper.config.model_copy(update={"database": url})
    assert "secret" not in repr(config)
    assert "secret" not in str(config)
    assert "host/name" in repr(config)
