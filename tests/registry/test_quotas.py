"""How much one author may have open: nobody fills the list, or takes another's place on it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from chorister.errors import QuotaExceeded, ServiceError
from chorister.registry.app import build_app
from chorister.registry.registry import author_share
from chorister.transparency import state
from chorister.transparency.auditor import audit
from chorister.transparency.state import MAX_LIST, MAX_OPEN_RECIPES
from tests.logworld import (
    ANALYSIS,
    DAY,
    HELPER,
    LEADER,
    NOW,
    OTHER_ANALYSIS,
    World,
    authority,
    end_entry,
    hpke_entry,
    recipe_entry,
    submission,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def fill(world: World, author: str, analysis: str = ANALYSIS) -> int:
    """Publish until the registry refuses; how many it took."""
    for number in range(1000):
        try:
            world.submit(
                recipe_entry(f"{author.split()[0]}-{number}", author=author, analysis=analysis)
            )
        except QuotaExceeded:
            return number
    raise AssertionError("the registry takes any number of recipes")


def test_an_author_has_so_many_recipes_open_and_no_more(world: World) -> None:
    assert fill(world, "author") == MAX_OPEN_RECIPES
    size = world.registry.status().size
    with pytest.raises(QuotaExceeded, match="end some of them"):
        world.submit(recipe_entry("one-more"))
    assert world.registry.status().size == size
    world.publish(end_entry(recipe_entry("author-0")))
    world.submit(recipe_entry("one-more"))
    with pytest.raises(QuotaExceeded):
        world.submit(recipe_entry("another"))


def test_an_author_who_publishes_and_ends_by_turns_fills_no_log(world: World) -> None:
    """Cosigners take so many new entries at once, and would stop for good behind more."""
    for number in range(MAX_OPEN_RECIPES):
        entry = recipe_entry(f"brief-{number}")
        world.submit(entry, end_entry(entry))
    with pytest.raises(QuotaExceeded):
        world.submit(recipe_entry("one-more"))
    world.restart()
    with pytest.raises(QuotaExceeded):
        world.submit(recipe_entry("one-more"))
    assert world.publish().checkpoint.size == 2 * MAX_OPEN_RECIPES + 1
    world.submit(recipe_entry("after-a-checkpoint"))


def test_recipes_that_have_closed_make_room_with_the_next_checkpoint(world: World) -> None:
    for number in range(MAX_OPEN_RECIPES):
        world.submit(recipe_entry(f"short-{number}", closes=NOW + DAY))
    world.clock.set(NOW + DAY)
    with pytest.raises(QuotaExceeded):
        world.submit(recipe_entry("long"))
    world.publish()
    world.submit(recipe_entry("long"))


def test_an_author_has_so_many_bytes_open_and_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = recipe_entry("a").body_size
    monkeypatch.setattr(state, "MAX_OPEN_BYTES", 2 * size)
    world.submit(recipe_entry("a"), recipe_entry("b"))
    with pytest.raises(QuotaExceeded, match=f"{3 * size:,} bytes"):
        world.submit(recipe_entry("c"))
    world.submit(recipe_entry("c", author="second author"))


def test_no_author_takes_another_s_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for three recipes of each: whoever comes first, the others still get theirs."""
    monkeypatch.setattr("chorister.registry.registry.MAX_LIST", 2300)
    world.restart()
    share = author_share(authority())
    assert 1 < share < MAX_OPEN_RECIPES
    assert fill(world, "other author", OTHER_ANALYSIS) == share
    assert fill(world, "second author") == share
    assert fill(world, "author") == share
    world.publish(hpke_entry(LEADER), hpke_entry(HELPER))
    found = audit(world.source, authority=authority())
    assert len(found.current.recipes) == 3 * share
    assert len(found.current.encode()) <= 2300


def test_the_share_of_a_few_authors_is_the_whole_quota() -> None:
    assert author_share(authority()) == MAX_OPEN_RECIPES


def test_many_authors_have_less_each_and_too_many_are_refused() -> None:
    """Each line of the list is counted: `MAX_LIST` is never exceeded, whatever they publish."""
    some = [number.to_bytes(32) for number in range(500)]
    crowded = replace(authority(), authors={"a": frozenset(some)})
    share = author_share(crowded)
    line = len(f"recipe a {'00' * 32} {'00' * 32} 11534336\n")
    assert share == (MAX_LIST - 400) // (500 * line) < MAX_OPEN_RECIPES
    many = frozenset(number.to_bytes(32) for number in range(MAX_LIST // line))
    with pytest.raises(ServiceError, match="several registries"):
        author_share(replace(authority(), authors={"a": many}))


def test_a_clock_that_is_set_back_does_not_overfill_the_list(world: World) -> None:
    """What had closed by a wrong clock is open again by the right one."""
    world.publish(hpke_entry(LEADER), hpke_entry(HELPER))
    for number in range(MAX_OPEN_RECIPES):
        world.submit(recipe_entry(f"short-{number}", closes=NOW + DAY))
    world.clock.set(NOW + 2 * DAY)
    with pytest.raises(QuotaExceeded):
        world.submit(recipe_entry("early"))
    world.clock.set(NOW + 60)
    assert world.publish().checkpoint.size == 4 + MAX_OPEN_RECIPES


def test_the_refusal_over_http_says_what_to_do(world: World) -> None:
    fill(world, "author")

    async def post() -> httpx2.Response:
        app = build_app(world.registry, world.public)
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://registry") as client:
            return await client.post(
                "/entries", content=submission(recipe_entry("one-more")).encode()
            )

    answer = asyncio.run(post())
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["type"] == "urn:chorister:problem:quota-exceeded"
    assert "end some of them" in problem["detail"]
