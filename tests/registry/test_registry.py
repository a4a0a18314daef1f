"""The registry as its users see it: who may submit, what waits for whom, what is published."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import (
    CheckpointTime,
    DecodeError,
    DuplicateEntry,
    EntryRefused,
    LogOutdated,
    LogSignatureInvalid,
    NotAuthorized,
    QuotaExceeded,
    ServiceError,
    StorageDamaged,
)
from chorister.registry.folder import LogFolder
from chorister.registry.registry import CANDIDATE_LIFETIME, Registry
from chorister.transparency.auditor import audit
from chorister.transparency.checkpoint import MAX_SKEW, Checkpoint
from chorister.transparency.disk import Disk
from chorister.transparency.entries import ListEntry, SignedEntry, Submission
from chorister.transparency.state import CurrentList
from chorister.transparency.tiles import read_entries
from chorister.transparency.tree import leaf_hash, root_hash
from tests.logworld import (
    DAY,
    HELPER,
    HELPER_NAME,
    LEADER,
    LEADER_NAME,
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
    submission,
    trust,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --- Submitting ----------------------------------------------------------------------------------


def test_an_author_submits_ends_and_revokes(world: World) -> None:
    one, two = recipe_entry("one"), recipe_entry("two")
    receipts = world.submit(one, two, end_entry(one), revocation("author", by="second author"))
    assert [receipt.index for receipt in receipts] == [0, 1, 2, 3]
    assert receipts[0].leaf == leaf_hash(one.encode())
    assert world.publish().checkpoint.size == 5


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
    assert list((world.public / "body").iterdir()) == []


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
    configs = [(name, bytes(32)) for name in (LEADER_NAME, HELPER_NAME)]
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
    assert world.publish().checkpoint.size == 9
    (left,) = audit(world.source, authority=authority()).current.recipes
    assert left.analysis == OTHER_ANALYSIS


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world that no test changes."""
    world = World(tmp_path_factory.mktemp("shared"))
    world.registry.issue()
    return world


@given(st.data())
def test_arbitrary_and_damaged_bytes_are_refused(shared: World, data: st.DataObject) -> None:
    entries: list[SignedEntry] = [recipe_entry("x"), hpke_entry(LEADER), revocation("author")]
    entry = data.draw(st.sampled_from(entries))
    good = submission(entry).encode()
    line = identity("leader").sign(a_checkpoint(), NOW).encode().encode()
    noise = data.draw(st.binary(min_size=1, max_size=40))
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + noise + good[at + len(noise) :]
    for sent in (noise, changed, good[:at]):
        if sent != good:
            with pytest.raises((EntryRefused, NotAuthorized)):
                shared.registry.submit(sent)
    for sent in (noise, line, line[:at] + noise + line[at:]):
        with pytest.raises((DecodeError, NotAuthorized, LogSignatureInvalid)):
            shared.registry.add_cosignature(sent)
    assert shared.registry.status().size == 1


# --- Candidates and cosignatures -----------------------------------------------------------------


def test_nothing_is_published_before_both_have_cosigned(world: World) -> None:
    world.submit(recipe_entry("one"))
    world.registry.issue()
    assert world.registry.status().waiting_for == (HELPER_NAME, LEADER_NAME)
    assert world.registry.add_cosignature(world.leader.cosign(world.source)) == (HELPER_NAME,)
    assert not (world.public / "checkpoint").exists()
    assert world.registry.add_cosignature(world.helper.cosign(world.source)) == ()
    assert world.checkpoint().checkpoint.size == 2
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
    assert (first.checkpoint.size, second.checkpoint.size) == (1, 3)


def test_one_cosigner_ahead_does_not_block_the_next_candidate(world: World) -> None:
    world.submit(recipe_entry("one"))
    world.registry.issue()
    world.registry.add_cosignature(world.leader.cosign(world.source))
    world.clock.advance(CANDIDATE_LIFETIME)
    assert world.publish(recipe_entry("two")).checkpoint.size == 4


def test_a_quiet_log_stays_fresh(world: World) -> None:
    first = world.publish(recipe_entry("one"))
    second = world.publish(wait=DAY)
    assert second.checkpoint == first.checkpoint, "nothing changed, so nothing is added"
    assert authority().oldest(second) == authority().oldest(first) + DAY
    device_reads(world)


def test_a_list_that_changes_by_time_alone_is_added(world: World) -> None:
    world.publish(recipe_entry("one", closes=NOW + DAY), recipe_entry("two"))
    world.clock.set(NOW + DAY - 2)
    assert world.publish().checkpoint.size == 3
    assert world.publish().checkpoint.size == 4
    found = audit(world.source, authority=authority())
    assert [type(logged.entry).__name__ for logged in found.entries[2:]] == ["ListEntry"] * 2
    assert len(found.current.recipes) == 1


def test_nobody_can_submit_a_list(world: World) -> None:
    closing = ListEntry(time=NOW, digest=world.registry._state.current(NOW).digest)
    with pytest.raises(EntryRefused, match="nobody can submit a list"):
        world.registry.submit(Submission(closing.encode()).encode())


def test_a_submission_needs_the_body_that_its_entry_names(world: World) -> None:
    one = submission(recipe_entry("one"))
    for body in (b"", submission(recipe_entry("two")).body, one.body + b"x"):
        with pytest.raises(EntryRefused, match="not the body"):
            world.registry.submit(one._replace(body=body).encode())
    with pytest.raises(EntryRefused, match="only a recipe"):
        world.registry.submit(Submission(hpke_entry(LEADER).encode(), b"x").encode())


def device_reads(world: World) -> None:
    """A device that has waited as long finds the log fresh."""
    proof = world.proof()
    proof.check_last()
    trust().check_signatures(proof.signed)


def test_cosignatures_of_others_and_of_other_checkpoints_are_refused(world: World) -> None:
    with pytest.raises(LogSignatureInvalid, match="no candidate"):
        world.registry.add_cosignature(
            identity("leader").sign(a_checkpoint(), NOW).encode().encode()
        )
    candidate = world.registry.issue().checkpoint
    stranger = candidate.cosign(name="stranger.example", key=key("x"), time=NOW)
    with pytest.raises(NotAuthorized):
        world.registry.add_cosignature(stranger.encode().encode())
    wrong_key = candidate.cosign(name=LEADER_NAME, key=key("helper"), time=NOW)
    with pytest.raises(LogSignatureInvalid):
        world.registry.add_cosignature(wrong_key.encode().encode())
    stale = identity("leader").sign(a_checkpoint(), NOW)
    with pytest.raises(LogSignatureInvalid):
        world.registry.add_cosignature(stale.encode().encode())
    for noise in (b"", b"\xff", b"two\nlines", "— a b c".encode()):
        with pytest.raises(DecodeError):
            world.registry.add_cosignature(noise)
    assert world.registry.status().waiting_for == (HELPER_NAME, LEADER_NAME)


def test_old_cosignatures_of_the_same_tree_are_not_taken_again(world: World) -> None:
    """They are public: a stranger who sends them must not make the log look old, nor stay old."""
    first = world.publish(recipe_entry("one"))
    old = [line.encode().encode() for line in first.note.signatures if line.name != ORIGIN]
    fresh = world.publish(wait=600)
    assert fresh.checkpoint == first.checkpoint
    for restarted in (False, True):
        if restarted:
            world.restart()
        for line in old:
            with pytest.raises(LogSignatureInvalid, match="not older"):
                world.registry.add_cosignature(line)
        assert world.checkpoint() == fresh
    # Nor for the next candidate, which waits for new times; nor lines of one that was given up.
    world.clock.advance(600)
    world.registry.issue()
    given_up = world.leader.cosign(world.source)
    world.registry.add_cosignature(given_up)
    world.clock.advance(CANDIDATE_LIFETIME)
    world.registry.issue()
    newest = [line.encode().encode() for line in fresh.note.signatures if line.name != ORIGIN]
    for line in (*old, *newest, given_up):
        with pytest.raises(LogSignatureInvalid, match="not older"):
            world.registry.add_cosignature(line)
    assert world.registry.status().waiting_for == (HELPER_NAME, LEADER_NAME)
    assert authority().oldest(world.publish()) == world.clock.now()


def test_a_cosignature_may_be_delivered_twice(world: World) -> None:
    world.registry.issue()
    line = world.leader.cosign(world.source)
    for _ in range(2):
        assert world.registry.add_cosignature(line) == (HELPER_NAME,)


def a_checkpoint() -> Checkpoint:
    return Checkpoint(origin=ORIGIN, size=9, root=bytes(32))


def test_a_clock_set_back_publishes_nothing(world: World) -> None:
    world.publish(recipe_entry("one"))
    world.clock.set(NOW - 5)
    with pytest.raises(CheckpointTime, match="behind"):
        world.registry.issue()


def test_a_clock_set_back_behind_a_list_issues_nothing(world: World) -> None:
    """Somebody may have cosigned it, and lists only go forward in time."""
    world.publish(recipe_entry("one"))
    world.submit(recipe_entry("two"))
    world.clock.set(NOW + 200)
    size = world.registry.issue().checkpoint.size
    world.clock.set(NOW + 199)
    with pytest.raises(CheckpointTime, match="behind the last list"):
        world.registry.issue()
    world.restart()
    with pytest.raises(CheckpointTime):
        world.registry.issue()
    world.clock.set(NOW + 201)
    assert world.publish(wait=0).checkpoint.size == size


def test_a_clock_that_jumps_ahead_adds_no_list_of_the_future(world: World) -> None:
    """Lists only go forward in time: with one of next year, the log could not go on before that."""
    world.publish(recipe_entry("one"))
    world.submit(recipe_entry("two"))
    world.clock.advance(DAY)  # that time passes is no jump
    world.clock.jump(MAX_SKEW)  # nor is it one that cosigners do not mind
    assert world.publish().checkpoint.size == 4
    world.submit(recipe_entry("three"))
    world.clock.jump(365 * DAY)
    with pytest.raises(CheckpointTime, match="set ahead by 31536000 s"):
        world.registry.issue()
    world.clock.jump(-365 * DAY)
    assert world.publish().checkpoint.size == 6
    # Operators who know better restart their servers.
    world.submit(recipe_entry("four"))
    world.clock.jump(DAY)
    with pytest.raises(CheckpointTime):
        world.registry.issue()
    for server in (world, world.leader, world.helper):
        server.restart()
    assert world.publish().checkpoint.size == 8


def test_never_two_lists_in_one_second(world: World) -> None:
    first = world.publish(recipe_entry("one"))
    world.submit(revocation("author"))
    assert world.registry.issue().checkpoint == first.checkpoint
    world.restart()
    assert world.registry.issue().checkpoint == first.checkpoint
    assert world.registry.status().waiting_for == ()
    world.clock.advance(1)
    assert world.registry.issue().checkpoint.size == 4


# --- Restarting ----------------------------------------------------------------------------------


def test_everything_survives_a_restart(world: World) -> None:
    world.publish(recipe_entry("one"))
    world.submit(recipe_entry("two"))
    world.clock.advance(1)
    world.registry.issue()
    world.registry.add_cosignature(world.leader.cosign(world.source))
    before = world.registry.status()
    world.restart()
    after = world.registry.status()
    assert (after.size, after.published) == (before.size, before.published)
    assert after.waiting_for == before.waiting_for
    assert before.waiting_for == (HELPER_NAME,)
    assert world.registry.add_cosignature(world.helper.cosign(world.source)) == ()


def test_two_registries_cannot_hold_one_folder(world: World) -> None:
    with pytest.raises(ServiceError, match="another process"):
        LogFolder.open(world.folder)


def test_a_missing_log_is_not_silently_started_over(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="restore it"):
        LogFolder.open(tmp_path)
    LogFolder.create(tmp_path / "log").close()
    with pytest.raises(ServiceError, match="already holds a log"):
        LogFolder.create(tmp_path / "log")


def test_lost_entries_are_noticed(world: World) -> None:
    world.publish(recipe_entry("one"), recipe_entry("two"))
    leaves = world.folder / "leaves"
    leaves.write_bytes(leaves.read_bytes()[:32])
    with pytest.raises(StorageDamaged, match="of which 2 are lost"):
        world.restart()


@pytest.mark.parametrize(
    "damage", ["entries", "entries cut", "entries gone", "leaf", "checkpoint", "candidate"]
)
def test_damage_is_noticed(world: World, damage: str) -> None:
    world.publish(recipe_entry("one"), recipe_entry("two"))
    leaves, entries = world.folder / "leaves", world.folder / "entries"
    data = entries.read_bytes()
    match damage:
        case "entries":
            entries.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
        case "entries cut":
            entries.write_bytes(data[:-1])
        case "entries gone":
            entries.write_bytes(b"")
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
        wrong(origin=LEADER_NAME, named=LEADER_NAME)
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
    assert audit_after.checkpoint.size >= 3
    audit(world.source, authority=authority())


# --- Many at once, many in all -------------------------------------------------------------------


def test_concurrent_appends_are_all_kept_once(world: World) -> None:
    entries = [recipe_entry(f"r{number}") for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda entry: world.submit(entry)[0], entries * 2))
    assert sorted({receipt.index for receipt in receipts}) == list(range(24))
    assert sum(receipt.new for receipt in receipts) == 24
    by_address = {receipt.leaf: receipt.index for receipt in receipts}
    assert len(by_address) == 24
    world.publish()
    found = audit(world.source, authority=authority())
    assert {logged.leaf: logged.index for logged in found.entries[:-1]} == by_address


@pytest.mark.parametrize("restarts", [False, True])
def test_tiles_of_a_log_that_outgrows_one(world: World, restarts: bool) -> None:
    """Full tiles and bundles never change; every published size can be read back."""
    made = [b"config %d" % number for number in range(300)]
    world.helper.configs.update(made)
    config = [hpke_entry(HELPER, each) for each in made]
    world.publish(*config[:250])
    small = [*read_entries(world.source, 0, 251)]
    world.publish(*config[250:254])
    full = [(world.public / "tile" / name / "000").read_bytes() for name in ("0", "entries")]
    assert (world.public / "tile/1/000.p/1").stat().st_size == 32
    assert not (world.public / "tile/0/001.p").exists()
    if restarts:
        world.restart()
    world.publish(*config[254:])
    again = [(world.public / "tile" / name / "000").read_bytes() for name in ("0", "entries")]
    assert again == full
    size = world.checkpoint().checkpoint.size
    entries = [*read_entries(world.source, 0, size)]
    assert entries[:251] == small
    assert [*read_entries(world.source, 255, size)] == entries[255:]
    leaves = [leaf_hash(entry) for entry in entries]
    assert root_hash(leaves) == world.checkpoint().checkpoint.root
    audit(world.source, authority=authority())
    world.restart()
    assert world.publish().checkpoint.size == size == 303
    audit(world.source, authority=authority())


def test_a_log_that_grew_far_beyond_its_last_checkpoint_is_tiled_after_a_restart(
    world: World,
) -> None:
    made = [b"config %d" % number for number in range(600)]
    world.helper.configs.update(made)
    world.publish(hpke_entry(HELPER, made[0]))
    world.submit(*(hpke_entry(HELPER, each) for each in made[1:]))
    world.restart()
    assert world.publish().checkpoint.size == 602
    audit(world.source, authority=authority())


def test_a_folder_of_the_former_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "public" / "entry").mkdir(parents=True)
    (tmp_path / "leaves").write_bytes(bytes(range(32)))
    with pytest.raises(LogOutdated, match=r"upgrade-the-log\.md"):
        LogFolder.open(tmp_path)
    assert (tmp_path / "leaves").read_bytes() == bytes(range(32))
