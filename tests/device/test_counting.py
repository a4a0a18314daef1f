"""For how long a charge counts, and that no policy update lowers what is spent."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.device.ledger import Ledger
from chorister.device.ledger.counting import Counts, PolicyTerms, period_end
from chorister.device.ledger.ledger_entries import MAX_OFFSET
from chorister.errors import BudgetExceeded
from chorister.policy import Policy
from tests.device.ledgers import (
    AGE_FIELD,
    DAY,
    NGRAM,
    PERPLEXITY,
    SLOW,
    START,
    Place,
    analysis,
    charge,
    grown,
    policy,
    spend,
    spent,
    standing,
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.make(tmp_path)


def updated(place: Place, new: Policy, now: int) -> Ledger:
    """The same ledger, opened with another policy."""
    ledger = place.ledger(new)
    ledger.settle(now)
    return ledger


@given(
    st.integers(0, 2**40),
    st.integers(1, 100 * 366 * DAY),
    st.integers(0, MAX_OFFSET - 1),
)
def test_periods_tile_the_time(time: int, period: int, offset: int) -> None:
    end = period_end(time, period, offset)
    assert end is not None
    assert time < end <= time + period
    assert (end + offset) % period == 0
    assert period_end(end - 1, period, offset) == end
    assert period_end(end, period, offset) == end + period


def test_without_a_period_nothing_ends() -> None:
    assert period_end(START, None, 5) is None


# 10 days before the end of a period of 30 days.
OFFSET = -(START + 10 * DAY) % (30 * DAY)
MONTHLY: dict[str, Any] = {"period": "30d", "epsilon": 1}


def monthly(**device: Any) -> Policy:
    return policy({"a": analysis(period="30d")}, **{**MONTHLY, **device})


def test_a_budget_renews_at_the_devices_own_time(place: Place) -> None:
    ledger = grown(place, monthly(), offset=OFFSET)
    spend(ledger, charge(1, epsilon="1"))
    renews = START + 10 * DAY
    assert standing(ledger, "device").renews == renews
    with pytest.raises(BudgetExceeded):
        ledger.check(charge(2), renews - 1)
    ledger.check(charge(2), renews)
    assert spent(ledger, "device", renews) == 0
    assert standing(ledger, "device", renews).renews == renews + 30 * DAY


def test_two_devices_renew_at_different_times(tmp_path: Path) -> None:
    ends = set()
    for name in "abcde":
        folder = tmp_path / name
        folder.mkdir()
        ledger = Ledger(Place.make(folder).connect(), monthly(), None, clock=SLOW)
        ledger.settle(START)
        ends.add(standing(ledger, "device").renews)
    assert len(ends) > 1  # all alike once in (30 days)^4 runs


def test_a_budget_without_a_period_never_renews(place: Place) -> None:
    ledger = grown(place, policy(epsilon=1))
    spend(ledger, charge(1, epsilon="1"))
    with pytest.raises(BudgetExceeded):
        ledger.check(charge(2), START + 100 * 366 * DAY)
    assert standing(ledger, "device").renews is None


def test_each_level_has_its_own_period(place: Place) -> None:
    ledger = grown(place, policy({"a": analysis(period="1d")}, period="30d"), offset=OFFSET)
    spend(ledger, charge(1))
    tomorrow = START + DAY
    assert spent(ledger, "device", tomorrow) == Decimal("0.1")
    assert spent(ledger, "analyses.a.budget", tomorrow) == 0
    assert spent(ledger, f"analyses.a.fields.{NGRAM}", tomorrow) == 0


# --- policy updates ------------------------------------------------------------------------------


def test_a_shorter_period_does_not_renew_early(place: Place) -> None:
    spend(grown(place, monthly(), offset=OFFSET), charge(1, epsilon="1"))
    daily = policy({"a": analysis(period="1d")}, period="1d", epsilon=1)
    ledger = updated(place, daily, START)
    with pytest.raises(BudgetExceeded):
        ledger.check(charge(2), START + 10 * DAY - 1)
    ledger.check(charge(2), START + 10 * DAY)


def test_a_longer_period_takes_back_in_what_had_renewed(place: Place) -> None:
    daily = policy({"a": analysis(period="1d")}, period="1d", epsilon=1)
    ledger = grown(place, daily, offset=OFFSET)
    spend(ledger, charge(1, epsilon="1"))
    assert spent(ledger, "device", START + 2 * DAY) == 0
    ledger = updated(place, monthly(), START + 2 * DAY)
    assert spent(ledger, "device", START + 2 * DAY) == 1
    assert spent(ledger, "device", START + 10 * DAY) == 0


def test_a_policy_without_a_period_makes_charges_count_for_ever(place: Place) -> None:
    spend(grown(place, monthly(), offset=OFFSET), charge(1, epsilon="1"))
    updated(place, policy(epsilon=1), START)
    ledger = updated(place, monthly(), START)
    assert spent(ledger, "device", START + 3650 * DAY) == 1
    # What is charged from now on renews as this policy says.
    later = START + 20 * DAY
    ledger = updated(place, monthly(epsilon=2), later)
    spend(ledger, charge(2, epsilon="1"), later)
    assert spent(ledger, "device", later) == 2
    assert spent(ledger, "device", later + 30 * DAY) == 1


@pytest.mark.parametrize("first", ["basic", {"renyi": 32}])
def test_another_composition_refunds_nothing(place: Place, first: object) -> None:
    """Both filters stay in force until what was charged under the first has renewed."""
    cheap: dict[str, Any] = {
        "local_epsilon": "3",
        "min_cohort": 10_000,
        "epsilon": "0.4",
        "delta": "0.0000001",
    }
    second = {"renyi": 32} if first == "basic" else "basic"
    delta = Decimal("1e-6")
    ledger = grown(place, monthly(composition=first, delta=delta), offset=OFFSET)
    spend(ledger, charge(1, **cheap))
    spend(ledger, charge(2, **cheap))
    before = spent(ledger)
    ledger = updated(place, monthly(composition=second, delta=delta), START)
    assert spent(ledger) >= before
    assert spent(ledger) == Decimal("0.8")  # basic is the larger one here
    with pytest.raises(BudgetExceeded) as caught:
        ledger.check(charge(3, **cheap), START)
    assert (caught.value.field, caught.value.spent) == ("device.epsilon", Decimal("0.8"))
    # The new period begins with the new filter alone.
    renewed = START + 10 * DAY
    for i in range(2):
        spend(ledger, charge(f"new {i}", **cheap), renewed)
    if second == "basic":
        with pytest.raises(BudgetExceeded):
            ledger.check(charge("basic", **cheap), renewed)
    else:
        assert spent(ledger, "device", renewed) < Decimal("0.5")
        ledger.check(charge("renyi", **cheap), renewed)


def test_a_renamed_analysis_inherits_what_the_old_name_spent(place: Place) -> None:
    spend(grown(place, policy({"a": analysis(epsilon=1)})), charge(1, epsilon="1"))
    ledger = updated(place, policy({"b": analysis(epsilon=1)}), START)
    assert spent(ledger, "analyses.b.budget") == 1
    assert spent(ledger, f"analyses.b.fields.{NGRAM}") == 1
    with pytest.raises(BudgetExceeded, match="the analysis b epsilon 1"):
        ledger.check(charge(2, to="b"), START)


def test_what_was_inherited_stays_when_the_old_name_comes_back(place: Place) -> None:
    spend(grown(place, policy({"a": analysis()})), charge(1, epsilon="1"))
    updated(place, policy({"b": analysis()}), START)
    both = policy({"a": analysis(), "b": analysis()})
    ledger = updated(place, both, START)
    assert spent(ledger, "analyses.a.budget") == 1
    assert spent(ledger, "analyses.b.budget") == 1
    assert spent(ledger) == 1  # one charge, however many inherit it


def test_an_analysis_of_other_fields_inherits_nothing(place: Place) -> None:
    spend(grown(place, policy({"a": analysis(epsilon=1)})), charge(1, epsilon="1"))
    other = policy({"c": analysis(fields={PERPLEXITY: {}}, epsilon=1)})
    ledger = updated(place, other, START)
    assert spent(ledger, "analyses.c.budget") == 0
    assert spent(ledger) == 1
    # Nor does one that stands beside the old name: it is another purpose.
    ledger = updated(place, policy({"a": analysis(), "b": analysis()}), START)
    assert spent(ledger, "analyses.b.budget") == 0


def test_a_field_that_was_removed_is_remembered(place: Place) -> None:
    with_age = policy({"a": analysis(fields={NGRAM: {}, AGE_FIELD: {"epsilon": 1}})})
    spend(grown(place, with_age), charge(1, fields=(NGRAM, AGE_FIELD), epsilon="1"))
    ledger = updated(place, policy({"a": analysis()}), START)
    assert spent(ledger, f"analyses.a.fields.{NGRAM}") == 1
    ledger = updated(place, with_age, START)
    assert spent(ledger, f"analyses.a.fields.{AGE_FIELD}") == 1
    with pytest.raises(BudgetExceeded, match=f"the field {AGE_FIELD} epsilon 1"):
        ledger.check(charge(2, fields=(AGE_FIELD,)), START)


def test_a_limit_lowered_and_raised_again(place: Place) -> None:
    spend(grown(place, policy(epsilon=1)), charge(1, epsilon="0.8"))
    ledger = updated(place, policy(epsilon=Decimal("0.5")), START)
    assert spent(ledger) == Decimal("0.8")
    assert standing(ledger, "device").remaining.epsilon == 0
    with pytest.raises(BudgetExceeded):
        ledger.check(charge(2, epsilon="0.1"), START)
    ledger = updated(place, policy(epsilon=1), START)
    ledger.check(charge(2, epsilon="0.2"), START)
    with pytest.raises(BudgetExceeded):
        ledger.check(charge(2, epsilon="0.21"), START)


PERIODS = st.sampled_from([None, "1d", "7d", "30d"])
COMPOSITIONS = st.sampled_from(["basic", {"renyi": 32}, {"renyi": 8}])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    def terms() -> dict[str, Any]:
        found: dict[str, Any] = {"composition": draw(COMPOSITIONS)}
        period = draw(PERIODS)
        return found if period is None else {**found, "period": period}

    names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
    fields = st.lists(
        st.sampled_from([NGRAM, AGE_FIELD, PERPLEXITY]), min_size=1, max_size=3, unique=True
    )
    analyses = {
        name: analysis(fields={ref: {} for ref in draw(fields)}, **terms()) for name in names
    }
    return policy(analyses, **terms())


@given(st.data())
def test_no_sequence_of_updates_lowers_what_is_spent(data: st.DataObject) -> None:
    """At the moment of an update, for every limit that both policies have."""
    old = data.draw(policies())
    counts = Counts(offset=data.draw(st.integers(0, MAX_OFFSET - 1)))
    counts = counts.with_policy(PolicyTerms.of(old))
    now = START
    for i in range(data.draw(st.integers(1, 6))):
        now += data.draw(st.integers(0, 20 * DAY))
        name = data.draw(st.sampled_from(sorted(old.analyses)))
        fields = tuple(old.analyses[name].fields)
        counts = counts.with_charge(charge(i, to=name, fields=fields), now)
        new = data.draw(policies())
        after = counts.with_policy(PolicyTerms.of(new))
        found = {limit.path: limit.standing() for limit in after.limits(new, now)}
        for limit in counts.limits(old, now):
            its = limit.standing()
            if limit.path in found:
                assert found[limit.path].spent.epsilon >= its.spent.epsilon
                assert found[limit.path].reports >= its.reports
        # And time alone renews nothing earlier than either policy says.
        for before, then in zip(counts.counted, after.counted, strict=True):
            assert then.device.until is None or (
                before.device.until is not None and then.device.until >= before.device.until
            )
            assert then.owners >= before.owners
        old, counts = new, after
