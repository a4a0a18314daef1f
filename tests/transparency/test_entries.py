"""Entries and lists: exact bytes, round trips, and only typed errors for anything else."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import DecodeError, InvalidInput, LogSignatureInvalid, SignatureInvalid
from chorister.transparency.entries import (
    MAX_ENTRY,
    MAX_HPKE_CONFIG_ENTRY,
    EndReason,
    Entry,
    HPKEConfigEntry,
    KeyRevocation,
    ListEntry,
    RecipeEnd,
    RecipeEntry,
    Submission,
    open_recipe,
    parse_entry,
)
from chorister.transparency.state import CurrentList, ListedRecipe
from tests.logworld import (
    ANALYSIS,
    HELPER,
    LEADER,
    NOW,
    body_of,
    end_entry,
    hpke_entry,
    key,
    public,
    recipe_entry,
    revocation,
    submission,
)

ENTRIES: list[Entry] = [
    recipe_entry("one"),
    end_entry(recipe_entry("one")),
    revocation("author"),
    hpke_entry(LEADER),
]


def test_the_bytes_of_each_entry() -> None:
    key32, digest = bytes(range(32)), bytes(range(32, 64))
    signed = b"\x07" * 32 + b"\x08" * 64
    signer = {"signer": b"\x07" * 32, "signature": b"\x08" * 64}
    recipe = RecipeEntry(
        recipe_digest=digest,
        body_digest=key32,
        body_size=258,
        analysis="a.b",
        opens=1,
        closes=258,
        **signer,
    )
    times = (1).to_bytes(8) + b"\x00\x00\x00\x00\x00\x00\x01\x02"
    size = b"\x00\x00\x01\x02"
    assert recipe.encode() == b"\x02\x01" + digest + key32 + size + b"\x03a.b" + times + signed
    end = RecipeEnd(recipe_digest=digest, reason=EndReason.WITHDRAWN, **signer)
    assert end.encode() == b"\x02\x02" + digest + b"\x02" + signed
    revoked = KeyRevocation(key=key32, **signer)
    assert revoked.encode() == b"\x02\x03" + key32 + signed
    config = HPKEConfigEntry(
        aggregator="a.example/", not_before=1, not_after=258, config=b"xyz", **signer
    )
    assert config.encode() == b"\x02\x04\x0aa.example/" + times + b"\x00\x03xyz" + signed
    assert config.address == hashlib.sha256(config.encode()).digest()
    closing = ListEntry(time=258, digest=digest)
    assert closing.encode() == b"\x02\x05" + times[8:] + digest
    for entry in (recipe, end, revoked, config, closing):
        assert parse_entry(entry.encode()) == entry


def test_a_recipe_s_entry_is_short() -> None:
    assert len(recipe_entry("one").encode()) < 240


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_one_changed_bit_breaks_the_signature(entry: RecipeEnd | KeyRevocation) -> None:
    entry.check_signature()
    data = entry.encode()
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((DecodeError, LogSignatureInvalid)):
            parse_entry(changed).check_signature()  # type: ignore[union-attr]


def test_a_recipe_verifies_under_the_key_beside_it_only() -> None:
    body = body_of(recipe_entry("one"))
    assert open_recipe(body).recipe.id == "one"
    with pytest.raises(SignatureInvalid):
        open_recipe(body._replace(author_key=public("other author")))


def test_an_entry_opens_its_own_body_only() -> None:
    entry = recipe_entry("one")
    body = body_of(entry).jws
    assert entry.open_body(body).recipe.id == "one"
    for other in (body_of(recipe_entry("two")).jws, body[:-1], b""):
        with pytest.raises(DecodeError, match="not the body"):
            entry.open_body(other)


@pytest.mark.parametrize(
    "lie",
    [
        {"recipe_digest": bytes(32)},
        {"analysis": "keyboard.perplexity"},
        {"opens": 1},
        {"closes": NOW + 1},
    ],
)
def test_an_entry_that_says_something_else_than_its_body_is_refused(lie: dict[str, Any]) -> None:
    """The author's own lie: an auditor who reads entries alone must not be misled."""
    entry = recipe_entry("one")
    lying = replace(entry, **lie).signed(key("author"))
    lying.check_signature()
    with pytest.raises(DecodeError, match="does not match the recipe"):
        lying.open_body(body_of(entry).jws)


def test_submissions_round_trip() -> None:
    for entry in ENTRIES:
        sent = submission(entry)
        assert Submission.parse(sent.encode()) == sent
        assert sent.open()[0] == entry
    for data in (b"", b"\x00", b"\x00\x05abcd"):
        with pytest.raises(DecodeError):
            Submission.parse(data)
    with pytest.raises(DecodeError, match="only a recipe has a body"):
        Submission(ENTRIES[1].encode(), b"body").open()


def test_a_cosignature_is_no_statement() -> None:
    """An aggregator's key signs checkpoints and entries: neither can be passed off as the other."""
    message = b"cosignature/v1\ntime 1\n"
    entry = KeyRevocation(key=public("author"), signer=public("leader"))
    forged = KeyRevocation(
        key=entry.key, signer=entry.signer, signature=key("leader").sign(message + entry.encode())
    )
    with pytest.raises(LogSignatureInvalid):
        forged.check_signature()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x01" + ENTRIES[2].encode()[1:],
        b"\x03" + ENTRIES[2].encode()[1:],
        b"\x02\x06" + bytes(128),
        b"\x02\x05" + bytes(39),
        b"\x02\x05\xff" + bytes(39),
        b"\x02" * (MAX_ENTRY + 1),
        ENTRIES[2].encode() + b"\x00",
        ENTRIES[2].encode()[:-1],
        b"\x02\x02" + bytes(32) + b"\x03" + bytes(96),
        b"\x02\x01" + bytes(68) + b"\x01a" + bytes(112),
        b"\x02\x04\x00" + bytes(16) + b"\x00\x01x" + bytes(96),
        b"\x02\x04\x02a " + bytes(15) + b"\x01\x00\x01x" + bytes(96),
        b"\x02\x04\x01\xff" + bytes(15) + b"\x01\x00\x01x" + bytes(96),
        b"\x02\x04\x01a" + bytes(16) + b"\x00\x01x" + bytes(96),
    ],
)
def test_malformed_entries_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_entry(data)


def test_impossible_entries_are_refused() -> None:
    with pytest.raises(InvalidInput):
        HPKEConfigEntry(aggregator=LEADER, not_before=2, not_after=2, config=b"x")
    with pytest.raises(InvalidInput):
        replace(recipe_entry("one"), signer=b"short")
    with pytest.raises(InvalidInput, match="4096 bytes"):
        hpke_entry(LEADER, bytes(4097))
    assert len(hpke_entry(LEADER, bytes(4096)).encode()) < MAX_HPKE_CONFIG_ENTRY


@given(st.binary(max_size=300))
def test_arbitrary_bytes_as_an_entry(data: bytes) -> None:
    for candidate in (data, b"\x02" + data, *(bytes([2, kind]) + data for kind in range(1, 6))):
        try:
            entry = parse_entry(candidate)
        except DecodeError:
            continue
        assert entry.encode() == candidate


@given(st.sampled_from(ENTRIES), st.data())
def test_damaged_entries(entry: RecipeEntry, data: st.DataObject) -> None:
    good = entry.encode()
    at = data.draw(st.integers(0, len(good)))
    damaged = good[:at] + data.draw(st.binary(max_size=3)) + good[at + 1 :]
    try:
        parsed = parse_entry(damaged)
    except DecodeError:
        return
    assert parsed.encode() == damaged
    if isinstance(parsed, RecipeEntry) and isinstance(entry, RecipeEntry):
        try:
            opened = parsed.open_body(body_of(entry).jws)
        except DecodeError:
            return
        assert opened.jws == body_of(entry).jws


# --- The current list ----------------------------------------------------------------------------


def a_list() -> CurrentList:
    return CurrentList.of(
        hpke_configs=[(LEADER, b"\x02" * 32), (HELPER, b"\x01" * 32)],
        recipes=[
            ListedRecipe(ANALYSIS, b"\x03" * 32, b"\xff" * 32, 7),
            ListedRecipe(ANALYSIS, b"\x03" * 32, b"\x00" * 32, 1234),
        ],
    )


def test_the_bytes_of_a_list() -> None:
    assert a_list().encode().decode() == (
        "chorister current list v3\n"
        f"hpke {HELPER} {'01' * 32}\n"
        f"hpke {LEADER} {'02' * 32}\n"
        f"recipe {ANALYSIS} {'03' * 32} {'00' * 32} 1234\n"
        f"recipe {ANALYSIS} {'03' * 32} {'ff' * 32} 7\n"
    )
    assert a_list().digest == hashlib.sha256(a_list().encode()).digest()


NAMES = st.from_regex(r"[!-*,-~]{1,20}", fullmatch=True)
HASHES = st.binary(min_size=32, max_size=32)
ROWS = st.builds(ListedRecipe, NAMES, HASHES, HASHES, st.integers(1, 99_999_999))


@given(st.dictionaries(NAMES, HASHES), st.lists(ROWS, unique_by=lambda recipe: recipe.address))
def test_lists_round_trip(configs: dict[str, bytes], recipes: list[ListedRecipe]) -> None:
    listed = CurrentList.of(hpke_configs=configs.items(), recipes=recipes)
    assert CurrentList.parse(listed.encode()) == listed
    lines = listed.encode().split(b"\n")[1:-1]
    assert lines == sorted(lines)


@pytest.mark.parametrize(
    "change",
    ["swap", "repeat", "header", "end", "case", "kind", "two keys", "two sizes", "zeros", "empty"],
)
def test_other_spellings_of_a_list_are_refused(change: str) -> None:
    lines = a_list().encode().splitlines(keepends=True)
    match change:
        case "swap":
            lines[1:3] = reversed(lines[1:3])
        case "repeat":
            lines.append(lines[-1])
        case "header":
            lines[0] = b"chorister current list v1\n"
        case "end":
            lines[-1] = lines[-1].removesuffix(b"\n")
        case "case":
            lines[-1] = lines[-1].replace(b"f", b"F")
        case "kind":
            lines[1] = lines[1].replace(b"hpke", b"hpki")
        case "two keys":
            lines.insert(1, f"hpke {HELPER} {'00' * 32}\n".encode())
        case "two sizes":
            lines.append(lines[-1].replace(b" 7\n", b" 8\n"))
        case "zeros":
            lines[-1] = lines[-1].replace(b" 7\n", b" 07\n")
        case "empty":
            lines[-1] = lines[-1].replace(b" 7\n", b" 0\n")
    with pytest.raises(DecodeError):
        CurrentList.parse(b"".join(lines))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_as_a_list(data: bytes) -> None:
    for candidate in (data, b"chorister current list v3\n" + data):
        try:
            listed = CurrentList.parse(candidate)
        except DecodeError:
            continue
        assert listed.encode() == candidate


def test_time_is_part_of_a_config_s_address() -> None:
    assert hpke_entry(LEADER, not_after=NOW + 1).address != hpke_entry(LEADER).address
