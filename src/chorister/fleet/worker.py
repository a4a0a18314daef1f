"""One process of a simulated fleet: runs its share of the devices, one after the other.

Each device is opened for what it does and closed again: thousands of open databases would need more
files than a process may have, and opening one is cheap.
"""

from __future__ import annotations

import heapq
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal, TypeAlias

from chorister.canonical import decimal_text
from chorister.clock import SystemClock
from chorister.device import Device, GivenKey, HeadFile, Sandbox, Timing
from chorister.errors import ChoristerError, SandboxUnavailable, ServiceError
from chorister.fleet.data import Person
from chorister.policy import Policy

__all__ = ["Done", "Home", "Order", "work"]

Order: TypeAlias = Literal["make", "answer", "answer once", "spent"]
_KEY: Final = 32
_TELL: Final = 0.2  # seconds between two words about progress
_PATIENCE: Final = 120.0
_STARTS: Final = 5
_MADE: Final = "made"
"""A file in a device's folder that is written last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where a fleet's devices are, and how they behave."""

    folder: Path
    policy: Path
    registry: str
    timing: Timing

    def key(self, number: int) -> bytes:
        """A device's key."""
        with (self.folder / "keys").open("rb") as file:
            file.seek(_KEY * number)
            return file.read(_KEY)

    def device(
        self,
        number: int,
        policy: Policy,
        key: bytes,
        sandbox: Sandbox | None,
        *,
        create: bool = False,
    ) -> Device:
        """A device, opened when it is first used."""
        return Device(
            self.folder / "devices" / str(number),
            policy,
            GivenKey(key),
            registry=self.registry,
            head=HeadFile(self.folder / "heads" / str(number)),
            timing=self.timing,
            sandbox=sandbox,
            create=create,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What became of one device."""

    device: int
    answered: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    uploaded: int = 0
    dropped: int = 0
    epsilon: str = "0"  # spent of the device-wide budget
    delta: str = "0"
    reports: int = 0


class _ParentGoneError(Exception):
    """Nobody listens any more: the command that started us ended."""


def work(pipe: Connection, home: Home, numbers: Sequence[int], people: Sequence[Person]) -> None:
    """Do what the pipe says until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    share: _Share | None = None
    with ExitStack() as stack:
        while True:
            try:
                order: Order = pipe.recv()
            except (EOFError, ConnectionResetError):
                return  # the parent is gone
            outcome: list[Done] | ServiceError
            try:
                if share is None:
                    share = _Share(pipe, home, numbers, people, stack.enter_context(_sandbox()))
                outcome = share.do(order)
            except ChoristerError as error:
                # In words: not every error survives the way through a pipe.
                outcome = ServiceError(f"a device of the fleet: {error}")
            except _ParentGoneError:
                return
            try:
                pipe.send(outcome)
            except OSError:
                return


def _sandbox() -> Sandbox:
    """The zygote has a deadline to start, which a busy machine may miss."""
    for _ in range(_STARTS - 1):
        try:
            return Sandbox()
        except SandboxUnavailable:
            time.sleep(1.0)
    return Sandbox()


class _Share:
    """A process' share of the fleet."""

    def __init__(
        self,
        pipe: Connection,
        home: Home,
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
            home.device(number, policy, home.key(number), sandbox) for number in numbers
        ]
        self._policy = policy
        self._sandbox = sandbox
        self._clock = SystemClock()
        self._told = 0.0
        self._answered: set[int] = set()

    def do(self, order: Order) -> list[Done]:
        """Carry out an order."""
        if order == "make":
            return self._make()
        if order in ("answer", "answer once"):
            return self._answer(again=order == "answer")
        return self._spent()

    def _tell(self, through: int, *, last: bool = False) -> None:
        if last or time.monotonic() >= self._told + _TELL:
            self._told = time.monotonic()
            try:
                self._pipe.send(through)
            except OSError:
                raise _ParentGoneError from None

    # --- Orders ---------------------------------------------------------------------------------

    def _make(self) -> list[Done]:
        done = []
        for place, (number, person) in enumerate(zip(self._numbers, self._people, strict=True)):
            device = self._devices[place]
            if not (device.folder / _MADE).exists():
                device = self._create(number, person)
            with device:
                self._begin_ledger(device)
                (device.folder / _MADE).touch(mode=0o600)
            done.append(Done(device=number))
            self._tell(place + 1, last=place + 1 == len(self._numbers))
        return done

    def _create(self, number: int, person: Person) -> Device:
        # What an interrupted start left behind is made anew: it never answered anything.
        shutil.rmtree(self._home.folder / "devices" / str(number), ignore_errors=True)
        (self._home.folder / "heads" / str(number)).unlink(missing_ok=True)
        key = self._home.key(number)
        device = self._home.device(number, self._policy, key, self._sandbox, create=True)
        device.opt_in()
        for stream, rows in person.streams.items():
            device.donate_many(stream, rows)
        for profile, row in person.profiles.items():
            device.set_profile(profile, row)
        return device

    @staticmethod
    def _begin_ledger(device: Device) -> None:
        """It begins with the first checkpoint that a device sees, and rests for a second."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            run = device.run_once()
            if not run.problems:
                return
            if time.monotonic() > deadline:
                raise ServiceError(f"the log can't be used: {run.problems[0]}")
            time.sleep(0.2)

    def _answer(self, *, again: bool) -> list[Done]:
        """Let all look at the log; send each report when its time has come.

        Unless `again`, those that answered before are left in peace.
        """
        found = {number: Done(device=number) for number in self._numbers}
        due: list[tuple[int, int]] = []
        through = 0

        def send() -> None:
            nonlocal through
            while due and due[0][0] <= self._clock.now():
                _, place = heapq.heappop(due)
                with self._devices[place] as device:
                    run = device.upload_due()
                    again = device.next_upload()
                number = self._numbers[place]
                found[number] = _added(found[number], run.uploaded, run.dropped)
                if again is not None:
                    heapq.heappush(due, (again, place))
                else:
                    through += 1
                self._tell(through)

        for place, number in enumerate(self._numbers):
            if place in self._answered and not again:
                through += 1
                continue
            with self._devices[place] as device:
                run = device.run_once()
                upload_at = device.next_upload()
            found[number] = Done(
                device=number,
                answered=run.answered,
                refused=run.refused,
                declined=run.declined,
                uploaded=run.uploaded,
                dropped=run.dropped,
            )
            if run.answered:
                self._answered.add(place)
            if upload_at is not None:
                heapq.heappush(due, (upload_at, place))
            else:
                through += 1
            self._tell(through)
            send()
        while due:
            time.sleep(max(0.05, min(0.5, due[0][0] - time.time())))
            send()
        self._tell(through, last=True)
        return list(found.values())

    def _spent(self) -> list[Done]:
        done = []
        for place, number in enumerate(self._numbers):
            with self._devices[place] as device:
                budgets = device.status().budgets
            whole = budgets[0]
            done.append(
                Done(
                    device=number,
                    epsilon=decimal_text(whole.spent.epsilon),
                    delta=decimal_text(whole.spent.delta),
                    reports=whole.reports,
                )
            )
            self._tell(place + 1, last=place + 1 == len(self._numbers))
        return done


def _added(done: Done, uploaded: int, dropped: int) -> Done:
    return Done(
        device=done.device,
        answered=done.answered,
        refused=done.refused,
        declined=done.declined,
        uploaded=done.uploaded + uploaded,
        dropped=done.dropped + dropped,
    )
