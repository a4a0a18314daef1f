"""One look at the log: what is kept of it, in the store and in memory."""

from __future__ import annotations

from typing import Any

from chorister.clock import SettableClock
from chorister.device import poll as module
from chorister.device.poll import Poll, poll
from chorister.device.transport import LogSource
from chorister.recipe import Recipe
from chorister.transparency.reader import NOTHING_ACCEPTED, LastAccepted
from tests.device.world import NOW, REGISTRY, Network, a_policy, a_recipe

POLICY = a_policy()


def look(network: Network, kept: dict[str, bytes], **changes: Any) -> Poll:
    arguments: dict[str, Any] = {
        "policy": POLICY,
        "clock": SettableClock(NOW),
        "last": NOTHING_ACCEPTED,
        "kept": kept.values,
        "forget": kept.clear,
        **changes,
    }
    return poll(LogSource(network, REGISTRY), **arguments)


def a_network(*recipes: Recipe) -> Network:
    network = Network()
    network.log.publish(recipes, time=NOW)
    return network


def test_files_are_handed_back_even_if_the_checkpoint_is_refused() -> None:
    network, kept = a_network(a_recipe("one")), dict[str, bytes]()
    accepted = look(network, kept)
    refused = look(network, kept, last=LastAccepted(time=NOW + 1))
    assert (accepted.accepted is None, refused.accepted is None) == (False, True)
    assert accepted.files == refused.files
    assert accepted.files is not None
    assert len(accepted.files) == 3


def test_what_is_kept_stays_if_the_log_shows_nothing_to_compare_it_with() -> None:
    kept = {"body/00": b"body"}
    network = a_network()
    network.log.publish([], time=NOW, cosigners={})
    assert look(network, kept).files is None
    network.down = True
    assert look(network, kept).files is None
    assert kept == {"body/00": b"body"}


def test_a_body_damaged_in_the_store_is_fetched_again() -> None:
    network, kept = a_network(a_recipe("one")), dict[str, bytes]()
    files = look(network, kept).files
    assert files is not None
    kept |= files
    kept[next(iter(kept))] += b"!"
    network.gets.clear()
    found = look(network, kept)
    assert found.files == files
    assert not found.problems
    assert len(network.gets) == 2 + 3


def test_long_recipes_are_not_remembered_in_memory() -> None:
    """An author who changes one each hour would fill the app's memory with them."""
    words = sorted(f"word{i}" for i in range(8000))
    long = a_recipe("long", {"features/1/vocabulary": words})
    for recipe, remembered in ((a_recipe("brief"), 1), (long, 0)):
        module._open_short.cache_clear()
        assert look(a_network(recipe), {}).listed
        assert module._open_short.cache_info().currsize == remembered
