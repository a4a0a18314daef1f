"""A rehearsal with real reports: every device, server and message as in the field, one process.

Slow and exact: each simulated device is a `chorister.device.Device` with encrypted databases, a
ledger and a sandbox; registry, leader and helper are their own applications. What is simulated is
the data, the time and the network.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.fleet import Gathered, Progress, Tell
from chorister.analyst.live import Connection
from chorister.analyst.population import Population
from chorister.analyst.rounds import Round
from chorister.analyst.servers import REGISTRY, Servers
from chorister.clock import SettableClock, SystemClock
from chorister.closing import Closing
from chorister.errors import InvalidInput, ServiceError
from chorister.policy import Policy

if TYPE_CHECKING:
    from chorister.analyst.question import Question

__all__ = ["MOST_DEVICES", "ReportsRehearsal"]

MOST_DEVICES: Final = 5_000
_SETTLE: Final = 6_000  # simulated seconds within which the aggregators finish: 60 real ones
_LOOK: Final = 0.05  # real seconds that 5 simulated ones of waiting take


class ReportsRehearsal(Connection, Closing):
    """A simulated fleet of real devices; `study` begins a study of it, `close` ends it."""

    def __init__(self, population: Population, policy: Policy) -> None:
        if population.size > MOST_DEVICES:
            raise InvalidInput(
                f"{population.size:,} devices: with real reports at most {MOST_DEVICES:,} are "
                'rehearsed; mode="law" has no limit and the same law'
            )
        self.population = population
        self._stack = contextlib.ExitStack()
        self._clock = SettableClock(SystemClock().now())
        with contextlib.ExitStack() as stack:
            self._home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
            self._servers = Servers(policy, self._home, self._clock)
            stack.callback(self._servers.close)
            super().__init__(
                self._servers.policy,
                registry=REGISTRY,
                author=self._servers.author,
                keypair=self._servers.keypair,
                token=self._servers.token,
                folder=None,
                devices=population.size,
                margin=1.0,
                transport=self._servers.network,
                clock=self._clock,
                pause=self._wait,
                settle=_SETTLE,
            )
            self._make_devices(population, stack)
            self._stack = stack.pop_all()

    def truth(self, question: Question) -> NDArray[np.float64]:
        """The true counts if every device answered: what only a rehearsal knows."""
        return self.population.truth(question.recipe(number=1, opens=0), 0)

    def close(self) -> None:
        """Stop devices and servers, and delete everything."""
        self._stack.close()

    def _wait(self, seconds: float) -> None:
        time.sleep(_LOOK)
        self._clock.advance(max(1, int(seconds)))

    def _make_devices(self, population: Population, stack: contextlib.ExitStack) -> None:
        from chorister.device import Device, GivenKey, Sandbox, Timing
        from chorister.fleet.network import InProcessTransport

        sandbox = stack.enter_context(Sandbox())
        self._devices: list[Device] = []
        stack.callback(self._close_devices)
        for number, tables in enumerate(population.each_device()):
            device = Device(
                self._home / f"device-{number}",
                self.policy,
                GivenKey(secrets.token_bytes(32)),
                registry=REGISTRY,
                create=True,
                clock=self._clock,
                transport=InProcessTransport(self._servers.network),
                sandbox=sandbox,
                timing=Timing(query=10, slack=1, spread=1, poll=1),
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
        """Ledgers begin with the first checkpoint that a device sees, and rest for a second."""
        deadline = time.monotonic() + 60.0
        while self._devices[0].run_once().problems:
            if time.monotonic() > deadline:
                raise ServiceError("the rehearsal's log did not come up in time")
            self._wait(1)  # two checkpoints are a second apart
        for device in self._devices[1:]:
            device.run_once()
        self._clock.advance(2)

    # --- What a study asks of a fleet -----------------------------------------------------------

    def publish(self, round_: Round) -> None:
        """Into the log, and on until both aggregators cosigned it."""
        super().publish(round_)
        self._servers.await_recipe(round_.recipe)

    def gather(self, round_: Round, tell: Tell, keep: Callable[[Round], None]) -> Gathered:
        """Let every device poll, answer and upload; then wait and collect as in the field."""
        if not round_.handles:
            self._answer(round_, tell)
        return super().gather(round_, tell, keep)

    def _answer(self, round_: Round, tell: Tell) -> None:
        least = round_.recipe.privacy.min_cohort
        due: list[int] = []
        self._await_listing(round_)
        for number, device in enumerate(self._devices):
            device.run_once()
            if (when := device.next_upload()) is not None:
                due.append(when)
            filled = min(1.0, len(due) // max(1, least // 10) / 10)
            tell(Progress(waiting_for=f"device {number + 1:,} was asked", filled=filled))
        if due:
            self._clock.set(max(self._clock.now(), *due))
        for device in self._devices:
            device.upload_due()
        if round_.target is None:
            self._clock.set(max(self._clock.now(), round_.recipe.window.closes))

    def _await_listing(self, round_: Round) -> None:
        """Until the log's newest checkpoint, with both cosignatures, lists the recipe."""
        deadline = time.monotonic() + 60.0
        first = self._devices[0]
        while time.monotonic() < deadline:
            run = first.run_once()
            named = (*run.answered, *run.declined, *run.refused)
            if round_.recipe.id in named or first.next_upload() is not None:
                return
            self._wait(1)
        raise ServiceError("the recipe did not become public in time")
