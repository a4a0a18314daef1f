"""A leader and a helper as two processes with a database each, and reports of 1,000 bins for them.

There is no registry: the tasks and keys that a cosigned log would bring are written into both
databases beforehand, and the servers are told not to cosign.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.aggregator.operators import TOKENS, OperatorAddresses, Operators, free_port  # noqa: E402
from tests.aggregator.server_processes import COMMAND, environment, process, stop  # noqa: E402
from tests.logworld import body_of  # noqa: E402

from chorister._native import HPKEKeypair  # noqa: E402
from chorister.aggregator.config import AggregatorConfig  # noqa: E402
from chorister.aggregator.http.report_writer import ReportWriter  # noqa: E402
from chorister.aggregator.service import Core, open_core  # noqa: E402
from chorister.aggregator.storage.counters import task_status  # noqa: E402
from chorister.clock import SystemClock  # noqa: E402
from chorister.dap.task import (  # noqa: E402
    Task,
    task_binding,
    verify_key,
)
from chorister.recipe import Recipe, SignedRecipe  # noqa: E402

__all__ = [
    "COMMAND",
    "TOKENS",
    "MeasuredPair",
    "Watch",
    "cpu_seconds",
    "environment",
    "free_port",
    "resident_bytes",
]

BINS = 1_000
JOB = 500
CLOCK = SystemClock()


@dataclass
class Native:
    """What both roles' native calls reach on all cores, nothing around them."""

    task: Task
    leader: HPKEKeypair
    helper: HPKEKeypair

    def measure(self, reports: Sequence[bytes]) -> tuple[float, float]:
        """Reports per second, by the clock and by the CPU time of all cores."""
        binding = task_binding(self.task.configuration)
        key = verify_key(bytes(32), self.task.task_id)
        spent = used = 0.0
        for start in range(0, len(reports), JOB):
            batch = b"".join(reports[start : start + JOB])
            begun, cpu = time.perf_counter(), time.process_time()
            job = binding.leader_initialize(key, [self.leader], batch)
            resps, _ = binding.helper_initialize(key, [self.helper], job.verify_inits)
            added = job.finish(resps)
            spent += time.perf_counter() - begun
            used += time.process_time() - cpu
            assert added.count == len(reports[start : start + JOB])
        return len(reports) / spent, len(reports) / used


class MeasuredPair:
    """Files, databases and keys of a pair."""

    def __init__(
        self,
        folder: Path,
        *,
        databases: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        min_cohort: int = 1_000,
        tasks: int = 1,
        bins: int = BINS,
    ) -> None:
        common = {"cosign": False, "log_level": "warning", **(settings or {})}
        roles = {
            role: {**common, **({"database": databases[role]} if databases else {})}
            for role in ("leader", "helper")
        }
        self.operators = Operators(folder, OperatorAddresses.local(), settings=roles)
        self.bins = bins
        recipes = [self._recipe(f"bench-{number}", min_cohort) for number in range(tasks)]
        self.recipe = recipes[0]
        self.tasks = [self.operators.task(each) for each in recipes]
        self.task = self.tasks[0]
        self.keys: dict[str, HPKEKeypair] = {}
        for role in ("leader", "helper"):
            core = self.core(role)
            logged = [body_of(self.operators.entry(each)).jws for each in recipes]
            core.tasks.accept([SignedRecipe.parse(each) for each in logged])
            assert core.tasks.find(self.task.task_id) is not None
            core.keys.publish(core.keys.generate())
            (self.keys[role],) = core.keys.keypairs()
            core.database.close()

    def _recipe(self, name: str, min_cohort: int) -> Recipe:
        edges = [str(age) for age in range(self.bins)]
        return self.operators.recipe(
            name,
            CLOCK.now(),
            {
                "features": [{"kind": "intervals", "column": "age", "edges": edges}],
                "privacy/local_epsilon": "5",
                "privacy/min_cohort": min_cohort,
            },
        )

    def config(self, role: str) -> AggregatorConfig:
        return self.operators.leader() if role == "leader" else self.operators.helper()

    def core(self, role: str) -> Core:
        return open_core(self.config(role), CLOCK, migrate=True)

    def seal(self, number: int, task: Task | None = None) -> Iterator[list[bytes]]:
        """Reports of devices that answer, a thousand at a time."""
        configuration = (task or self.task).configuration
        binding = task_binding(configuration)
        interval = configuration.task_interval
        assert interval is not None
        generator = np.random.default_rng(1)
        while number > 0:
            size = min(number, 1_000)
            number -= size
            bits = self.recipe.randomizer.randomize_many(generator.integers(0, self.bins, size))
            yield binding.seal_reports(
                bits,
                report_ids=secrets.token_bytes(16 * size),
                time=interval.start,
                leader_config=self.keys["leader"].config,
                helper_config=self.keys["helper"].config,
            )

    def load(self, reports: Iterator[list[bytes]], task: Task | None = None) -> list[bytes]:
        """Store reports at the leader as single uploads would, 64 in a transaction; the first."""
        core = self.core("leader")
        writer = ReportWriter(core.database, core.keys, CLOCK, queue=core.queue)
        known = core.tasks.find((task or self.task).task_id)
        assert known is not None
        first: list[bytes] = []
        for some in reports:
            first = first or some
            for start in range(0, len(some), 64):
                plans = [writer.check(known, each) for each in some[start : start + 64]]
                assert not any(errors.statuses for errors in writer.store(plans))
        core.database.close()
        return first

    def native(self) -> Native:
        return Native(self.task, self.keys["leader"], self.keys["helper"])

    @contextlib.contextmanager
    def serving(self, role: str, **more: str) -> Iterator[subprocess.Popen[str]]:
        settings, log = self.operators.settings(role), self.operators.folder / f"{role}.log"
        with process(role, settings, log, **more) as (_, server):
            yield server
            stop(server)

    def disk_bytes(self) -> int:
        """Of the leader's SQLite database."""
        return sum(path.stat().st_size for path in self.operators.folder.glob("leader.db*"))


class Watch:
    """Looks at the leader's counters from outside."""

    def __init__(self, pair: MeasuredPair) -> None:
        self._core = pair.core("leader")
        found = [self._core.tasks.find(each.task_id) for each in pair.tasks]
        self._tasks = [each for each in found if each is not None]
        assert len(self._tasks) == len(pair.tasks)

    def verified(self) -> int:
        return sum(each.verified for each in task_status(self._core.database, self._tasks))

    def until(self, reports: int, marks: Sequence[int] = (), seconds: float = 900) -> list[float]:
        """When each mark was passed, and at the end when all reports were verified."""
        wanted = [*marks, reports]
        passed: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(passed) < len(wanted):
            verified = self.verified()
            now = time.perf_counter()
            assert now < deadline, f"{verified} of {reports} reports after {seconds} s"
            while len(passed) < len(wanted) and verified >= wanted[len(passed)]:
                passed.append(now)
            time.sleep(0.02)
        return passed

    def close(self) -> None:
        self._core.database.close()


def cpu_seconds(process: int) -> float:
    """What a process has used of all cores so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")")[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(server: subprocess.Popen[str]) -> int:
    """What a process holds in memory now."""
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
