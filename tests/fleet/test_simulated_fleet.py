"""A fleet's folder: it is kept, it grows, and each device has a key of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorister.errors import InvalidInput
from chorister.fleet.device_worker import DeviceOutcome
from chorister.fleet.simulated_fleet import (
    FleetPlan,
    SimulatedFleet,
    devices_that_answered,
    fleet_size,
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
