"""A rehearsal with real devices, servers and messages, all in one process.

Slow and exact: each device is a `chorister.device.Device` with encrypted databases, a ledger and a
sandbox; registry, leader and helper are the real applications with their databases. Only the data,
the time and the network are simulated. Needs the extra `server`.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.fleet import ReleasedSums
from chorister.analyst.live_fleet import LiveFleet, Profile
from chorister.analyst.rehearsal.population import Population
from chorister.analyst.rounds import Round
from chorister.analyst.study_status import OnProgress, Progress
from chorister.clock import SettableClock, SystemClock
from chorister.closing import Closing
from chorister.device import Device, GivenKey, HTTPTransport, Sandbox, Timing
from chorister.errors import InvalidInput, ServiceError
from chorister.fleet.deployment_files import Addresses, DeploymentFiles, with_keys
from chorister.policy import Policy
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.aggregator.service import Service
    from chorister.analyst.question import Question

MAX_DEVICES: Final = 5_000
_REGISTRY: Final = "https://registry.rehearsal.invalid/"
_FINISH_SECONDS: Final = 6_000  # simulated, for the aggregators to finish: 60 real ones
_WAIT_SECONDS: Final = 0.05  # real seconds that one simulated wait takes
_TIMEOUT_SECONDS: Final = 60.0
_CHECKPOINT_SECONDS: Final = 0.05  # between two checkpoints of the log


class ReportsRehearsal(LiveFleet, Closing):
    """A fleet of real devices in this process; `close` ends it."""

    def __init__(self, population: Population, policy: Policy) -> None:
        if population.size > MAX_DEVICES:
            raise InvalidInput(
                f"{population.size:,} devices: with real reports at most {MAX_DEVICES:,} can be "
                'rehearsed; mode="law" has no limit and draws from the same distribution'
            )
        self.population = population
        self._stack = contextlib.ExitStack()
        self._clock = SettableClock(SystemClock().now())
        with contextlib.ExitStack() as stack:
            self._home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
            self._servers = InProcessServers(policy, self._home, self._clock)
            stack.callback(self._servers.close)
            profile = Profile.load(self._home / "analyst" / "profile.toml")
            super().__init__(
                profile.access(),
                folder=None,
                devices=population.size,
                margin=1.0,
                transport=self._servers.network,
                clock=self._clock,
                pause=self._wait,
                finish_seconds=_FINISH_SECONDS,
            )
            self._make_devices(population, stack)
            self._stack = stack.pop_all()

    def truth(self, question: Question) -> NDArray[np.float64]:
        """The true counts if every device answered, which only a rehearsal knows."""
        return self.population.truth(question.recipe(number=1, opens=0), 0)

    def close(self) -> None:
        """Stop devices and servers, and delete everything."""
        self._stack.close()

    def _wait(self, seconds: float) -> None:
        time.sleep(_WAIT_SECONDS)
        self._clock.advance(max(1, int(seconds)))

    def _make_devices(self, population: Population, stack: contextlib.ExitStack) -> None:
        sandbox = stack.enter_context(Sandbox())
        self._devices: list[Device] = []
        stack.callback(self._close_devices)
        for number, tables in enumerate(population.each_device()):
            device = Device(
                self._home / f"device-{number}",
                self.policy,
                GivenKey(secrets.token_bytes(32)),
                registry=_REGISTRY,
                create=True,
                clock=self._clock,
                transport=HTTPTransport(network=self._servers.network),
                sandbox=sandbox,
                timing=Timing(query=10, slack=1, housekeeping=1, settle=0, spread=1, poll=1),
            )
            self._devices.append(device)
            device.opt_in()
            for table, held in tables.items():
                known = {**self.policy.streams, **self.policy.profiles}[table].fields
                rows = [{name: row.get(name) for name in known} for row in held]
                if table in self.policy.streams:
                    device.donate_many(table, rows)
                elif rows:
                    device.set_profile(table, rows[0])
        self._begin_ledgers()

    def _close_devices(self) -> None:
        for device in self._devices:
            device.close()

    def _begin_ledgers(self) -> None:
        """Show every device a checkpoint, with which its ledger begins, and wait a second."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while self._devices[0].run_once().problems:
            if time.monotonic() > deadline:
                raise ServiceError("the rehearsal's log did not start in time")
            self._wait(1)  # there is one checkpoint per second
        for device in self._devices[1:]:
            device.run_once()
        self._clock.advance(2)

    def publish(self, round_: Round) -> None:
        """Publish, and wait until both aggregators have cosigned the recipe."""
        super().publish(round_)
        self._servers.await_recipe(round_.recipe)

    def collect(
        self, round_: Round, on_progress: OnProgress, save: Callable[[Round], None]
    ) -> ReleasedSums:
        """Let every device poll, answer and upload; then wait and collect as a live fleet does."""
        if not round_.handles:
            self._answer(round_, on_progress)
        return super().collect(round_, on_progress, save)

    def is_over(self, round_: Round) -> bool:
        """Whether a window is over: time passes here as you collect."""
        del round_
        return True

    def _answer(self, round_: Round, on_progress: OnProgress) -> None:
        least = round_.recipe.privacy.min_cohort
        due: list[float] = []
        self._clock.set(max(self._clock.now(), round_.window.opens))
        self._servers.await_checkpoint(self._clock.now())
        self._await_listing(round_)
        for number, device in enumerate(self._devices):
            self._clock.advance(device.quiet_seconds())
            device.run_once()
            if (when := device.next_upload()) is not None:
                due.append(when)
            filled = min(1.0, len(due) // max(1, least // 10) / 10)
            on_progress(Progress(waiting_for=f"device {number + 1:,} was asked", filled=filled))
        if due:
            self._clock.set(max(self._clock.now(), math.ceil(max(due))))
        for device in self._devices:
            device.upload_due()
        if round_.target is None:
            self._clock.set(max(self._clock.now(), round_.window.closes))

    def _await_listing(self, round_: Round) -> None:
        """Wait until the newest checkpoint, with both cosignatures, lists the recipe."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        first = self._devices[0]
        while time.monotonic() < deadline:
            run = first.run_once()
            named = (*run.answered, *run.declined, *run.refused)
            if round_.number_in_series and not run.problems:
                return  # it was listed before the first window
            if round_.recipe.id in named or first.next_upload() is not None:
                return
            self._wait(1)
        raise ServiceError("the recipe was not listed in time")


class InProcessServers:
    """Registry, leader and helper with their own keys, reached without sockets."""

    def __init__(self, policy: Policy, folder: Path, clock: SettableClock) -> None:
        try:
            from chorister.aggregator.inprocess import InProcessNetwork
            from chorister.registry.app import build_app
            from chorister.registry.server import RegistryConfig, open_registry
        except ModuleNotFoundError as error:
            raise InvalidInput(
                f"real reports need {error.name}, which is not installed: "
                'pip install "chorister[analyst,server]"'
            ) from None
        self._clock = clock
        pair = policy.aggregators[0]
        files = DeploymentFiles(
            folder,
            Addresses(registry=_REGISTRY, leader=pair.leader.url, helper=pair.helper.url),
        )
        files.write_settings(with_keys(policy, files.write_keys()), batch_delay_milliseconds=20)
        self._policy = Policy.load(folder / "policy.toml")
        with contextlib.ExitStack() as stack:
            self.network = stack.enter_context(InProcessNetwork())
            settings = RegistryConfig.load(folder / "registry" / "registry.toml")
            self._registry, log = stack.enter_context(open_registry(settings, clock, create=True))
            app = build_app(self._registry, log.public, interval=_CHECKPOINT_SECONDS)
            self.network.serve(_REGISTRY, app)
            self._services = [
                self._start(folder / role / f"{role}.toml", stack) for role in ("leader", "helper")
            ]
            self._stack = stack.pop_all()

    def _start(self, settings: Path, stack: contextlib.ExitStack) -> Service:
        from chorister.aggregator.config import load_config
        from chorister.aggregator.service import Service

        config = load_config(settings, {})
        service = Service(config, self._clock, begin_log=True, transport=self.network)
        stack.callback(service.close)
        self.network.serve(config.url, service.app)
        stack.callback(self.network.withdraw, config.url)
        return service

    def close(self) -> None:
        self._stack.close()

    def await_recipe(self, recipe: Recipe) -> None:
        """Wait until both aggregators have cosigned the recipe, and devices can know their keys."""
        from chorister.dap.task import task_configurations

        tasks = [task.task_id for task in task_configurations(self._policy, recipe)]
        self._cosign_until(
            lambda: all(
                service.core.keys.published()
                and all(service.core.tasks.find(task) is not None for task in tasks)
                for service in self._services
            )
        )

    def await_checkpoint(self, since: int) -> None:
        """Wait for a checkpoint that both aggregators cosigned since: devices refuse older ones."""

        def published() -> bool:
            newest = self._registry.status().published
            return newest is not None and newest.time >= since

        self._cosign_until(published)

    def _cosign_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not done():
            if time.monotonic() > deadline:
                raise ServiceError("the aggregators did not cosign the log in time")
            for service in self._services:
                if service.cosigning is not None:
                    service.cosigning.run()
            time.sleep(_WAIT_SECONDS)
            self._clock.advance(1)  # there is one checkpoint per second
