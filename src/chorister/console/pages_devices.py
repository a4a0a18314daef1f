"""The simulated devices of the local fleet, each as its owner would see it.

Only simulated devices keep their keys in a file next to them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.responses import Response

from chorister.console.access import NotFound
from chorister.console.pages_studies import meters
from chorister.console.web import Visit
from chorister.device.audit_pages import shown, totals
from chorister.fleet.device_worker import FleetFolder

_MAX_LISTED: Final = 200
_MAX_ENTRIES: Final = 200
_NOWHERE: Final = "http://127.0.0.1:9/"  # a device that is only read contacts no registry


def _fleet(visit: Visit) -> FleetFolder:
    config = visit.workspace.config.fleet
    if config is None:
        raise NotFound
    return FleetFolder(
        folder=Path(config.folder), policy=Path(config.policy), registry=_NOWHERE, timing=None
    )


def list_devices(visit: Visit) -> Response:
    numbers = _fleet(visit).numbers()
    return visit.page("devices.html", numbers=numbers[:_MAX_LISTED], total=len(numbers))


def find_device(visit: Visit) -> Response:
    """Redirect to the page of a device by its number."""
    text = visit.request.query_params.get("number", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise NotFound
    return visit.go_to(f"/devices/{int(text)}")


def show_device(visit: Visit) -> Response:
    """A device's state and its audit log, the newest entry first."""
    number = visit.number()
    fleet = _fleet(visit)
    if number not in fleet.numbers():
        raise NotFound
    with fleet.open_device(number) as device:
        records = list(device.audit.records(newest=_MAX_ENTRIES))
        state = device.status()
    return visit.page(
        "device.html",
        number=number,
        state=state,
        entries=[shown(record) for record in reversed(records)],
        totals=totals(records),
        meters=meters(state.budgets),
    )
