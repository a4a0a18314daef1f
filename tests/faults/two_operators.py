"""Two operators as they are deployed: two PostgreSQLs, web processes, workers, a line in between.

There is no registry: tasks and keys that a cosigned log would bring are written into both databases
beforehand. Everything is a real process on this machine, and can be killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chorister.aggregator.config import AggregatorConfig
from chorister.aggregator.service import Core, open_core
from chorister.clock import SystemClock
from chorister.dap.task import Task, task_binding
from chorister.recipe import SignedRecipe
from tests.aggregator.operators import OperatorAddresses, Operators, free_port
from tests.faults.forking_starter import ForkingStarter
from tests.faults.postgres_servers import MortalPostgres
from tests.faults.proxy import Proxy
from tests.logworld import body_of

CLOCK = SystemClock()
BINS = 6


@dataclass
class Member:
    """One process of the deployment; killed and started again under the same name."""

    name: str
    arguments: list[str]
    log: Path
    zygote: ForkingStarter
    surroundings: dict[str, str]
    skew: int = 0
    process: int | None = None

    def start(self) -> None:
        """Start, without waiting."""
        self.process = self.zygote.start(
            self.arguments, log=self.log, env=self.surroundings, skew=self.skew
        )

    def wait(self, seconds: float = 60) -> None:
        """Until it says that it runs."""
        said = " started" if self.arguments[0] == "worker" else " listening on "
        deadline = time.monotonic() + seconds
        while said not in (text := self.log.read_text() if self.log.exists() else ""):
            assert self.alive, f"{self.name}: {text[-3000:]}"
            assert time.monotonic() < deadline, f"{self.name} does not start: {text[-3000:]}"
            time.sleep(0.05)

    @property
    def alive(self) -> bool:
        if self.process is None:
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        return True

    def freeze(self) -> None:
        """Stop, with all that it holds; it knows nothing of it afterwards."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, number)

    def kill(self) -> None:
        """-9."""
        while self.alive:
            self._signal(signal.SIGKILL)
            time.sleep(0.01)


class TwoOperators:
    """All of it."""

    def __init__(
        self,
        folder: Path,
        databases: Sequence[MortalPostgres],
        *,
        seed: int,
        recipes: int,
        cohort: int,
        webs: int = 2,
        workers: int = 2,
        helper_skew: int = 0,
    ) -> None:
        self.databases = dict(zip(("leader", "helper"), databases, strict=True))
        self.ports = [free_port() for _ in range(webs)]
        helper, line = free_port(), free_port()
        common = {"cosign": False, "workers": True, "sweep_every": "5s", "log_level": "info"}
        settings: dict[str, dict[str, Any]] = {
            "leader": {**common, "database": databases[0].url, "helper_seconds": 3},
            "helper": {**common, "database": databases[1].url, "port": helper},
        }
        addresses = OperatorAddresses(
            leader=f"http://127.0.0.1:{self.ports[0]}/dap/",
            helper=f"http://127.0.0.1:{line}/dap/",
            registry=f"http://127.0.0.1:{free_port()}",
        )
        crowd = {"crowds": ["noised", "honest"], "honest_fraction": "1/1"}
        self.operators = Operators(folder, addresses, settings=settings, policy=crowd)
        self.proxy = Proxy(line, helper, seed)
        self._zygote = ForkingStarter()
        self.tasks = self._tasks(recipes, cohort)
        self.members = self._members(workers, helper_skew)

    def _tasks(self, recipes: int, cohort: int) -> list[Task]:
        edges = [str(10 * edge) for edge in range(1, BINS + 1)]
        made = [
            self.operators.recipe(
                f"storm-{number}",
                CLOCK.now(),
                {
                    "features": [{"kind": "intervals", "column": "age", "edges": edges}],
                    "privacy/min_cohort": cohort,
                    "privacy/crowd": "honest",
                    "privacy/honest_fraction": "1/1",
                },
            )
            for number in range(recipes)
        ]
        self.configs: dict[str, bytes] = {}
        for role in ("leader", "helper"):
            core = self.core(role)
            core.tasks.accept(
                [SignedRecipe.parse(body_of(self.operators.entry(each)).jws) for each in made]
            )
            core.keys.publish(core.keys.generate())
            (self.configs[role],) = core.keys.published()
            core.database.close()
        return [self.operators.task(each) for each in made]

    def core(self, role: str) -> Core:
        config: AggregatorConfig = (
            self.operators.leader() if role == "leader" else self.operators.helper()
        )
        return open_core(config, CLOCK, migrate=True)

    def _members(self, workers: int, helper_skew: int) -> dict[str, Member]:
        found = []
        for place, port in enumerate(self.ports):
            more = {"CHORISTER_LEADER__PORT": str(port)}
            found.append(self._member(f"web-{place}", ["serve", "leader"], "leader", more))
        found += [
            self._member(f"worker-{place}", ["worker"], "leader", {}) for place in range(workers)
        ]
        helper = self._member("helper", ["serve", "helper"], "helper", {})
        sweeper = self._member("helper-worker", ["worker"], "helper", {})
        helper.skew = sweeper.skew = helper_skew
        return {each.name: each for each in (*found, helper, sweeper)}

    def _member(self, name: str, words: list[str], role: str, more: Mapping[str, str]) -> Member:
        settings = str(self.operators.settings(role))
        log = self.operators.folder / f"{name}.log"
        surroundings = {"COLUMNS": "200", **more}
        return Member(name, [*words, "--config", settings], log, self._zygote, surroundings)

    def start(self) -> None:
        for each in self.members.values():
            each.start()
        for each in self.members.values():
            each.wait()

    def stop(self) -> None:
        for each in self.members.values():
            each.kill()
        self._zygote.close()
        self.proxy.close()

    def seal(self, task: Task, bins: Sequence[int]) -> list[bytes]:
        """One report a bin, with that bit set and no other: sums are known exactly."""
        bits = np.zeros((len(bins), task.configuration.vdaf.length), np.uint8)
        bits[np.arange(len(bins)), list(bins)] = 1
        interval = task.configuration.task_interval
        assert interval is not None
        return task_binding(task.configuration).seal_reports(
            bits,
            report_ids=secrets.token_bytes(16 * len(bins)),
            time=interval.start,
            leader_config=self.configs["leader"],
            helper_config=self.configs["helper"],
            threads=1,
        )


@contextlib.contextmanager
def deployed(
    folder: Path, databases: Sequence[MortalPostgres], **options: Any
) -> Iterator[TwoOperators]:
    deployment = TwoOperators(folder, databases, **options)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.stop()
