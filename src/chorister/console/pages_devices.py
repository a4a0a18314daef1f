"""Simulated devices of the local fleet, as their owners would read them."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from chorister.console.errors import NotFound
from chorister.console.meters import device_meters
from chorister.console.simulated import SimulatedDevices
from chorister.console.web import Visit

__all__ = ["list_devices", "show_device"]

_LISTED: Final = 200


def _devices(visit: Visit) -> SimulatedDevices:
    config = visit.workspace.config.fleet
    if config is None:
        raise NotFound
    return SimulatedDevices(config)


def list_devices(visit: Visit) -> Response:
    """Some of them to choose from."""
    numbers = _devices(visit).numbers()
    return visit.page("devices.html", numbers=numbers[:_LISTED], total=len(numbers))


def find_device(visit: Visit) -> Response:
    """The page of a device by its number."""
    text = visit.request.query_params.get("number", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise NotFound
    return visit.go_to(f"/devices/{int(text)}")


def show_device(visit: Visit) -> Response:
    """One device's audit log."""
    number = visit.number()
    state, entries = _devices(visit).audit(number)
    return visit.page(
        "device.html",
        number=number,
        state=state,
        entries=entries,
        meters=device_meters(state.budgets),
    )
