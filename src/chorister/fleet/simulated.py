"""A fleet of real devices on this machine: each has its own folder, key, stores, ledger and log.

    fleet.json            how many, of what kind, with which seed
    keys                  32 bytes a device; apart from the devices, as keys are
    heads/NUMBER          the head of each device's ledger, apart from it as well
    devices/NUMBER/       the device: two encrypted databases

A few worker processes run them, a core each. What is simulated is the people's data and, so that a
demonstration takes minutes and not hours, *when* a device looks at the log: all look as soon as
there is something new. Uploads happen at the times that the devices drew.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from chorister.aggregator.secret_files import write_private
from chorister.closing import Closing
from chorister.device import Device, Sandbox, Timing
from chorister.errors import ChoristerError, InvalidInput, ServiceError
from chorister.fleet.data import KINDS, Person, people
from chorister.fleet.deployment import Deployment
from chorister.fleet.worker import Done, Home, Order, work
from chorister.policy import Policy

__all__ = [
    "FleetPlan",
    "SimulatedFleet",
    "Tell",
    "fleet_size",
    "keep_answering",
    "keep_plan",
    "numbers_of",
    "open_device",
]

Tell = Callable[[int, int], None]
"""Told how many devices are through, of how many."""

_SETTINGS: Final = "fleet.json"
_KEY: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """What a fleet is made of."""

    devices: int
    seed: int = 1
    kind: str = "everything"

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InvalidInput("a fleet has at least one device")
        if self.kind not in KINDS or self.seed < 0:
            raise InvalidInput(f"a fleet is of a kind ({', '.join(KINDS)}), with a seed of 0 or up")


class SimulatedFleet(Closing):
    """Devices and the processes that run them; a context manager."""

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        plan: FleetPlan,
        *,
        timing: Timing | None = None,
        workers: int | None = None,
    ) -> None:
        """Opens the fleet in a folder, or begins one there; `make` makes what is missing."""
        self.folder = folder
        self.plan = keep_plan(folder, plan)
        self.people: list[Person] = people(self.plan.kind, self.plan.devices, self.plan.seed)
        self._home = Home(
            folder=folder,
            policy=deployment.folder / "policy.toml",
            registry=deployment.registry,
            timing=timing or Timing(query=2, slack=1, spread=2, poll=5),
        )
        _write_keys(folder, self.plan.devices)
        self._count = max(1, min(workers or os.cpu_count() or 1, self.plan.devices))
        self._workers: list[_Worker] = []

    def close(self) -> None:
        """End the worker processes; the devices stay."""
        while self._workers:
            self._workers.pop().close()

    def make(self, tell: Tell) -> None:
        """Make the devices that are missing, and let every ledger begin with a checkpoint."""
        self._order("make", tell)

    def answer(self, tell: Tell, *, again: bool = True) -> list[Done]:
        """Let every device look at the log, answer what it may, and send what it made.

        Unless `again`, a device that answered before does not look: where the policy allows one
        report, that would only take time.
        """
        return self._order("answer" if again else "answer once", tell)

    def spent(self, tell: Tell = lambda _done, _all: None) -> list[Done]:
        """What each device's ledger says."""
        return self._order("spent", tell)

    def device(self, number: int, *, sandbox: Sandbox | None = None) -> Device:
        """One of the devices, as its owner would open it."""
        if not 0 <= number < self.plan.devices:
            raise InvalidInput(f"there are devices 0 to {self.plan.devices - 1}, not {number}")
        return open_device(self._home, number, sandbox=sandbox)

    def _order(self, what: Order, tell: Tell) -> list[Done]:
        if not self._workers:
            self._start()
        for worker in self._workers:
            worker.pipe.send(what)
        done: list[Done] = []
        busy: dict[object, _Worker] = {worker.pipe: worker for worker in self._workers}
        progress = dict.fromkeys(busy, 0)
        while busy:
            for pipe in wait([worker.pipe for worker in busy.values()], timeout=1.0):
                message = busy[pipe].receive()
                if isinstance(message, list):
                    done += message
                    del busy[pipe]
                else:
                    progress[pipe] = message
            tell(sum(progress.values()), self.plan.devices)
        return sorted(done, key=lambda each: each.device)

    def _start(self) -> None:
        # Not a fork: this process has threads.
        context = get_context("spawn")
        for first in range(self._count):
            numbers = range(first, self.plan.devices, self._count)
            pipe, theirs = context.Pipe()
            own = [self.people[number] for number in numbers]
            process = context.Process(
                target=work, args=(theirs, self._home, list(numbers), own), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process=process, pipe=pipe))


def open_device(home: Home, number: int, *, sandbox: Sandbox | None = None) -> Device:
    """A device of a fleet."""
    return home.device(number, Policy.load(home.policy), home.key(number), sandbox)


@dataclass(kw_only=True, slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection

    def receive(self) -> Any:  # noqa: ANN401 (a number, or a list of `Done`)
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5.0)
            raise ServiceError(
                f"a process of the fleet ended ({self.process.exitcode}); is there enough memory?"
            ) from None
        if isinstance(message, ChoristerError):
            raise message
        return message

    def close(self) -> None:
        self.pipe.close()
        self.process.join(10.0)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def fleet_size(folder: Path) -> int:
    """How many devices the fleet in a folder has; 0 if there is none."""
    found = _read_plan(folder)
    return 0 if found is None else found.devices


def keep_answering(fleet: SimulatedFleet, deployment: Deployment) -> Iterator[str]:
    """Let all devices look at the log whenever something new is in it; says what they did."""
    fleet.make(lambda _done, _all: None)
    yield f"{fleet.plan.devices:,} devices are there"
    seen: set[bytes] = set()
    while True:
        try:
            entries = deployment.current(deployment.policy.analyses.keys()).recipes
        except ChoristerError as error:
            yield f"the log can't be used: {error}"
            time.sleep(2.0)
            continue
        listed = {entry.address for entry in entries}
        if listed - seen:
            done = fleet.answer(lambda _done, _all: None)
            answered = sum(len(each.answered) for each in done)
            uploaded = sum(each.uploaded for each in done)
            refused = sum(len(each.refused) for each in done)
            yield f"{answered:,} answers, {uploaded:,} uploads, {refused:,} refusals"
        seen = listed
        time.sleep(1.0)


def _read_plan(folder: Path) -> FleetPlan | None:
    path = folder / _SETTINGS
    try:
        return FleetPlan(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        raise InvalidInput(f"{path} is damaged: restore it, or remove the fleet") from None


def keep_plan(folder: Path, plan: FleetPlan) -> FleetPlan:
    """The plan of the fleet that is there, grown to the wanted number; or this one, now kept."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / _SETTINGS
    found = _read_plan(folder)
    if found is not None:
        plan = FleetPlan(devices=max(found.devices, plan.devices), seed=found.seed, kind=found.kind)
    text = json.dumps({"devices": plan.devices, "seed": plan.seed, "kind": plan.kind}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    for name in ("heads", "devices"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    return plan


def _write_keys(folder: Path, devices: int) -> None:
    path = folder / "keys"
    if not path.exists():
        write_private(path, b"")
    missing = devices - path.stat().st_size // _KEY
    if missing > 0:
        with path.open("ab") as file:
            file.write(secrets.token_bytes(_KEY * missing))
            file.flush()
            os.fsync(file.fileno())


def numbers_of(done: Iterable[Done], recipe: str) -> Sequence[int]:
    """The devices that answered a recipe."""
    return [each.device for each in done if recipe in each.answered]
