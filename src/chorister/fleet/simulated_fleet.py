"""Simulated people with real devices: each has its own folder, key, databases, ledger and log.

    fleet.json            how many, of what kind, with which seed
    keys                  32 bytes per device, kept apart from the devices
    heads/NUMBER          the head of each device's ledger, kept apart as well
    devices/NUMBER/       the device: two encrypted databases

Worker processes run them, two per core, because a device often waits for a server or a disk. Only
two things are simulated: the people's data, and *when* a device polls. All poll as soon as there is
something new, so that a demonstration takes minutes instead of hours. Uploads happen at the times
that the devices drew.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from chorister.closing import Closing
from chorister.device import Device, Sandbox, Timing
from chorister.errors import ChoristerError, InvalidInput, ServiceError
from chorister.fleet.deployment import Deployment
from chorister.fleet.device_worker import (
    KEY_BYTES,
    MADE,
    AnswerCommand,
    DeviceOutcome,
    FleetFolder,
    WorkerCommand,
    work,
)
from chorister.fleet.people import KINDS, Person, bike_share, moved, people
from chorister.key_files import write_private
from chorister.transparency.entries import RecipeBody, open_recipe

OnCount: TypeAlias = Callable[[int, int], None]
"""Called with the number of devices that are done, and the number of all devices."""

_PLAN: Final = "fleet.json"
_TIMING: Final = Timing(query=2, slack=1, housekeeping=1, settle=0, spread=1, poll=5)
"""Short, because made-up data needs no protection against timing."""
_RETRY_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before unsettled devices poll again. A real device would, an hour later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """The number and kind of the devices."""

    devices: int
    seed: int = 1
    kind: str = "everything"

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InvalidInput("a fleet needs at least one device")
        if self.kind not in KINDS or self.seed < 0:
            raise InvalidInput(
                f"the kind of a fleet must be one of {', '.join(KINDS)}, and its seed 0 or above"
            )


class SimulatedFleet(Closing):
    """Devices, and the processes that run them."""

    def __init__(self, folder: Path, deployment: Deployment, plan: FleetPlan) -> None:
        """Open the fleet in a folder, or plan a new one; `make` creates missing devices."""
        self.folder = folder
        self.plan = store_plan(folder, plan)
        self.people: list[Person] = people(self.plan.kind, self.plan.devices, self.plan.seed)
        self._home = FleetFolder(
            folder=folder,
            policy=deployment.folder / "policy.toml",
            registry=deployment.registry,
            timing=_TIMING,
        )
        _write_keys(folder, self.plan.devices)
        self._count = max(1, min(2 * (os.cpu_count() or 1), self.plan.devices))
        self._workers: list[_Worker] = []

    def start(self) -> None:
        """Start the worker processes now; otherwise they start when they are first needed."""
        if not self._workers:
            self._start_workers()

    def close(self) -> None:
        """Stop the worker processes; the devices stay."""
        while self._workers:
            self._workers.pop().close()

    def make(self, on_count: OnCount) -> None:
        """Create missing devices, and let every ledger begin with a checkpoint."""
        self._run("make", on_count)

    def answer(
        self, on_count: OnCount, *, again: bool = True, until: float = math.inf
    ) -> list[DeviceOutcome]:
        """Let every device poll, answer what it may, and upload; none polls after `until`.

        Unless `again`, devices that answered before are skipped: if the policy allows one report,
        polling would only take time.
        """
        which: Literal["all", "those that have not answered"]
        which = "all" if again else "those that have not answered"
        return self._run(AnswerCommand(which=which, until=until), on_count)

    def move(self, share: float) -> None:
        """Let this share of the people change how they go to work; see `people.moved`."""
        self._run(float(share), lambda _done, _all: None)
        first = people(self.plan.kind, self.plan.devices, self.plan.seed)
        self.people = [moved(person, number, share) for number, person in enumerate(first)]

    def retry(self, on_count: OnCount) -> list[DeviceOutcome]:
        """Let only those devices poll again that could not read the log, or refused something."""
        return self._run(AnswerCommand(which="unsettled"), on_count)

    def spent(self, on_count: OnCount = lambda _done, _all: None) -> list[DeviceOutcome]:
        return self._run("spent", on_count)

    def device(self, number: int, *, sandbox: Sandbox | None = None) -> Device:
        """Open one of the devices, as its owner would."""
        if not 0 <= number < self.plan.devices:
            raise InvalidInput(f"the devices are 0 to {self.plan.devices - 1}, not {number}")
        return self._home.open_device(number, sandbox=sandbox)

    def _run(self, what: WorkerCommand, on_count: OnCount) -> list[DeviceOutcome]:
        self.start()
        for worker in self._workers:
            worker.pipe.send(what)
        done: list[DeviceOutcome] = []
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
            on_count(sum(progress.values()), self.plan.devices)
        return sorted(done, key=lambda each: each.device)

    def _start_workers(self) -> None:
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


@dataclass(kw_only=True, slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection

    def receive(self) -> Any:  # noqa: ANN401 (a number, or a list of `DeviceOutcome`)
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
    """The number of devices in a folder; 0 if there is no fleet."""
    found = _read_plan(folder)
    return 0 if found is None else found.devices


def devices_ready(folder: Path) -> int:
    """The number of devices in a folder that exist and have begun their ledgers."""
    return sum(1 for _ in folder.glob(f"devices/*/{MADE}"))


def _open_window(body: RecipeBody) -> int | None:
    """The window of a series that is open now; None if none is, and for a single question."""
    recipe = open_recipe(body).recipe
    return None if recipe.series is None else recipe.window_open(int(time.time()))


def keep_answering(
    fleet: SimulatedFleet,
    deployment: Deployment,
    *,
    pause: Callable[[float], None] = time.sleep,
    open_window: Callable[[RecipeBody], int | None] = _open_window,
) -> Iterator[str]:
    """Let all devices poll whenever there is something new: a question, or a window of a series.

    Before each window of a series people change a little. Yields what they did.
    """
    fleet.make(lambda _done, _all: None)
    yield f"{fleet.plan.devices:,} devices are ready"
    seen: set[tuple[bytes, int | None]] = set()
    pauses: list[float] = []  # before the retries that are left
    retry = False
    while True:
        try:
            entries = deployment.current().recipes
        except ChoristerError as error:
            yield f"can't use the log: {error}"
            pause(2.0)
            continue
        listed = {(entry.address, open_window(entry)) for entry in entries}
        if listed - seen:
            windows = [number for _, number in listed - seen if number is not None]
            if windows:
                fleet.move(bike_share(max(windows)))
            done = fleet.answer(lambda _done, _all: None)
            pauses = list(_RETRY_PAUSES)
        elif retry:
            done = fleet.retry(lambda _done, _all: None)
        else:
            done = []
        if done:
            answered = sum(len(each.answered) for each in done)
            uploaded = sum(each.uploaded for each in done)
            refused = sum(len(each.refused) for each in done)
            yield f"{answered:,} answers, {uploaded:,} uploads, {refused:,} refusals"
        seen = listed
        retry = bool(pauses) and any(each.unsettled for each in done)
        pause(pauses.pop(0) if retry else 1.0)


def _read_plan(folder: Path) -> FleetPlan | None:
    path = folder / _PLAN
    try:
        return FleetPlan(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        raise InvalidInput(f"{path} is damaged: restore it, or remove the fleet") from None


def store_plan(folder: Path, plan: FleetPlan) -> FleetPlan:
    """Store a plan, or enlarge the existing one to the wanted number of devices."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / _PLAN
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
    missing = devices - path.stat().st_size // KEY_BYTES
    if missing > 0:
        with path.open("ab") as file:
            file.write(secrets.token_bytes(KEY_BYTES * missing))
            file.flush()
            os.fsync(file.fileno())


def devices_that_answered(done: Iterable[DeviceOutcome], recipe: str) -> list[int]:
    return [each.device for each in done if recipe in each.answered]
