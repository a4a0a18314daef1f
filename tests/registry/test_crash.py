"""No checkpoint ever covers an entry that could be lost: by simulation, and by kill -9."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chorister.errors import CheckpointTime, LogError, LogSignatureInvalid
from chorister.registry.folder import LogFolder
from chorister.transparency.auditor import audit
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.client import FolderSource
from chorister.transparency.cosigner import fetch_body
from chorister.transparency.entries import ListEntry, parse_entry
from chorister.transparency.tiles import TileTree, check_tiles, read_entries
from chorister.transparency.tree import leaf_hash, root_hash
from tests.logworld import World, authority, recipe_entry
from tests.simulated_disk import Crash, SimulatedDisk

ENTRIES = [recipe_entry(f"recipe-{number}") for number in range(40)]


def check_covered(public: Path) -> int:
    """Everything that any signed file covers can be read, and has its root."""
    size = 0
    for name in ("checkpoint", "candidate"):
        if (public / name).exists():
            checkpoint = SignedCheckpoint.parse((public / name).read_bytes()).checkpoint
            source = FolderSource(public)
            entries = [*read_entries(source, 0, checkpoint.size)]
            tree = TileTree()
            tree.extend(leaf_hash(entry) for entry in entries)
            assert root_hash(tree.leaves) == checkpoint.root
            check_tiles(source, tree)
            for entry in entries:
                fetch_body(source, parse_entry(entry))
            last = parse_entry(entries[-1])
            assert isinstance(last, ListEntry)
            source.read(f"list/{last.digest.hex()}", limit=1 << 20)
            size = max(size, checkpoint.size)
    return size


@pytest.mark.parametrize("power_fails", [False, True], ids=["kill", "power"])
def test_a_crash_after_any_step_of_append_and_publish(tmp_path: Path, power_fails: bool) -> None:
    # Two submissions and a publication take some 60 steps; SIGKILL itself is tested below.
    for step in range(0, 64, 1 if power_fails else 4):
        rng = random.Random(step)
        folder = tmp_path / str(step)
        folder.mkdir()
        disk = SimulatedDisk(folder / "registry")
        world = World(folder, disk=disk)
        world.publish(ENTRIES[0])
        disk.steps = step
        acknowledged = [leaf_hash(ENTRIES[0].encode())]
        try:
            for entry in ENTRIES[1:3]:
                world.submit(entry)
                acknowledged.append(leaf_hash(entry.encode()))
            world.publish()
        except Crash:
            pass
        if power_fails:
            disk.crash(rng.randrange)
        else:
            disk.kill()
        # Before any recovery: what is visible is complete.
        covered = check_covered(world.public)
        world.restart()
        leaves = world._log.leaves
        assert [leaf for leaf in leaves if leaf in acknowledged] == acknowledged
        assert len(leaves) >= covered
        # The submitter, not knowing, submits again; then all is as if nothing had happened.
        world.submit(*ENTRIES[1:3])
        world.clock.advance(300)
        assert world.publish().checkpoint.size >= 5
        found = audit(world.source, authority=authority())
        submitted = [each.entry for each in found.entries if not isinstance(each.entry, ListEntry)]
        assert submitted == ENTRIES[:3]


def test_the_power_fails_after_a_killed_process_was_restarted(tmp_path: Path) -> None:
    """What a killed process wrote and did not sync is relied on by the next: it has to sync it."""
    for step in range(8):
        folder = tmp_path / str(step)
        folder.mkdir()
        disk = SimulatedDisk(folder / "registry")
        world = World(folder, disk=disk)
        world.publish(ENTRIES[0])
        disk.steps = step
        try:
            world.submit(ENTRIES[1])
        except Crash:
            disk.kill()
        disk.steps = None
        world.restart()
        world.publish()
        disk.crash(lambda _: 0)
        check_covered(world.public)
        world.restart()


class LogMachine(RuleBasedStateMachine):
    """Append, issue, cosign, crash and restart in any order."""

    @initialize()
    def start(self) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        root = Path(self._temporary.name)
        self.disk = SimulatedDisk(root / "registry")
        self.world = World(root, disk=self.disk)
        self.next = 0
        self.acknowledged: list[bytes] = []
        self.published: list[SignedCheckpoint] = []

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world._log.close()
            self.world.leader.head.close()
            self.world.helper.head.close()
            self._temporary.cleanup()

    def _survive(self, action: object, choices: st.DataObject) -> None:
        """Run an action that the machine may not survive."""
        assert callable(action)
        try:
            action()
        except Crash:
            if choices.draw(st.booleans(), label="power fails"):
                self.disk.crash(lambda n: choices.draw(st.integers(0, n - 1)))
            else:
                self.disk.kill()
            self.world.restart()
        self.disk.steps = None

    def _arm(self, choices: st.DataObject) -> None:
        self.disk.steps = choices.draw(st.none() | st.integers(0, 12), label="steps until crash")

    @precondition(lambda self: self.next < len(ENTRIES))
    @rule(choices=st.data())
    def submit(self, choices: st.DataObject) -> None:
        entry = ENTRIES[self.next]
        self.next += 1

        def action() -> None:
            self.world.submit(entry)
            self.acknowledged.append(leaf_hash(entry.encode()))

        self._arm(choices)
        self._survive(action, choices)

    @rule(choices=st.data(), seconds=st.integers(0, 200))
    def issue(self, choices: st.DataObject, seconds: int) -> None:
        self.world.clock.advance(seconds)
        self._arm(choices)

        def action() -> None:
            with contextlib.suppress(CheckpointTime):  # a second list of one second
                self.world.registry.issue()

        self._survive(action, choices)

    @rule(choices=st.data(), side=st.sampled_from(["leader", "helper"]), again=st.booleans())
    def cosign(self, choices: st.DataObject, side: str, again: bool) -> None:
        aggregator = self.world.leader if side == "leader" else self.world.helper
        if again:
            aggregator.restart()
        try:
            line = aggregator.cosign(self.world.source)
        except LogError:
            # Nothing to sign yet, or a candidate that waited too long.
            return
        self._arm(choices)

        def action() -> None:
            # After a crash between a list and its checkpoint, the registry issues a new one first.
            with contextlib.suppress(LogSignatureInvalid):
                self.world.registry.add_cosignature(line)

        self._survive(action, choices)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def what_is_signed_can_be_read(self) -> None:
        if hasattr(self, "world"):
            check_covered(self.world.public)

    @invariant()
    def what_was_acknowledged_is_kept_in_order(self) -> None:
        if hasattr(self, "world"):
            kept = [leaf for leaf in self.world._log.leaves if leaf in self.acknowledged]
            assert kept == self.acknowledged

    @invariant()
    def what_was_published_is_extended(self) -> None:
        path = self.world.public / "checkpoint" if hasattr(self, "world") else Path("/nowhere")
        if path.exists():
            audit(self.world.source, authority=authority(), earlier=self.published)
            self.published.append(self.world.checkpoint())


LogMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestLogMachine = LogMachine.TestCase


CHILD = """
import os, signal, sys
from pathlib import Path
from tests.logworld import World, recipe_entry
from chorister.transparency.disk import Disk

class Deadly(Disk):
    steps = None
    def _step(self):
        if Deadly.steps is not None:
            Deadly.steps -= 1
            if Deadly.steps < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    def write(self, path, data): self._step(); super().write(path, data)
    def append(self, path, data): self._step(); super().append(path, data)
    def sync(self, path): self._step(); super().sync(path)
    def rename(self, old, new): self._step(); super().rename(old, new)

for step in map(int, sys.argv[2:]):
    if os.fork() == 0:
        folder = Path(sys.argv[1]) / str(step)
        folder.mkdir()
        world = World(folder, disk=Deadly())
        world.publish(recipe_entry("recipe-0"))
        print(step, 0, flush=True)
        Deadly.steps = step
        for number in (1, 2):
            world.publish(recipe_entry(f"recipe-{number}"))
            print(step, number, flush=True)
        os._exit(0)
    _, status = os.wait()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL or status == 0, status
"""


def test_kill_9_in_a_real_process(tmp_path: Path) -> None:
    """The process dies by SIGKILL after every step; its folder opens again with all it promised."""
    # One publication takes some 50 steps; the last one outlives both.
    steps = [str(step) for step in (*range(0, 56, 3), 140)]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), *steps],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    promised: dict[str, int] = {}
    for line in done.stdout.splitlines():
        step, number = line.split()
        promised[step] = int(number)
    assert set(promised) == set(steps)
    assert {0, 1, 2} <= set(promised.values())
    for name, last in promised.items():
        folder = tmp_path / name / "registry"
        covered = check_covered(folder / "public")
        log = LogFolder.open(folder)
        log.load()
        log.close()
        assert len(log.leaves) >= max(covered, 2 * last + 2)
        found = audit(FolderSource(folder / "public"), authority=authority())
        assert found.checkpoint.size >= 2 * last + 2


def test_the_simulated_disk_does_forget(tmp_path: Path) -> None:
    """Guards the guard: code that does not sync loses data here."""
    disk = SimulatedDisk(tmp_path)
    path = tmp_path / "file"
    disk.write(path, b"never synced")
    disk.crash(lambda _: 0)
    assert not path.exists()
    disk.replace(path, b"old")
    disk.write(tmp_path / "new", b"new")
    disk.rename(tmp_path / "new", path)
    disk.crash(lambda _: 0)
    assert path.read_bytes() == b"old"
