"""The log read by Go programs of others: tessera's client and fsck, sumdb/tlog, torchwood."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chorister.registry.folder import LogFolder
from chorister.transparency.trust import standard_policy
from tests.logworld import (
    HELPER,
    HELPER_NAME,
    LEADER,
    LOG_VKEY,
    World,
    hpke_entry,
    identity,
    recipe_entry,
    vkey,
)
from tests.logworld import policy as a_policy
from tests.registry.serving import serving

ENTRIES = 100_000


def run(program: Path, *arguments: object) -> str:
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def cosign_blindly(world: World) -> None:
    """Both sign without reading the log: this is about what others find in it."""
    candidate = world.registry.issue().checkpoint
    for side in ("leader", "helper"):
        line = identity(side).sign(candidate, world.clock.now())
        world.registry.add_cosignature(line.encode().encode())


def test_a_log_of_a_hundred_thousand_entries(tmp_path: Path, interop: Path) -> None:
    """In bulk, as real entries, and then a few through the registry."""
    world = World(tmp_path)
    entries = [hpke_entry(HELPER, b"config %d" % number).encode() for number in range(ENTRIES)]
    world._log.append_all(entries, {})
    world.restart()
    world.submit(hpke_entry(LEADER), recipe_entry("one"))
    cosign_blindly(world)
    with serving(world) as port:
        said = run(interop, "read", f"http://127.0.0.1:{port}", LOG_VKEY, 1000, 20)
    assert said == f"{ENTRIES + 3} entries, 1000 inclusion proofs, 20 consistency proofs\n"


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 600])
def test_logs_around_the_width_of_a_tile(tmp_path: Path, interop: Path, size: int) -> None:
    world = World(tmp_path)
    world.submit(*(hpke_entry(HELPER, b"config %d" % number) for number in range(size - 1)))
    cosign_blindly(world)
    with serving(world) as port:
        said = run(interop, "read", f"http://127.0.0.1:{port}", LOG_VKEY, 20, 5)
    assert said.startswith(f"{size} entries")


def test_torchwood_accepts_the_proof_that_devices_get(tmp_path: Path, interop: Path) -> None:
    world = World(tmp_path)
    world.publish(hpke_entry(LEADER), hpke_entry(HELPER), recipe_entry("one"))
    policy = tmp_path / "policy"
    policy.write_text(standard_policy(a_policy()))
    proof = world.public / "list.tlog-proof"
    assert run(interop, "proof", proof, policy).startswith("proof of an entry")
    # And not one of another log, or under a policy that asks for somebody else.
    policy.write_text(policy.read_text().replace(vkey(HELPER_NAME, "helper"), vkey("w", "other")))
    failed = subprocess.run(
        [str(interop), "proof", str(proof), str(policy)], capture_output=True, check=False
    )
    assert failed.returncode == 1


def test_a_bulk_append_is_opened_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world._log.append_all([hpke_entry(HELPER, b"%d" % number).encode() for number in range(9)], {})
    world._log.close()
    opened = LogFolder.open(world.folder)
    assert opened.load().size == 9
    opened.close()
