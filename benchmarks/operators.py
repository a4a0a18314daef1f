"""Two operators on PostgreSQL: 1 and 2 workers, many tasks, sizes on disk, where the time goes.

Reports are stored at the leader while no worker runs; then helper and workers start. Ratios are
over the native calls alone, in the same run. CPU times are counted for every process, the
databases' too, so that other work on the machine hardly shows in them. `scale.py` computes from
the JSON what a large fleet needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from _pair import (
    CLOCK,
    COMMAND,
    JOB,
    TOKENS,
    MeasuredPair,
    Watch,
    cpu_seconds,
    environment,
    resident_bytes,
)
from _postgres import database_bytes, postgres
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.service import Service
from chorister.dap.collector import Collected, Collector
from chorister.dap.task import task_binding, verify_key

SIZES = (272, 1_000, 10_000)


@contextlib.contextmanager
def a_pair(*, tasks: int = 1, cohort: int = 1_000, bins: int = 1_000) -> Iterator[MeasuredPair]:
    with (
        tempfile.TemporaryDirectory(prefix="chorister-bench-") as folder,
        postgres(["leader", "helper"]) as databases,
    ):
        settings = {"workers": True}
        yield MeasuredPair(
            Path(folder),
            databases=databases,
            settings=settings,
            min_cohort=cohort,
            tasks=tasks,
            bins=bins,
        )


@contextlib.contextmanager
def worker(pair: MeasuredPair) -> Iterator[subprocess.Popen[str]]:
    settings = str(pair.operators.settings("leader"))
    with (pair.operators.folder / "worker.log").open("a") as log:
        process = subprocess.Popen(
            [*COMMAND, "worker", "--config", settings],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        assert "started" in process.stdout.readline()
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def database_cpu(pair: MeasuredPair) -> float:
    """Of this pair's PostgreSQL processes, those that have ended too; of no other benchmark's."""
    own = pair.config("leader").database.partition("host=")[2]
    total = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if (folder / "cwd").resolve().is_relative_to(own):
                fields = (folder / "stat").read_text().rsplit(")")[1].split()
                ticks = sum(map(int, fields[11:15]))  # with those of children that ended
                total += ticks / os.sysconf("SC_CLK_TCK")
    return total


def aggregate(pair: MeasuredPair, reports: int, workers: int) -> dict[str, float]:
    """Seconds and CPU seconds of everybody, from the workers' start to the last job's end."""
    watch = Watch(pair)
    with contextlib.ExitStack() as stack:
        helper = stack.enter_context(pair.serving("helper"))
        cpu = -cpu_seconds(helper.pid)
        data = -database_cpu(pair)
        # All workers are there before the first of them finds anything to do.
        address = pair.config("leader").database.replace("+psycopg", "")
        queue = stack.enter_context(psycopg.connect(address, autocommit=True))
        queue.execute("UPDATE procrastinate_jobs SET scheduled_at = 'infinity'")
        running = [stack.enter_context(worker(pair)) for _ in range(workers)]
        before = sum(cpu_seconds(each.pid) for each in running)
        begun = time.perf_counter()
        queue.execute(
            "UPDATE procrastinate_jobs SET scheduled_at = NULL WHERE task_name = 'gather'"
        )
        watch.until(reports)
        seconds = time.perf_counter() - begun
        return {
            "seconds": seconds,
            "worker_cpu": sum(cpu_seconds(each.pid) for each in running) - before,
            "helper_cpu": cpu + cpu_seconds(helper.pid),
            "database_cpu": data + database_cpu(pair),
            "worker_memory": max(map(resident_bytes, running)),
        }


def throughput(reports: int, workers: int, tasks: int = 1) -> dict[str, float]:
    with a_pair(tasks=tasks) as pair:
        share = reports // tasks
        sample: list[bytes] = []
        for task in pair.tasks:
            first = pair.load(pair.seal(share, task), task)
            sample = sample or first
        native = [pair.native().measure(sample)]
        run = aggregate(pair, share * tasks, workers)
        native.append(pair.native().measure(sample))
    # The better of two: whatever else ran meanwhile must not make the native calls look slow.
    clock, cpu = (max(side) for side in zip(*native, strict=True))
    spent = run["worker_cpu"] + run["helper_cpu"] + run["database_cpu"]
    return {
        **{name: value / reports for name, value in run.items() if name.endswith("_cpu")},
        "reports_per_second": reports / run["seconds"],
        "native_reports_per_second": clock,
        "over_native": reports / run["seconds"] / clock,
        "cpu_over_native": reports / spent / cpu,
        "cpu": spent / reports,
        "native_cpu": 1 / cpu,
        "worker_memory": run["worker_memory"],
    }


def best_throughput(reports: int, workers: int, turns: int) -> dict[str, float]:
    """By the clock the best turn of each side, in CPU time the median of the turns' ratios."""
    runs = [throughput(reports, workers) for _ in range(turns)]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name in ("reports_per_second", "native_reports_per_second"):
        found[name] = max(run[name] for run in runs)
    found["over_native"] = found["reports_per_second"] / found["native_reports_per_second"]
    return found


def over_native(reports: int, tasks: int) -> float:
    """CPU over that of the native calls in the same minute: a core's pace changes."""
    run = throughput(reports, 2, tasks)
    return run["cpu"] / run["native_cpu"]


def sizes_on_disk(reports: int) -> dict[str, float]:
    """Bytes a report at both operators: waiting, added up, collected."""
    found: dict[str, float] = {}
    with a_pair(cohort=reports) as pair:
        urls = {role: pair.config(role).database for role in ("leader", "helper")}
        vacuum(urls)
        empty = {role: database_bytes(url) for role, url in urls.items()}

        def note(when: str) -> None:
            for role, url in urls.items():
                used = database_bytes(url) - empty[role]
                found[f"{role}_bytes_{when}"] = used / reports

        pair.load(pair.seal(reports))
        note("waiting")
        with pair.serving("helper"), pair.serving("leader"), worker(pair):
            collector = Collector(
                pair.operators.at.leader, TOKENS["collector"], pair.operators.collector
            )
            handle = collector.create(pair.task)
            while not isinstance(collector.poll(handle, noise_trials=reports), Collected):
                time.sleep(0.1)
        vacuum(urls)
        note("collected")
    return found


def vacuum(urls: Mapping[str, str]) -> None:
    """What autovacuum would do within minutes, so that freed space is seen as free."""
    for url in urls.values():
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("VACUUM FULL")


def where_time_goes(reports: int) -> dict[str, float]:
    """CPU seconds per report of the leader's steps here: HTTP, database, native, rest."""
    with a_pair() as pair, pair.serving("helper"):
        pair.load(pair.seal(reports))
        leader_config = pair.operators.leader().model_copy(update={"threads": 1})
        service = Service(leader_config, CLOCK)
        spent = {"http": 0.0, "database": 0.0}
        leader = service.leader
        client = leader.aggregation._helper
        database = service.core.database
        exchange, read, write = client.create_aggregation_job, database.read, database.write

        def timed_exchange(task: KnownTask, request: bytes) -> bytes:
            begun = time.thread_time()
            try:
                return exchange(task, request)
            finally:
                spent["http"] += time.thread_time() - begun

        def timed(transaction: Callable[..., Any]) -> Callable[..., Any]:
            @contextlib.contextmanager
            def inner(**options: bool) -> Iterator[Any]:
                begun = time.thread_time()
                with transaction(**options) as connection:
                    yield connection
                spent["database"] += time.thread_time() - begun

            return inner

        for target, name, replacement in (
            (client, "create_aggregation_job", timed_exchange),
            (database, "read", timed(read)),
            (database, "write", timed(write)),
        ):
            setattr(target, name, replacement)
        begun = time.thread_time()
        while made := leader.aggregation.create_jobs(8):
            for ref in made:
                assert leader.aggregation.step(ref).done
        total = time.thread_time() - begun
        service.close()
        native = native_costs(pair, min(reports, 1_000))
    parts = {
        "leader_http": spent["http"] / reports,
        "leader_database": spent["database"] / reports,
        "leader_native": native["leader_native_cpu"],
    }
    parts["leader_python"] = max(0.0, total / reports - sum(parts.values()))
    return parts


def native_costs(pair: MeasuredPair, number: int) -> dict[str, float]:
    """CPU seconds of both roles' native calls and bytes on the wire, a report."""
    binding = task_binding(pair.task.configuration)
    key = verify_key(bytes(32), pair.task.task_id)
    reports = [report for some in pair.seal(number) for report in some]
    found = {"leader_native_cpu": 0.0, "helper_native_cpu": 0.0, "inits": 0.0, "resps": 0.0}
    for start in range(0, number, JOB):
        batch = b"".join(reports[start : start + JOB])
        begun = time.process_time()
        job = binding.leader_initialize(key, [pair.keys["leader"]], batch, threads=1)
        between = time.process_time()
        resps, _ = binding.helper_initialize(
            key, [pair.keys["helper"]], job.verify_inits, threads=1
        )
        after = time.process_time()
        job.finish(resps, threads=1)
        found["leader_native_cpu"] += between - begun + time.process_time() - after
        found["helper_native_cpu"] += after - between
        found["inits"] += len(job.verify_inits)
        found["resps"] += len(resps)
    return {
        "report_bytes": float(len(reports[0])),
        **{name: value / number for name, value in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--reports", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3, help="turns of each number of workers")
    parser.add_argument("--large", type=int, default=100_000, help="reports of the large task")
    parser.add_argument("--only", choices=["workers", "large", "tasks", "disk", "time", "bins"])
    options = parser.parse_args()
    results: dict[str, float] = {}

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    if wanted("workers"):
        for number in (1, 2):
            run = best_throughput(options.reports, number, options.turns)
            results |= {f"workers_{number}_{name}": value for name, value in run.items()}
    if wanted("large"):
        small, large = (throughput(number, 2) for number in (options.reports, options.large))
        before, after = (each["cpu"] / each["native_cpu"] for each in (small, large))
        results["large_reports"] = options.large
        results["large_cpu_over_small"] = after / before
        results["worker_megabytes"] = small["worker_memory"] / 1e6
        results["worker_megabytes_large"] = large["worker_memory"] / 1e6
    if wanted("tasks"):
        # As many tasks as there are full jobs; and small ones, whose jobs are small too.
        by_tasks = {n: over_native(max(options.reports, n * JOB), n) for n in (1, 10, 100)}
        results["tasks_10_cpu_over_1"] = by_tasks[10] / by_tasks[1]
        results["tasks_100_cpu_over_1"] = by_tasks[100] / by_tasks[1]
        results["tasks_100_small_cpu_over_1"] = over_native(options.reports, 100) / by_tasks[1]
    if wanted("disk"):
        results |= sizes_on_disk(options.reports)
    if wanted("time"):
        results |= where_time_goes(options.reports)
    if wanted("bins"):
        for bins in SIZES:
            with a_pair(bins=bins) as pair:
                found = native_costs(pair, 500 if bins < 10_000 else 60)
            results |= {f"bins_{bins}_{name}": value for name, value in found.items()}
    show(results)
    if options.json:
        print(json.dumps({name: round(value, 8) for name, value in results.items()}))


WANTED = {
    "workers_2_over_native": "at least .8",
    "workers_2_cpu_over_native": "at least .8, where other work disturbs the clock",
    "large_cpu_over_small": "at most 1.1",
    "tasks_100_cpu_over_1": "at most 1.1",
}


def show(results: Mapping[str, float]) -> None:
    table = Table(title="two operators on PostgreSQL; CPU seconds per report")
    for title in ("", "measured", "wanted"):
        table.add_column(title, justify="right" if title == "measured" else "left")
    for name, value in results.items():
        text = (
            f"{value:,.0f}" if value >= 100 else f"{value:.6f}" if value < 0.1 else f"{value:.3f}"
        )
        table.add_row(name, text, WANTED.get(name, ""))
    Console().print(table)


if __name__ == "__main__":
    main()
