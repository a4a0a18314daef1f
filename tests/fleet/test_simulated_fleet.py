"""A fleet's folder: it is kept, it grows, and each device has a key of its own.

And its devices: whoever could not answer yet is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chorister.device.run import Run
from chorister.errors import InvalidInput
from chorister.fleet.device_worker import AnswerCommand, DeviceOutcome, work
from chorister.fleet.people import bike_share, moved, people
from chorister.fleet.simulated_fleet import (
    FleetPlan,
    SimulatedFleet,
    devices_that_answered,
    fleet_size,
    keep_answering,
    store_plan,
)
from tests.fleet.local import create


def test_a_fleet_grows_and_keeps_its_seed(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    assert fleet_size(folder) == 0
    first = FleetPlan(devices=3, seed=7, kind="phrases")
    assert store_plan(folder, first) == first
    assert store_plan(folder, FleetPlan(devices=5, seed=8)) == FleetPlan(
        devices=5, seed=7, kind="phrases"
    )
    assert store_plan(folder, FleetPlan(devices=2)).devices == fleet_size(folder) == 5


def test_keys_are_private_and_never_change(tmp_path: Path) -> None:
    deployment = create(tmp_path / "here")
    folder = tmp_path / "fleet"
    SimulatedFleet(folder, deployment, FleetPlan(devices=3))
    keys = (folder / "keys").read_bytes()
    assert len(keys) == 3 * 32
    assert len({keys[i : i + 32] for i in range(0, 96, 32)}) == 3
    assert (folder / "keys").stat().st_mode & 0o777 == 0o600
    fleet = SimulatedFleet(folder, deployment, FleetPlan(devices=4))
    assert (folder / "keys").read_bytes()[:96] == keys
    assert len(fleet.people) == 4
    with pytest.raises(InvalidInput, match="devices are 0 to 3"):
        fleet.device(4)


@pytest.mark.parametrize("text", ["", "[]", '{"devices": 0}', '{"devices": "x"}', '{"nobody": 1}'])
def test_a_damaged_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "fleet.json").write_text(text)
    with pytest.raises(InvalidInput):
        fleet_size(tmp_path)


@pytest.mark.parametrize(
    "plan", [{"devices": 0}, {"devices": 1, "seed": -1}, {"devices": 1, "kind": "x"}]
)
def test_what_is_no_fleet_is_refused(plan: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        FleetPlan(**plan)  # type: ignore[arg-type]


def test_who_answered() -> None:
    done = [
        DeviceOutcome(device=1, answered=("a",)),
        DeviceOutcome(device=2),
        DeviceOutcome(device=3, answered=("b", "a")),
    ]
    assert devices_that_answered(done, "a") == [1, 3]


class _ScriptedDevice:
    """Answers each poll with the next of the given runs."""

    def __init__(self, *runs: Run) -> None:
        self._runs = list(runs)

    def __enter__(self) -> _ScriptedDevice:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def quiet_seconds(self) -> float:
        return 0.0

    def run_once(self) -> Run:
        return self._runs.pop(0)

    def upload_due(self) -> Run:
        return Run(uploaded=1)

    def next_upload(self) -> float | None:
        return None


ALL = AnswerCommand(which="all")
UNSETTLED = AnswerCommand(which="unsettled")


def carry_out(
    orders: list[AnswerCommand],
    devices: list[_ScriptedDevice],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[list[int]]:
    """Give a worker orders; return which devices answered or declined, order by order."""

    @contextmanager
    def no_sandbox() -> Iterator[None]:
        yield None

    monkeypatch.setattr("chorister.fleet.device_worker._sandbox", no_sandbox)
    home = SimpleNamespace(
        policy=create(folder / "here").folder / "policy.toml",
        open_device=lambda number, **_: devices[number],
    )
    monkeypatch.setattr("chorister.fleet.device_worker.signal.signal", lambda *_: None)
    sent: list[list[DeviceOutcome]] = []

    class Pipe:
        def recv(self) -> AnswerCommand:
            if not orders:
                raise EOFError
            return orders.pop(0)

        def send(self, message: object) -> None:
            if isinstance(message, list):
                sent.append(message)

    count = len(devices)
    work(cast(Any, Pipe()), cast(Any, home), range(count), cast(Any, [None] * count))
    return [[each.device for each in done if each.answered or each.declined] for done in sent]


def test_only_devices_that_are_not_settled_poll_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Run(answered=("a",))
    devices = [
        _ScriptedDevice(answered),
        _ScriptedDevice(Run(problems=("the log can't be read",)), answered),
        _ScriptedDevice(Run(refused=("a",)), Run(silent="no checkpoint yet"), answered),
        _ScriptedDevice(Run(waiting=True), Run(declined=("a",))),
    ]
    orders = [ALL, UNSETTLED, UNSETTLED, UNSETTLED]
    assert carry_out(orders, devices, tmp_path, monkeypatch) == [[0], [1, 3], [2], []]


def test_no_device_polls_after_the_given_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine it would answer the next window of a series."""
    devices = [_ScriptedDevice(Run(answered=("a",))) for _ in range(3)]
    late = AnswerCommand(which="all", until=time.time() - 1)
    assert carry_out([late, ALL], devices, tmp_path, monkeypatch) == [[], [0, 1, 2]]


class EnoughError(Exception):
    """Ends what would go on for ever."""


def test_a_device_that_fails_at_first_is_asked_again_but_not_forever() -> None:
    class ScriptedRetries:
        plan = FleetPlan(devices=2)

        def __init__(self, retries: list[bool]) -> None:
            self._retries = retries
            self.orders: list[str] = []

        def make(self, _on_count: object) -> None:
            self.orders.append("make")

        def answer(self, _on_count: object) -> list[DeviceOutcome]:
            self.orders.append("answer")
            return [DeviceOutcome(device=0, unsettled=True), DeviceOutcome(device=1)]

        def retry(self, _on_count: object) -> list[DeviceOutcome]:
            self.orders.append("retry")
            settled = self._retries.pop(0)
            return [DeviceOutcome(device=0, unsettled=not settled), DeviceOutcome(device=1)]

    def orders(retries: list[bool]) -> tuple[list[str], list[float]]:
        fleet, pauses = ScriptedRetries(retries), []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 10:
                raise EnoughError

        log = SimpleNamespace(current=lambda: SimpleNamespace(recipes=[recipe]))
        with pytest.raises(EnoughError):
            list(
                keep_answering(
                    cast(Any, fleet), cast(Any, log), pause=pause, open_window=lambda _: None
                )
            )
        return fleet.orders, pauses

    recipe = SimpleNamespace(address=b"recipe")
    assert orders([False, True]) == (["make", "answer", "retry", "retry"], [1, 2] + [1] * 8)
    assert orders([False] * 10) == (
        ["make", "answer"] + ["retry"] * 5,
        [1, 2, 4, 8, 16] + [1] * 5,
    )


def test_devices_poll_in_every_window_of_a_series_and_people_change_before() -> None:
    class ScriptedWindows:
        plan = FleetPlan(devices=1)

        def __init__(self) -> None:
            self.orders: list[object] = []

        def make(self, _on_count: object) -> None:
            pass

        def move(self, share: float) -> None:
            self.orders.append(share)

        def answer(self, _on_count: object) -> list[DeviceOutcome]:
            self.orders.append("answer")
            return []

    fleet, looks = ScriptedWindows(), iter([0, 0, 1, None, 2])

    def window(_body: object) -> int | None:
        try:
            return next(looks)
        except StopIteration:
            raise EnoughError from None

    log = SimpleNamespace(
        current=lambda: SimpleNamespace(recipes=[SimpleNamespace(address=b"series")])
    )
    with pytest.raises(EnoughError):
        list(
            keep_answering(
                cast(Any, fleet), cast(Any, log), pause=lambda _: None, open_window=window
            )
        )
    shares = [bike_share(number) for number in (0, 1, 2)]
    assert fleet.orders == [shares[0], "answer", shares[1], "answer", "answer", shares[2], "answer"]


def test_the_more_people_change_the_more_go_by_bike() -> None:
    everybody = people("profiles", 500, 1)
    bikes = []
    for share in (0.0, 0.2, 0.6):
        then = [moved(person, number, share) for number, person in enumerate(everybody)]
        bikes.append(sum(person.profiles["user"]["commute"] == "bike" for person in then))
    assert bikes[0] < bikes[1] < bikes[2]
    assert everybody == [moved(person, number, 0.0) for number, person in enumerate(everybody)]
    assert moved(people("phrases", 1, 1)[0], 0, 1.0) == people("phrases", 1, 1)[0]
    assert bike_share(0) == 0.0
    assert 0.5 < bike_share(6) <= 0.6
