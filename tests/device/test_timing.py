"""Times and coins: drawn by the device alone, before data is touched."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.clock import SECOND
from chorister.device.outbox import FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS, wait_after
from chorister.device.schedule import Timing, flip
from chorister.errors import InvalidInput, QueryRefused
from tests.device.world import NOW, a_recipe

RECIPE = a_recipe("one")
TIMING = Timing(query=20, slack=10, spread=3600, poll=3600)


@given(st.integers(0, 10), st.integers(NOW * SECOND, RECIPE.window.closes * SECOND - 1))
def test_an_upload_lies_after_all_deadlines_and_inside_the_window(queries: int, now: int) -> None:
    busy_until = TIMING.busy_until(now, queries)
    assert busy_until == now + (30 * queries + 5) * SECOND
    closes = RECIPE.window.closes * SECOND
    if busy_until >= closes:
        with pytest.raises(QueryRefused, match="too soon"):
            TIMING.draw_upload(RECIPE, busy_until=busy_until)
        return
    for ticket in (lambda _: 0, lambda n: n - 1):
        drawn = TIMING.draw_upload(RECIPE, busy_until=busy_until, randbelow=ticket)
        assert busy_until <= drawn <= min(busy_until + 3600 * SECOND, closes - 1)


def test_polls_are_spread_around_their_interval() -> None:
    now = NOW * SECOND
    assert TIMING.draw_poll(now, randbelow=lambda _: 0) == now + 1800 * SECOND + 1
    assert TIMING.draw_poll(now, randbelow=lambda n: n - 1) == now + 5400 * SECOND


def test_a_run_that_is_asked_for_sends_after_what_it_prepares() -> None:
    now = NOW * SECOND
    assert TIMING.draw_start(now, randbelow=lambda _: 0) == now + 2 * SECOND
    assert TIMING.draw_start(now, randbelow=lambda n: n - 1) == now + 3 * SECOND - 1
    assert Timing(settle=0).draw_start(now) == now


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
    if left > MAX_WAIT_SECONDS:
        full = min(FIRST_WAIT_SECONDS * 2 ** (tries - 1), MAX_WAIT_SECONDS)
        assert (shortest, longest) == (full // 2 + 1, full)


def test_devices_that_failed_together_do_not_come_back_together() -> None:
    waits = Counter(wait_after(8, left=10**6) for _ in range(1000))
    assert max(waits.values()) < 20
