"""What a version can't read it refuses as a whole, with a typed error that says what to do.

Two kinds: files of a version that is newer than this one, and files that are damaged. Neither is
ever opened by half: nothing is sent, nothing is changed, and nothing that is missing is made up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from chorister.aggregator.config import load_config
from chorister.aggregator.service import Service, open_core
from chorister.clock import SettableClock
from chorister.console.config import ConsoleConfig
from chorister.console.workspace import Workspace
from chorister.device import Device, KeyFile
from chorister.device.audit import Event
from chorister.device.database import open_database, upgrade
from chorister.errors import (
    ChoristerError,
    LedgerBehind,
    ServiceError,
    StorageDamaged,
    StoreError,
    StudyError,
)
from chorister.registry.server import RegistryConfig, open_registry
from tests.compatibility.opening import (
    Servers,
    a_network,
    keys_from_json,
    open_device,
    start_log_again,
    unpack,
)
from tests.device.home import the_sandbox
from tests.device.world import Network
from tests.logworld import DAY

# --- A device ------------------------------------------------------------------------------------

# The parts of the two databases, each with a version of its own.
PARTS = {
    "events": "events",
    "ledger": "ledger",
    "audit": "ledger",
    "device_time": "ledger",
    "attempts": "ledger",
    "outbox": "ledger",
}
CALLS: dict[str, Callable[[Device], object]] = {
    "status": Device.status,
    "run_once": Device.run_once,
    "upload_due": Device.upload_due,
    "donate": lambda device: device.donate("keyboard", {"ngram": "a", "perplexity": 1.0}),
    "opt_out": Device.opt_out,
    "verify": Device.verify,
}


class OldDevice:
    """A device of an earlier version, which nobody has opened yet."""

    def __init__(self, kept: Path, folder: Path) -> None:
        expected = unpack(kept, "device", folder)
        self.folder = folder
        self.clock = SettableClock(expected["time"] + DAY)
        self.network: Network = a_network(keys_from_json(expected["keys"]))

    def open(self) -> Device:
        return open_device(self.folder, self.clock, self.network, sandbox=the_sandbox())

    def path(self, name: str) -> Path:
        return self.folder / "device" / f"{name}.db"

    def settle(self) -> None:
        """Let the write-ahead logs be copied into the databases, as a last close does."""
        with self.open() as device:
            device.status()
        assert not self.path("ledger").with_name("ledger.db-wal").exists()

    def refused_by_every_call(self, words: str) -> None:
        before = digests(self.folder / "device")
        for name, call in CALLS.items():
            with closing(self.open()) as device, pytest.raises(StoreError, match=words):
                call(device)
            assert digests(self.folder / "device") == before, name
        assert self.network.gets == []
        assert self.network.posts == []


@pytest.fixture
def device(kept: Path, tmp_path: Path) -> OldDevice:
    return OldDevice(kept, tmp_path)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.db")
    }


@pytest.mark.parametrize("part", PARTS)
def test_a_device_of_a_newer_version(device: OldDevice, part: str) -> None:
    device.settle()
    key = KeyFile(device.folder / "elsewhere" / "key", store=device.folder / "device")
    own = key.obtain(create=False).derive(PARTS[part])
    with closing(open_database(device.path(PARTS[part]), own, create=False)) as connection:
        upgrade(connection, part, ["SELECT 1"] * 1000)  # as a thousand later migrations would
    device.refused_by_every_call(r"newer Chorister.*upgrade Chorister")


@pytest.mark.parametrize("name", ["ledger", "events"])
@pytest.mark.parametrize("left", [0, 100, 4096, 5000, -4096])
def test_a_device_whose_database_was_cut_off(device: OldDevice, name: str, left: int) -> None:
    device.settle()
    path = device.path(name)
    path.write_bytes(path.read_bytes()[:left])
    device.refused_by_every_call("restore")


@pytest.mark.parametrize("name", ["ledger", "events"])
def test_every_damaged_page_of_a_device(device: OldDevice, name: str) -> None:
    """Whichever page it is: what meets it raises a `StoreError`, never the database's own error."""
    device.settle()
    path = device.path(name)
    whole = path.read_bytes()
    met = 0
    for place in range(0, len(whole), 4096):
        path.write_bytes(whole[:place] + b"\xaa" * 4096 + whole[place + 4096 :])
        for call in (Device.status, Device.verify, Device.run_once):
            with closing(device.open()) as opened:
                try:
                    call(opened)
                except StoreError as error:
                    assert "restore" in str(error)
                    met += 1
        path.write_bytes(whole)
        for beside in path.parent.glob(f"{name}.db-*"):
            beside.unlink()
    assert met > 0


def test_a_ledger_that_was_replaced_by_a_new_one(device: OldDevice) -> None:
    """Its head, outside the folder, tells: nothing is answered, nothing made up."""
    for path in device.path("ledger").parent.glob("ledger.db*"):
        path.unlink()
    key = KeyFile(device.folder / "elsewhere" / "key", store=device.folder / "device")
    own = key.obtain(create=False).derive("ledger")
    open_database(device.path("ledger"), own, create=True).close()
    device.network.log.publish([], time=device.clock.now())
    with closing(device.open()) as opened:
        done = opened.run_once()
        last = list(opened.audit.records())[-1].entry
    assert done.silent == last.why
    assert (last.event, last.check) == (Event.SILENT, LedgerBehind.__name__)
    assert device.network.posts == []


# --- Servers -------------------------------------------------------------------------------------


class OldServers:
    """Servers of an earlier version, which nobody has opened yet."""

    def __init__(self, kept: Path, folder: Path) -> None:
        self.expected: dict[str, Any] = unpack(kept, "servers", folder)
        self.folder = folder
        self.clock = SettableClock(self.expected["time"])

    def settle(self) -> None:
        """Open everything once, with a new log, and publish something in it."""
        start_log_again(self.folder)
        servers = Servers(self.folder, self.clock, begin=True)
        servers.publish()
        servers.close()

    def start(self, role: str) -> None:
        """Start one aggregator, and stop it again."""
        Service(load_config(self.folder / f"{role}.toml", {}), self.clock).close()

    def start_registry(self) -> None:
        config = RegistryConfig.load(self.folder / "registry.toml")
        with open_registry(config, self.clock):
            pass


@pytest.fixture
def servers(kept: Path, tmp_path: Path) -> OldServers:
    return OldServers(kept, tmp_path)


@pytest.mark.parametrize("role", ["leader", "helper"])
def test_an_aggregator_of_a_newer_version(servers: OldServers, role: str) -> None:
    servers.settle()
    core = open_core(load_config(servers.folder / f"{role}.toml", {}), servers.clock, migrate=False)
    with core.database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    core.database.close()
    before = (servers.folder / f"{role}.db").read_bytes()
    with pytest.raises(ServiceError, match=r"newer than this software's .*: upgrade the software"):
        servers.start(role)
    assert (servers.folder / f"{role}.db").read_bytes() == before


@pytest.mark.parametrize("role", ["leader", "helper"])
@pytest.mark.parametrize("left", [100, 16_384, 20_000, -16_384])
def test_an_aggregator_whose_database_was_cut_off(
    servers: OldServers, role: str, left: int
) -> None:
    servers.settle()
    path = servers.folder / f"{role}.db"
    cut = path.read_bytes()[:left]
    path.write_bytes(cut)
    with pytest.raises(ServiceError, match=r"damaged.*restore it from a backup"):
        servers.start(role)
    assert path.read_bytes() == cut


@pytest.mark.parametrize("role", ["leader", "helper"])
@pytest.mark.parametrize("name", ["head", "entries"])
def test_a_cosigner_whose_memory_was_cut_off(servers: OldServers, role: str, name: str) -> None:
    servers.settle()
    path = servers.folder / f"{role}-head" / name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StorageDamaged, match=r"damaged.*restore|restore both files"):
        servers.start(role)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda log: (log / "leaves").write_bytes((log / "leaves").read_bytes()[:-96]), "restore"),
        (
            lambda log: (log / "entries").write_bytes(b""),
            "entry .* is damaged.*restore it",
        ),
        (
            lambda log: (log / "entries").write_bytes(b"?" + (log / "entries").read_bytes()[1:]),
            "is damaged.*restore it",
        ),
        (lambda log: (log / "public" / "checkpoint").write_bytes(b"?"), "damaged.*restore it"),
    ],
    ids=["leaves cut off", "entries missing", "an entry changed", "the checkpoint changed"],
)
def test_a_damaged_registry(
    servers: OldServers, damage: Callable[[Path], object], words: str
) -> None:
    servers.settle()
    damage(servers.folder / "log")
    with pytest.raises(StorageDamaged, match=words):
        servers.start_registry()


# --- Files of an analyst and of a console --------------------------------------------------------


def documents(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every file that names its format."""
    for path in sorted(folder.rglob("*.json")):
        tree = json.loads(path.read_bytes())
        if isinstance(tree, dict) and "format" in tree:
            yield path, tree


def open_console(folder: Path) -> None:
    with Workspace.open(ConsoleConfig.load(folder / "console.toml")) as workspace:
        for view in workspace.visible("ada"):
            workspace.runs.of(view.key)


def test_every_file_of_a_console_from_a_newer_version(kept: Path, tmp_path: Path) -> None:
    unpack(kept, "console", tmp_path)
    found = list(documents(tmp_path))
    assert len({tree["format"] for _, tree in found}) == 5  # round, study, rehearsal, run, shares
    for path, tree in found:
        whole = path.read_bytes()
        name, _, _ = str(tree["format"]).rpartition("-")
        path.write_text(json.dumps({**tree, "format": f"{name}-99"}))
        with pytest.raises(ChoristerError, match=r"-99.*upgrade"):
            open_console(tmp_path)
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ChoristerError, match=r"restore( or remove)? it"):
            open_console(tmp_path)
        path.write_bytes(whole)


def test_every_file_of_a_live_study_from_a_newer_version(servers: OldServers) -> None:
    start_log_again(servers.folder)
    opened = Servers(servers.folder, servers.clock, begin=True)
    try:
        found = list(documents(servers.folder / "studies"))
        assert len(found) == 5  # four rounds and the study
        for path, tree in found:
            whole = path.read_bytes()
            name, _, _ = str(tree["format"]).rpartition("-")
            path.write_text(json.dumps({**tree, "format": f"{name}-99"}))
            with pytest.raises(StudyError, match=r"-99.*upgrade"):
                opened.connection(lambda _: None).study("ages", analysis="keyboard.next-word")
            path.write_bytes(whole)
    finally:
        opened.close()
