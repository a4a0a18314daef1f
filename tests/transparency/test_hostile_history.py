"""A registry that lies about its history, one way in each test, and who catches it.

The forger holds the log's own key and writes whatever it likes (`logworld.forge`). Each test says
in its name who catches it: the cosigner, the device's check, or the auditor.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from chorister.errors import (
    CheckpointTime,
    EntryRefused,
    InvalidInput,
    LogForked,
    LogRewound,
    LogSignatureInvalid,
    LogWithheld,
)
from chorister.transparency.auditor import audit
from chorister.transparency.checkpoint import ListProof, SignedCheckpoint
from chorister.transparency.client import PROOF, body_path
from chorister.transparency.cosigner import adopt_head
from chorister.transparency.monitor import LogMonitor
from chorister.transparency.reader import read_current
from chorister.transparency.tiles import bundle_path, encode_bundle
from chorister.transparency.trust import Authority
from tests.logworld import (
    DAY,
    NOW,
    ORIGIN,
    World,
    authority,
    body_of,
    forge,
    identity,
    key,
    policy,
    public,
    recipe_entry,
    revocation,
    trust,
)
from tests.transparency.lies import (
    FIRST,
    HELPER_CONFIG,
    HONEST,
    LEADER_CONFIG,
    SECOND,
    device_reads,
    forged,
)

# --- First of all, the honest one ----------------------------------------------------------------


def test_honest_registry_passes_everyone(world: World) -> None:
    expected = sorted((FIRST, SECOND), key=lambda entry: entry.body_digest)
    assert device_reads(world.source) == [body_of(entry) for entry in expected]
    found = audit(world.source, authority=authority(), clock=world.clock)
    assert [logged.entry for logged in found.entries] == HONEST
    assert [signed.recipe.id for signed in world.leader.accepted] == ["first", "second"]


def test_honest_extension_is_cosigned(world: World, tmp_path: Path) -> None:
    world.leader.cosign(forged(tmp_path, *HONEST, recipe_entry("third")))
    assert world.leader.accepted[-1].recipe.id == "third"


# --- Forks ---------------------------------------------------------------------------------------


def test_fork_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    """Another history of the same size: a private recipe in the place of a public one."""
    other = [*HONEST[:4], recipe_entry("private")]
    with pytest.raises(LogForked) as caught:
        world.leader.cosign(forged(tmp_path, *other))
    # What remains is proof: two roots for one size, both signed by the log.
    seen, shown = (SignedCheckpoint.parse(data) for data in caught.value.evidence)
    for signed in (seen, shown):
        signed.note.check_signature(ORIGIN, [public("log")])
    assert seen.checkpoint.size == shown.checkpoint.size
    assert seen.checkpoint.root != shown.checkpoint.root
    # The cosigner keeps it, and of the first fork only.
    kept = world.leader.folder / "fork"
    assert [(kept / name).read_bytes() for name in ("1", "2")] == list(caught.value.evidence)
    with pytest.raises(LogForked):
        world.leader.cosign(forged(tmp_path, *other, recipe_entry("another")))
    assert [(kept / name).read_bytes() for name in ("1", "2")] == list(caught.value.evidence)
    world.leader.restart()


def test_longer_fork_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    other = [*HONEST[:4], recipe_entry("private"), recipe_entry("third")]
    with pytest.raises(LogForked):
        world.helper.cosign(forged(tmp_path, *other))


def test_fork_for_one_victim_is_caught_by_the_devices_check(world: World, tmp_path: Path) -> None:
    """Signed by the log, and by one dishonest aggregator; the honest one never sees it."""
    source = forged(tmp_path, *HONEST, recipe_entry("private"), name="checkpoint")
    folder = tmp_path / "forged"
    with pytest.raises(LogSignatureInvalid, match="leader"):
        device_reads(source)
    proof = ListProof.parse((folder / PROOF).read_bytes())
    line = identity("leader").sign(proof.signed.checkpoint, NOW + 10)
    one_sided = replace(proof, signed=proof.signed.with_cosigner(line))
    (folder / PROOF).write_bytes(one_sided.encode())
    with pytest.raises(LogSignatureInvalid, match="helper"):
        device_reads(source)


def test_fork_is_caught_by_the_auditor_who_kept_a_checkpoint(world: World, tmp_path: Path) -> None:
    """Even if both aggregators collude with the registry."""
    kept = world.checkpoint()
    other = [*HONEST[:4], recipe_entry("private"), recipe_entry("third")]
    source = forged(tmp_path, *other, cosigned=True, name="checkpoint")
    audit(source, authority=authority())
    with pytest.raises(LogForked):
        audit(source, authority=authority(), earlier=[kept])


def test_forking_candidate_is_caught_by_the_auditor(world: World) -> None:
    other = [*HONEST[:4], recipe_entry("private"), recipe_entry("third")]
    proof = world.proof().encode()
    forge(world.public, [entry.encode() for entry in other], time=NOW + 10)
    (world.public / PROOF).write_bytes(proof)
    with pytest.raises(LogForked, match="candidate"):
        audit(world.source, authority=authority())


@pytest.mark.parametrize("shorter", [True, False])
def test_another_tree_for_devices_is_caught_by_the_auditor_and_the_monitor(
    world: World, tmp_path: Path, shorter: bool
) -> None:
    """Of another size than the one that everybody else is shown, older or newer."""
    other = [recipe_entry("private")] if shorter else [recipe_entry(f"r{n}") for n in range(9)]
    forged(tmp_path, *other, cosigned=True)
    (world.public / PROOF).write_bytes((tmp_path / "forged" / PROOF).read_bytes())
    size = world.proof().signed.checkpoint.size
    if not shorter:  # it serves the entries as well
        path = bundle_path(0, size)
        (world.public / path).write_bytes((tmp_path / "forged" / path).read_bytes())
    monitor = LogMonitor(world.source, authority=authority(), clock=world.clock)
    for look in (lambda: audit(world.source, authority=authority()), monitor.fetch_new):
        with pytest.raises(LogForked, match="devices are shown another log") as caught:
            look()
        for data in caught.value.evidence:
            SignedCheckpoint.parse(data).check_log(ORIGIN, [public("log")])


def test_devices_may_be_shown_an_older_or_a_newer_checkpoint(world: World) -> None:
    """A cache has it for some seconds, or a new one came while the log was read."""
    older, checkpoint = world.proof().encode(), world.checkpoint().encode()
    world.publish(recipe_entry("third"))
    monitor = LogMonitor(world.source, authority=authority(), clock=world.clock)
    newer, newest = world.proof().encode(), world.checkpoint().encode()
    for shown, proof in ((checkpoint, newer), (newest, older), (newest, newer)):
        (world.public / "checkpoint").write_bytes(shown)
        (world.public / PROOF).write_bytes(proof)
        audit(world.source, authority=authority())
        monitor.fetch_new()
    # Whatever it is, the log has to have signed it.
    forged_proof = replace(world.proof(), signed=world.proof().signed.checkpoint.sign(key("x")))
    (world.public / PROOF).write_bytes(forged_proof.encode())
    with pytest.raises(LogSignatureInvalid, match="no signature of the log"):
        audit(world.source, authority=authority())


def test_never_two_roots_for_one_size_even_after_a_restart(world: World, tmp_path: Path) -> None:
    world.leader.restart()
    other = [*HONEST[:4], recipe_entry("private")]
    with pytest.raises(LogForked):
        world.leader.cosign(forged(tmp_path, *other, time=NOW + 20))


# --- Another log ---------------------------------------------------------------------------------


@pytest.fixture
def staging(tmp_path: Path) -> World:
    """A second log with the same keys, each of its checkpoints honestly cosigned."""
    (tmp_path / "staging").mkdir()
    staging = World(tmp_path / "staging", origin="staging.example/log")
    staging.publish(LEADER_CONFIG, HELPER_CONFIG, FIRST, SECOND, recipe_entry("private"))
    return staging


def test_another_log_is_caught_by_the_devices_check(world: World, staging: World) -> None:
    assert device_reads(world.source)
    with pytest.raises(LogSignatureInvalid, match=r"this is the log staging.example/log, not"):
        device_reads(staging.source)
    # Its own devices believe it.
    own = trust("staging.example/log")
    read_current(staging.source, trust=own, clock=staging.clock)


def test_another_log_is_caught_by_the_auditor(world: World, staging: World) -> None:
    with pytest.raises(LogSignatureInvalid, match=r"this is the log staging.example/log, not"):
        audit(staging.source, authority=authority())
    audit(staging.source, authority=authority("staging.example/log"))
    audit(world.source, authority=authority())
    with pytest.raises(LogSignatureInvalid, match=r"this is the log staging.example/log, not"):
        audit(world.source, authority=authority(), earlier=[staging.checkpoint()])
    candidate = (staging.public / "candidate").read_bytes()
    (world.public / "candidate").write_bytes(candidate)
    with pytest.raises(LogSignatureInvalid, match=r"this is the log staging.example/log, not"):
        audit(world.source, authority=authority())


def test_another_log_is_caught_by_the_cosigner(world: World, staging: World) -> None:
    with pytest.raises(LogSignatureInvalid, match=r"this is the log staging.example/log, not"):
        world.leader.cosign(staging.source)


def test_another_log_is_not_adopted(world: World, staging: World, tmp_path: Path) -> None:
    with pytest.raises(LogSignatureInvalid, match=r"this is the log staging.example/log, not"):
        adopt_head(
            tmp_path / "adopted",
            identity("leader"),
            checkpoint=staging.checkpoint(),
            source=staging.source,
        )


def test_policies_of_two_logs_are_not_taken_together() -> None:
    with pytest.raises(InvalidInput, match=r"name different logs: registry.example/log, staging"):
        Authority.of([policy()], earlier=[policy("staging.example/log")])


# --- Withholding ---------------------------------------------------------------------------------


def test_withheld_entry_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    third = recipe_entry("third")
    source = forged(tmp_path, *HONEST, third)
    (tmp_path / "forged" / body_path(third.body_digest)).unlink()
    with pytest.raises(LogWithheld, match="body/"):
        world.leader.cosign(source)


def test_withheld_tile_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    source = forged(tmp_path, *HONEST, recipe_entry("third"))
    shutil.rmtree(tmp_path / "forged" / "tile")
    with pytest.raises(LogWithheld, match="tile/"):
        world.leader.cosign(source)


def test_exchanged_body_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    third = recipe_entry("third")
    source = forged(tmp_path, *HONEST, third)
    path = tmp_path / "forged" / body_path(third.body_digest)
    path.write_bytes(body_of(recipe_entry("fakes")).jws)
    with pytest.raises(LogWithheld, match="not the body with that digest"):
        world.leader.cosign(source)


def test_withheld_body_is_caught_by_the_devices_check(world: World) -> None:
    (world.public / body_path(FIRST.body_digest)).unlink()
    with pytest.raises(LogWithheld, match="body/"):
        device_reads(world.source)


def test_exchanged_body_is_caught_by_the_devices_check(world: World) -> None:
    path = world.public / body_path(FIRST.body_digest)
    for other, why in (("other", "not the body with that digest"), ("longer", "longer than the")):
        path.write_bytes(body_of(recipe_entry(other)).jws)
        with pytest.raises(LogWithheld, match=why):
            device_reads(world.source)


def test_withheld_entry_is_caught_by_the_auditor(world: World) -> None:
    for path in (body_path(LEADER_CONFIG.address), "tile/entries/000.p/6", "tile/0/000.p/6"):
        data = (world.public / path).read_bytes()
        (world.public / path).unlink()
        with pytest.raises(LogWithheld, match=path):
            audit(world.source, authority=authority())
        (world.public / path).write_bytes(data)
    audit(world.source, authority=authority())


def test_withheld_revocation_is_caught_by_the_devices_check(world: World) -> None:
    """Going on with an old checkpoint hides a revocation only until it is too old."""
    before = (world.public / PROOF).read_bytes()
    world.publish(revocation("author"))
    assert device_reads(world.source) == []
    (world.public / PROOF).write_bytes(before)
    with pytest.raises(LogRewound):
        device_reads(world.source, not_before=NOW + 3)
    # A device that was never shown the newer one: until the policy's limit, and not longer.
    assert device_reads(world.source) != []
    with pytest.raises(CheckpointTime):
        device_reads(world.source, now=NOW + 3 * DAY)


# --- Rewinding -----------------------------------------------------------------------------------


def test_rewind_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    with pytest.raises(LogRewound, match="had 6 entries and now shows 4"):
        world.leader.cosign(forged(tmp_path, *HONEST[:3]))


@pytest.mark.parametrize("offset", [-1, 0])
def test_second_list_of_one_second_is_caught_by_the_cosigner(
    world: World, tmp_path: Path, offset: int
) -> None:
    """Or one of an earlier time: the later list is the newer one, whatever else was logged."""
    revoked = [*HONEST, revocation("author")]
    with pytest.raises(EntryRefused, match="is not after"):
        world.leader.cosign(
            forged(tmp_path, *revoked, time=NOW + 2 + offset, list_digest=bytes(32))
        )


def test_rewind_within_a_second_is_caught_by_the_devices_check(
    world: World, tmp_path: Path
) -> None:
    """Two checkpoints of one second, whoever cosigned them: the smaller one does not come back."""
    time = NOW + 2
    revoked = [*HONEST, revocation("author")]
    source = forged(
        tmp_path, *revoked, time=time + 1, cosigned=True, cosigned_at=time, name="checkpoint"
    )
    root = SignedCheckpoint.parse((tmp_path / "forged/checkpoint").read_bytes()).checkpoint.root
    assert device_reads(source, not_before=time, not_smaller=6) == []
    assert device_reads(source, not_before=time, not_smaller=8, root=root) == []
    with pytest.raises(LogRewound, match="8 entries"):
        device_reads(world.source, not_before=time, not_smaller=8, root=root)


def test_fork_of_the_same_size_is_caught_by_the_devices_check(world: World, tmp_path: Path) -> None:
    """Even if both aggregators sign both trees: a device sees one of them."""
    other = [*HONEST[:4], recipe_entry("private")]
    source = forged(tmp_path, *other, cosigned=True, name="checkpoint")
    root = world.checkpoint().checkpoint.root
    assert device_reads(world.source, not_smaller=6, root=root)
    with pytest.raises(LogForked, match="two different logs"):
        device_reads(source, not_smaller=6, root=root)


def test_second_list_of_one_second_is_caught_by_the_auditor(world: World, tmp_path: Path) -> None:
    kept = world.checkpoint()
    audit(world.source, authority=authority(), earlier=[kept])
    more = [*(entry.encode() for entry in HONEST), revocation("author").encode()]
    for folder, name in ((tmp_path / "forged", "checkpoint"), (world.public, "candidate")):
        source = forge(folder, more, time=NOW + 2, list_digest=bytes(32), cosigned=True, name=name)
        with pytest.raises(EntryRefused, match="is not after"):
            audit(source, authority=authority(), earlier=[kept])


def test_rewind_is_caught_by_the_devices_check(world: World) -> None:
    accepted = NOW + 2
    assert device_reads(world.source, not_before=accepted)
    with pytest.raises(LogRewound):
        device_reads(world.source, not_before=accepted + 1)


def test_rewind_is_caught_by_the_auditor_who_kept_a_checkpoint(
    world: World, tmp_path: Path
) -> None:
    kept = world.checkpoint()
    source = forged(tmp_path, *HONEST[:3], cosigned=True, name="checkpoint")
    with pytest.raises(LogRewound):
        audit(source, authority=authority(), earlier=[kept])


def test_rewinding_candidate_is_caught_by_the_auditor(world: World, tmp_path: Path) -> None:
    proof = world.proof().encode()
    forge(world.public, [entry.encode() for entry in HONEST[:3]], time=NOW + 10)
    (world.public / PROOF).write_bytes(proof)
    with pytest.raises(LogRewound, match="candidate"):
        audit(world.source, authority=authority())


# --- Reordering ----------------------------------------------------------------------------------


def test_reordering_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    first, second, *rest = HONEST
    with pytest.raises(LogForked):
        world.leader.cosign(forged(tmp_path, second, first, *rest))


def test_reordering_is_caught_by_the_auditor(world: World) -> None:
    """Tiles in another order than the signed one."""
    tile = world.public / "tile/0/000.p/6"
    data = tile.read_bytes()
    tile.write_bytes(data[32:64] + data[:32] + data[64:])
    with pytest.raises(LogWithheld, match="not the tile of the log's entries"):
        audit(world.source, authority=authority())


def test_reordered_bundle_is_caught_by_the_auditor(world: World) -> None:
    first, second, *rest = HONEST
    bundle = encode_bundle(entry.encode() for entry in (second, first, *rest))
    (world.public / "tile/entries/000.p/6").write_bytes(bundle)
    with pytest.raises(LogForked):
        audit(world.source, authority=authority())


@pytest.mark.parametrize("cut", [1, 3, 200])
def test_a_bundle_that_is_cut_off_is_noticed(world: World, cut: int) -> None:
    path = world.public / "tile/entries/000.p/6"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(LogWithheld, match="tile/entries"):
        audit(world.source, authority=authority())
