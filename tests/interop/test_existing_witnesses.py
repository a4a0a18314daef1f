"""Existing witnesses, litewitness and omniwitness, cosign our log over HTTP."""

from __future__ import annotations

import base64
import contextlib
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chorister.errors import LogForked
from chorister.policy.witnesses import WitnessKey, WitnessPolicy
from chorister.registry.witnessing import Witnessing
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.note import LOG_SIGNATURE, note_key_id
from chorister.transparency.tree import EMPTY_ROOT
from chorister.transparency.witness import Witness, WitnessRequest
from tests.aggregator.operators import free_port
from tests.logworld import (
    HELPER,
    LEADER,
    LOG_VKEY,
    ORIGIN,
    World,
    forge,
    hpke_entry,
    key,
    public,
    recipe_entry,
    trust,
)

NAME = "witness.example/w1"
# As litewitness itself creates them; its own tool for adding logs needs more modules.
TABLES = """
CREATE TABLE log (origin TEXT PRIMARY KEY, tree_size INTEGER NOT NULL, tree_hash TEXT NOT NULL);
CREATE TABLE key (origin TEXT NOT NULL, key TEXT NOT NULL,
                  FOREIGN KEY(origin) REFERENCES log(origin));
CREATE TABLE bastion (origin TEXT NOT NULL, bastion TEXT NOT NULL,
                      FOREIGN KEY(origin) REFERENCES log(origin));
"""


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
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def running(own: bytes, program: Path, *options: object) -> Iterator[Witness]:
    """A witness with this public key."""
    port = free_port()
    with process(program, *options, "-listen", f"127.0.0.1:{port}"):
        wait_for(lambda: listening(port))
        with Witness(WitnessKey(NAME, own), f"http://127.0.0.1:{port}") as witness:
            yield witness


@contextlib.contextmanager
def lite(program: Path, folder: Path) -> Iterator[Witness]:
    """A litewitness that knows our log, with a key of its own in an ssh-agent."""
    secret, agent = folder / "key", folder / "agent"
    quiet = {"check": True, "capture_output": True, "text": True}
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(secret)], **quiet)  # type: ignore[call-overload]
    blob = base64.b64decode(secret.with_suffix(".pub").read_text().split()[1])
    found = subprocess.run(["ssh-keygen", "-lf", str(secret)], **quiet)  # type: ignore[call-overload]
    with sqlite3.connect(folder / "db") as database:
        database.executescript(TABLES)
        root = base64.b64encode(EMPTY_ROOT).decode()
        database.execute("INSERT INTO log VALUES (?, 0, ?)", (ORIGIN, root))
        database.execute("INSERT INTO key VALUES (?, ?)", (ORIGIN, LOG_VKEY))
    database.close()
    with process("ssh-agent", "-D", "-a", agent):
        wait_for(agent.exists)
        subprocess.run(["ssh-add", str(secret)], env={"SSH_AUTH_SOCK": str(agent)}, **quiet)  # type: ignore[call-overload]
        options = ("-name", NAME, "-db", folder / "db", "-ssh-agent", agent)
        with running(blob[-32:], program, *options, "-key", found.stdout.split()[1]) as witness:
            yield witness


@contextlib.contextmanager
def omni(program: Path, folder: Path) -> Iterator[Witness]:
    """An omniwitness that knows our log; its key is of the form of golang.org/x/mod/sumdb/note."""
    data = base64.b64encode(bytes([LOG_SIGNATURE]) + key("omni").private_bytes_raw()).decode()
    key_id = note_key_id(NAME, LOG_SIGNATURE, public("omni")).hex()
    secret, logs = folder / "key", folder / "logs.yaml"
    secret.write_text(f"PRIVATE+KEY+{NAME}+{key_id}+{data}")
    logs.write_text(f"Logs:\n- Origin: {ORIGIN}\n  PublicKey: {LOG_VKEY}\n")
    options = ("-private_key_path", secret, "-additional_logs", logs, "-metrics_listen", "")
    with running(public("omni"), program, *options, "-db_file", folder / "db") as witness:
        yield witness


def cosigns_our_log(world: World, witness: Witness, folder: Path) -> None:
    """The witness signs each tree, our verifier accepts that, and a fork is noticed."""
    required = WitnessPolicy(quorum="w", witnesses={"w": witness.key})
    devices = replace(trust(), witnesses=required)
    side = Witnessing(witness=witness, interval=60)
    side.ask(world.registry)
    for name in ("one", "two"):
        world.publish(recipe_entry(name))
        side.ask(world.registry)
        signed = world.checkpoint()
        found = signed.note.check_cosignature(NAME, [witness.key.key])
        assert abs(found.time - time.time()) < 600
        devices.check_signatures(signed)
    side.ask(world.registry)  # the same tree again
    # A registry that forgot what the witness saw asks it.
    Witnessing(witness=witness, interval=60).ask(world.registry)
    # Other logs with our signature: the witness does not sign them, and that is an alarm.
    size = world.checkpoint().checkpoint.size
    for number, others in enumerate((size, size + 1)):
        forged = folder / f"forged{number}"
        entries = [hpke_entry(LEADER, b"%d" % each).encode() for each in range(others - 1)]
        forge(forged, entries, time=world.clock.now())
        fork = SignedCheckpoint.parse((forged / "candidate").read_bytes())
        assert fork.checkpoint.size == others
        with pytest.raises(LogForked, match="refuses the checkpoint"):
            witness.add_checkpoint(WitnessRequest(size, (), fork))


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.publish(hpke_entry(LEADER), hpke_entry(HELPER))
    return world


def test_litewitness_cosigns_our_log(tmp_path: Path, world: World, litewitness: Path) -> None:
    with lite(litewitness, tmp_path) as witness:
        cosigns_our_log(world, witness, tmp_path)


def test_omniwitness_cosigns_our_log(tmp_path: Path, world: World, omniwitness: Path) -> None:
    with omni(omniwitness, tmp_path) as witness:
        cosigns_our_log(world, witness, tmp_path)
