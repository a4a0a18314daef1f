"""A registry that shows devices different checkpoints, to know them again by what they fetch.

Every checkpoint here is one that both aggregators cosigned: the registry lies about nothing, it
chooses which device sees which. What a poll requests may depend on the list it is shown and on the
policy, and on one thing more: whether the files of that list are those of the device's last
complete poll.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chorister.device.audit import Event
from chorister.device.transport import Answer
from chorister.recipe import Recipe
from chorister.transparency.entries import RecipeEntry
from chorister.transparency.state import MAX_OPEN_RECIPES
from tests.device.home import Home, at_home
from tests.device.world import DAY, NOW, REGISTRY, a_recipe, an_entry

# Refused by every device, so that nothing is answered: what is fetched must be the same anyway.
A, B, C, D = (a_recipe(name, {"privacy/min_cohort": 2}) for name in "abcd")


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[tuple[Home, Home]]:
    """Two devices of one fleet."""
    with ExitStack() as stack:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        one, two = (stack.enter_context(at_home(tmp_path / name)) for name in ("one", "two"))
        yield one, two


def shown(
    home: Home, *recipes: Recipe | RecipeEntry, time: int = NOW, size: int | None = None
) -> list[str]:
    """What a device requests when it is shown this list."""
    entries = [each if isinstance(each, RecipeEntry) else an_entry(each) for each in recipes]
    home.network.log.publish_raw({A.analysis: entries}, time=time, size=size)
    home.network.gets.clear()
    home.run()
    return [url.removeprefix(REGISTRY) for url in home.network.gets]


def withhold(home: Home, recipe: Recipe) -> None:
    """Let one body fail whenever it is asked for."""
    missing = f"{REGISTRY}body/{an_entry(recipe).body_digest.hex()}"
    get = home.network.get

    def failing(url: str, *, limit: int) -> Answer:
        answer = get(url, limit=limit)
        return Answer(status=500, content_type="", body=b"") if url == missing else answer

    home.network.get = failing  # type: ignore[method-assign]


def bodies(requests: list[str]) -> list[str]:
    return [path for path in requests if path.startswith("body/")]


def test_lists_shown_before_do_not_choose_which_bodies_are_fetched(
    devices: tuple[Home, Home],
) -> None:
    one, two = devices
    shown(one, A, time=NOW)
    shown(two, B, time=NOW)
    assert shown(one, A, B, C, time=NOW + 1) == shown(two, A, B, C, time=NOW + 1)


def test_the_order_of_lists_shown_before_is_not_remembered(devices: tuple[Home, Home]) -> None:
    one, two = devices
    for step, (first, second) in enumerate([([A], [D]), ([A, B], [B, C]), ([C], [A, B, C])]):
        shown(one, *first, time=NOW + step)
        shown(two, *second, time=NOW + step)
    for step, recipes in enumerate([[B, D], [B, D], [A, D], []], start=10):
        assert shown(one, *recipes, time=NOW + step) == shown(two, *recipes, time=NOW + step)


def test_an_earlier_checkpoint_does_not_tell_what_was_accepted_since(
    devices: tuple[Home, Home],
) -> None:
    """Refused by one of them, which has seen a later one: only the device itself knows."""
    one, two = devices
    shown(one, A, time=NOW)
    shown(two, A, time=NOW + 60)
    for recipes in ([A], [B], [B], [A, B], []):
        assert shown(one, *recipes, time=NOW + 30) == shown(two, *recipes, time=NOW + 30)
    assert not one.run().problems
    assert "accepted before" in two.run().problems[0]


def test_a_smaller_checkpoint_does_not_tell_what_was_accepted_before(
    devices: tuple[Home, Home],
) -> None:
    one, two = devices
    shown(one, A, time=NOW, size=10)
    shown(two, A, time=NOW, size=20)
    for size, recipes in enumerate([[A], [B], [B], [A, B], []], start=11):
        requests = [shown(home, *recipes, time=NOW + 30, size=size) for home in devices]
        assert requests[0] == requests[1]
    assert not one.run().problems
    assert "20 entries was accepted" in two.run().problems[0]


def test_an_old_checkpoint_does_not_tell_what_time_a_device_has(
    devices: tuple[Home, Home],
) -> None:
    """Its clock's error would be a name that lasts: one device finds it too old, the other not."""
    one, two = devices
    limit = one.policy.checkpoint_max_age
    one.clock.set(NOW + limit - 60)
    two.clock.set(NOW + limit + 1)
    for recipes in ([A], [B], [B], [A, B]):
        assert shown(one, *recipes, time=NOW) == shown(two, *recipes, time=NOW)
    assert not one.run().problems
    assert "from this device's clock" in two.run().problems[0]


def test_a_poll_that_fails_half_way_asks_one_question_and_no_second(
    devices: tuple[Home, Home],
) -> None:
    """Else a registry could try one list after the other until it finds the device's own."""
    one, two = devices
    shown(one, A, time=NOW)
    shown(two, B, time=NOW)
    for home in devices:
        withhold(home, D)
        assert len(bodies(shown(home, C, D, time=NOW + 1))) >= 3
        assert home.device.status().checkpoint_time == NOW
    requests = shown(one, A, time=NOW + 2)
    assert requests == shown(two, A, time=NOW + 2)
    assert len(bodies(requests)) == 3, "the two keys and the recipe"


def test_a_poll_that_is_interrupted_keeps_nothing(devices: tuple[Home, Home]) -> None:
    one, two = devices
    shown(one, A, time=NOW)
    shown(two, B, time=NOW)
    for home in devices:
        home.network.requested = _interrupt_after(4)
        with pytest.raises(KeyboardInterrupt):
            shown(home, A, B, C, D, time=NOW + 1)
        home.network.requested = lambda: None
        home.restart()
    assert shown(one, A, time=NOW + 2) == shown(two, A, time=NOW + 2)


def test_a_registry_makes_no_difference_between_devices_by_itself(
    devices: tuple[Home, Home],
) -> None:
    """It can log what it likes under keys of its own, and no device fetches any of it."""
    one, two = devices
    own = [an_entry(a_recipe(f"own-{i}"), f"throwaway {i}") for i in range(3)]
    shown(one, A, own[0], time=NOW)
    shown(two, A, own[1], own[2], time=NOW)
    for recipes in ([A, own[0]], [A, *own], [A]):
        requests = shown(one, *recipes, time=NOW + 1)
        assert requests == shown(two, *recipes, time=NOW + 1)
        assert not bodies(requests), "the files of the last poll, for both"


def test_a_list_that_is_too_much_is_refused_before_a_body_is_fetched(
    devices: tuple[Home, Home],
) -> None:
    one, _ = devices
    many = [a_recipe(f"r{i}", {"privacy/min_cohort": 2}) for i in range(MAX_OPEN_RECIPES + 1)]
    assert not bodies(shown(one, *many, time=NOW))
    assert one.last(Event.SILENT).check == "QuotaExceeded"
    assert len(bodies(shown(one, *many[1:], time=NOW + 1))) == MAX_OPEN_RECIPES + 2


def test_what_is_left_is_whether_the_files_changed_since_the_last_complete_poll(
    devices: tuple[Home, Home],
) -> None:
    """All or nothing, in the list's order; the checkpoint and the list are fetched every time."""
    one, two = devices
    everything = shown(one, A, B, time=NOW)
    assert [path.partition("/")[0] for path in everything] == [
        "list.tlog-proof",
        "list",
        *["body"] * 4,
    ]
    recipes = sorted(f"body/{an_entry(each).body_digest.hex()}" for each in (A, B))
    assert bodies(everything)[2:] == recipes
    assert shown(one, A, B, time=NOW + DAY // 2) == everything[:2]
    shown(two, A, time=NOW)
    assert shown(two, A, B, time=NOW + DAY // 2) == everything


def _interrupt_after(requests: int) -> Callable[[], None]:
    left = iter(range(requests))

    def interrupt() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return interrupt
