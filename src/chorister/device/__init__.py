"""The device: the guardian of its person's data, budget and log.

Host apps use `Device`; everything else here is for those who look closer. Names are loaded when
they are first used, so that the sandbox's process holds nothing of the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from chorister.device.device import Device, HeadFile, HeadKeyring
    from chorister.device.keys import GivenKey, KeyFile, KeyringKey
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
    "HeadFile": "device",
    "HeadKeyring": "device",
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
