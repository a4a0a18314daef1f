"""A device at home in a world that it does not trust."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chorister.clock import SettableClock
from chorister.device import Device, GivenKey, HeadFile, Run, Sandbox, Timing
from chorister.device.audit import AuditEntry, Event
from chorister.device.ledger.ledger_entries import Charged
from chorister.device.sandbox import confinement
from chorister.policy import Policy
from chorister.recipe import Recipe
from chorister.transparency.entries import RecipeEntry
from tests.device.world import DAY, NOW, REGISTRY, Network, a_policy

TIMING = Timing(query=5, slack=5, housekeeping=1, settle=0, spread=600, poll=600)
"""Without the wait before a request, which would move the clock."""


def the_sandbox() -> Sandbox:
    """One for all tests of a system: it holds nothing between two queries."""
    return _sandbox_of(confinement.FACILITIES)


@functools.cache
def _sandbox_of(facilities: frozenset[str]) -> Sandbox:
    del facilities  # what a test pretends that this system offers
    return Sandbox()


class Home:
    """One device with its world."""

    def __init__(
        self, folder: Path, policy: Policy | None = None, network: Network | None = None
    ) -> None:
        self.folder = folder
        self.policy = policy or a_policy()
        self.clock = SettableClock(NOW - DAY)
        self.network = network or Network()
        (folder / "elsewhere").mkdir()
        self.device = self.build(create=True)
        self.device.opt_in()
        # The ledger is made, and grows old enough to answer.
        self.network.log.publish([], time=self.clock.now())
        self.device.run_once()
        self.clock.set(NOW)

    def build(self, *, create: bool = False, **changes: Any) -> Device:
        arguments: dict[str, Any] = {
            "registry": REGISTRY,
            "head": HeadFile(self.folder / "elsewhere" / "head"),
            "clock": self.clock,
            "transport": self.network,
            "sandbox": the_sandbox(),
            "timing": TIMING,
            "create": create,
            **changes,
        }
        return Device(self.folder / "device", self.policy, GivenKey(bytes(range(32))), **arguments)

    def restart(self, **changes: Any) -> None:
        self.device.close()
        self.device = self.build(**changes)

    def ask(self, *recipes: Recipe | RecipeEntry) -> Run:
        """Publish these recipes, and run."""
        self.clock.advance(self.device.quiet_seconds())
        self.network.log.publish(recipes, time=self.clock.now())
        return self.device.run_once()

    def run(self) -> Run:
        """Run as soon as no process may be at work on data."""
        self.clock.advance(self.device.quiet_seconds())
        return self.device.run_once()

    def deliver(self) -> None:
        """Wait until everything in the outbox is due, and send it."""
        waiting = self.device.status().outbox
        if waiting:
            self.clock.set(max(self.clock.now(), *(each.next_try for each in waiting)))
            self.device.upload_due()

    def events(self) -> list[Event]:
        return [record.entry.event for record in self.device.audit.records()]

    def why(self) -> str:
        return list(self.device.audit.records())[-1].entry.why

    def donate(self) -> None:
        assert self.device.set_profile("user", {"age": 33, "locale": "de_DE"})
        assert self.device.donate("keyboard", {"ngram": "hello world you", "perplexity": 1.5})

    def last(self, event: Event) -> AuditEntry:
        """The newest entry of the audit log of one kind."""
        found = [r.entry for r in self.device.audit.records() if r.entry.event is event]
        assert found, f"the audit log does not tell of {event}"
        return found[-1]

    def charges(self) -> int:
        entries = self.device._opened().ledger.entries()
        return sum(isinstance(entry, Charged) for entry in entries)


@contextmanager
def at_home(
    folder: Path, policy: Policy | None = None, network: Network | None = None
) -> Iterator[Home]:
    """A device whose ledger is old enough to answer."""
    home = Home(folder, policy, network)
    try:
        yield home
    finally:
        home.device.close()
