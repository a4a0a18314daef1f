"""Jobs on PostgreSQL: enqueued with what makes them due, run by workers, dead, revived."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from procrastinate.jobs import Job
from procrastinate.schema import SchemaManager
from typer.testing import CliRunner

from chorister.aggregator.leader import Leader, Step
from chorister.aggregator.queue import dead_jobs, recover, revive
from chorister.aggregator.service import Service
from chorister.aggregator.worker import Backoff, Later, Worker, cron
from chorister.canonical import sha256
from chorister.cli import app
from chorister.dap.collector import Collected
from chorister.dap.task import Task
from chorister.errors import InternalError, ServiceError
from tests.aggregator.inprocess_pair import InProcessPair, a_pair, wait_until
from tests.aggregator.postgres import Server, postgres

__all__ = ["postgres"]

COHORT = 4
TROUBLE = {"workers": True, "linger_milliseconds": 10, "sweep_every": "5s"}


@pytest.fixture
def pair(tmp_path: Path, postgres: Server) -> Iterator[InProcessPair]:
    with postgres.databases(2) as (leader, helper):
        settings = {"leader": {"database": leader, **TROUBLE}, "helper": {"database": helper}}
        with a_pair(tmp_path, settings=settings) as made:
            yield made


@contextmanager
def working(service: Service, number: int = 1) -> Iterator[list[Worker]]:
    """Workers, each in a thread with an event loop of its own."""
    workers = [Worker(service) for _ in range(number)]
    with ExitStack() as stack:
        for worker in workers:
            loop = asyncio.new_event_loop()
            stop = asyncio.Event()
            thread = threading.Thread(
                target=_run, args=(loop, worker, stop), name="worker", daemon=True
            )
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(loop.call_soon_threadsafe, stop.set)
        yield workers


def _run(loop: asyncio.AbstractEventLoop, worker: Worker, stop: asyncio.Event) -> None:
    loop.run_until_complete(worker.run(stop, jobs=3))
    loop.close()


def a_task(pair: InProcessPair, name: str = "ages") -> Task:
    changes = {"privacy/min_cohort": COHORT}
    return pair.publish(pair.operators.recipe(name, pair.clock.now(), changes))


def upload(pair: InProcessPair, task: Task, number: int = COHORT) -> None:
    for report in pair.seal(task, [0] * number):
        assert pair.upload(task, report).status_code == 200


def queued(pair: InProcessPair, *columns: str) -> list[tuple[Any, ...]]:
    names = ", ".join(columns or ("task_name", "status::text"))
    with pair.leader.core.database.read() as connection:
        rows = connection.exec_driver_sql(
            f"SELECT {names} FROM procrastinate_jobs "  # noqa: S608
            "WHERE task_name NOT IN ('sweep', 'recover') ORDER BY id"
        )
        return [tuple(row) for row in rows]


def result(pair: InProcessPair, task: Task) -> Collected:
    collector = pair.collector()
    handle = collector.create(task)
    return wait_until(lambda: pair.result(collector, handle, noise_trials=COHORT - 1), "the result")


def test_a_result_comes_by_workers_alone(pair: InProcessPair) -> None:
    task = a_task(pair)
    assert pair.leader.loop is None  # the web process runs no jobs
    upload(pair, task)
    assert {name for name, _ in queued(pair)} == {"gather"}
    with working(pair.leader, 2):
        assert result(pair, task).report_count == COHORT
        wait_until(lambda: not queued(pair), "an empty queue")


def test_a_result_follows_the_last_report_within_seconds(pair: InProcessPair) -> None:
    task = a_task(pair)
    collector = pair.collector()
    with working(pair.leader):
        handle = collector.create(task)
        upload(pair, task, COHORT - 1)
        wait_until(lambda: not queued(pair), "what waits for the last report")
        assert pair.result(collector, handle, noise_trials=COHORT - 1) is None
        upload(pair, task, 1)
        begun = time.monotonic()
        wait_until(lambda: pair.result(collector, handle, noise_trials=COHORT - 1), "the result")
        assert time.monotonic() - begun < 20  # by what happened, not by a sweep that finds it


def test_jobs_are_enqueued_with_what_makes_them_due_or_not_at_all(pair: InProcessPair) -> None:
    task = a_task(pair)
    upload(pair, task)
    leader, database = pair.leader.leader, pair.leader.core.database
    made = leader.create_aggregation_jobs(10)
    kinds = [name for name, _ in queued(pair)]
    assert kinds.count("aggregate") == len(made) == 1
    ((_, args),) = [row for row in queued(pair, "task_name", "args") if row[0] == "aggregate"]
    assert args == {"task": made[0].task_id.hex(), "job": made[0].job_id.hex()}

    class Broken(Exception):
        pass

    (report,) = pair.seal(task, [0])
    known = leader.tasks.find(task.task_id)
    assert known is not None
    before = queued(pair)
    with pytest.raises(Broken), broken_commit(database, Broken):
        leader.store_uploads([leader.check_upload(known, report)])
    assert queued(pair) == before


@contextmanager
def broken_commit(database: Any, error: type[Exception]) -> Iterator[None]:
    """Transactions fail after their last statement."""
    whole = database.write

    @contextmanager
    def write(*, durable: bool = True) -> Iterator[Any]:
        with whole(durable=durable) as connection:
            yield connection
            raise error

    database.write = write
    try:
        yield
    finally:
        del database.write


def test_two_workers_at_one_job_add_it_once(pair: InProcessPair) -> None:
    task = a_task(pair)
    upload(pair, task)
    (ref,) = pair.leader.leader.create_aggregation_jobs(10)
    twice = (
        "INSERT INTO procrastinate_jobs (queue_name, task_name, args) "
        "SELECT queue_name, task_name, args FROM procrastinate_jobs, generate_series(1, 3) "
        "WHERE task_name = 'aggregate'"
    )
    with pair.leader.core.database.write() as connection:
        connection.exec_driver_sql(twice)
    with working(pair.leader, 2):
        found = result(pair, task)
        wait_until(lambda: not queued(pair), "an empty queue")
    assert found.report_count == COHORT
    assert ref not in pair.leader.leader.unfinished_jobs()


def test_what_a_dead_worker_held_is_taken_back(pair: InProcessPair) -> None:
    task = a_task(pair)
    upload(pair, task)
    database = pair.leader.core.database
    with database.write() as connection:
        number = connection.exec_driver_sql(
            "INSERT INTO procrastinate_workers (last_heartbeat) "
            "VALUES (now() - interval '1 hour') RETURNING id"
        ).scalar_one()
        fetch = "SELECT id FROM procrastinate_fetch_job_v2(NULL, %s)"
        wait = time.monotonic() + 10
        while connection.exec_driver_sql(fetch, (number,)).scalar() is None:
            assert time.monotonic() < wait
            connection.exec_driver_sql("UPDATE procrastinate_jobs SET scheduled_at = NULL")
    assert ("gather", "doing") in queued(pair)
    assert recover(database, heartbeat=10, longest=1000) == 1
    assert ("gather", "doing") not in queued(pair)
    with working(pair.leader):
        assert result(pair, task).report_count == COHORT


def test_what_has_no_place_in_the_queue_gets_one(pair: InProcessPair) -> None:
    """Jobs that a server's own loop made, before there were workers."""
    task = a_task(pair)
    upload(pair, task)
    pair.leader.leader.create_aggregation_jobs(10)
    upload(pair, task)
    database = pair.leader.core.database
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM procrastinate_jobs")
    assert recover(database, heartbeat=10, longest=1000) == 1
    assert sorted(queued(pair)) == [("aggregate", "todo"), ("gather", "todo")]
    assert recover(database, heartbeat=10, longest=1000) == 0
    with working(pair.leader):
        assert result(pair, task).report_count == 2 * COHORT


def test_dead_jobs_are_shown_and_revived(
    pair: InProcessPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = a_task(pair)
    broken = threading.Event()
    broken.set()
    step = Leader.step

    def stumbling(self: Leader, job: Any) -> Step:
        if broken.is_set():
            raise RuntimeError("a bug")
        return step(self, job)

    monkeypatch.setattr(Leader, "step", stumbling)
    monkeypatch.setattr("chorister.aggregator.worker._ATTEMPTS", 2)
    upload(pair, task)
    database = pair.leader.core.database
    with working(pair.leader):
        (dead,) = wait_until(lambda: dead_jobs(database), "a dead job")
        assert (dead.kind, dead.task_id, dead.attempts) == ("aggregate", task.task_id, 2)
        settings = str(pair.operators.settings("leader"))
        shown = CliRunner().invoke(app, ["jobs", "list", "--config", settings, "--json"])
        assert [each["job"] for each in json.loads(shown.stdout)["dead"]] == [dead.number]
        broken.clear()
        said = CliRunner().invoke(app, ["jobs", "revive", "--all", "--config", settings])
        assert "1 jobs will be tried again" in said.stdout
        assert result(pair, task).report_count == COHORT
    assert revive(database) == 0


@pytest.mark.parametrize(
    ("error", "attempts", "again"),
    [
        (Later("the helper is away"), 1000, True),
        (ServiceError("the database is away"), 1000, True),
        (RuntimeError("a bug"), 3, True),
        (RuntimeError("a bug"), 30, False),
        (InternalError("a bug"), 30, False),
    ],
)
def test_only_a_bug_kills_a_job(error: Exception, attempts: int, again: bool) -> None:
    job = Job(queue="q", lock=None, queueing_lock=None, task_name="aggregate", attempts=attempts)
    assert (Backoff().get_retry_decision(exception=error, job=job) is not None) == again


@pytest.mark.parametrize(
    ("seconds", "pattern"),
    [
        (1, "* * * * * */1"),
        (5, "* * * * * */5"),
        (50, "* * * * * */30"),
        (60, "*/1 * * * *"),
        (3600, "0 */1 * * *"),
        (50_000, "0 */12 * * *"),
        (10**6, "0 0 * * *"),
    ],
)
def test_intervals_as_cron_says_them(seconds: int, pattern: str) -> None:
    assert cron(seconds) == pattern


def test_workers_need_the_setting(tmp_path: Path) -> None:
    with a_pair(tmp_path) as pair, pytest.raises(ServiceError, match="workers = true"):
        Worker(pair.leader)


def test_the_queues_tables_are_those_that_our_migration_made() -> None:
    """A Procrastinate with other tables needs a revision of ours, with its migration."""
    digest = sha256(SchemaManager.get_schema().encode()).hex()
    assert digest.startswith("c70ec4b400a60ad9"), (
        "write a revision with the new version's migration"
    )


def test_a_worker_outlives_its_connections(pair: InProcessPair) -> None:
    task = a_task(pair)
    with working(pair.leader):
        upload(pair, task)
        address = pair.operators.leader().database.replace("+psycopg", "")
        for _ in range(3):
            time.sleep(0.3)
            with psycopg.connect(address, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
        upload_again = pair.seal(task, [1])
        wait_until(
            lambda: pair.upload(task, upload_again[0]).status_code == 200, "the leader's return"
        )
        assert result(pair, task).report_count == COHORT + 1


def test_a_helper_that_is_gone_for_minutes_is_left_alone_and_asked_again(
    pair: InProcessPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten jobs, five minutes by a clock of our own: few requests, and nothing is given up."""
    now, gone_until = 0.0, 300.0
    asked: list[float] = []

    def step(_leader: Leader, _job: object) -> Step:
        asked.append(now)
        return Step(done=now >= gone_until, why="the helper: away", peer=now < gone_until)

    monkeypatch.setattr(Leader, "step", step)
    monkeypatch.setattr("chorister.aggregator.worker.time", SimpleNamespace(monotonic=lambda: now))
    worker, backoff = Worker(pair.leader), Backoff()
    due = dict.fromkeys(range(10), 0.0)
    attempts = dict.fromkeys(due, 0)
    while due:
        number, now = min(due.items(), key=lambda each: each[1])
        try:
            worker.aggregate("00", f"{number:02}")
        except Later as later:
            job = Job(
                id=number, queue="chorister", lock=None, queueing_lock=None, task_name="aggregate",
                attempts=attempts[number],
            )  # fmt: skip
            decision = backoff.get_retry_decision(exception=later, job=job)
            assert decision is not None
            assert decision.retry_at is not None
            pause = (decision.retry_at - datetime.now(UTC)).total_seconds()
            due[number], attempts[number] = now + max(pause, 0.01), attempts[number] + 1
        else:
            del due[number]
    away = [each for each in asked if each < gone_until]
    assert len(away) < 20
    assert max(after - before for before, after in pairwise(asked)) < 45
    assert len(asked) - len(away) == 10
    assert now < gone_until + 45
