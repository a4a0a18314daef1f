"""A registry that lists too much, or lies about how much: cosigner, auditor and device refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorister.errors import LogWithheld, QuotaExceeded, SignatureInvalid, WrongList
from chorister.transparency import state
from chorister.transparency.auditor import audit
from chorister.transparency.checkpoint import ListProof
from chorister.transparency.client import PROOF, body_path
from chorister.transparency.entries import MAX_HPKE_CONFIG_ENTRY, Entry, open_recipe
from chorister.transparency.state import MAX_OPEN_RECIPES, ListedRecipe
from chorister.transparency.tiles import Source
from tests.logworld import (
    ANALYSIS,
    NOW,
    World,
    authority,
    body_of,
    forge,
    public,
    recipe_entry,
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

THIRD = recipe_entry("third")
TOO_MANY: list[Entry] = [
    *HONEST,
    *(recipe_entry(f"more-{number}") for number in range(MAX_OPEN_RECIPES - 1)),
]


class WatchedSource:
    """A source that notes what is asked of it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.fetched: list[str] = []

    def read(self, path: str, *, limit: int) -> bytes:
        self.fetched.append(path)
        return self.source.read(path, limit=limit)


def watched(tmp_path: Path, *recipes: ListedRecipe) -> WatchedSource:
    """A log with these lines on its list."""
    return WatchedSource(served(tmp_path, *HONEST, listed=a_list(*recipes)))


def test_too_many_recipes_are_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    with pytest.raises(QuotaExceeded, match=f"{MAX_OPEN_RECIPES + 1} open recipes"):
        world.leader.cosign(forged(tmp_path, *TOO_MANY))
    world.leader.cosign(forged(tmp_path, *TOO_MANY[:-1]))


def test_too_many_bytes_are_caught_by_the_cosigner(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = FIRST.body_size + SECOND.body_size + THIRD.body_size
    monkeypatch.setattr(state, "MAX_OPEN_BYTES", size - 1)
    source = forged(tmp_path, *HONEST, THIRD)
    with pytest.raises(QuotaExceeded, match=f"{size:,} bytes"):
        world.leader.cosign(source)
    monkeypatch.setattr(state, "MAX_OPEN_BYTES", size)
    world.leader.cosign(source)


def test_a_list_that_is_too_long_is_caught_by_the_cosigner(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By thousands of keys, none of which has too many: devices would fetch the list in vain."""
    honest = len(world.registry._state.current(world.clock.now()).encode())
    monkeypatch.setattr(state, "MAX_LIST", honest + 100)
    flood = [recipe_entry("x", author="stranger")]
    with pytest.raises(QuotaExceeded, match="the current list has more than"):
        world.leader.cosign(forged(tmp_path, *HONEST, *flood))
    world.leader.cosign(forged(tmp_path, *HONEST))


def test_too_many_recipes_are_caught_by_the_auditor(tmp_path: Path) -> None:
    source = forged(tmp_path, *TOO_MANY, cosigned=True, name="checkpoint")
    with pytest.raises(QuotaExceeded):
        audit(source, authority=authority())


def test_a_candidate_with_too_many_recipes_is_caught_by_the_auditor(world: World) -> None:
    forge(world.public, [entry.encode() for entry in TOO_MANY], time=NOW + 10)
    with pytest.raises(QuotaExceeded):
        audit(world.source, authority=authority())


def test_too_many_recipes_are_caught_by_the_device_before_it_fetches_one(tmp_path: Path) -> None:
    source = WatchedSource(forged(tmp_path, *TOO_MANY, cosigned=True, name="checkpoint"))
    with pytest.raises(QuotaExceeded):
        device_reads(source)
    assert [path.partition("/")[0] for path in source.fetched] == [PROOF, "list"]


def test_too_many_bytes_are_caught_by_the_device_before_it_fetches_one(tmp_path: Path) -> None:
    claimed = [
        ListedRecipe(ANALYSIS, public("author"), bytes([number]) * 32, 99_999_999)
        for number in range(2)
    ]
    source = watched(tmp_path, *claimed)
    with pytest.raises(QuotaExceeded):
        device_reads(source)
    assert [path.partition("/")[0] for path in source.fetched] == [PROOF, "list"]


def test_strangers_recipes_are_neither_fetched_nor_counted(tmp_path: Path) -> None:
    """Under as many keys as one likes, for an analysis of the policy."""
    strangers = [
        ListedRecipe(ANALYSIS, bytes([number % 7]) * 32, number.to_bytes(32), 99_999_999)
        for number in range(1000)
    ]
    source = watched(tmp_path, ListedRecipe.of(FIRST), *strangers)
    assert device_reads(source) == [body_of(FIRST)]
    wanted = [LEADER_CONFIG.address, HELPER_CONFIG.address, FIRST.body_digest]
    assert sorted(source.fetched[2:]) == sorted(body_path(address) for address in wanted)


def test_a_body_longer_than_the_list_says_is_cut_off(tmp_path: Path) -> None:
    said = ListedRecipe.of(FIRST)
    source = watched(tmp_path, said._replace(size=said.size - 1))
    with pytest.raises(LogWithheld, match=f"longer than the {said.size - 1} bytes"):
        device_reads(source)


def test_a_body_that_is_not_what_the_list_says_is_caught_by_the_device(tmp_path: Path) -> None:
    said = ListedRecipe.of(FIRST)
    with pytest.raises(WrongList, match="wrong size"):
        device_reads(watched(tmp_path, said._replace(size=said.size + 1)))
    # By another author than the list says: the signature does not verify under that key.
    (body,) = device_reads(watched(tmp_path, said._replace(author_key=public("second author"))))
    with pytest.raises(SignatureInvalid):
        open_recipe(body)


def test_a_config_of_megabytes_is_cut_off(tmp_path: Path) -> None:
    source = watched(tmp_path)
    path = tmp_path / "forged" / body_path(LEADER_CONFIG.address)
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(LogWithheld, match="longer than"):
        device_reads(source)


def test_the_documented_limits_and_lines_are_those_of_the_code() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "reference" / "log.md").read_text()
    for limit in (MAX_OPEN_RECIPES, state.MAX_OPEN_BYTES, state.MAX_LIST):
        assert f"| {limit:,}" in text
    assert f"{MAX_HPKE_CONFIG_ENTRY:,} bytes" in text
    vectors = root / "tests" / "vectors" / "log"
    stored = (vectors / "checkpoint").read_text() + (vectors / PROOF).read_text()
    listed = ListProof.parse((vectors / PROOF).read_bytes()).entry.digest.hex()
    stored += (vectors / "list" / listed).read_text()
    blocks = [block for block in text.split("```text\n")[1:] if "registry.example" in block]
    blocks += [block for block in text.split("```text\n")[1:] if "current list v" in block]
    lines = [
        line.removesuffix("…") for block in blocks for line in block.split("```")[0].split("\n")
    ]
    assert len(lines) > 10
    assert [line for line in lines if line not in stored] == []
