"""The log's rules: what may follow what, and what is current when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.canonical import b64url_encode, sha256
from chorister.errors import (
    CheckpointTime,
    DuplicateEntry,
    EntryRefused,
    InternalError,
    NotAuthorized,
    WrongList,
)
from chorister.transparency.cosigner import check_body
from chorister.transparency.entries import Entry, KeyRevocation, ListEntry
from chorister.transparency.state import ListedRecipe, LogState
from chorister.transparency.tree import Frontier, leaf_hash, verify_inclusion
from tests.logworld import (
    DAY,
    HELPER,
    HELPER_NAME,
    LEADER,
    LEADER_NAME,
    NOW,
    OTHER_ANALYSIS,
    authority,
    end_entry,
    hpke_entry,
    key,
    public,
    recipe_entry,
    revocation,
)


def state_of(*entries: Entry) -> LogState:
    state = LogState()
    for entry in entries:
        state.append(entry.encode())
    return state


def test_a_recipe_is_current_from_its_logging_to_the_end_of_its_answer_period() -> None:
    entry = recipe_entry("one", closes=NOW + DAY)
    state = state_of(entry)
    assert state.current(0).recipes == (ListedRecipe.of(entry),)
    assert state.current(NOW + DAY - 1).recipes == (ListedRecipe.of(entry),)
    assert state.current(NOW + DAY).recipes == ()


def test_a_recipe_that_ended_is_not_current() -> None:
    one, two = recipe_entry("one"), recipe_entry("two")
    state = state_of(one, two, end_entry(one))
    assert state.current(NOW).recipes == (ListedRecipe.of(two),)


def test_a_revoked_key_takes_its_recipes_with_it_and_brings_no_more() -> None:
    mine = recipe_entry("mine")
    other = recipe_entry("other", author="other author", analysis=OTHER_ANALYSIS)
    state = state_of(mine, other, revocation("author", by="log"))
    assert state.current(NOW).recipes == (ListedRecipe.of(other),)
    with pytest.raises(EntryRefused, match="revoked by entry 2"):
        state.append(recipe_entry("late").encode())
    with pytest.raises(DuplicateEntry):
        state.append(revocation("author", by="second author").encode())


def test_the_hpke_config_logged_last_among_the_valid_ones_is_current() -> None:
    old = hpke_entry(LEADER, b"old", not_before=0, not_after=NOW + 10)
    new = hpke_entry(LEADER, b"new", not_before=NOW, not_after=NOW + 20)
    helper = hpke_entry(HELPER, not_before=0, not_after=NOW + 5)
    state = state_of(old, new, helper)
    current = {time: dict(state.current(time).hpke_configs) for time in range(NOW - 1, NOW + 21)}
    assert current[NOW - 1] == {LEADER_NAME: old.address, HELPER_NAME: helper.address}
    assert current[NOW] == {LEADER_NAME: new.address, HELPER_NAME: helper.address}
    assert current[NOW + 5] == {LEADER_NAME: new.address}
    assert current[NOW + 20] == {}
    # Logged in the other order, the old one supersedes while it is valid.
    assert dict(state_of(new, old).current(NOW).hpke_configs) == {LEADER_NAME: old.address}


def test_an_end_needs_its_recipe_once_and_under_its_own_key() -> None:
    one = recipe_entry("one")
    state = state_of(one)
    with pytest.raises(EntryRefused, match="not in the log"):
        state.append(end_entry(recipe_entry("two")).encode())
    with pytest.raises(EntryRefused, match="other than the one that signed it"):
        state.append(end_entry(one, author="second author").encode())
    state.append(end_entry(one).encode())
    with pytest.raises(EntryRefused):
        state.append(end_entry(one).encode())


def test_nothing_is_logged_twice() -> None:
    one = recipe_entry("one")
    state = state_of(one)
    with pytest.raises(DuplicateEntry) as caught:
        state.append(one.encode())
    assert caught.value.index == 0
    again = recipe_entry("one", author="second author")
    with pytest.raises(DuplicateEntry):
        state.append(again.encode())


def test_refused_entries_leave_no_trace() -> None:
    state = state_of(recipe_entry("one"))
    before = (state.size, state.frontier, state.current(NOW))
    for bad in (b"", b"\x02\x01", recipe_entry("one").encode()):
        with pytest.raises(EntryRefused):
            state.append(bad)
    assert (state.size, state.frontier, state.current(NOW)) == before


def test_a_copy_is_independent() -> None:
    state = state_of(hpke_entry(LEADER, b"old"))
    copy = state.copy()
    copy.append(hpke_entry(LEADER, b"new").encode())
    copy.append(recipe_entry("one").encode())
    assert state.current(NOW).hpke_configs != copy.current(NOW).hpke_configs
    assert state.size == 1


# --- Who may ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        recipe_entry("stranger", author="stranger"),
        recipe_entry("other-analysis", author="other author"),
        recipe_entry("unknown-analysis", analysis="keyboard.unknown"),
        revocation("author", by="other author"),
        revocation("author", by="leader"),
        revocation("stranger"),
        hpke_entry(LEADER, by="helper"),
        hpke_entry(LEADER, by="log"),
        hpke_entry("https://unknown.example/", by="leader"),
    ],
)
def test_keys_that_no_policy_lists_are_not_authorized(entry: Entry) -> None:
    logged = LogState().check(entry.encode())
    with pytest.raises(NotAuthorized):
        authority().check_entry(logged)


@pytest.mark.parametrize(
    "entry",
    [
        recipe_entry("mine"),
        recipe_entry("second", author="second author"),
        revocation("author"),
        revocation("author", by="second author"),
        revocation("author", by="log"),
        hpke_entry(LEADER),
        hpke_entry(HELPER),
    ],
)
def test_keys_that_a_policy_lists_are_authorized(entry: Entry) -> None:
    authority().check_entry(LogState().check(entry.encode()))


def test_a_statement_with_a_wrong_signature_is_refused() -> None:
    forged = KeyRevocation(
        key=public("author"), signer=public("log"), signature=key("stranger").sign(b"anything")
    )
    with pytest.raises(EntryRefused, match="does not verify"):
        LogState().append(forged.encode())


@given(st.sampled_from([recipe_entry("one"), revocation("author"), hpke_entry(LEADER)]), st.data())
def test_only_entry_refused_for_damaged_entries(entry: Entry, data: st.DataObject) -> None:
    good = entry.encode()
    at = data.draw(st.integers(0, len(good)))
    damaged = (
        good[:at] + data.draw(st.binary(max_size=4)) + good[at + data.draw(st.integers(0, 3)) :]
    )
    try:
        logged = LogState().append(damaged)
    except EntryRefused:
        return
    assert logged.entry == entry


@given(st.binary(max_size=200))
def test_only_entry_refused_for_arbitrary_recipes(noise: bytes) -> None:
    """Signed by the author, so that everything behind the signature is reached too."""
    good = recipe_entry("one")
    for signed_part in (noise, b"e30." + noise.hex().encode(), noise + b"." + noise):
        signature = b64url_encode(key("author").sign(signed_part)).encode()
        body = signed_part + b"." + signature
        entry = replace(good, body_digest=sha256(body), body_size=len(body)).signed(key("author"))
        logged = LogState().append(entry.encode())
        with pytest.raises(EntryRefused):
            check_body(logged, body)


# --- Lists ------------------------------------------------------------------------------------


def closing(state: LogState, time: int) -> bytes:
    return ListEntry(time=time, digest=state.current(time).digest).encode()


def test_a_list_is_what_follows_from_the_entries_before_it() -> None:
    state = state_of(recipe_entry("one", closes=NOW + DAY))
    assert not state.closed
    with pytest.raises(WrongList, match="follows from the entries"):
        state.append(ListEntry(time=NOW, digest=bytes(32)).encode())
    at_the_end = ListEntry(time=NOW, digest=state.current(NOW + DAY).digest)
    with pytest.raises(WrongList):
        state.append(at_the_end.encode())
    state.append(closing(state, NOW))
    assert state.closed
    assert state.last_list is not None
    verify_inclusion(
        leaf=leaf_hash(state.last_list.entry.encode()),
        index=1,
        size=2,
        proof=state.last_list.path,
        root=state.frontier.root,
    )
    for earlier in (NOW - 1, NOW):
        late = ListEntry(time=earlier, digest=state.last_list.entry.digest)
        with pytest.raises(EntryRefused):
            state.append(late.encode())
    state.append(recipe_entry("two").encode())
    assert not state.closed
    state.append(closing(state, NOW + 1))


@given(st.integers(1, 600))
def test_the_proof_of_the_last_list_holds_for_any_size(size: int) -> None:
    frontier = Frontier().extend(number.to_bytes(32) for number in range(size - 1))
    leaf = bytes(32)
    verify_inclusion(
        leaf=leaf,
        index=size - 1,
        size=size,
        proof=frontier.next_path,
        root=frontier.extend([leaf]).root,
    )


def test_a_list_is_current_within_what_clocks_may_be_off() -> None:
    state = state_of(recipe_entry("one", closes=NOW + DAY))
    state.append(closing(state, NOW))
    for now in (NOW - 300, NOW, NOW + DAY, NOW + DAY + 299):
        state.check_current(now)
    with pytest.raises(CheckpointTime):
        state.check_current(NOW - 301)
    with pytest.raises(WrongList, match="out of date"):
        state.check_current(NOW + DAY + 300)


def test_what_has_closed_by_a_list_s_time_stays_closed() -> None:
    """And what ended or was revoked: the list after it is never longer without a new entry."""
    state = state_of(recipe_entry("one", closes=NOW + DAY), recipe_entry("two"))
    state.append(closing(state, NOW + DAY))
    assert [row.address for row in state.current(NOW + DAY).recipes] == [
        recipe_entry("two").body_digest
    ]
    with pytest.raises(InternalError):
        state.current(NOW)


def test_two_recipes_do_not_share_a_body() -> None:
    """Else one would hide the other on the list."""
    one = recipe_entry("one")
    other = replace(one, recipe_digest=bytes(32)).signed(key("author"))
    with pytest.raises(EntryRefused, match="body"):
        state_of(one, other)
