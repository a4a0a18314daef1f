"""The device: it keeps a person's data, budget and audit log, and answers recipes.

Host apps use `Device` and the names below. They are imported when first used, so that the sandbox's
process loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from chorister.device.device import Device
    from chorister.device.keys import GivenKey, KeyFile, KeyringKey
    from chorister.device.ledger.head_store import HeadFile, HeadKeyring
    from chorister.device.run import Run
    from chorister.device.sandbox import Sandbox
    from chorister.device.schedule import Timing
    from chorister.device.status import Status
    from chorister.device.transport import HTTPTransport, Transport

__all__ = [
    "Device",
    "GivenKey",
    "HTTPTransport",
    "HeadFile",
    "HeadKeyring",
    "KeyFile",
    "KeyringKey",
    "Run",
    "Sandbox",
    "Status",
    "Timing",
    "Transport",
]

_MODULES: Final = {
    "Device": "device",
    "GivenKey": "keys",
    "HTTPTransport": "transport",
    "HeadFile": "ledger.head_store",
    "HeadKeyring": "ledger.head_store",
    "KeyFile": "keys",
    "KeyringKey": "keys",
    "Run": "run",
    "Sandbox": "sandbox",
    "Status": "status",
    "Timing": "schedule",
    "Transport": "transport",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 (whatever the name stands for)
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
