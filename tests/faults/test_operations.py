"""What the guide for two operators promises: upgrades, new tokens and backups, each as it says."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine

from chorister.aggregator.jobs.job_queue import JobQueue
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.service import Service
from chorister.aggregator.storage import database as database_module
from chorister.aggregator.storage.database import Database, Sealer
from chorister.dap.draft import Problem, Role
from chorister.dap.messages import AggregationJobInitReq
from chorister.errors import ProblemError, ServiceError
from chorister.key_files import new_secret, token_digest
from tests.aggregator.apps import Apps
from tests.aggregator.postgres import PostgresServer, binaries, postgres, unprivileged
from tests.aggregator.world import HELPER_URL, Pair, one_bit, small_recipe

__all__ = ["postgres"]

BEFORE = "0002"
"""The schema before the one that brought the queue."""


def upload(pair: Pair, task: KnownTask, number: int) -> None:
    for report in pair.reports(task, one_bit(4, [0] * number)):
        assert not pair.upload(task, report).statuses


def exact(pair: Pair, task: KnownTask, number: int) -> None:
    pair.collect(task)
    while pair.work():
        pass
    found = pair.result(task)
    assert found is not None
    leaders, helpers = (side.draws[-1] for side in pair.noise)
    assert found[0] == number
    assert (found[1] - leaders - helpers).tolist() == [number, 0, 0, 0]


# --- a new version, without a pause -------------------------------------------------------------


def older(url: str, role: Role, sealer: Sealer) -> Database:
    """As software of the version before opens it: that knows nothing of later tables."""
    database = Database(create_engine(url.replace("postgresql:", "postgresql+psycopg:")), sealer)
    with database.write() as connection:
        config = database_module._alembic()
        config.attributes["connection"] = connection
        command.upgrade(config, BEFORE)
    database._check_owner(role)
    return database


def test_tables_are_migrated_while_reports_come_in(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("before_leader", "before_helper")
    for name in names:
        postgres._execute(f"CREATE DATABASE {name}")
    leader, helper = (postgres._address(name) for name in names)
    pair = Pair((leader, helper), open_database=older)
    (task,) = pair.accept(small_recipe())
    running = threading.Event()
    migrated = threading.Event()
    sent: list[int] = []

    def send() -> None:
        while not migrated.is_set() or len(sent) < 20:
            upload(pair, task, 1)
            sent.append(1)
            running.set()
            if len(sent) % 10 == 0:
                pair.work()

    thread = threading.Thread(target=send)
    thread.start()
    assert running.wait(30)
    newer = Database.open(leader, role=Role.LEADER, sealer=pair.sealers[0], migrate=True)
    migrated.set()
    thread.join(60)
    assert newer.revision() != BEFORE
    # What the older process left is found by workers, and it goes on beside them.
    upload(pair, task, 1)
    JobQueue(newer).enqueue_missing()
    with newer.read() as connection:
        queued = connection.exec_driver_sql("SELECT task_name FROM procrastinate_jobs").scalars()
        assert "gather" in queued.all()
    exact(pair, task, len(sent) + 1)
    newer.close()
    monkeypatch.setattr(database_module, "_revisions", lambda: (BEFORE, "0001"))
    with pytest.raises(ServiceError, match="newer than this software's"):
        Database.open(leader, role=Role.LEADER, sealer=pair.sealers[0], migrate=True)
    pair.stop()
    for name in names:
        postgres._execute(f"DROP DATABASE {name} WITH (FORCE)")


# --- rotation -----------------------------------------------------------------------------------


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[Apps]:
    made = Apps(tmp_path)
    yield made
    made.close()


def restart_helper(apps: Apps, *tokens: str) -> None:
    digests = tuple(token_digest(each.encode()).hex() for each in tokens)
    apps.network.withdraw(HELPER_URL)
    apps.helper.close()
    config = apps.helper.config.model_copy(update={"leader_token_digests": digests})
    apps.helper = Service(config, apps.clock)
    apps.services = (apps.leader, apps.helper)
    apps.network.serve(HELPER_URL, apps.helper.app)


def test_the_leaders_token_is_changed_without_a_pause(apps: Apps) -> None:
    old, new = apps.helper_token, new_secret()
    task = apps.task()
    request = AggregationJobInitReq(verify_inits=apps.verify_inits(task, *apps.reports(task, 1)))
    for accepted in ((old,), (old, new), (new,)):
        restart_helper(apps, *accepted)
        for token in (old, new):
            answer = apps.create_job(task, request, token=token)
            assert answer.status_code == (200 if token in accepted else 401), (accepted, token)


def test_hpke_keys_rotate_while_reports_come_in(postgres: PostgresServer) -> None:
    """Devices seal to the key that they saw; it lives for as long as any of them may."""
    with postgres.databases(2) as urls:
        pair = Pair((urls[0], urls[1]))
        (task,) = pair.accept(small_recipe())
        early = pair.reports(task, one_bit(4, [0] * 6))
        rings = (pair.leader.keys, pair.helper.keys)
        old = [ring.published()[0] for ring in rings]
        for report in early[:2]:
            assert not pair.upload(task, report).statuses
        # One operator after the other; a device in between saw one new key and one old.
        sent = len(early)
        for ring in rings:
            ring.publish(ring.generate())
            upload(pair, task, 2)
            sent += 2
            pair.work()
        assert [ring.published()[0] for ring in rings] != old
        # A sweep destroys nothing that a report of an open task may be sealed to.
        pair.set_clocks(pair.clock.now() + 2 * 3600)
        assert [ring.destroy_due() for ring in rings] == [0, 0]
        for report in early[2:]:
            assert not pair.upload(task, report).statuses
        exact(pair, task, sent)
        pair.stop()


# --- backup and restore -------------------------------------------------------------------------


def program(name: str, *arguments: str) -> None:
    programs = binaries()
    assert programs is not None
    surroundings = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    done = subprocess.run(
        [programs / name, *arguments], capture_output=True, env=surroundings, cwd="/",
        text=True, **unprivileged(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", [0, 1], ids=["leader", "helper"])
def test_an_operator_restored_from_a_backup_goes_on_and_releases_nothing_wrong(
    postgres: PostgresServer, place: int
) -> None:
    with postgres.databases(2) as urls:
        pair = Pair((urls[0], urls[1]))
        whole, cut = (pair.accept(small_recipe(id=name))[0] for name in ("whole", "cut"))
        upload(pair, whole, 5)
        upload(pair, cut, 5)
        pair.work()
        dump = str(postgres.folder / f"backup-{place}")
        program("pg_dump", "--format=custom", f"--dbname={urls[place]}", f"--file={dump}")
        upload(pair, cut, 3)
        pair.work()
        pair.stop()
        options = ("--clean", "--if-exists", f"--dbname={urls[place]}", dump)
        program("pg_restore", *options)
        pair.start()
        # What came after the backup is forgotten here, and remembered there: no sum is released.
        pair.collect(cut)
        pair.work()
        with pytest.raises(ProblemError) as refused:
            pair.result(cut)
        assert refused.value.problem == Problem.BATCH_MISMATCH
        # What was complete before is whole, and what comes later works as ever.
        exact(pair, whole, 5)
        (later,) = pair.accept(small_recipe(id="later"))
        upload(pair, later, 4)
        exact(pair, later, 4)
        pair.stop()
