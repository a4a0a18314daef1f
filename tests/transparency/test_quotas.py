"""A registry that lists too much, or lies about how much: cosigner, auditor and device refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorister.errors import LogWithheld, QuotaExceeded, WrongList
from chorister.transparency import state
from chorister.transparency.auditor import audit
from chorister.transparency.client import Source, entry_path
from chorister.transparency.entries import MAX_HPKE_CONFIG_ENTRY, Entry, RecipeEntry
from chorister.transparency.state import MAX_OPEN_RECIPES, CurrentList, ListedRecipe
from tests.logworld import (
    ANALYSIS,
    HELPER,
    LEADER,
    NOW,
    World,
    authority,
    forge,
    public,
    recipe_entry,
)
from tests.transparency.lies import HONEST, device_reads, forged

TOO_MANY: list[Entry] = [
    *HONEST,
    *(recipe_entry(f"more-{number}") for number in range(MAX_OPEN_RECIPES - 1)),
]


class Watched:
    """A source that notes what is asked of it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.fetched: list[str] = []

    def read(self, path: str, *, limit: int) -> bytes:
        self.fetched.append(path)
        return self.source.read(path, limit=limit)


def served(tmp_path: Path, *recipes: ListedRecipe) -> Watched:
    """A log, cosigned by both although they are not asked, with these lines on its list."""
    configs = [(LEADER, HONEST[0].address), (HELPER, HONEST[1].address)]
    listed = CurrentList.of(hpke_configs=configs, recipes=recipes)
    source = forged(
        tmp_path,
        *HONEST,
        list_digest=listed.digest,
        served_list=listed.encode(),
        cosigned=True,
        name="checkpoint",
    )
    return Watched(source)


def first() -> RecipeEntry:
    return recipe_entry("first")


def test_too_many_recipes_are_caught_by_the_cosigner(world: World, tmp_path: Path) -> None:
    with pytest.raises(QuotaExceeded, match=f"{MAX_OPEN_RECIPES + 1} open recipes"):
        world.leader.cosign(forged(tmp_path, *TOO_MANY))
    world.leader.cosign(forged(tmp_path, *TOO_MANY[:-1]))


def test_too_many_bytes_are_caught_by_the_cosigner(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(len(entry.encode()) for entry in HONEST[2:])
    monkeypatch.setattr(state, "MAX_OPEN_BYTES", size - 1)
    with pytest.raises(QuotaExceeded, match=f"{size:,} bytes"):
        world.leader.cosign(forged(tmp_path, *HONEST))
    monkeypatch.setattr(state, "MAX_OPEN_BYTES", size)
    world.leader.cosign(forged(tmp_path, *HONEST))


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
    source = Watched(forged(tmp_path, *TOO_MANY, cosigned=True, name="checkpoint"))
    with pytest.raises(QuotaExceeded):
        device_reads(source)
    assert [path.partition("/")[0] for path in source.fetched] == ["checkpoint", "list"]


def test_too_many_bytes_are_caught_by_the_device_before_it_fetches_one(tmp_path: Path) -> None:
    claimed = [
        ListedRecipe(ANALYSIS, public("author"), bytes([number]) * 32, 99_999_999)
        for number in range(2)
    ]
    source = served(tmp_path, *claimed)
    with pytest.raises(QuotaExceeded):
        device_reads(source)
    assert [path.partition("/")[0] for path in source.fetched] == ["checkpoint", "list"]


def test_strangers_recipes_are_neither_fetched_nor_counted(tmp_path: Path) -> None:
    """Under as many keys as one likes, for an analysis of the policy."""
    strangers = [
        ListedRecipe(ANALYSIS, bytes([number % 7]) * 32, number.to_bytes(32), 99_999_999)
        for number in range(1000)
    ]
    source = served(tmp_path, ListedRecipe.of(ANALYSIS, first()), *strangers)
    assert device_reads(source) == [first()]
    bodies = source.fetched[2:]
    assert sorted(bodies) == sorted(entry_path(entry.address) for entry in HONEST[:3])


def test_a_body_longer_than_the_list_says_is_cut_off(tmp_path: Path) -> None:
    said = ListedRecipe.of(ANALYSIS, first())
    source = served(tmp_path, said._replace(size=said.size - 1))
    with pytest.raises(LogWithheld, match=f"longer than the {said.size - 1} bytes"):
        device_reads(source)


@pytest.mark.parametrize("lie", ["size", "author"])
def test_a_body_that_is_not_what_the_list_says_is_caught_by_the_device(
    tmp_path: Path, lie: str
) -> None:
    said = ListedRecipe.of(ANALYSIS, first())
    other = {"size": said.size + 1} if lie == "size" else {"author_key": public("second author")}
    with pytest.raises(WrongList, match="wrong author or size"):
        device_reads(served(tmp_path, said._replace(**other)))


def test_a_config_of_megabytes_is_cut_off(tmp_path: Path) -> None:
    source = served(tmp_path)
    path = tmp_path / "forged" / entry_path(HONEST[0].address)
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(LogWithheld, match="longer than"):
        device_reads(source)


def test_the_documented_limits_and_lines_are_those_of_the_code() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "reference" / "log.md").read_text()
    for limit in (MAX_OPEN_RECIPES, state.MAX_OPEN_BYTES, state.MAX_LIST):
        assert f"| {limit:,}" in text
    assert f"{MAX_HPKE_CONFIG_ENTRY:,} bytes" in text
    signed = (root / "tests" / "vectors" / "log" / "checkpoint").read_text()
    listed = signed.split("list ")[1].split()[0]
    stored = signed + (root / "tests" / "vectors" / "log" / "list" / listed).read_text()
    blocks = [block for block in text.split("```text\n")[1:] if "registry.example" in block]
    blocks += [block for block in text.split("```text\n")[1:] if "current list v" in block]
    lines = [
        line.removesuffix("…") for block in blocks for line in block.split("```")[0].split("\n")
    ]
    assert len(lines) > 10
    assert [line for line in lines if line not in stored] == []
