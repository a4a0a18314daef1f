"""A registry, a leader and a helper in one process, as a fixture for tests of their HTTP."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import numpy as np
import pytest

from chorister.aggregator.cosigning import Cosigning
from chorister.aggregator.inprocess import InProcessNetwork
from chorister.aggregator.service import Service
from chorister.clock import Clock, SettableClock, SystemClock
from chorister.dap.collector import Collected, CollectionHandle, Collector
from chorister.dap.task import Task, task_binding
from chorister.dap.upload_client import upload
from chorister.recipe import Recipe
from chorister.registry.app import build_app
from chorister.registry.server import RegistryConfig, open_registry
from tests.aggregator.operators import TOKENS, Operators
from tests.logworld import NOW, submission

T = TypeVar("T")


def wait_until(met: Callable[[], T | None], what: str, seconds: float = 60) -> T:
    """The first true value; a test that waits for longer has failed."""
    deadline = time.monotonic() + seconds
    while not (found := met()):
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.02)
    return found


def origin(service: Service) -> str:
    """Scheme and host: health is asked at the root."""
    return service.config.url.removesuffix(service.config.prefix)


class InProcessPair:
    """All servers on one in-process network."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        policy: Mapping[str, Any] | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.operators = Operators(folder, settings=settings, policy=policy)
        self.stack = contextlib.ExitStack()
        self.network = self.stack.enter_context(InProcessNetwork())
        config = RegistryConfig.load(folder / "registry.toml")
        self.registry, log = self.stack.enter_context(
            open_registry(config, self.clock, create=True)
        )
        self.network.serve(
            self.operators.at.registry, build_app(self.registry, log.public, interval=0.05)
        )
        self.leader = self.start("leader", begin_log=True)
        self.helper = self.start("helper", begin_log=True)

    def start(self, role: str, *, begin_log: bool = False) -> Service:
        config = self.operators.leader() if role == "leader" else self.operators.helper()
        service = Service(config, self.clock, begin_log=begin_log, transport=self.network)
        self.network.serve(origin(service), service.app)
        return service

    def stop(self, service: Service) -> None:
        self.network.withdraw(origin(service))
        service.close()

    def close(self) -> None:
        for service in (self.leader, self.helper):
            with contextlib.suppress(KeyError):
                self.network.withdraw(origin(service))
            service.close()
        self.stack.close()

    def publish(self, recipe: Recipe) -> Task:
        """Log a recipe, and wait until both aggregators know it and have published their keys."""
        self.registry.submit(submission(self.operators.entry(recipe)).encode())
        task = self.operators.task(recipe)

        def ready() -> bool:
            for service in (self.leader, self.helper):
                assert service.cosigning is not None
                service.cosigning.run()
            return all(
                service.core.tasks.find(task.task_id) is not None and service.core.keys.published()
                for service in (self.leader, self.helper)
            )

        wait_until(ready, "the recipe to be cosigned")
        return task

    def seal(self, task: Task, rows: Sequence[int]) -> list[bytes]:
        """Reports whose bit at each index is one, and no other: devices without noise."""
        length = task.configuration.vdaf.length
        bits = np.zeros((len(rows), length), np.uint8)
        bits[np.arange(len(rows)), rows] = 1
        interval = task.configuration.task_interval
        assert interval is not None
        return task_binding(task.configuration).seal_reports(
            bits,
            report_ids=secrets.token_bytes(16 * len(rows)),
            time=interval.start,
            leader_config=self.leader.core.keys.published()[0],
            helper_config=self.helper.core.keys.published()[0],
            threads=1,
        )

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> httpx2.Response:
        fields = [(k.encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
        request = httpx2.Request(method, url, headers=fields, content=body)
        response = self.network.handle_request(request)
        response.read()
        return response

    def upload(self, task: Task, reports: bytes, **headers: str) -> httpx2.Response:
        request = upload(task.configuration.encode(), reports)
        return self.request(
            "POST", request.url, headers={**request.headers, **headers}, body=request.body
        )

    @staticmethod
    def result(
        collector: Collector, handle: CollectionHandle, *, noise_trials: int
    ) -> Collected | None:
        found = collector.poll(handle, noise_trials=noise_trials)
        return found if isinstance(found, Collected) else None

    def collector(self, whose: str = "collector") -> Collector:
        return Collector(
            self.operators.at.leader,
            TOKENS[whose],
            self.operators.collector,
            transport=self.network,
            clock=self.clock,
        )


@contextlib.contextmanager
def a_pair(folder: Path, **options: Any) -> Iterator[InProcessPair]:
    pair = InProcessPair(folder, **options)
    try:
        yield pair
    finally:
        pair.close()


@contextlib.contextmanager
def an_idle_pair(folder: Path, **leader: Any) -> Iterator[InProcessPair]:
    """Time stands still, and nobody looks at the log but the tests.

    That is so once both have looked by themselves, which each does when it starts.
    """
    slow = {"cosign_every": "3000d"}
    looked: list[Cosigning] = []
    run = Cosigning.run

    def counted(cosigning: Cosigning) -> bool:
        try:
            return run(cosigning)
        finally:
            looked.append(cosigning)

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(Cosigning, "run", counted)
        settings = {"leader": slow | leader, "helper": slow}
        pair = stack.enter_context(a_pair(folder, clock=SettableClock(NOW), settings=settings))
        wait_until(lambda: len(looked) == 2, "the first looks")
        patch.undo()
        yield pair
