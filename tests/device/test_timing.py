"""Times and coins: drawn by the device alone, before data is touched."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.device.outbox import FIRST_WAIT, LONGEST_WAIT, wait_after
from chorister.device.timing import Timing, flip
from chorister.errors import InvalidInput, QueryRefused
from tests.device.world import NOW, a_recipe

RECIPE = a_recipe("one")
TIMING = Timing(query=20, slack=10, spread=3600, poll=3600)


@given(st.integers(0, 10), st.integers(NOW, RECIPE.window.closes - 1))
def test_an_upload_lies_after_all_deadlines_and_inside_the_window(before: int, now: int) -> None:
    earliest = now + (before + 1) * 30
    if earliest >= RECIPE.window.closes:
        with pytest.raises(QueryRefused, match="too soon"):
            TIMING.draw_upload(RECIPE, now=now, before=before)
        return
    for ticket in (lambda _: 0, lambda n: n - 1):
        drawn = TIMING.draw_upload(RECIPE, now=now, before=before, randbelow=ticket)
        assert earliest <= drawn <= min(earliest + 3600, RECIPE.window.closes - 1)


def test_polls_are_spread_around_their_interval() -> None:
    assert TIMING.next_poll(NOW, randbelow=lambda _: 0) == NOW + 1801
    assert TIMING.next_poll(NOW, randbelow=lambda n: n - 1) == NOW + 1800 + 3600


def test_times_below_a_second_are_refused() -> None:
    with pytest.raises(InvalidInput):
        Timing(query=0)


@given(st.decimals("0.000001", 1, places=6))
def test_a_coin_is_exact(probability: Decimal) -> None:
    """Of all tickets, exactly the share `probability` says yes."""
    sides = probability.as_integer_ratio()[1]
    winners = int(probability * sides)
    assert winners == probability * sides
    assert flip(probability, randbelow=lambda _: winners - 1)
    assert winners == sides or not flip(probability, randbelow=lambda _: winners)


def test_a_fair_coin_is_fair() -> None:
    """Outside 5 standard deviations once in 1.7 million runs."""
    heads = sum(flip(Decimal("0.5")) for _ in range(10_000))
    assert abs(heads - 5000) < 250


@given(st.integers(1, 1000), st.integers(1, 10**7))
def test_waits_double_are_jittered_and_end_with_the_window(tries: int, left: int) -> None:
    shortest, longest = (
        wait_after(tries, left=left, randbelow=ticket) for ticket in (lambda _: 0, lambda n: n - 1)
    )
    assert shortest >= 1
    assert longest <= max(left, 1)
    if left > LONGEST_WAIT:
        full = min(FIRST_WAIT * 2 ** (tries - 1), LONGEST_WAIT)
        assert (shortest, longest) == (full // 2 + 1, full)


def test_devices_that_failed_together_do_not_come_back_together() -> None:
    waits = Counter(wait_after(8, left=10**6) for _ in range(1000))
    assert max(waits.values()) < 20
