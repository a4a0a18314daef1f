"""A registry that lies about what it holds, one way in each test, and who catches it.

The forger holds the log's own key and writes whatever it likes (`logworld.forge`). Each test says
in its name who catches it: the cosigner, the device's check, or the auditor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chorister.clock import SettableClock
from chorister.errors import (
    CheckpointTime,
    DuplicateEntry,
    EntryRefused,
    ForeignHPKEConfig,
    LogRewound,
    LogSignatureInvalid,
    LogWithheld,
    NotAuthorized,
    RecipeError,
    WrongList,
)
from chorister.policy.witnesses import parse_witness_policy
from chorister.transparency.auditor import audit
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.client import PROOF, FolderSource, body_path, list_path
from chorister.transparency.entries import HPKEConfigEntry, ListEntry, open_recipe
from chorister.transparency.reader import read_current
from chorister.transparency.state import CurrentList, ListedRecipe
from chorister.transparency.tiles import Source
from chorister.transparency.trust import Trust
from tests.logworld import (
    ANALYSIS,
    DAY,
    HELPER_NAME,
    LEADER,
    NOW,
    OTHER_ANALYSIS,
    World,
    authority,
    forge,
    hpke_entry,
    identity,
    key,
    public,
    recipe_entry,
    revocation,
    trust,
    vkey,
)
from tests.transparency.lies import (
    FIRST,
    HELPER_CONFIG,
    HONEST,
    LEADER_CONFIG,
    SECOND,
    a_list,
    device_reads,
    forged,
    served,
)

# --- Keys in an aggregator's name ----------------------------------------------------------------


def test_foreign_hpke_config_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    """Signed even with the aggregator's own (stolen) key."""
    foreign = hpke_entry(LEADER, b"the registry holds the private half")
    source = forged(tmp_path, *HONEST, foreign)
    with pytest.raises(ForeignHPKEConfig, match="stolen"):
        world.leader.cosign(source)
    world.helper.cosign(source)  # Which is why both have to sign.


def test_hpke_config_by_a_stranger_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    with pytest.raises(ForeignHPKEConfig):
        world.leader.cosign(
            forged(tmp_path, *HONEST, hpke_entry(LEADER, b"foreign", by="stranger"))
        )


def test_own_new_hpke_config_is_cosigned(world: World, tmp_path: Path) -> None:
    world.leader.configs.add(b"rotated")
    world.leader.cosign(forged(tmp_path, *HONEST, hpke_entry(LEADER, b"rotated")))


def test_foreign_hpke_config_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    """Both aggregators asleep: the key that signed it is still not one of the policy's."""
    entries = [*HONEST, hpke_entry(LEADER, b"foreign", by="stranger")]
    source = forged(tmp_path, *entries, cosigned=True, name="checkpoint")
    with pytest.raises(NotAuthorized, match="unknown key"):
        device_reads(source)


def test_foreign_hpke_config_is_caught_by_the_auditor(tmp_path: Path) -> None:
    entries = [*HONEST, hpke_entry(LEADER, b"foreign", by="stranger")]
    source = forged(tmp_path, *entries, cosigned=True, name="checkpoint")
    with pytest.raises(NotAuthorized, match="entry 6"):
        audit(source, authority=authority())


def with_config(tmp_path: Path, leader_config: HPKEConfigEntry) -> Source:
    """A log whose list calls this entry the leader's config."""
    listed = a_list(leader_config=leader_config)
    return served(tmp_path, leader_config, HELPER_CONFIG, listed=listed)


def test_unsigned_hpke_config_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    unsigned = replace(hpke_entry(LEADER, b"foreign"), signature=bytes(64))
    with pytest.raises(LogSignatureInvalid):
        device_reads(with_config(tmp_path, unsigned))


@pytest.mark.parametrize(("start", "end"), [(NOW - DAY, NOW + 10), (NOW + 11, NOW + DAY)])
def test_invalid_hpke_config_is_caught_by_the_devices_check(
    tmp_path: Path, start: int, end: int
) -> None:
    config = hpke_entry(LEADER, not_before=start, not_after=end)
    with pytest.raises(WrongList, match="not valid"):
        device_reads(with_config(tmp_path, config))


def test_hpke_config_for_another_name_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    config = hpke_entry("https://leader.example.org/test/", by="leader")
    with pytest.raises(WrongList, match="not an HPKE config of"):
        device_reads(with_config(tmp_path, config))


def test_missing_hpke_config_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    source = forged(tmp_path, HELPER_CONFIG, FIRST, cosigned=True, name="checkpoint")
    with pytest.raises(LogWithheld, match="no HPKE config"):
        device_reads(source)


def test_recipe_that_is_none_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    """It is read as one later, and its signature then fails: see `tests/device`."""
    data = LEADER_CONFIG.encode()
    recipe = ListedRecipe(ANALYSIS, public("author"), LEADER_CONFIG.address, len(data))
    source = served(tmp_path, *HONEST[:2], listed=a_list(recipe))
    (body,) = device_reads(source)
    with pytest.raises(RecipeError):
        open_recipe(body)


# --- Lists ---------------------------------------------------------------------------------------


def a_wrong_list() -> CurrentList:
    """One that leaves out a recipe, so that one victim alone would be asked another."""
    return a_list(ListedRecipe.of(FIRST))


def test_wrong_list_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    with pytest.raises(WrongList):
        world.leader.cosign(forged(tmp_path, *HONEST, list_digest=a_wrong_list().digest))


def test_wrong_list_is_caught_by_the_devices_check(world: World) -> None:
    digest = world.proof().entry.digest
    for shown in (a_wrong_list().encode(), b"not a list", b""):
        (world.public / list_path(digest)).write_bytes(shown)
        with pytest.raises(WrongList):
            device_reads(world.source)


def test_wrong_list_is_caught_by_the_auditor(world: World, tmp_path: Path) -> None:
    source = served(tmp_path, *HONEST, listed=a_wrong_list())
    assert len(device_reads(source)) == 1  # A device has no tree: this needs both aggregators.
    with pytest.raises(WrongList, match="follows from the entries"):
        audit(source, authority=authority())
    (world.public / list_path(world.proof().entry.digest)).unlink()
    with pytest.raises(LogWithheld, match="list/"):
        audit(world.source, authority=authority())


def test_candidate_with_a_wrong_list_is_caught_by_the_auditor(world: World) -> None:
    entries = [entry.encode() for entry in HONEST]
    forge(world.public, entries, time=NOW + 10, list_digest=a_wrong_list().digest)
    with pytest.raises(WrongList, match="entry 6"):
        audit(world.source, authority=authority())


def test_expired_recipe_left_in_the_list_is_caught_by_the_cosigner(
    world: World, tmp_path: Path
) -> None:
    late = NOW + 8 * DAY
    world.clock.set(late)
    stale = world.proof().entry.digest
    with pytest.raises(WrongList, match="follows from the entries"):
        world.leader.cosign(forged(tmp_path, *HONEST, time=late, list_digest=stale))
    # Nor with the time at which it was right, nor the same tree once more.
    with pytest.raises(WrongList, match="out of date"):
        world.leader.cosign(forged(tmp_path, *HONEST, time=late - 2 * DAY))
    with pytest.raises(WrongList, match="out of date"):
        world.leader.cosign(world.source)
    world.leader.cosign(forged(tmp_path, *HONEST, time=late))


def test_a_key_that_expired_under_the_same_tree_is_caught_by_the_cosigner(
    world: World, tmp_path: Path
) -> None:
    """Nothing was logged since; time alone has changed what is current."""
    expires = NOW + 3600
    config = hpke_entry(LEADER, b"short", not_after=expires)
    world.leader.configs.add(b"short")
    source = forged(tmp_path, *HONEST, config)
    world.leader.cosign(source)
    world.clock.set(expires + 299)
    world.leader.cosign(source)
    world.clock.set(expires + 300)
    with pytest.raises(WrongList, match="out of date"):
        world.leader.cosign(source)


def test_a_last_leaf_that_is_no_list_is_caught_by_everyone(world: World, tmp_path: Path) -> None:
    for target in ("candidate", "checkpoint"):
        source = forged(
            tmp_path, *HONEST, recipe_entry("third"), closed=False, cosigned=True, name=target
        )
    with pytest.raises(WrongList, match="last entry is not a list"):
        world.leader.cosign(source)
    with pytest.raises(WrongList, match="last entry is not a list"):
        audit(source, authority=authority())
    with pytest.raises(LogWithheld, match=PROOF):
        device_reads(source)


def test_an_old_list_under_a_fresh_checkpoint_is_caught_by_the_devices_check(
    tmp_path: Path,
) -> None:
    """With a valid inclusion proof: it is in the tree, and all signatures are fresh."""
    for index in (3, 5):
        source = forged(
            tmp_path, *HONEST, revocation("author"), cosigned=True, name="checkpoint", index=index
        )
        with pytest.raises(WrongList, match=f"entry {index} of 8, not the last"):
            device_reads(source)


@pytest.mark.parametrize("offset", [-1, 0])
def test_a_list_that_is_not_later_is_caught_by_the_cosigner(
    world: World, tmp_path: Path, offset: int
) -> None:
    last = HONEST[-1]
    assert isinstance(last, ListEntry)
    digest = last.digest
    source = forged(tmp_path, *HONEST, time=last.time + offset, list_digest=digest)
    with pytest.raises(EntryRefused, match=r"is not after|repeats"):
        world.leader.cosign(source)


def test_collusion_of_both_aggregators_is_seen_by_witnesses_and_auditors(
    world: World, tmp_path: Path
) -> None:
    """A private list needs a private tree: k honest witnesses refuse it, an auditor sees it.

    Both aggregators sign a tree for one victim whose list leaves a question out. A witness saw
    the public tree and signs no other, so the victim's policy is not met; and if the registry
    shows the private tree to everybody, whoever audits it finds the wrong list in it.
    """
    source = served(tmp_path, *HONEST, listed=a_wrong_list())
    assert len(device_reads(source)) == 1
    with pytest.raises(LogSignatureInvalid, match="quorum two"):
        read_current(source, trust=witnessed_trust(2), clock=SettableClock(NOW + 10))
    with pytest.raises(WrongList, match="follows from the entries"):
        audit(source, authority=authority())
    # The public tree, which honest witnesses cosign, is accepted.
    proof = world.proof()
    for number in range(2):
        line = proof.signed.checkpoint.cosign(
            name=f"witness.example/{number}", key=key(f"witness {number}"), time=NOW
        )
        proof = replace(proof, signed=proof.signed.with_cosigner(line))
    (world.public / PROOF).write_bytes(proof.encode())
    read_current(world.source, trust=witnessed_trust(2), clock=world.clock)


def witnessed_trust(needed: int) -> Trust:
    """A policy that requires so many of three witnesses."""
    lines = [
        f"witness w{number} {vkey(f'witness.example/{number}', f'witness {number}')}"
        for number in range(3)
    ]
    lines += [f"group two {needed} w0 w1 w2", "quorum two"]
    return replace(trust(), witnesses=parse_witness_policy("\n".join(lines)))


# --- Time ----------------------------------------------------------------------------------------


def test_future_candidates_are_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    """Stale ones only if what they list has changed: see the lists above."""
    world.clock.advance(DAY)
    now = world.clock.now()
    with pytest.raises(CheckpointTime):
        world.leader.cosign(forged(tmp_path, *HONEST, time=now + 301))
    world.leader.cosign(forged(tmp_path, *HONEST, time=now + 300))


def test_a_clock_that_was_set_back_is_noticed_by_the_cosigner(world: World) -> None:
    world.clock.set(NOW - 10)
    with pytest.raises(CheckpointTime, match="set the clock"):
        world.leader.cosign(world.source)


def test_a_clock_that_jumps_ahead_is_noticed_by_the_cosigner(world: World) -> None:
    """It never signs an earlier time again: one of tomorrow would silence it for a day."""
    world.clock.jump(DAY)
    with pytest.raises(CheckpointTime, match="set ahead by 86400 s"):
        world.leader.cosign(world.source)
    world.clock.jump(-DAY)
    world.leader.cosign(world.source)
    world.clock.advance(DAY)
    world.publish()
    # A machine that starts with a clock far behind is right once its clock is set.
    world.clock.jump(-365 * DAY)
    for server in (world, world.leader, world.helper):
        server.restart()
    with pytest.raises(CheckpointTime, match="behind"):
        world.registry.issue()
    with pytest.raises(CheckpointTime, match="behind"):
        world.leader.cosign(world.source)
    world.clock.jump(365 * DAY)
    world.publish(recipe_entry("third"))


def test_stale_checkpoint_is_caught_by_the_devices_check(world: World) -> None:
    limit = trust().max_age
    published = NOW + 2
    assert device_reads(world.source, now=published + limit)
    with pytest.raises(CheckpointTime):
        device_reads(world.source, now=published + limit + 1)


def test_future_checkpoint_is_caught_by_the_devices_check(world: World) -> None:
    limit = trust().max_age
    published = NOW + 2
    with pytest.raises(CheckpointTime):
        device_reads(world.source, now=published - limit - 1)


@pytest.mark.parametrize("offset", [-301, 3 * DAY])
def test_stale_and_future_checkpoints_are_caught_by_the_auditor(world: World, offset: int) -> None:
    clock = SettableClock(NOW + 2 + offset)
    with pytest.raises(CheckpointTime):
        audit(world.source, authority=authority(), clock=clock)


@pytest.mark.parametrize("side", ["leader", "helper"])
def test_a_time_forged_by_one_aggregator_is_caught_by_the_devices_check(
    world: World, side: str
) -> None:
    """Forward or back, by more than the policy allows; and by less, the earlier time counts."""
    proof, limit = world.proof(), trust().max_age

    def shown(time: int) -> None:
        line = identity(side).sign(proof.signed.checkpoint, time)
        forged = replace(proof, signed=proof.signed.with_cosigner(line))
        (world.public / PROOF).write_bytes(forged.encode())

    now = NOW + 10
    for time in (now + limit + 1, now - limit - 1):
        shown(time)
        with pytest.raises(CheckpointTime):
            device_reads(world.source, now=now)
    for time in (now + limit, now - DAY // 2):
        shown(time)
        assert device_reads(world.source, now=now, not_before=min(time, NOW + 2))
        with pytest.raises(LogRewound):
            device_reads(world.source, now=now, not_before=min(time, NOW + 2) + 1)


# --- Entries that break the rules ----------------------------------------------------------------

BAD_ENTRIES: dict[str, tuple[bytes, type[Exception]]] = {
    "repeated": (HONEST[2].encode(), DuplicateEntry),
    "altered recipe": (
        replace(recipe_entry("x"), signer=public("other author")).encode(),
        EntryRefused,
    ),
    "noise": (b"\x02\x09noise", EntryRefused),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_entry_against_the_rules_is_caught_by_the_cosigner_and_the_auditor(
    world: World, tmp_path: Path, name: str
) -> None:
    bad, error = BAD_ENTRIES[name]
    entries = [*(entry.encode() for entry in HONEST), bad]
    digest = world.proof().entry.digest
    for target in ("candidate", "checkpoint"):
        source = forge(
            tmp_path / "forged",
            entries,
            time=NOW + 10,
            list_digest=digest,
            cosigned=True,
            name=target,
        )
    with pytest.raises(error, match="entry 6"):
        world.leader.cosign(source)
    with pytest.raises(error, match="entry 6"):
        audit(source, authority=authority())


def test_recipe_by_a_revoked_key_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    entries = [*HONEST, revocation("author", by="log"), recipe_entry("late")]
    digest = world.proof().entry.digest
    with pytest.raises(EntryRefused, match="revoked"):
        world.leader.cosign(forged(tmp_path, *entries, list_digest=digest))


def test_unlisted_author_is_caught_by_the_auditor(tmp_path: Path) -> None:
    entries = [*HONEST, recipe_entry("x", author="other author")]
    source = forged(tmp_path, *entries, cosigned=True, name="checkpoint")
    with pytest.raises(NotAuthorized, match="entry 6"):
        audit(source, authority=authority())


def test_an_entry_that_lies_about_its_body_is_caught_by_the_cosigner_and_the_auditor(
    world: World, tmp_path: Path
) -> None:
    """Signed by the author: an auditor who reads entries alone would be misled."""
    lying = replace(recipe_entry("third"), closes=NOW + 30 * DAY).signed(key("author"))
    for target in ("candidate", "checkpoint"):
        source = forged(tmp_path, *HONEST, lying, cosigned=True, name=target)
    with pytest.raises(EntryRefused, match="does not match the recipe"):
        world.leader.cosign(source)
    with pytest.raises(EntryRefused, match="does not match the recipe"):
        audit(source, authority=authority())


# --- Names and keys ------------------------------------------------------------------------------


def test_another_logs_checkpoint_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    source = forged(tmp_path, *HONEST)
    path = tmp_path / "forged" / "candidate"
    checkpoint = SignedCheckpoint.parse(path.read_bytes()).checkpoint
    other = type(checkpoint)(
        origin="registry.example/other",
        size=checkpoint.size,
        root=checkpoint.root,
    )
    path.write_bytes(other.sign(key("log")).encode())
    with pytest.raises(LogSignatureInvalid, match="other"):
        world.leader.cosign(source)
    path.write_bytes(checkpoint.sign(key("stranger")).encode())
    with pytest.raises(LogSignatureInvalid, match="no signature"):
        world.leader.cosign(source)


def test_one_aggregator_cannot_sign_for_both(world: World) -> None:
    """The leader's cosignature under the helper's name."""
    signed = world.checkpoint()
    line = signed.checkpoint.cosign(name=HELPER_NAME, key=key("leader"), time=NOW)
    ours = [each for each in signed.note.signatures if each.name != HELPER_NAME]
    forged = replace(signed, note=replace(signed.note, signatures=(*ours, line)))
    with pytest.raises(LogSignatureInvalid, match="helper"):
        trust().check_signatures(forged)


def test_a_device_fetches_the_bodies_of_its_analyses_and_no_more(world: World) -> None:
    other = recipe_entry("other", author="other author", analysis=OTHER_ANALYSIS)
    world.publish(other)
    fetched: list[str] = []

    class Watched(FolderSource):
        def read(self, path: str, *, limit: int) -> bytes:
            fetched.append(path)
            return super().read(path, limit=limit)

    device_reads(Watched(world.public))
    bodies = {path for path in fetched if path.startswith("body/")}
    wanted = [LEADER_CONFIG.address, HELPER_CONFIG.address, FIRST.body_digest, SECOND.body_digest]
    assert bodies == {body_path(address) for address in wanted}
    assert {path.split("/")[0] for path in fetched} == {PROOF, "list", "body"}
