"""The registry as its users see it: who may submit, what waits for whom, what is published."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chorister.errors import (
    CheckpointTime,
    DecodeError,
    DuplicateEntry,
    EntryRefused,
    LogSignatureInvalid,
    NotAuthorized,
    QuotaExceeded,
    ServiceError,
    StorageDamaged,
)
from chorister.registry.folder import LogFolder
from chorister.registry.registry import CANDIDATE_LIFETIME, Registry
from chorister.transparency.auditor import audit
from chorister.transparency.checkpoint import Checkpoint
from chorister.transparency.client import read_leaves
from chorister.transparency.disk import Disk
from chorister.transparency.state import CurrentList
from chorister.transparency.tree import root_hash
from tests.logworld import (
    DAY,
    HELPER,
    LEADER,
    NOW,
    ORIGIN,
    OTHER_ANALYSIS,
    World,
    authority,
    end_entry,
    hpke_entry,
    identity,
    key,
    recipe_entry,
    revocation,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --- Submitting ----------------------------------------------------------------------------------


def test_an_author_submits_ends_and_revokes(world: World) -> None:
    one, two = recipe_entry("one"), recipe_entry("two")
    receipts = world.submit(one, two, end_entry(one), revocation("author", by="second author"))
    assert [receipt.index for receipt in receipts] == [0, 1, 2, 3]
    assert receipts[0].address == one.address
    assert world.publish().checkpoint.size == 4


def test_submitting_again_changes_nothing(world: World) -> None:
    entry = recipe_entry("one")
    first, again = world.submit(entry, entry)
    assert (first.index, first.new, again.index, again.new) == (0, True, 0, False)
    assert world.registry.status().size == 1


def test_the_same_recipe_under_another_key_is_a_conflict(world: World) -> None:
    world.submit(recipe_entry("one"))
    with pytest.raises(DuplicateEntry):
        world.submit(recipe_entry("one", author="second author"))


@pytest.mark.parametrize(
    "entry",
    [
        recipe_entry("x", author="other author"),
        hpke_entry(LEADER, by="helper"),
        revocation("author", by="helper"),
    ],
)
def test_strangers_are_refused(world: World, entry: object) -> None:
    with pytest.raises(NotAuthorized):
        world.submit(entry)  # type: ignore[arg-type]
    assert world.registry.status().size == 0
    assert list((world.public / "entry").iterdir()) == []


def test_what_could_never_be_current_is_refused(world: World) -> None:
    with pytest.raises(EntryRefused, match="already over"):
        world.submit(recipe_entry("late", closes=NOW))
    with pytest.raises(EntryRefused, match="expired"):
        world.submit(hpke_entry(LEADER, not_before=0, not_after=NOW))


def test_a_full_list_takes_what_empties_it_and_nothing_that_adds_to_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [recipe_entry("one"), recipe_entry("two"), recipe_entry("three", author="second author")]
    world.submit(*full)
    state = world.registry._state.current(NOW)
    configs = [(name, bytes(32)) for name in (LEADER, HELPER)]
    longest = CurrentList.of(hpke_configs=configs, recipes=state.recipes).encode()
    monkeypatch.setattr("chorister.registry.registry.MAX_LIST", len(longest))
    with pytest.raises(QuotaExceeded, match="the current list is full"):
        world.submit(recipe_entry("four"))
    # Recipes take no aggregator's place.
    world.submit(hpke_entry(LEADER))
    world.submit(
        end_entry(full[0]),
        revocation("author", by="second author"),
        revocation("second author", by="log"),
    )
    # Now there is room again.
    world.submit(recipe_entry("five", author="other author", analysis=OTHER_ANALYSIS))
    assert world.publish().checkpoint.size == 8
    (left,) = audit(world.source, authority=authority()).current.recipes
    assert left.analysis == OTHER_ANALYSIS


# --- Candidates and cosignatures -----------------------------------------------------------------


def test_nothing_is_published_before_both_have_cosigned(world: World) -> None:
    world.submit(recipe_entry("one"))
    world.registry.issue()
    assert world.registry.status().waiting_for == (HELPER, LEADER)
    assert world.registry.add_cosignature(world.leader.cosign(world.source)) == (HELPER,)
    assert not (world.public / "checkpoint").exists()
    assert world.registry.add_cosignature(world.helper.cosign(world.source)) == ()
    assert world.checkpoint().checkpoint.size == 1
    assert world.registry.status().waiting_for == ()


def test_a_candidate_waits_for_its_cosigners_and_is_replaced_when_they_would_refuse_it(
    world: World,
) -> None:
    first = world.registry.issue()
    world.submit(recipe_entry("one"))
    world.clock.advance(CANDIDATE_LIFETIME - 1)
    assert world.registry.issue() == first
    world.clock.advance(1)
    second = world.registry.issue()
    assert (second.checkpoint.size, second.checkpoint.time) == (1, NOW + CANDIDATE_LIFETIME)


def test_one_cosigner_ahead_does_not_block_the_next_candidate(world: World) -> None:
    world.submit(recipe_entry("one"))
    world.registry.issue()
    world.registry.add_cosignature(world.leader.cosign(world.source))
    world.clock.advance(CANDIDATE_LIFETIME)
    assert world.publish(recipe_entry("two")).checkpoint.size == 2


def test_a_quiet_log_stays_fresh(world: World) -> None:
    first = world.publish(recipe_entry("one"))
    second = world.publish(wait=DAY)
    assert second.checkpoint.time == first.checkpoint.time + DAY
    assert second.checkpoint.root == first.checkpoint.root


def test_cosignatures_of_others_and_of_other_checkpoints_are_refused(world: World) -> None:
    with pytest.raises(LogSignatureInvalid, match="no candidate"):
        world.registry.add_cosignature(
            identity("leader").sign(a_checkpoint(world), NOW).encode().encode()
        )
    candidate = world.registry.issue().checkpoint
    stranger = candidate.cosign(name="https://stranger.example/", key=key("x"), time=NOW)
    with pytest.raises(NotAuthorized):
        world.registry.add_cosignature(stranger.encode().encode())
    wrong_key = candidate.cosign(name=LEADER, key=key("helper"), time=NOW)
    with pytest.raises(LogSignatureInvalid):
        world.registry.add_cosignature(wrong_key.encode().encode())
    stale = identity("leader").sign(a_checkpoint(world), NOW)
    with pytest.raises(LogSignatureInvalid):
        world.registry.add_cosignature(stale.encode().encode())
    for noise in (b"", b"\xff", b"two\nlines", "— a b c".encode()):
        with pytest.raises(DecodeError):
            world.registry.add_cosignature(noise)
    assert world.registry.status().waiting_for == (HELPER, LEADER)


def a_checkpoint(world: World) -> Checkpoint:
    return Checkpoint(
        origin=ORIGIN, size=9, root=bytes(32), time=world.clock.now(), list_digest=bytes(32)
    )


def test_a_clock_set_back_publishes_nothing(world: World) -> None:
    world.publish(recipe_entry("one"))
    world.clock.set(NOW - 5)
    with pytest.raises(CheckpointTime, match="behind"):
        world.registry.issue()


def test_a_clock_set_back_behind_a_candidate_issues_nothing(world: World) -> None:
    """Somebody may have cosigned it, and its second would come twice."""
    world.publish(recipe_entry("one"))
    world.clock.set(NOW + 100)
    world.registry.issue()
    world.clock.set(NOW + 99)
    with pytest.raises(CheckpointTime, match="remove public/candidate"):
        world.registry.issue()
    world.restart()
    with pytest.raises(CheckpointTime):
        world.registry.issue()
    (world.public / "candidate").unlink()
    world.restart()
    assert world.publish(wait=0).checkpoint.time == NOW + 99


def test_never_two_checkpoints_in_one_second(world: World) -> None:
    first = world.publish(recipe_entry("one"))
    world.submit(revocation("author"))
    assert world.registry.issue().checkpoint == first.checkpoint
    world.restart()
    assert world.registry.issue().checkpoint == first.checkpoint
    assert world.registry.status().waiting_for == ()
    world.clock.advance(1)
    second = world.registry.issue().checkpoint
    assert (second.size, second.time) == (2, first.checkpoint.time + 1)


# --- Restarting ----------------------------------------------------------------------------------


def test_everything_survives_a_restart(world: World) -> None:
    world.publish(recipe_entry("one"))
    world.submit(recipe_entry("two"))
    world.clock.advance(1)
    world.registry.issue()
    world.registry.add_cosignature(world.leader.cosign(world.source))
    before = world.registry.status()
    world.restart()
    assert world.registry.status() == before
    assert before.waiting_for == (HELPER,)
    assert world.registry.add_cosignature(world.helper.cosign(world.source)) == ()


def test_two_registries_cannot_hold_one_folder(world: World) -> None:
    with pytest.raises(ServiceError, match="another process"):
        LogFolder.open(world.folder)


def test_a_missing_log_is_not_silently_begun_anew(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="restore it"):
        LogFolder.open(tmp_path)
    LogFolder.create(tmp_path / "log").close()
    with pytest.raises(ServiceError, match="already holds a log"):
        LogFolder.create(tmp_path / "log")


def test_lost_entries_are_noticed(world: World) -> None:
    world.publish(recipe_entry("one"), recipe_entry("two"))
    leaves = world.folder / "leaves"
    leaves.write_bytes(leaves.read_bytes()[:32])
    with pytest.raises(StorageDamaged, match="of which 1 are lost"):
        world.restart()


@pytest.mark.parametrize("damage", ["body", "body gone", "leaf", "checkpoint", "candidate"])
def test_damage_is_noticed(world: World, damage: str) -> None:
    entry = recipe_entry("one")
    world.publish(entry, recipe_entry("two"))
    leaves = world.folder / "leaves"
    body = world.public / "entry" / entry.address.hex()
    match damage:
        case "body":
            body.write_bytes(body.read_bytes()[:-1])
        case "body gone":
            body.unlink()
        case "leaf":
            leaves.write_bytes(leaves.read_bytes()[32:] + leaves.read_bytes()[:32])
        case name:
            (world.public / name).write_bytes(b"noise")
    with pytest.raises(StorageDamaged):
        world.restart()


def test_a_folder_is_of_one_log_and_a_key_of_its_policies(world: World) -> None:
    world.publish(recipe_entry("one"))
    folder = world._log

    def wrong(*, origin: str = ORIGIN, named: str = ORIGIN, by: str = "log") -> Registry:
        return Registry(
            folder, origin=origin, key=key(by), authority=authority(named), clock=world.clock
        )

    with pytest.raises(ServiceError, match="holds the log"):
        wrong(origin="registry.example/other", named="registry.example/other")
    with pytest.raises(ServiceError, match=f"name the log {ORIGIN}, not registry.example/other"):
        wrong(origin="registry.example/other")
    with pytest.raises(ServiceError, match="not among the log keys"):
        wrong(by="stranger")
    with pytest.raises(ServiceError, match="cosigner"):
        wrong(origin=LEADER, named=LEADER)
    assert key("log").private_bytes_raw().hex() not in repr(world.registry)


def test_a_failed_write_stops_the_registry(tmp_path: Path) -> None:
    class FullDisk(Disk):
        full = False

        def sync(self, path: Path) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            super().sync(path)

    disk = FullDisk()
    world = World(tmp_path, disk=disk)
    world.submit(recipe_entry("one"))
    disk.full = True
    with pytest.raises(ServiceError, match="No space left"):
        world.submit(recipe_entry("two"))
    disk.full = False
    with pytest.raises(ServiceError, match="restart"):
        world.submit(recipe_entry("three"))
    world.restart()
    world.submit(recipe_entry("three"))
    audit_after = world.publish()
    assert audit_after.checkpoint.size >= 2
    audit(world.source, authority=authority())


# --- Many at once, many in all -------------------------------------------------------------------


def test_concurrent_appends_are_all_kept_once(world: World) -> None:
    entries = [recipe_entry(f"r{number}") for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda entry: world.submit(entry)[0], entries * 2))
    assert sorted({receipt.index for receipt in receipts}) == list(range(24))
    assert sum(receipt.new for receipt in receipts) == 24
    by_address = {receipt.address: receipt.index for receipt in receipts}
    assert len(by_address) == 24
    world.publish()
    found = audit(world.source, authority=authority())
    assert {logged.address: logged.index for logged in found.entries} == by_address


def test_tiles_of_a_log_that_outgrows_one(world: World) -> None:
    """Full tiles never change; every published size can be read back."""
    made = [b"config %d" % number for number in range(300)]
    world.helper.configs.update(made)
    config = [hpke_entry(HELPER, each) for each in made]
    world.publish(*config[:250])
    small = [*read_leaves(world.source, 0, 250)]
    world.publish(*config[250:256])
    full = (world.public / "tile/0/000").read_bytes()
    world.publish(*config[256:])
    assert (world.public / "tile/0/000").read_bytes() == full
    leaves = [*read_leaves(world.source, 0, 300)]
    assert leaves[:250] == small
    assert [*read_leaves(world.source, 255, 300)] == leaves[255:]
    assert root_hash(leaves) == world.checkpoint().checkpoint.root
    world.restart()
    assert world.publish().checkpoint.size == 300
