"""One process of a simulated fleet, which runs its part of the devices one after the other.

Each device is opened for every task and closed again: thousands of open databases would need more
files than a process may open. Only those whose reports leave in a few seconds stay open, up to a
limit.
"""

from __future__ import annotations

import gc
import heapq
import math
import resource
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal, TypeAlias

from chorister.canonical import decimal_text
from chorister.device import Device, GivenKey, HeadFile, Sandbox, Timing
from chorister.errors import ChoristerError, SandboxUnavailable, ServiceError
from chorister.fleet.people import Person, moved
from chorister.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerCommand:
    """Let devices poll, answer and upload."""

    which: Literal["all", "those that have not answered", "unsettled"]
    until: float = math.inf  # no device polls after this time


WorkerCommand: TypeAlias = AnswerCommand | Literal["make", "spent"] | float
"""A number: let this share of the people change, see `people.moved`."""
KEY_BYTES: Final = 32
_PROGRESS_SECONDS: Final = 0.2
_LOG_TIMEOUT_SECONDS: Final = 120.0
_SANDBOX_ATTEMPTS: Final = 5
_LEDGER_AGE_SECONDS: Final = 1.0
"""With the sample policy, a new ledger answers after a second."""
_MAX_OPEN: Final = 64
_FILES_PER_DEVICE: Final = 16  # more than an open device has
MADE: Final = "made"
"""The file in a device's folder that is written last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetFolder:
    """The folder of a simulated fleet, and how its devices behave."""

    folder: Path
    policy: Path
    registry: str
    timing: Timing | None  # None: those of a real device

    def numbers(self) -> list[int]:
        """The numbers of the existing devices."""
        folder = self.folder / "devices"
        if not folder.is_dir():
            return []
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    def key(self, number: int) -> bytes:
        with (self.folder / "keys").open("rb") as file:
            file.seek(KEY_BYTES * number)
            return file.read(KEY_BYTES)

    def open_device(
        self,
        number: int,
        *,
        policy: Policy | None = None,
        sandbox: Sandbox | None = None,
        create: bool = False,
    ) -> Device:
        """Open one of the devices; pass the policy if it is loaded already."""
        return Device(
            self.folder / "devices" / str(number),
            Policy.load(self.policy) if policy is None else policy,
            GivenKey(self.key(number)),
            registry=self.registry,
            head=HeadFile(self.folder / "heads" / str(number)),
            timing=self.timing,
            sandbox=sandbox,
            create=create,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOutcome:
    """What one device did."""

    device: int
    answered: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    uploaded: int = 0
    dropped: int = 0
    unsettled: bool = False  # a later poll may still answer something
    epsilon: str = "0"  # spent from the device-wide budget
    delta: str = "0"
    reports: int = 0


class _ParentGoneError(Exception):
    """The process that started us has ended."""


def work(
    pipe: Connection, home: FleetFolder, numbers: Sequence[int], people: Sequence[Person]
) -> None:
    """Carry out commands from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    share: _DeviceGroup | None = None
    with ExitStack() as stack:
        while True:
            try:
                order: WorkerCommand = pipe.recv()
            except (EOFError, ConnectionResetError):
                return  # the parent is gone
            outcome: list[DeviceOutcome] | ServiceError
            try:
                if share is None:
                    share = _DeviceGroup(
                        pipe, home, numbers, people, stack.enter_context(_sandbox())
                    )
                    gc.freeze()  # hundreds of devices and people, which stay
                outcome = share.do(order)
            except ChoristerError as error:
                # As text: not every error can be sent through a pipe.
                outcome = ServiceError(f"a device of the fleet: {error}")
            except _ParentGoneError:
                return
            try:
                pipe.send(outcome)
            except OSError:
                return


def _sandbox() -> Sandbox:
    """Start a sandbox; on a busy machine it may not be ready in time at first."""
    for _ in range(_SANDBOX_ATTEMPTS - 1):
        try:
            return Sandbox()
        except SandboxUnavailable:
            time.sleep(1.0)
    return Sandbox()


class _DeviceGroup:
    """The devices of one process."""

    def __init__(
        self,
        pipe: Connection,
        home: FleetFolder,
        numbers: Sequence[int],
        people: Sequence[Person],
        sandbox: Sandbox,
    ) -> None:
        self._pipe = pipe
        self._home = home
        self._numbers = numbers
        self._people = people
        policy = Policy.load(home.policy)
        self._devices = [
            home.open_device(number, policy=policy, sandbox=sandbox) for number in numbers
        ]
        self._policy = policy
        self._sandbox = sandbox
        self._reported = 0.0
        self._answer_from = 0.0  # a time of `time.monotonic`
        self._answered: set[int] = set()
        self._unsettled: set[int] = set()
        # By place: what a device had spent when its last report left.
        self._totals: dict[int, DeviceOutcome] = {}
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_open = min(_MAX_OPEN, files // _FILES_PER_DEVICE)
        self._moved = 0.0

    def do(self, order: WorkerCommand) -> list[DeviceOutcome]:
        if isinstance(order, float):
            return self._move(order)
        if order == "make":
            return self._make()
        if order == "spent":
            return self._spent()
        skipped: set[int] = set()
        if order.which == "those that have not answered":
            skipped = self._answered
        elif order.which == "unsettled":
            skipped = set(range(len(self._numbers))) - self._unsettled
        return self._answer(skipped.copy(), order.until)

    def _report(self, done: int, *, last: bool = False) -> None:
        if last or time.monotonic() >= self._reported + _PROGRESS_SECONDS:
            self._reported = time.monotonic()
            try:
                self._pipe.send(done)
            except OSError:
                raise _ParentGoneError from None

    def _make(self) -> list[DeviceOutcome]:
        done = []
        for place, (number, person) in enumerate(zip(self._numbers, self._people, strict=True)):
            device = self._devices[place]
            if not (device.folder / MADE).exists():
                device = self._create(number, person)
            with device:
                self._begin_ledger(device)
                (device.folder / MADE).touch(mode=0o600)
            done.append(DeviceOutcome(device=number))
            self._report(place + 1, last=place + 1 == len(self._numbers))
        self._answer_from = time.monotonic() + _LEDGER_AGE_SECONDS
        return done

    def _create(self, number: int, person: Person) -> Device:
        # Replace what an interrupted start left behind: it never answered anything.
        shutil.rmtree(self._home.folder / "devices" / str(number), ignore_errors=True)
        (self._home.folder / "heads" / str(number)).unlink(missing_ok=True)
        device = self._home.open_device(
            number, policy=self._policy, sandbox=self._sandbox, create=True
        )
        device.opt_in()
        for stream, rows in person.streams.items():
            device.donate_many(stream, rows)
        for profile, row in person.profiles.items():
            device.set_profile(profile, row)
        return device

    def _move(self, share: float) -> list[DeviceOutcome]:
        """Let people change: their devices get the profile that they have then."""
        for place, (number, person) in enumerate(zip(self._numbers, self._people, strict=True)):
            before, after = (moved(person, number, each) for each in (self._moved, share))
            if before != after:
                with self._devices[place] as device:
                    for profile, row in after.profiles.items():
                        device.set_profile(profile, row)
        self._moved = share
        return []

    @staticmethod
    def _begin_ledger(device: Device) -> None:
        """Poll until the device has seen a checkpoint, with which its ledger begins."""
        deadline = time.monotonic() + _LOG_TIMEOUT_SECONDS
        while True:
            time.sleep(device.quiet_seconds())
            run = device.run_once()
            if not run.problems:
                return
            if time.monotonic() > deadline:
                raise ServiceError(f"can't use the log: {run.problems[0]}")
            time.sleep(0.2)

    def _answer(self, skipped: set[int], until: float) -> list[DeviceOutcome]:
        """Let the devices poll, and send each report when it is due."""
        time.sleep(max(0.0, self._answer_from - time.monotonic()))
        found = {number: DeviceOutcome(device=number) for number in self._numbers}
        due: list[tuple[float, int]] = []
        through = 0

        def send() -> None:
            nonlocal through
            while due and due[0][0] <= time.time():
                _, place = heapq.heappop(due)
                with self._devices[place] as device:
                    run = device.upload_due()
                    again = device.next_upload()
                    if again is None:
                        self._totals[place] = self._total(place)  # while it is open
                number = self._numbers[place]
                found[number] = replace(
                    found[number],
                    uploaded=found[number].uploaded + run.uploaded,
                    dropped=found[number].dropped + run.dropped,
                )
                if again is not None:
                    heapq.heappush(due, (again, place))
                else:
                    through += 1
                self._report(through)

        for place, number in enumerate(self._numbers):
            if place in skipped or time.time() > until:
                through += 1
                continue
            with ExitStack() as stack:
                device = stack.enter_context(self._devices[place])
                self._totals.pop(place, None)
                time.sleep(device.quiet_seconds())
                run = device.run_once()
                upload_at = device.next_upload()
                if upload_at is not None and len(due) < self._max_open:
                    stack.pop_all()  # it stays open until then
            # A refusal may be for now alone: a ledger that is too new, a window not yet open.
            unsettled = bool(run.silent or run.waiting or run.problems or run.refused)
            found[number] = DeviceOutcome(
                device=number,
                answered=run.answered,
                refused=run.refused,
                declined=run.declined,
                uploaded=run.uploaded,
                dropped=run.dropped,
                unsettled=unsettled,
            )
            (self._unsettled.add if unsettled else self._unsettled.discard)(place)
            if run.answered:
                self._answered.add(place)
            if upload_at is not None:
                heapq.heappush(due, (upload_at, place))
            else:
                through += 1
            self._report(through)
            send()
        while due:
            time.sleep(max(0.05, min(0.5, due[0][0] - time.time())))
            send()
        self._report(through, last=True)
        return list(found.values())

    def _spent(self) -> list[DeviceOutcome]:
        done = []
        for place in range(len(self._numbers)):
            if place not in self._totals:
                with self._devices[place]:
                    self._totals[place] = self._total(place)
            done.append(self._totals[place])
            self._report(place + 1, last=place + 1 == len(self._numbers))
        return done

    def _total(self, place: int) -> DeviceOutcome:
        """Read what a device has spent from its ledger."""
        whole = self._devices[place].status().budgets[0]
        return DeviceOutcome(
            device=self._numbers[place],
            epsilon=decimal_text(whole.spent.epsilon),
            delta=decimal_text(whole.spent.delta),
            reports=whole.reports,
        )
