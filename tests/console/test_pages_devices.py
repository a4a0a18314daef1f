"""A simulated device's audit log, as its owner would read it."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

from chorister.clock import SettableClock
from chorister.console.access import origins_of
from chorister.console.app import build_app
from chorister.console.config import FleetConfig
from chorister.device import Device, GivenKey, HeadFile
from tests.console.test_access import NOW, ORIGIN
from tests.console.world import TOKENS, open_workspace
from tests.keyboard import POLICY, POLICY_FILE


def fleet(folder: Path) -> FleetConfig:
    """Two devices, laid out as a local fleet has them."""
    (folder / "heads").mkdir(parents=True)
    (folder / "devices").mkdir()
    keys = [bytes([number]) * 32 for number in (7, 8)]
    (folder / "keys").write_bytes(b"".join(keys))
    for number, key in enumerate(keys):
        device = Device(
            folder / "devices" / str(number),
            POLICY,
            GivenKey(key),
            registry="http://127.0.0.1:9/",
            head=HeadFile(folder / "heads" / str(number)),
            create=True,
        )
        with device:
            device.opt_in()
            if number:
                device.opt_out()
    return FleetConfig(folder=str(folder), policy=str(POLICY_FILE))


def test_a_devices_log_is_shown_in_words(tmp_path: Path) -> None:
    workspace, _ = open_workspace(tmp_path, fleet=fleet(tmp_path / "fleet"))
    origins = origins_of("127.0.0.1", 8090, None)
    app = build_app(workspace, SettableClock(NOW), origins=origins, warm=False)
    client = TestClient(app, base_url=ORIGIN, headers={"origin": ORIGIN})
    client.post("/sign-in", data={"token": TOKENS["ada"]})
    assert "2 devices run" in client.get("/devices").text
    first, second = (client.get(f"/devices/{number}").text for number in (0, 1))
    assert "The person opted in" in first
    assert "opted out" not in first
    assert "The person opted out" in second
    assert "What left device 1" in client.get("/devices/find?number=1").text
    for path in ("/devices/2", "/devices/x", "/devices/-1", "/devices/find?number=x"):
        assert client.get(path).status_code == 404, path
