"""A registry that lies, colludes with one aggregator, or withholds: the device stays silent.

In each case nothing is charged, queried or sent, and the audit log tells why.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chorister._native import HPKEKeypair
from chorister.device.audit import Event
from chorister.transparency.checkpoint import Checkpoint, ListProof
from chorister.transparency.client import PROOF, list_path
from chorister.transparency.entries import Entry, ListEntry, parse_entry
from chorister.transparency.note import key_name
from chorister.transparency.state import CurrentList, ListedRecipe, LogState
from chorister.transparency.tree import inclusion_proof, leaf_hash, root_hash
from tests.device.home import Home, at_home
from tests.device.world import (
    DAY,
    HELPER_KEYS,
    LEADER_KEYS,
    NOW,
    REGISTRY,
    a_recipe,
    an_entry,
    bits_of,
    hpke_entry,
)
from tests.logworld import HELPER, LEADER, ORIGIN, body_files, key, revocation

RECIPE = a_recipe("one")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        home.donate()
        yield home


def silent(home: Home) -> str | None:
    """Poll; nothing may happen. What the audit log says."""
    run = home.run()
    home.deliver()
    assert run.problems
    assert not home.network.posts
    assert home.charges() == 0
    home.device.audit.verify()
    return home.last(Event.SILENT).check


def charged(home: Home) -> list[str]:
    entries = [record.entry for record in home.device.audit.records()]
    questions = [entry.question for entry in entries if entry.event is Event.CHARGED]
    return [question.id for question in questions if question is not None]


# --- Signatures ---


@pytest.mark.parametrize("missing", [LEADER, HELPER])
def test_one_cosignature_is_missing(missing: str, home: Home) -> None:
    cosigners = {LEADER: "leader", HELPER: "helper"}
    del cosigners[missing]
    home.network.log.publish([RECIPE], cosigners=cosigners)
    assert silent(home) == "LogSignatureInvalid"
    assert key_name(missing) in home.last(Event.SILENT).why


def test_one_aggregator_cosigns_for_both(home: Home) -> None:
    home.network.log.publish([RECIPE], cosigners={LEADER: "leader", HELPER: "leader"})
    assert silent(home) == "LogSignatureInvalid"


def test_a_stranger_signs_the_log(home: Home) -> None:
    home.network.log.publish([RECIPE], log=key("stranger"))
    assert silent(home) == "LogSignatureInvalid"


def test_a_cosignature_from_another_time(home: Home) -> None:
    home.network.log.publish([RECIPE], cosigned_at=NOW - 3 * DAY)
    assert silent(home) == "LogRewound"


# --- Time ---


def test_a_stale_checkpoint(home: Home) -> None:
    home.clock.set(NOW + 3 * DAY)
    home.network.log.publish([RECIPE], time=NOW)
    assert silent(home) == "CheckpointTime"


def test_a_checkpoint_from_the_future(home: Home) -> None:
    home.network.log.publish([RECIPE], time=NOW + 3 * DAY)
    assert silent(home) == "CheckpointTime"


def test_a_rewound_checkpoint(home: Home) -> None:
    home.ask()
    home.network.log.publish([RECIPE], time=NOW - 60)
    assert silent(home) == "LogRewound"


def test_a_log_that_shrank(home: Home) -> None:
    home.ask(RECIPE, a_recipe("two", {"privacy/min_cohort": 10}))
    charged = home.charges()
    home.network.log.publish_raw({}, time=NOW + 60, size=2)
    home.clock.set(NOW + 60)
    run = home.run()
    assert run.problems
    assert home.charges() == charged
    assert home.last(Event.SILENT).check == "LogRewound"


def test_another_log_of_the_same_registry(home: Home) -> None:
    """Signed with the right keys, under another log's name."""
    home.network.log.publish([RECIPE], origin="registry.example/other")
    assert silent(home) is not None


@pytest.mark.parametrize("liar", [LEADER, HELPER])
def test_one_aggregator_s_time_is_forged_forward(liar: str, home: Home) -> None:
    """By more than the policy allows it is refused; by less, the other's time counts."""
    home.network.log.publish([RECIPE], cosigned_at={liar: NOW + 3 * DAY})
    assert silent(home) == "CheckpointTime"
    home.network.log.publish([], cosigned_at={liar: NOW + DAY // 2})
    assert not home.run().problems
    assert home.device.status().checkpoint_time == NOW


@pytest.mark.parametrize("liar", [LEADER, HELPER])
def test_one_aggregator_vouches_for_what_the_other_no_longer_does(liar: str, home: Home) -> None:
    """An old checkpoint stays old if only one of the two signs it again."""
    home.clock.set(NOW + 3 * DAY)
    home.network.log.publish([RECIPE], time=NOW, cosigned_at={liar: NOW + 3 * DAY})
    assert silent(home) == "CheckpointTime"


def test_two_logs_of_the_same_size(home: Home) -> None:
    home.network.log.publish_raw({}, time=NOW, size=9)
    assert not home.run().problems
    home.network.log.publish_raw({RECIPE.analysis: [an_entry(RECIPE)]}, time=NOW + 60, size=9)
    home.clock.set(NOW + 60)
    assert silent(home) == "LogForked"


# --- The list is the last entry ---


def relabelled(home: Home, **changes: object) -> None:
    """Serve a proof whose parts do not belong together."""
    files = home.network.log.files
    files[PROOF] = replace(ListProof.parse(files[PROOF]), **changes).encode()  # type: ignore[arg-type]


def test_an_old_list_entry_under_a_fresh_checkpoint(home: Home) -> None:
    """It is in the tree, with a valid proof and fresh signatures, and still not the newest."""
    old = ListEntry(time=NOW - 60, digest=bytes(32)).encode()
    new = ListEntry(time=NOW, digest=bytes(32)).encode()
    leaves = [leaf_hash(old), leaf_hash(new)]
    checkpoint = Checkpoint(origin=ORIGIN, size=2, root=root_hash(leaves))
    signed = checkpoint.sign(key("log"))
    for url, side in ((LEADER, "leader"), (HELPER, "helper")):
        line = checkpoint.cosign(name=key_name(url), key=key(side), time=NOW)
        signed = signed.with_cosigner(line)
    entry = parse_entry(old)
    assert isinstance(entry, ListEntry)
    proof = ListProof(entry=entry, index=0, path=inclusion_proof(0, leaves), signed=signed)
    home.network.log.files = {PROOF: proof.encode()}
    assert silent(home) == "WrongList"
    assert home.network.gets[-1].endswith(PROOF)
    relabelled(home, index=1)
    assert silent(home) == "ProofInvalid"


def test_a_list_that_is_not_in_the_tree(home: Home) -> None:
    home.network.log.publish([RECIPE])
    relabelled(home, entry=ListEntry(time=NOW, digest=bytes(32)))
    assert silent(home) == "ProofInvalid"


def test_a_last_leaf_that_is_no_list(home: Home) -> None:
    home.network.log.publish([RECIPE])
    served = home.network.log.files[PROOF].split(b"\n")
    served[1] = b"extra " + base64.b64encode(home.network.log.hpke[0].encode())
    home.network.log.files[PROOF] = b"\n".join(served)
    assert silent(home) == "DecodeError"


def test_a_key_that_expired_since_the_list_was_made(home: Home) -> None:
    """The same size and root, signed again by both although the list is out of date."""
    log = home.network.log
    log.hpke[0] = replace(log.hpke[0], not_after=NOW + 60).signed(key("leader"))
    log.publish([], time=NOW)
    assert not home.run().problems
    log.publish_raw({}, time=NOW, size=log.size, cosigned_at=NOW + 61)
    home.clock.set(NOW + 61)
    assert silent(home) == "WrongList"


# --- The list and its bodies ---


def test_a_recipe_that_is_not_in_the_current_list(home: Home) -> None:
    """Its body lies there to be fetched; nobody asks for it."""
    home.network.log.publish([])
    entry = an_entry(RECIPE)
    home.network.log.files |= body_files([entry.encode()])
    home.run()
    assert home.charges() == 0


def test_a_list_that_is_not_the_checkpoint_s(home: Home) -> None:
    home.network.log.publish([])
    log = home.network.log
    (path,) = (path for path in log.files if path.startswith("list/"))
    entry = an_entry(RECIPE)
    forged = CurrentList.of(
        hpke_configs=[(each.aggregator, each.address) for each in log.hpke],
        recipes=[ListedRecipe.of(entry)],
    )
    log.files[path] = forged.encode()
    log.files[list_path(forged.digest)] = forged.encode()
    log.files |= body_files([entry.encode()])
    assert silent(home) == "WrongList"


def test_a_withdrawn_recipe_served_with_yesterday_s_list(home: Home) -> None:
    """Withdrawn, or by a revoked author: the cosigners' list no longer has it."""
    home.network.log.publish([RECIPE])
    old = {path: data for path, data in home.network.log.files.items() if path != PROOF}
    home.network.log.publish([], time=NOW + 60)
    home.network.log.files = old | home.network.log.files
    home.clock.set(NOW + 60)
    run = home.run()
    assert not run.problems
    assert home.charges() == 0


def test_a_recipe_by_a_revoked_author(home: Home) -> None:
    """A revocation in the log takes all recipes of that key from the list that is cosigned."""
    state, log = LogState(), home.network.log
    asked = [an_entry(a_recipe("one")), an_entry(a_recipe("two"), "second author")]
    entries: list[Entry] = [*log.hpke, *asked]
    for entry in entries:
        state.append(entry.encode())
    revoked = state.append(revocation("author", by="second author").encode())
    assert revoked.index == 4
    current = {recipe.address for recipe in state.current(NOW).recipes}
    left = [entry for entry in asked if entry.body_digest in current]
    assert left == asked[1:]
    log.publish(left, time=NOW)
    home.run()
    assert charged(home) == ["two"]
    # Of the registry alone: both aggregators computed another list, and cosigned that one.
    log.publish(asked, time=NOW + 1, cosigners={})
    home.clock.advance(1)
    assert home.run().problems
    assert charged(home) == ["two"]


def test_an_author_who_was_revoked_asks_again(home: Home) -> None:
    """The body was fetched before, and yesterday's list is signed by everybody."""
    log = home.network.log
    log.publish([a_recipe("early", {"privacy/min_cohort": 10})], time=NOW)
    home.run()
    home.clock.advance(60)
    log.publish([], time=NOW + 60)  # the revocation
    home.run()
    log.publish([RECIPE], time=NOW)
    assert silent(home) == "LogRewound"


def test_another_body_under_a_recipe_s_address(home: Home) -> None:
    home.network.log.publish([RECIPE])
    (path,) = body_files([an_entry(RECIPE).encode()])
    (other,) = body_files([an_entry(a_recipe("other")).encode()]).values()
    home.network.log.files[path] = other
    assert silent(home) == "LogWithheld"


def test_a_body_that_is_withheld(home: Home) -> None:
    home.network.log.publish([RECIPE, a_recipe("two")])
    (path,) = body_files([an_entry(RECIPE).encode()])
    del home.network.log.files[path]
    assert silent(home) == "LogWithheld"


def test_garbage_instead_of_a_checkpoint(home: Home) -> None:
    home.network.log.files[PROOF] = b"\xff" * 100
    assert silent(home) == "DecodeError"


def test_a_registry_that_is_down(home: Home) -> None:
    home.network.down = True
    assert silent(home) == "LogWithheld"


def test_a_problem_is_told_once_and_again_when_it_comes_back(home: Home) -> None:
    home.network.down = True
    for _ in range(3):
        home.run()
    before = home.events().count(Event.SILENT)
    home.network.down = False
    home.ask()
    home.network.down = True
    home.run()
    assert home.events().count(Event.SILENT) == before + 1


# --- The aggregators' keys ---


def test_keys_come_from_the_log_only(home: Home) -> None:
    home.ask(RECIPE)
    home.deliver()
    assert all(url.startswith(REGISTRY) for url in home.network.gets)
    bits_of(home.policy, RECIPE, home.network.reports[0])


def test_a_key_for_one_victim_signed_by_a_stranger(home: Home) -> None:
    own = HPKEKeypair.generate(9).config
    home.network.log.hpke = [
        hpke_entry(LEADER, own, by="stranger"),
        hpke_entry(HELPER, HELPER_KEYS.config),
    ]
    home.network.log.publish([RECIPE])
    assert silent(home) == "NotAuthorized"


def test_the_leader_s_key_in_the_helper_s_name(home: Home) -> None:
    """Sealed to the leader twice, a report would be open to it alone."""
    home.network.log.hpke = [
        hpke_entry(LEADER, LEADER_KEYS.config),
        hpke_entry(HELPER, LEADER_KEYS.config, by="leader"),
    ]
    home.network.log.publish([RECIPE])
    assert silent(home) == "NotAuthorized"


def test_no_key_of_the_helper(home: Home) -> None:
    home.network.log.hpke = [hpke_entry(LEADER, LEADER_KEYS.config)]
    home.network.log.publish([RECIPE])
    assert silent(home) == "LogWithheld"


def test_a_key_that_nothing_can_be_sealed_to(home: Home) -> None:
    home.network.log.hpke = [
        hpke_entry(LEADER, b"nonsense"),
        hpke_entry(HELPER, HELPER_KEYS.config),
    ]
    home.network.log.publish([RECIPE])
    home.run()
    assert home.charges() == 0
    assert home.last(Event.REFUSED).check == "keys"
