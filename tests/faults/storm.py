"""A seeded storm: everything is killed, cut and delayed at random moments, under load.

Afterwards the faults stop, and nobody touches anything. Then every report that was uploaded must be
in exactly one batch, each sum must equal the truth, and no share may be left behind.

    python -m tests.faults.storm --seconds 600 --seed 1

runs a long one (`make soak`); a seed that failed goes into the list in `test_storm.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from chorister.aggregator.jobs.worker import DEAD_AFTER_SECONDS
from chorister.dap.collector import Collected, Collector
from chorister.dap.http import HTTPClient
from chorister.dap.task import Task
from chorister.dap.upload_client import check_answer, upload
from chorister.errors import ChoristerError
from tests.aggregator.operators import TOKENS
from tests.faults.postgres_servers import mortal_servers
from tests.faults.proxy import MODES
from tests.faults.two_operators import BINS, TwoOperators, deployed

MAIN_KINDS = {"kill", "database", "line"}
_LONG = 60
_LOOK = 0.3
_RECOVERY = 90
"""Seconds without progress, once the faults have stopped, after which it has failed."""


@dataclass
class StormReport:
    """One device's report, and whether the leader has said that it has it."""

    task: Task
    place: int
    body: bytes
    stored: bool = False


@dataclass
class Storm:
    """One storm over one deployment."""

    deployment: TwoOperators
    seed: int
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.calm = threading.Event()
        self.client = HTTPClient(timeout=5)

    # --- load -----------------------------------------------------------------------------------

    def reports(self, per_task: int) -> list[StormReport]:
        made = []
        for task in self.deployment.tasks:
            places = [self.random.randrange(BINS) for _ in range(per_task)]
            sealed = self.deployment.seal(task, places)
            made += [StormReport(task, *each) for each in zip(places, sealed, strict=True)]
        self.random.shuffle(made)
        return made

    def upload(self, reports: Sequence[StormReport], pause: float, seed: int) -> None:
        """Each until it is stored, wherever it is taken; some of them twice, and out of order."""
        own = random.Random(seed)
        waiting = list(reports)
        while waiting:
            report = waiting.pop(own.randrange(len(waiting)))
            if not self._send(report, own):
                waiting.append(report)
            elif own.random() < 0.1:
                self._send(report, own)  # a copy, at the other server perhaps
            if not self.calm.is_set():
                time.sleep(own.uniform(0, 2 * pause))

    def _send(self, report: StormReport, own: random.Random) -> bool:
        port = own.choice(self.deployment.ports)
        request = upload(report.task.configuration.encode(), report.body)
        path = request.url.partition("/dap/")[2]
        try:
            answer = self.client.request(
                "POST",
                f"http://127.0.0.1:{port}/dap/{path}",
                headers=request.headers,
                body=request.body,
            )
            check_answer(
                report.body[:16],
                status=answer.status,
                content_type=answer.content_type,
                body=answer.body,
            )
        except ChoristerError:
            time.sleep(0.1)
            return False
        report.stored = True
        return True

    # --- faults ---------------------------------------------------------------------------------

    def blow(self, seconds: float) -> None:
        """Faults at random moments, for so long, and of all main kinds; then all are healed."""
        deadline = time.monotonic() + seconds
        kinds = [
            self._kill, self._kill, self._database, self._line, self._line, self._two_at_once,
            self._freeze,
        ]  # fmt: skip
        if seconds >= _LONG:
            kinds.append(self._freeze_for_long)
            self._helper_away(seconds / 3)
        # On a machine that stood still there may have been time for few.
        while time.monotonic() < deadline or not self.kinds() >= MAIN_KINDS:
            time.sleep(self.random.uniform(0.2, 1.5))
            self.random.choice(kinds)()
        self.heal()

    def kinds(self) -> set[str]:
        """What has happened so far."""
        return {name.partition(" ")[0] for name in self.happened}

    def _kill(self) -> None:
        member = self.random.choice(list(self.deployment.members.values()))
        member.kill()
        self.happened[f"kill {member.name}"] += 1
        time.sleep(self.random.uniform(0, 1))
        member.start()

    def _database(self) -> None:
        role = self.random.choice(["leader", "helper"])
        database = self.deployment.databases[role]
        if self.random.random() < 0.5:
            database.kill()
        else:
            database.stop()
        self.happened[f"database {role}"] += 1
        time.sleep(self.random.uniform(0, 1))
        database.start()

    def _line(self) -> None:
        mode = self.random.choice(MODES)
        self.deployment.proxy.mode = mode
        self.happened[f"line {mode}"] += 1
        time.sleep(self.random.uniform(0.5, 3))
        self.deployment.proxy.mode = None

    def _freeze(self, least: float = 0.5, most: float = 3) -> None:
        """A process stands still and goes on, with connections and jobs that it thinks it holds."""
        member = self.random.choice(list(self.deployment.members.values()))
        member.freeze()
        self.happened[f"freeze {member.name}"] += 1
        time.sleep(self.random.uniform(least, most))
        member.thaw()

    def _freeze_for_long(self) -> None:
        """So long that others take its jobs: then two hold one."""
        self._freeze(DEAD_AFTER_SECONDS + 3, DEAD_AFTER_SECONDS + 8)

    def _helper_away(self, seconds: float) -> None:
        """Nobody answers at the helper's address, while reports come in."""
        self.deployment.members["helper"].kill()
        self.happened[f"helper away {seconds:.0f} s"] += 1
        time.sleep(seconds)
        self.deployment.members["helper"].start()

    def _two_at_once(self) -> None:
        """Every job that waits, or is being done, is there a second time for another worker."""
        again = (
            "INSERT INTO procrastinate_jobs (queue_name, task_name, args) "
            "SELECT queue_name, task_name, args FROM procrastinate_jobs "
            "WHERE task_name IN ('aggregate', 'collect') AND status IN ('todo', 'doing') "
            "RETURNING id"
        )
        with contextlib.suppress(psycopg.Error):
            made = self.deployment.databases["leader"].query(again)
            self.happened["jobs twice"] += len(made)

    def heal(self) -> None:
        self.deployment.proxy.mode = None
        for member in self.deployment.members.values():
            if not member.alive:
                member.start()

    # --- afterwards -----------------------------------------------------------------------------

    def collect(self, task: Task) -> Collected:
        operators = self.deployment.operators
        collector = Collector(operators.at.leader, TOKENS["collector"], operators.collector)
        deadline = time.monotonic() + _RECOVERY
        while True:
            with contextlib.suppress(ChoristerError):
                found = collector.poll(collector.create(task))
                if isinstance(found, Collected):
                    return found
            assert time.monotonic() < deadline, f"no result; {self.state()}"
            time.sleep(0.2)

    def state(self) -> str:
        """What the leader's queue and tables say, for a failure's message."""
        with contextlib.suppress(psycopg.Error):
            leader = self.deployment.databases["leader"]
            jobs = leader.query(
                "SELECT task_name, status::text, attempts, scheduled_at::text, worker_id "
                "FROM procrastinate_jobs ORDER BY id LIMIT 20"
            )
            left = leader.query("SELECT failure FROM aggregation_jobs LIMIT 5")
            said = leader.query("SELECT failure FROM collections LIMIT 5")
            return f"queue {jobs}; jobs {left}; collections {said}; {self.happened}"
        return "the database does not answer"

    def until(self, look: Callable[[], int], wanted: int, what: str) -> None:
        """Wait as long as the number grows; a machine may be slow."""
        found, still = look(), 0.0
        while found != wanted:
            time.sleep(_LOOK)
            before, found = found, look()
            still = still + _LOOK if found == before else 0.0
            assert still < _RECOVERY, f"{found} of {wanted} {what}, and no more: {self.state()}"

    def verified(self) -> int:
        """As the leader counts them, over all tasks."""
        asked = "SELECT COALESCE(sum(value), 0) FROM counters WHERE name = 'verified'"
        ((number,),) = self.deployment.databases["leader"].query(asked)
        return int(number)


_LEFT = {
    "leader": ("segments", "report_blobs", "aggregation_jobs", "accumulators"),
    "helper": ("helper_jobs", "accumulators"),
}


def check(storm: Storm, reports: Sequence[StormReport]) -> None:
    """What must be so after every storm."""
    assert all(report.stored for report in reports)
    storm.until(storm.verified, len(reports), "verified")
    for task in storm.deployment.tasks:
        own = [report for report in reports if report.task is task]
        found = storm.collect(task)
        truth = [sum(report.place == place for report in own) for place in range(BINS)]
        assert found.report_count == len(own)
        assert found.counts.tolist()[:BINS] == truth
        assert sum(found.counts.tolist()) == len(own)
    for role, tables in _LEFT.items():
        for table in tables:
            assert storm.deployment.databases[role].query(f"SELECT count(*) FROM {table}") == [(0,)]  # noqa: S608
    dead = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'failed'"
    assert storm.deployment.databases["leader"].query(dead) == [(0,)]


def weather(folder: Path, seed: int, seconds: float, per_task: int, recipes: int = 3) -> Storm:
    """One whole storm, and its check."""
    skew = random.Random(seed).choice([-90, 0, 90])
    with (
        mortal_servers(2) as databases,
        deployed(
            folder, databases, seed=seed, recipes=recipes, cohort=per_task, helper_skew=skew
        ) as deployment,
    ):
        storm = Storm(deployment, seed)
        storm.happened[f"clock {skew}"] += 1
        reports = storm.reports(per_task)
        # Two threads on different reports, and a third that sends again what they send.
        pause = 1.6 * seconds / len(reports)
        halves = [reports[0::2], reports[1::2], reports[::7]]
        threads = [
            threading.Thread(target=storm.upload, args=(part, pause, seed + place), daemon=True)
            for place, part in enumerate(halves)
        ]
        for thread in threads:
            thread.start()
        storm.blow(seconds)
        storm.calm.set()
        storm.until(lambda: sum(each.stored for each in reports), len(reports), "uploaded")
        for thread in threads:  # the third may still repeat what is there
            thread.join(2 * _RECOVERY)
            assert not thread.is_alive(), "uploads do not end"
        check(storm, reports)
        return storm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chorister-storm-") as folder:
        per_task = max(60, int(2 * options.seconds))
        storm = weather(Path(folder), options.seed, options.seconds, per_task)
    for name, number in sorted(storm.happened.items()):
        print(f"{number:6} {name}")
    print("every sum is exact, and nothing is left behind")


if __name__ == "__main__":
    main()
