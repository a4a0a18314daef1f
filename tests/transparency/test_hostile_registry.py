"""A registry that lies, one way in each test, and who catches it.

The forger holds the log's own key and writes whatever it likes (`logworld.forge`). Each test says
in its name who catches it: the cosigner, the device's check, or the auditor.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chorister.clock import SettableClock
from chorister.errors import (
    CheckpointTime,
    DuplicateEntry,
    EntryRefused,
    ForeignHPKEConfig,
    LogForked,
    LogRewound,
    LogSignatureInvalid,
    LogWithheld,
    NotAuthorized,
    WrongList,
)
from chorister.transparency.auditor import audit
from chorister.transparency.checkpoint import SignedCheckpoint
from chorister.transparency.entries import Entry, RecipeEntry
from chorister.transparency.listing import CurrentList
from chorister.transparency.reader import accept_checkpoint, read_current
from chorister.transparency.sources import FolderSource, Source, entry_path, list_path
from tests.logworld import (
    ANALYSIS,
    DAY,
    HELPER,
    LEADER,
    NOW,
    ORIGIN,
    OTHER_ANALYSIS,
    World,
    a_world,
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

HONEST: list[Entry] = [
    hpke_entry(LEADER),
    hpke_entry(HELPER),
    recipe_entry("first"),
    recipe_entry("second"),
]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return a_world(tmp_path)


def forged(tmp_path: Path, *entries: Entry, time: int = NOW + 10, **options: object) -> Source:
    encoded = [entry.encode() for entry in entries]
    return forge(tmp_path / "forged", encoded, time=time, **options)  # type: ignore[arg-type]


def device_reads(source: Source, now: int = NOW + 10, not_before: int = 0) -> list[RecipeEntry]:
    current = read_current(
        source,
        trust=trust(),
        clock=SettableClock(now),
        analyses={ANALYSIS},
        not_before=not_before,
    )
    return list(current.recipes)


# --- First of all, the honest one ----------------------------------------------------------------


def test_honest_registry_passes_everyone(world: World) -> None:
    assert device_reads(world.source) == sorted(HONEST[2:], key=lambda entry: entry.address)
    found = audit(world.source, authority=authority(), clock=world.clock)
    assert [logged.entry for logged in found.entries] == HONEST
    assert [signed.recipe.id for signed in world.leader.accepted] == ["first", "second"]


def test_honest_extension_is_cosigned(world: World, tmp_path: Path) -> None:
    world.leader.cosign(forged(tmp_path, *HONEST, recipe_entry("third")))
    assert world.leader.accepted[-1].recipe.id == "third"


# --- Forks ---------------------------------------------------------------------------------------


def test_fork_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    """Another history of the same size: a private recipe in the place of a public one."""
    other = [*HONEST[:3], recipe_entry("private")]
    with pytest.raises(LogForked) as caught:
        world.leader.cosign(forged(tmp_path, *other))
    # What remains is proof: two roots for one size, both signed by the log.
    seen, shown = (SignedCheckpoint.parse(data) for data in caught.value.evidence)
    for signed in (seen, shown):
        signed.note.check_signature(ORIGIN, [public("log")])
    assert seen.checkpoint.size == shown.checkpoint.size
    assert seen.checkpoint.root != shown.checkpoint.root


def test_longer_fork_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    other = [*HONEST[:3], recipe_entry("private"), recipe_entry("third")]
    with pytest.raises(LogForked):
        world.helper.cosign(forged(tmp_path, *other))


def test_fork_for_one_victim_is_caught_by_the_devices_check(world: World, tmp_path: Path) -> None:
    """Signed by the log, and by one dishonest aggregator; the honest one never sees it."""
    source = forged(tmp_path, *HONEST, recipe_entry("private"), name="checkpoint")
    folder = tmp_path / "forged"
    with pytest.raises(LogSignatureInvalid, match="leader"):
        device_reads(source)
    signed = SignedCheckpoint.parse((folder / "checkpoint").read_bytes())
    one_sided = signed.with_cosigner(identity("leader").sign(signed.checkpoint, NOW + 10))
    (folder / "checkpoint").write_bytes(one_sided.encode())
    with pytest.raises(LogSignatureInvalid, match="helper"):
        device_reads(source)


def test_fork_is_caught_by_the_auditor_who_kept_a_checkpoint(world: World, tmp_path: Path) -> None:
    """Even if both aggregators collude with the registry."""
    kept = world.checkpoint()
    other = [*HONEST[:3], recipe_entry("private"), recipe_entry("third")]
    source = forged(tmp_path, *other, cosigned=True, name="checkpoint")
    audit(source, authority=authority())
    with pytest.raises(LogForked):
        audit(source, authority=authority(), earlier=[kept])


def test_never_two_roots_for_one_size_even_after_a_restart(world: World, tmp_path: Path) -> None:
    world.leader.restart()
    other = [*HONEST[:3], recipe_entry("private")]
    with pytest.raises(LogForked):
        world.leader.cosign(forged(tmp_path, *other, time=NOW + 20))


# --- Withholding ---------------------------------------------------------------------------------


def test_withheld_entry_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    third = recipe_entry("third")
    source = forged(tmp_path, *HONEST, third)
    (tmp_path / "forged" / entry_path(third.address)).unlink()
    with pytest.raises(LogWithheld, match="entry/"):
        world.leader.cosign(source)


def test_withheld_tile_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    source = forged(tmp_path, *HONEST, recipe_entry("third"))
    shutil.rmtree(tmp_path / "forged" / "tile")
    with pytest.raises(LogWithheld, match="tile/"):
        world.leader.cosign(source)


def test_exchanged_body_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    third = recipe_entry("third")
    source = forged(tmp_path, *HONEST, third)
    path = tmp_path / "forged" / entry_path(third.address)
    path.write_bytes(recipe_entry("private").encode())
    with pytest.raises(LogWithheld, match="not the entry with that hash"):
        world.leader.cosign(source)


def test_withheld_body_is_caught_by_the_devices_check(world: World) -> None:
    (world.public / entry_path(HONEST[2].address)).unlink()
    with pytest.raises(LogWithheld, match="entry/"):
        device_reads(world.source)


def test_exchanged_body_is_caught_by_the_devices_check(world: World) -> None:
    (world.public / entry_path(HONEST[2].address)).write_bytes(recipe_entry("private").encode())
    with pytest.raises(LogWithheld, match="not the entry with that hash"):
        device_reads(world.source)


def test_withheld_entry_is_caught_by_the_auditor(world: World) -> None:
    (world.public / entry_path(HONEST[0].address)).unlink()
    with pytest.raises(LogWithheld, match="entry/"):
        audit(world.source, authority=authority())


def test_withheld_revocation_is_caught_by_the_devices_check(world: World) -> None:
    """Going on with an old checkpoint hides a revocation only until it is too old."""
    before = (world.public / "checkpoint").read_bytes()
    world.publish(revocation("author"))
    assert device_reads(world.source) == []
    accepted = world.checkpoint().checkpoint.time
    (world.public / "checkpoint").write_bytes(before)
    with pytest.raises(LogRewound):
        device_reads(world.source, not_before=accepted)
    # A device that was never shown the newer one: until the policy's limit, and not longer.
    assert device_reads(world.source) != []
    with pytest.raises(CheckpointTime):
        device_reads(world.source, now=NOW + 3 * DAY)


# --- Rewinding -----------------------------------------------------------------------------------


def test_rewind_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    with pytest.raises(LogRewound, match="had 4 entries and now shows 3"):
        world.leader.cosign(forged(tmp_path, *HONEST[:3]))


def test_earlier_time_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    last = world.leader.cosigner.last.time
    with pytest.raises(LogRewound, match="before"):
        world.leader.cosign(forged(tmp_path, *HONEST, time=last - 1))


def test_rewind_is_caught_by_the_devices_check(world: World) -> None:
    accepted = world.checkpoint().checkpoint.time
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
    forge(world.public, [entry.encode() for entry in HONEST[:3]], time=NOW + 10)
    with pytest.raises(LogRewound, match="candidate"):
        audit(world.source, authority=authority())


# --- Reordering ----------------------------------------------------------------------------------


def test_reordering_is_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    first, second, *rest = HONEST
    with pytest.raises(LogForked):
        world.leader.cosign(forged(tmp_path, second, first, *rest))


def test_reordering_is_caught_by_the_auditor(world: World) -> None:
    """Tiles in another order than the signed one."""
    tile = world.public / "tile/0/000.p/4"
    data = tile.read_bytes()
    tile.write_bytes(data[32:64] + data[:32] + data[64:])
    with pytest.raises(LogForked):
        audit(world.source, authority=authority())


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
    with pytest.raises(NotAuthorized, match="foreign key"):
        device_reads(source)


def test_foreign_hpke_config_is_caught_by_the_auditor(tmp_path: Path) -> None:
    entries = [*HONEST, hpke_entry(LEADER, b"foreign", by="stranger")]
    source = forged(tmp_path, *entries, cosigned=True, name="checkpoint")
    with pytest.raises(NotAuthorized, match="entry 4"):
        audit(source, authority=authority())


# --- Lists ---------------------------------------------------------------------------------------


def a_wrong_list() -> CurrentList:
    """One that leaves out a recipe, so that one victim alone would be asked another."""
    return CurrentList.of(
        hpke_configs=[(LEADER, HONEST[0].address), (HELPER, HONEST[1].address)],
        recipes=[(ANALYSIS, HONEST[2].address)],
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
        accept_checkpoint(
            signed.with_cosigner(late).encode(), trust=trust(), clock=SettableClock(NOW)
        )


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
        accept_checkpoint(
            signed.with_cosigner(line).encode(), trust=trust(), clock=SettableClock(NOW)
        )


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
