"""The simulated devices of the local fleet: what each one's owner would read.

A folder of `chorister up --fleet` holds `keys` (32 bytes a device), `heads/NUMBER` and
`devices/NUMBER/`. Only simulated devices have their keys lying about.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from chorister.console.config import FleetConfig
from chorister.console.errors import NotFound
from chorister.device import Device, GivenKey, HeadFile
from chorister.device.audit_pages import Shown, shown
from chorister.device.status import Status
from chorister.policy import Policy

__all__ = ["SimulatedDevices"]

_KEY: Final = 32
_NEWEST: Final = 200
_NOWHERE: Final = "http://127.0.0.1:9/"  # a device that is only looked at asks no registry


class SimulatedDevices:
    """The devices in a fleet's folder, opened one at a time and only to be read."""

    def __init__(self, config: FleetConfig) -> None:
        self._folder = Path(config.folder)
        self._policy = Policy.load(Path(config.policy))

    def numbers(self) -> list[int]:
        """The devices that are there."""
        folder = self._folder / "devices"
        if not folder.is_dir():
            return []
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    def audit(self, number: int) -> tuple[Status, list[Shown]]:
        """One device's state and its log, the newest entry first."""
        folder = self._folder / "devices" / str(number)
        if not folder.is_dir():
            raise NotFound
        with (self._folder / "keys").open("rb") as file:
            file.seek(_KEY * number)
            key = file.read(_KEY)
        device = Device(
            folder,
            self._policy,
            GivenKey(key),
            registry=_NOWHERE,
            head=HeadFile(self._folder / "heads" / str(number)),
        )
        with device:
            records = list(device.audit.records(newest=_NEWEST))
            return device.status(), [shown(record) for record in reversed(records)]
