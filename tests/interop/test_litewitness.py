"""An existing witness, litewitness, cosigns our log over HTTP."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorister.errors import LogForked
from chorister.policy.witnesses import WitnessKey
from chorister.registry.witnesses import Witnessing
from chorister.transparency.tree import EMPTY_ROOT
from chorister.transparency.witness import Witness, WitnessRequest
from tests.aggregator.operators import free_port
from tests.interop.test_interop import LOG
from tests.logworld import HELPER, LEADER, ORIGIN, World, forge, hpke_entry, public, recipe_entry

NAME = "witness.example/lite"
# As litewitness itself creates them; its own tool for adding logs needs more modules.
TABLES = """
CREATE TABLE log (origin TEXT PRIMARY KEY, tree_size INTEGER NOT NULL, tree_hash TEXT NOT NULL);
CREATE TABLE key (origin TEXT NOT NULL, key TEXT NOT NULL,
                  FOREIGN KEY(origin) REFERENCES log(origin));
CREATE TABLE bastion (origin TEXT NOT NULL, bastion TEXT NOT NULL,
                      FOREIGN KEY(origin) REFERENCES log(origin));
"""


@pytest.fixture(scope="session")
def litewitness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for program in ("go", "ssh-agent", "ssh-add", "ssh-keygen"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    program_ = tmp_path_factory.mktemp("litewitness") / "litewitness"
    built = subprocess.run(
        ["go", "build", "-o", str(program_), "filippo.io/torchwood/cmd/litewitness"],
        cwd=Path(__file__).parent / "witness",
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if built.returncode and ("dial tcp" in built.stderr or "Forbidden" in built.stderr):
        pytest.skip("the Go modules can't be downloaded")
    assert built.returncode == 0, built.stderr
    return program_


@contextlib.contextmanager
def process(*command: object) -> Iterator[None]:
    started = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        started.terminate()
        started.wait(10)


def wait_for(ready: object) -> None:
    assert callable(ready)
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def running(program: Path, folder: Path) -> Iterator[Witness]:
    """A litewitness that knows our log, with a key of its own in an ssh-agent."""
    key, agent, port = folder / "key", folder / "agent", free_port()
    quiet = {"check": True, "capture_output": True, "text": True}
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], **quiet)  # type: ignore[call-overload]
    blob = base64.b64decode(key.with_suffix(".pub").read_text().split()[1])
    found = subprocess.run(["ssh-keygen", "-lf", str(key)], **quiet)  # type: ignore[call-overload]
    with sqlite3.connect(folder / "db") as database:
        database.executescript(TABLES)
        root = base64.b64encode(EMPTY_ROOT).decode()
        database.execute("INSERT INTO log VALUES (?, 0, ?)", (ORIGIN, root))
        database.execute("INSERT INTO key VALUES (?, ?)", (ORIGIN, LOG))
    database.close()
    with process("ssh-agent", "-D", "-a", agent):
        wait_for(agent.exists)
        subprocess.run(["ssh-add", str(key)], env={"SSH_AUTH_SOCK": str(agent)}, **quiet)  # type: ignore[call-overload]
        options = ("-name", NAME, "-db", folder / "db", "-ssh-agent", agent)
        fingerprint = found.stdout.split()[1]
        with process(program, *options, "-key", fingerprint, "-listen", f"127.0.0.1:{port}"):
            wait_for(lambda: listening(port))
            with Witness(WitnessKey(NAME, blob[-32:]), f"http://127.0.0.1:{port}") as witness:
                yield witness


def test_an_existing_witness_cosigns_our_log(tmp_path: Path, litewitness: Path) -> None:
    world = World(tmp_path)
    world.publish(hpke_entry(LEADER), hpke_entry(HELPER))
    with running(litewitness, tmp_path) as witness:
        side = Witnessing(witness=witness, interval=60)
        side.ask(world.registry)
        for name in ("one", "two"):
            world.publish(recipe_entry(name))
            side.ask(world.registry)
            signed = world.checkpoint()
            found = signed.note.check_cosignature(NAME, [witness.key.key])
            assert abs(found.time - time.time()) < 600
            signed.check_log(ORIGIN, [public("log")])
        # A registry that forgot what the witness saw asks it.
        Witnessing(witness=witness, interval=60).ask(world.registry)
        # Another log of the same size: the witness does not sign it, and that is an alarm.
        size = world.checkpoint().checkpoint.size
        other = [hpke_entry(LEADER, b"%d" % number).encode() for number in range(size - 1)]
        forge(tmp_path / "forged", other, time=world.clock.now())
        fork = type(world.checkpoint()).parse((tmp_path / "forged" / "candidate").read_bytes())
        assert fork.checkpoint.size == size
        with pytest.raises(LogForked, match="refuses the checkpoint"):
            witness.add_checkpoint(WitnessRequest(size, (), fork))
