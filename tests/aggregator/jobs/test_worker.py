"""Jobs on PostgreSQL: enqueued with what makes them due, run by workers, dead, revived."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from packaging.requirements import Requirement
from procrastinate import sql
from procrastinate.jobs import Job
from procrastinate.schema import SchemaManager
from typer.testing import CliRunner

from chorister.aggregator.jobs.aggregation_job_driver import AggregationJobDriver, StepResult
from chorister.aggregator.jobs.job_queue import JobQueue, check_schema, requeue_stalled
from chorister.aggregator.jobs.worker import Backoff, RetryLater, Worker, cron
from chorister.aggregator.server import make_worker
from chorister.aggregator.service import Service, open_core
from chorister.aggregator.storage.reports import JobRef
from chorister.canonical import sha256
from chorister.cli import app
from chorister.dap.collector import Collected
from chorister.dap.task import Task
from chorister.errors import InternalError, ServiceError
from tests.aggregator.inprocess_pair import InProcessPair, a_pair, wait_until
from tests.aggregator.postgres import PostgresServer, postgres

__all__ = ["postgres"]

COHORT = 4
TROUBLE = {"workers": True, "batch_delay_milliseconds": 10, "sweep_every": "5s"}


@pytest.fixture
def pair(tmp_path: Path, postgres: PostgresServer) -> Iterator[InProcessPair]:
    with postgres.databases(2) as (leader, helper):
        settings = {"leader": {"database": leader, **TROUBLE}, "helper": {"database": helper}}
        with a_pair(tmp_path, settings=settings) as made:
            yield made


@contextmanager
def working(service: Service, number: int = 1) -> Iterator[list[Worker]]:
    """Workers, each in a thread with an event loop of its own."""
    workers = [make_worker(service) for _ in range(number)]
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


def the_queue(pair: InProcessPair) -> JobQueue:
    queue = pair.leader.core.queue
    assert queue is not None
    return queue


def requeued(pair: InProcessPair, *, longest: float, now: float = 0.0, **seen: Any) -> int:
    """What a worker takes back, with a heartbeat of ten seconds."""
    worker = make_worker(pair.leader)

    async def run() -> int:
        async with worker.app.open_async():
            return await requeue_stalled(
                worker.app.job_manager,
                heartbeat=10,
                longest=longest,
                seen=seen.get("seen", {}),
                now=now,
            )

    return asyncio.run(run())


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
    made = leader.aggregation.create_jobs(10)
    kinds = [name for name, _ in queued(pair)]
    assert kinds.count("aggregate") == len(made) == 1
    ((_, args),) = [row for row in queued(pair, "task_name", "args") if row[0] == "aggregate"]
    assert args == {"task": made[0].task_id.hex(), "job": made[0].job_id.hex()}

    class Broken(Exception):
        pass

    (report,) = pair.seal(task, [0])
    known = pair.leader.core.tasks.find(task.task_id)
    assert known is not None
    before = queued(pair)
    with pytest.raises(Broken), broken_commit(database, Broken):
        leader.writer.store([leader.writer.check(known, report)])
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
    (ref,) = pair.leader.leader.aggregation.create_jobs(10)
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
    assert ref not in pair.leader.leader.aggregation.unfinished()


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
    assert requeued(pair, longest=1000) == 1
    assert ("gather", "doing") not in queued(pair)
    with working(pair.leader):
        assert result(pair, task).report_count == COHORT


def test_a_job_that_runs_for_too_long_is_taken_from_a_living_worker(pair: InProcessPair) -> None:
    upload(pair, a_task(pair))
    with pair.leader.core.database.write() as connection:
        connection.exec_driver_sql("UPDATE procrastinate_jobs SET scheduled_at = NULL")
        number = connection.exec_driver_sql(
            "INSERT INTO procrastinate_workers (last_heartbeat) VALUES (now()) RETURNING id"
        ).scalar_one()
        connection.exec_driver_sql("SELECT procrastinate_fetch_job_v2(NULL, %s)", (number,))
    seen: dict[tuple[int, int], float] = {}
    for now, taken in ((100.0, 0), (160.0, 0), (161.0, 1), (162.0, 0)):
        assert requeued(pair, longest=60, now=now, seen=seen) == taken, now
    assert not seen


def test_nothing_of_the_queue_stays_behind_periodic_jobs(pair: InProcessPair) -> None:
    database = pair.leader.core.database
    with database.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO procrastinate_jobs (queue_name, task_name, status) VALUES "
            "('chorister-periodic', 'sweep', 'doing'), ('chorister-periodic', 'sweep', 'doing')"
        )
        connection.exec_driver_sql(
            "UPDATE procrastinate_jobs SET status = 'failed' "
            "WHERE id = (SELECT max(id) FROM procrastinate_jobs)"
        )
    assert requeued(pair, longest=1000) == 0
    with database.read() as connection:
        left = connection.exec_driver_sql("SELECT count(*) FROM procrastinate_jobs").scalar_one()
    assert left == 0


# --- another version of Procrastinate -----------------------------------------------------------

ROOT = Path(__file__).parents[3]


def test_the_requirement_is_as_narrow_as_what_the_queue_needs() -> None:
    """Enqueuing on a connection of ours came with 3.8; a major version may change the API."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = [
        each for each in extras["optional-dependencies"]["server"] if "procrastinate" in each
    ]
    allowed = Requirement(found).specifier
    assert not any(allowed.contains(each) for each in ("3.0", "3.4", "3.7.9", "4.0"))
    locked = re.search(r"^procrastinate==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert locked is not None
    assert allowed.contains(locked[1])
    assert allowed.contains("3.8.0")


def test_no_table_or_function_of_procrastinate_is_named_in_the_source() -> None:
    for path in (ROOT / "src" / "chorister").rglob("*.py"):
        found = re.findall(r"procrastinate_(?!\\)\w+", path.read_text())
        assert not found, (path, found)


def test_the_queue_outlives_new_names_of_its_functions(
    pair: InProcessPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later versions of Procrastinate replace its functions: only its API may know their names."""
    replaced = {
        "defer_jobs": "procrastinate_defer_jobs_v1",
        "retry_job": "procrastinate_retry_job_v2",
        "cancel_job": "procrastinate_cancel_job_v1",
        "prune_stalled_workers": "procrastinate_prune_stalled_workers_v1",
    }
    with pair.leader.core.database.write() as connection:
        for query, name in replaced.items():
            connection.exec_driver_sql(f"ALTER FUNCTION {name} RENAME TO {name}9")
            new = sql.queries[query].replace(name, f"{name}9")
            monkeypatch.setitem(sql.queries, query, cast(Any, new))
    task = a_task(pair)
    upload(pair, task)
    upload(pair, task)  # two `gather`: one of them claims the other
    with working(pair.leader):
        assert result(pair, task).report_count == 2 * COHORT
        wait_until(lambda: not queued(pair), "an empty queue")


def test_a_queue_of_another_version_is_refused_at_the_start(pair: InProcessPair) -> None:
    core = pair.leader.core
    check_schema(core.database)
    with core.database.write() as connection:
        connection.exec_driver_sql("DROP FUNCTION procrastinate_update_heartbeat_v1")
    with pytest.raises(ServiceError, match=r"needs procrastinate_update_heartbeat_v1: install"):
        open_core(pair.leader.config, pair.clock, migrate=True)
    settings = str(pair.operators.settings("leader"))
    shown = CliRunner().invoke(app, ["jobs", "list", "--config", settings])
    assert shown.exit_code
    assert "procrastinate_update_heartbeat_v1" in shown.output.replace("\n", "")


def test_what_has_no_place_in_the_queue_gets_one(pair: InProcessPair) -> None:
    """Jobs that a server's own loop made, before there were workers."""
    task = a_task(pair)
    upload(pair, task)
    pair.leader.leader.aggregation.create_jobs(10)
    upload(pair, task)
    database = pair.leader.core.database
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM procrastinate_jobs")
    assert the_queue(pair).enqueue_missing() == 1
    assert sorted(queued(pair)) == [("aggregate", "todo"), ("gather", "todo")]
    assert the_queue(pair).enqueue_missing() == 0
    assert sorted(queued(pair)) == [("aggregate", "todo"), ("gather", "todo")]
    with working(pair.leader):
        assert result(pair, task).report_count == 2 * COHORT


def test_dead_jobs_are_shown_and_revived(
    pair: InProcessPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = a_task(pair)
    broken = threading.Event()
    broken.set()
    step = AggregationJobDriver.step

    def stumbling(self: AggregationJobDriver, job: Any) -> StepResult:
        if broken.is_set():
            raise RuntimeError("a bug")
        return step(self, job)

    monkeypatch.setattr(AggregationJobDriver, "step", stumbling)
    monkeypatch.setattr("chorister.aggregator.jobs.worker.MAX_ATTEMPTS", 2)
    upload(pair, task)
    with working(pair.leader):
        (dead,) = wait_until(the_queue(pair).dead_jobs, "a dead job")
        assert (dead.kind, dead.task_id, dead.attempts) == ("aggregate", task.task_id, 2)
        settings = str(pair.operators.settings("leader"))
        shown = CliRunner().invoke(app, ["jobs", "list", "--config", settings, "--json"])
        assert [each["job"] for each in json.loads(shown.stdout)["dead"]] == [dead.number]
        assert abs(dead.since - time.time()) < 600
        broken.clear()
        said = CliRunner().invoke(app, ["jobs", "revive", "--all", "--config", settings])
        assert "1 jobs will be tried again" in said.stdout
        assert result(pair, task).report_count == COHORT
    assert the_queue(pair).revive() == 0


@pytest.mark.parametrize(
    ("error", "attempts", "again"),
    [
        (RetryLater("the helper is away"), 1000, True),
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
        make_worker(pair.leader)


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

    def step(_driver: AggregationJobDriver, _job: object) -> StepResult:
        asked.append(now)
        return StepResult(
            done=now >= gone_until, reason="the helper: away", helper_away=now < gone_until
        )

    monkeypatch.setattr(AggregationJobDriver, "step", step)
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("chorister.aggregator.jobs.aggregation_job_driver.time", clock)
    worker, backoff = make_worker(pair.leader), Backoff()
    due = dict.fromkeys(range(10), 0.0)
    attempts = dict.fromkeys(due, 0)
    while due:
        number, now = min(due.items(), key=lambda each: each[1])
        try:
            worker.aggregate("00", f"{number:02}")
        except RetryLater as later:
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


def test_a_worker_asks_other_helpers_while_one_is_away(
    pair: InProcessPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(_driver: AggregationJobDriver, job: JobRef) -> StepResult:
        away = job.task_id == b"\0"
        return StepResult(done=not away, reason="the helper: away", helper_away=away)

    monkeypatch.setattr(AggregationJobDriver, "step", step)
    monkeypatch.setattr(AggregationJobDriver, "helper_of", lambda _, task_id: task_id.hex())
    worker = make_worker(pair.leader)
    for _ in range(2):
        with pytest.raises(RetryLater):
            worker.aggregate("00", "00")
        worker.aggregate("01", "00")
