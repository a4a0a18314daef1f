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
    LogSignatureInvalid,
    LogWithheld,
    NotAuthorized,
    WrongList,
)
from chorister.transparency.auditor import audit
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.client import FolderSource, Source, entry_path, list_path
from chorister.transparency.entries import HPKEConfigEntry, RecipeEntry
from chorister.transparency.reader import check_cosigned
from chorister.transparency.state import CurrentList, ListedRecipe
from tests.logworld import (
    ANALYSIS,
    DAY,
    HELPER,
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
)
from tests.transparency.lies import HONEST, device_reads, forged

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
    with pytest.raises(NotAuthorized, match="entry 4"):
        audit(source, authority=authority())


def served(tmp_path: Path, leader_config: HPKEConfigEntry) -> Source:
    """A log, cosigned by both, whose list calls this entry the leader's config."""
    listed = CurrentList.of(
        hpke_configs=[(LEADER, leader_config.address), (HELPER, HONEST[1].address)], recipes=[]
    )
    return forged(
        tmp_path,
        leader_config,
        HONEST[1],
        list_digest=listed.digest,
        served_list=listed.encode(),
        cosigned=True,
        name="checkpoint",
    )


def test_unsigned_hpke_config_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    unsigned = replace(hpke_entry(LEADER, b"foreign"), signature=bytes(64))
    with pytest.raises(LogSignatureInvalid):
        device_reads(served(tmp_path, unsigned))


@pytest.mark.parametrize(("start", "end"), [(NOW - DAY, NOW + 10), (NOW + 11, NOW + DAY)])
def test_invalid_hpke_config_is_caught_by_the_devices_check(
    tmp_path: Path, start: int, end: int
) -> None:
    config = hpke_entry(LEADER, not_before=start, not_after=end)
    with pytest.raises(WrongList, match="not valid"):
        device_reads(served(tmp_path, config))


def test_hpke_config_for_another_name_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    config = hpke_entry("https://leader.example.org/test/", by="leader")
    with pytest.raises(WrongList, match="not an HPKE config of"):
        device_reads(served(tmp_path, config))


def test_missing_hpke_config_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    source = forged(tmp_path, *HONEST[1:], cosigned=True, name="checkpoint")
    with pytest.raises(LogWithheld, match="no HPKE config"):
        device_reads(source)


def test_recipe_that_is_none_is_caught_by_the_devices_check(tmp_path: Path) -> None:
    configs = [(LEADER, HONEST[0].address), (HELPER, HONEST[1].address)]
    recipe = ListedRecipe(ANALYSIS, public("author"), HONEST[0].address, len(HONEST[0].encode()))
    listed = CurrentList.of(hpke_configs=configs, recipes=[recipe])
    source = forged(
        tmp_path,
        *HONEST[:2],
        list_digest=listed.digest,
        served_list=listed.encode(),
        cosigned=True,
        name="checkpoint",
    )
    with pytest.raises(WrongList, match="but it is not"):
        device_reads(source)


# --- Lists ---------------------------------------------------------------------------------------


def a_wrong_list() -> CurrentList:
    """One that leaves out a recipe, so that one victim alone would be asked another."""
    return CurrentList.of(
        hpke_configs=[(LEADER, HONEST[0].address), (HELPER, HONEST[1].address)],
        recipes=[ListedRecipe.of(ANALYSIS, recipe_entry("first"))],
    )


def test_wrong_list_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    with pytest.raises(WrongList):
        world.leader.cosign(forged(tmp_path, *HONEST, list_digest=a_wrong_list().digest))


def test_wrong_list_is_caught_by_the_devices_check(world: World) -> None:
    digest = world.checkpoint().checkpoint.list_digest
    for served in (a_wrong_list().encode(), b"not a list", b""):
        (world.public / list_path(digest)).write_bytes(served)
        with pytest.raises(WrongList):
            device_reads(world.source)


def test_wrong_list_is_caught_by_the_auditor(world: World, tmp_path: Path) -> None:
    served = a_wrong_list()
    source = forged(
        tmp_path,
        *HONEST,
        list_digest=served.digest,
        served_list=served.encode(),
        cosigned=True,
        name="checkpoint",
    )
    assert len(device_reads(source)) == 1  # A device has no tree: this needs both aggregators.
    with pytest.raises(WrongList, match="follows from the entries"):
        audit(source, authority=authority())
    (world.public / list_path(world.checkpoint().checkpoint.list_digest)).unlink()
    with pytest.raises(LogWithheld, match="list/"):
        audit(world.source, authority=authority())


def test_candidate_with_a_wrong_list_is_caught_by_the_auditor(world: World) -> None:
    entries = [entry.encode() for entry in HONEST]
    forge(world.public, entries, time=NOW + 10, list_digest=a_wrong_list().digest)
    with pytest.raises(WrongList, match="candidate"):
        audit(world.source, authority=authority())


def test_expired_recipe_left_in_the_list_is_caught_by_the_cosigner(
    world: World, tmp_path: Path
) -> None:
    late = NOW + 8 * DAY
    world.clock.set(late)
    stale = world.checkpoint().checkpoint.list_digest
    with pytest.raises(WrongList):
        world.leader.cosign(forged(tmp_path, *HONEST, time=late, list_digest=stale))
    world.leader.cosign(forged(tmp_path, *HONEST, time=late))


# --- Time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-301, 301])
def test_stale_and_future_candidates_are_caught_by_the_cosigner(
    world: World, tmp_path: Path, offset: int
) -> None:
    world.clock.advance(DAY)
    now = world.clock.now()
    with pytest.raises(CheckpointTime):
        world.leader.cosign(forged(tmp_path, *HONEST, time=now + offset))
    within = offset - (1 if offset > 0 else -1)
    world.leader.cosign(forged(tmp_path, *HONEST, time=now + within))


def test_stale_checkpoint_is_caught_by_the_devices_check(world: World) -> None:
    limit = trust().max_age
    published = world.checkpoint().checkpoint.time
    assert device_reads(world.source, now=published + limit)
    with pytest.raises(CheckpointTime):
        device_reads(world.source, now=published + limit + 1)


def test_future_checkpoint_is_caught_by_the_devices_check(world: World) -> None:
    limit = trust().max_age
    published = world.checkpoint().checkpoint.time
    with pytest.raises(CheckpointTime):
        device_reads(world.source, now=published - limit - 1)


@pytest.mark.parametrize("offset", [-301, 3 * DAY])
def test_stale_and_future_checkpoints_are_caught_by_the_auditor(world: World, offset: int) -> None:
    clock = SettableClock(world.checkpoint().checkpoint.time + offset)
    with pytest.raises(CheckpointTime):
        audit(world.source, authority=authority(), clock=clock)


def test_cosignature_made_at_another_time_is_caught_by_the_devices_check(world: World) -> None:
    signed = world.checkpoint()
    late = identity("leader").sign(signed.checkpoint, signed.checkpoint.time + 601)
    with pytest.raises(LogSignatureInvalid, match="no honest cosigner"):
        check_cosigned(signed.with_cosigner(late), trust())


# --- Entries that break the rules ----------------------------------------------------------------

BAD_ENTRIES: dict[str, tuple[bytes, type[Exception]]] = {
    "repeated": (HONEST[2].encode(), DuplicateEntry),
    "altered recipe": (
        RecipeEntry(author_key=public("other author"), jws=recipe_entry("x").jws).encode(),
        EntryRefused,
    ),
    "noise": (b"\x01\x09noise", EntryRefused),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_entry_against_the_rules_is_caught_by_the_cosigner_and_the_auditor(
    world: World, tmp_path: Path, name: str
) -> None:
    bad, error = BAD_ENTRIES[name]
    entries = [*(entry.encode() for entry in HONEST), bad]
    digest = world.checkpoint().checkpoint.list_digest
    for target in ("candidate", "checkpoint"):
        source = forge(
            tmp_path / "forged",
            entries,
            time=NOW + 10,
            list_digest=digest,
            cosigned=True,
            name=target,
        )
    with pytest.raises(error, match="entry 4"):
        world.leader.cosign(source)
    with pytest.raises(error, match="entry 4"):
        audit(source, authority=authority())


def test_recipe_by_a_revoked_key_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    entries = [*HONEST, revocation("author", by="log"), recipe_entry("late")]
    digest = world.checkpoint().checkpoint.list_digest
    with pytest.raises(EntryRefused, match="revoked"):
        world.leader.cosign(forged(tmp_path, *entries, list_digest=digest))


def test_unlisted_author_is_caught_by_the_auditor(tmp_path: Path) -> None:
    entries = [*HONEST, recipe_entry("x", author="other author")]
    source = forged(tmp_path, *entries, cosigned=True, name="checkpoint")
    with pytest.raises(NotAuthorized, match="entry 4"):
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
        time=checkpoint.time,
        list_digest=checkpoint.list_digest,
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
    line = signed.checkpoint.cosign(name=HELPER, key=key("leader"), time=NOW)
    with pytest.raises(LogSignatureInvalid, match="helper"):
        check_cosigned(signed.with_cosigner(line), trust())


def test_a_device_fetches_the_bodies_of_its_analyses_and_no_more(world: World) -> None:
    other = recipe_entry("other", author="other author", analysis=OTHER_ANALYSIS)
    world.publish(other)
    fetched: list[str] = []

    class Watched(FolderSource):
        def read(self, path: str, *, limit: int) -> bytes:
            fetched.append(path)
            return super().read(path, limit=limit)

    device_reads(Watched(world.public))
    bodies = {path for path in fetched if path.startswith("entry/")}
    assert bodies == {entry_path(entry.address) for entry in HONEST}
    assert {path.split("/")[0] for path in fetched} == {"checkpoint", "list", "entry"}
