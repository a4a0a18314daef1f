"""A cosigner's memory: what it signed last survives everything, or it signs nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from chorister.clock import SettableClock
from chorister.dap.task import task_configurations
from chorister.errors import (
    CheckpointTime,
    EntryRefused,
    HeadLost,
    LogForked,
    LogOutdated,
    LogSignatureInvalid,
    ServiceError,
    StorageDamaged,
)
from chorister.recipe import SignedRecipe
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.cosigner import (
    Cosigner,
    CosignerIdentity,
    Head,
    adopt_head,
    create_head,
)
from chorister.transparency.disk import Disk
from chorister.transparency.entries import Entry
from chorister.transparency.note import Note, SignatureLine
from tests.logworld import (
    DAY,
    LEADER,
    LEADER_NAME,
    NOW,
    ORIGIN,
    CosigningAggregator,
    World,
    forge,
    hpke_entry,
    identity,
    policy,
    public,
    recipe_entry,
)
from tests.simulated_disk import Crash, SimulatedDisk
from tests.transparency.lies import HONEST


def test_a_cosigner_goes_on_after_a_restart(world: World) -> None:
    last = world.leader.cosigner.last
    world.leader.restart()
    assert world.leader.cosigner.last == last
    world.publish(recipe_entry("third"))
    assert [signed.recipe.id for signed in world.leader.accepted] == ["first", "second", "third"]


def test_the_same_tree_is_signed_again_with_a_new_time(world: World) -> None:
    """And remembered: a restarted cosigner does not sign with an earlier one."""
    checkpoint, lines = world.checkpoint(), []
    for _ in range(2):
        world.clock.advance(5)
        lines.append(world.leader.cosign(world.source))
    assert lines[0] != lines[1]
    world.leader.restart()
    assert world.leader.cosigner.last == checkpoint.checkpoint
    world.clock.set(world.clock.now() - 1)
    with pytest.raises(CheckpointTime, match="set the clock"):
        world.leader.cosign(world.source)


def test_requests_within_one_second_write_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may ask an aggregator for a cosignature, as often as they like."""
    world.clock.advance(5)
    first = world.leader.cosign(world.source)
    syncs = list[Path]()
    monkeypatch.setattr(world.leader.disk, "sync", syncs.append)
    for _ in range(3):
        assert world.leader.cosign(world.source) == first
    assert not syncs
    world.clock.advance(1)
    assert world.leader.cosign(world.source) != first
    assert syncs


def test_a_cosigner_that_lost_its_head_refuses_until_its_operator_acts(
    world: World, tmp_path: Path
) -> None:
    folder = world.leader.folder
    (folder / "head").unlink()
    with pytest.raises(HeadLost, match="does not know what it signed last"):
        world.leader.restart()
    with pytest.raises(HeadLost):
        Head.open(tmp_path / "never created")


def test_a_head_is_never_created_over_another(world: World) -> None:
    world.leader.head.close()
    with pytest.raises(HeadLost, match="not replaced"):
        create_head(world.leader.folder, identity("leader"), world.clock)


def test_a_cosigner_checks_entries_without_its_lock(world: World) -> None:
    """Checking what a log holds can take long; nobody may have to wait for that.

    One call stops in the middle of it, another signs the same candidate meanwhile, and the first
    then finds it signed.
    """
    world.submit(recipe_entry("third"))
    world.clock.advance(1)
    world.registry.issue()
    checking, signed = Event(), Event()
    calls: list[int] = []

    def accept(recipes: Sequence[SignedRecipe]) -> None:
        calls.append(len(recipes))
        if len(calls) == 1:
            checking.set()
            assert signed.wait(20)

    cosigner = Cosigner(
        identity=identity("leader"),
        head=world.leader.head,
        clock=world.clock,
        own_configs=lambda: {b"config"},
        accept=accept,
    )
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(cosigner.cosign, world.source)
        assert checking.wait(20)
        try:
            quick = pool.submit(cosigner.cosign, world.source).result(timeout=10)
        finally:
            signed.set()
        assert slow.result(timeout=10) == quick  # the same tree at the same second
    assert calls == [1, 1, 0]
    assert cosigner.last.size == 8


def test_asking_for_the_old_tree_every_second_holds_up_no_new_one(world: World) -> None:
    """Anybody may ask: the log's signature under the tree that was signed last is public."""
    published = world.leader.head.last
    world.submit(recipe_entry("third"))
    world.clock.advance(1)
    world.registry.issue()
    checks = 0

    def accept(recipes: Sequence[SignedRecipe]) -> None:
        nonlocal checks
        if recipes and checks < 10:  # the stranger's own requests bring none
            checks += 1
            world.clock.advance(1)
            cosigner.cosign(world.source, published)

    cosigner = Cosigner(
        identity=identity("leader"),
        head=world.leader.head,
        clock=world.clock,
        own_configs=lambda: {b"config"},
        accept=accept,
    )
    line = cosigner.cosign(world.source)
    assert checks == 1
    assert cosigner.last.size == published.checkpoint.size + 2
    assert (
        Note(text=cosigner.last.text, signatures=(line,))
        .check_cosignature(identity("leader").name, [public("leader")])
        .time
        == world.clock.now()
    )


def test_an_operator_adopts_the_newest_checkpoint_known(world: World, tmp_path: Path) -> None:
    published = world.checkpoint()
    head = adopt_head(
        tmp_path / "new leader",
        identity("leader"),
        checkpoint=published,
        source=world.source,
    )
    assert head.last.checkpoint == published.checkpoint
    cosigner = Cosigner(
        identity=identity("leader"),
        head=head,
        clock=world.clock,
        own_configs=lambda: {b"config"},
        accept=lambda _: None,
    )
    fork: list[Entry] = [*HONEST[:4], recipe_entry("private")]
    source = forge(tmp_path / "forged", [entry.encode() for entry in fork], time=NOW + 9)
    with pytest.raises(LogForked):
        cosigner.cosign(source)


def test_only_a_checkpoint_with_ones_own_cosignature_is_adopted(
    world: World, tmp_path: Path
) -> None:
    published = world.checkpoint()
    stranger = CosignerIdentity(
        name="new.example",
        key=identity("leader").key,
        origin=published.checkpoint.origin,
        log_keys=identity("leader").log_keys,
    )
    with pytest.raises(LogSignatureInvalid, match=r"new\.example"):
        adopt_head(tmp_path / "x", stranger, checkpoint=published, source=world.source)
    assert not (tmp_path / "x" / "head").exists()


@pytest.mark.parametrize("damage", ["head", "entries cut", "entries changed", "entries gone"])
def test_a_damaged_memory_is_refused(world: World, damage: str) -> None:
    head, entries = world.leader.folder / "head", world.leader.folder / "entries"
    match damage:
        case "head":
            head.write_bytes(head.read_bytes()[:40])
        case "entries cut":
            entries.write_bytes(entries.read_bytes()[:-1])
        case "entries changed":
            data = bytearray(entries.read_bytes())
            data[60] ^= 1
            entries.write_bytes(data)
        case "entries gone":
            entries.unlink()
    with pytest.raises(StorageDamaged):
        world.leader.restart()


def test_a_memory_of_the_former_format_is_refused_and_left_alone(world: World) -> None:
    path = world.leader.folder / "head"
    note = world.checkpoint().note
    old = Note(text=f"{note.text}time 1\nlist {'00' * 32}\n", signatures=note.signatures).encode()
    path.write_bytes(old)
    with pytest.raises(LogOutdated, match=r"upgrade-the-log\.md"):
        world.leader.restart()
    assert path.read_bytes() == old


def test_a_memory_is_of_one_log(world: World) -> None:
    other = CosignerIdentity(
        name=LEADER_NAME, key=identity("leader").key, origin="registry.example/other", log_keys=()
    )
    with pytest.raises(LogForked, match="other"):
        Cosigner(
            identity=other,
            head=world.leader.head,
            clock=world.clock,
            own_configs=list,
            accept=lambda _: None,
        )


def test_two_processes_cannot_hold_one_memory(world: World) -> None:
    with pytest.raises(ServiceError, match="another process"):
        Head.open(world.leader.folder)


def test_secrets_do_not_print(world: World) -> None:
    secret = identity("leader").key.private_bytes_raw()
    for value in (identity("leader"), world.leader.cosigner, world.leader.head):
        assert secret.hex() not in repr(value)
        assert "Ed25519PrivateKey" not in repr(value)


def test_recipes_are_accepted_before_the_cosignature_is_given(world: World) -> None:
    """An aggregator that can't store the tasks does not sign; it gets the recipes again."""
    refused: list[SignedRecipe] = []

    def fail(recipes: object) -> None:
        refused.extend(recipes)  # type: ignore[arg-type]
        raise OSError("no space left")

    world.submit(recipe_entry("third"))
    world.clock.advance(1)
    world.registry.issue()
    broken = Cosigner(
        identity=identity("leader"),
        head=world.leader.head,
        clock=world.clock,
        own_configs=lambda: {b"config"},
        accept=fail,
    )
    with pytest.raises(OSError, match="no space"):
        broken.cosign(world.source)
    world.leader.cosign(world.source)
    assert [signed.recipe.id for signed in refused] == ["third"]
    assert world.leader.accepted[-1].recipe.id == "third"


def test_a_cosignature_has_the_time_at_which_the_list_was_checked(world: World) -> None:
    """However long an aggregator then takes to store the new recipes."""
    world.submit(recipe_entry("slow"))
    world.clock.advance(1)
    world.registry.issue()
    checked = world.clock.now()
    world.leader.cosigner.accept = lambda _: world.clock.advance(DAY)
    world.leader.cosign(world.source)
    assert world.clock.now() == checked + DAY
    found = world.leader.head.last.note.check_cosignature(LEADER_NAME, [public("leader")])
    assert found.time == checked


def test_a_head_keeps_the_signatures_of_the_log_and_its_own_alone(world: World) -> None:
    """Whoever asks may add lines in the log's name, with ids of keys that it does not have."""
    world.clock.advance(60)
    candidate = world.registry.issue()
    for number in range(20):
        junk = SignatureLine(name=ORIGIN, blob=bytes([number]) * 68)
        candidate = candidate.with_cosigner(junk)
    world.leader.cosigner.cosign(world.source, candidate)
    kept = world.leader.head.last.note.signatures
    assert [line.name for line in kept] == [ORIGIN, LEADER_NAME]
    world.leader.head.last.check_log(ORIGIN, [public("log")])


def test_the_task_ids_of_new_recipes_are_known_before_the_cosignature(world: World) -> None:
    """What an aggregator passes as `accept`: opt-in is a lookup in what it enumerates here."""
    tasks: dict[bytes, str] = {}

    def enumerate_tasks(recipes: Sequence[SignedRecipe]) -> None:
        for signed in recipes:
            for task in task_configurations(policy(), signed.recipe):
                tasks[task.task_id] = signed.recipe.id

    world.submit(recipe_entry("third"))
    world.clock.advance(1)
    world.registry.issue()
    cosigner = Cosigner(
        identity=identity("leader"),
        head=world.leader.head,
        clock=world.clock,
        own_configs=lambda: {b"config"},
        accept=enumerate_tasks,
    )
    cosigner.cosign(world.source)
    groups = len(policy().group_values("user.locale"))
    assert len(tasks) == groups
    assert set(tasks.values()) == {"third"}


def test_a_registry_cannot_bury_a_cosigner(world: World) -> None:
    world.submit(recipe_entry("third"), recipe_entry("fourth"))
    world.clock.advance(1)
    world.registry.issue()
    for limits in ({"max_new_entries": 1}, {"max_new_bytes": 3000}):
        cosigner = Cosigner(
            identity=identity("leader"),
            head=world.leader.head,
            clock=world.clock,
            own_configs=lambda: {b"config"},
            accept=lambda _: None,
            **limits,
        )
        with pytest.raises(EntryRefused, match="operator can raise new_log_"):
            cosigner.cosign(world.source)
    world.leader.cosign(world.source)


def test_a_failed_write_stops_the_cosigner(tmp_path: Path) -> None:
    class FailingDisk(Disk):
        fails = False

        def sync(self, path: Path) -> None:
            if self.fails:
                raise OSError(5, "Input/output error")
            super().sync(path)

    disk = FailingDisk()
    source = forge(tmp_path / "log", [hpke_entry(LEADER).encode()], time=NOW)
    side = CosigningAggregator("leader", tmp_path / "leader", SettableClock(NOW), disk=disk)
    disk.fails = True
    with pytest.raises(StorageDamaged, match="Input/output error"):
        side.cosign(source)
    disk.fails = False
    with pytest.raises(StorageDamaged, match="restart"):
        side.cosign(source)
    side.restart()
    side.cosign(source)


def test_a_crash_at_any_step_never_lets_a_cosigner_forget_what_it_gave_away(
    tmp_path: Path,
) -> None:
    """Crash the machine after each step of cosigning, in many mixtures of what was lost."""
    fork = [hpke_entry(LEADER).encode(), recipe_entry("private").encode()]
    honest = [hpke_entry(LEADER).encode(), recipe_entry("public").encode()]
    source = forge(tmp_path / "honest", honest, time=NOW + 1)
    forked = forge(tmp_path / "forked", fork, time=NOW + 2)
    outcomes = set()
    for seed in range(60):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        disk = SimulatedDisk(folder)
        side = CosigningAggregator("leader", folder / "leader", SettableClock(NOW), disk=disk)
        disk.steps = rng.randrange(12)
        signed = False
        try:
            side.cosign(source)
            signed = True
        except Crash:
            pass
        side.head.close()
        disk.crash(rng.randrange)
        side.restart()
        outcomes.add((signed, side.cosigner.last.size))
        assert not signed or side.cosigner.last.size == 3
        if side.cosigner.last.size == 3:
            with pytest.raises(LogForked):
                side.cosign(forked)
        kept = SignedCheckpoint.parse((side.folder / "head").read_bytes())
        assert kept.checkpoint == side.cosigner.last
    assert {(True, 3), (False, 0), (False, 3)} <= outcomes
