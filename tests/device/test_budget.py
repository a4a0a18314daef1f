"""One limit and the charges against it: exact sums, each part of a limit, filters."""

from __future__ import annotations

import decimal
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from chorister.device.ledger.budget import Charge
from chorister.errors import BudgetExceeded, InvalidInput, QueryRefused
from chorister.privacy import filters
from tests.device.ledgers import (
    AGE_FIELD,
    NGRAM,
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
from tests.keyboard import RECIPE


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.make(tmp_path)


def test_the_charge_of_a_recipe() -> None:
    made = Charge.of(RECIPE)
    assert made.recipe == RECIPE.digest.hex()
    assert made.fields == RECIPE.fields_read
    assert made.privacy == RECIPE.privacy
    assert made.replacement_epsilon == RECIPE.randomizer.replacement_epsilon


def test_a_tenth_and_two_tenths_fit_into_three_tenths(place: Place) -> None:
    ledger = grown(place, policy(epsilon=Decimal("0.3")))
    spend(ledger, charge(1, epsilon="0.1"))
    spend(ledger, charge(2, epsilon="0.2"))
    assert spent(ledger) == Decimal("0.3")
    assert standing(ledger, "device").remaining.epsilon == 0
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, charge(3, epsilon="0.000000000000000000000000000001"))
    assert caught.value.field == "device.epsilon"
    assert (caught.value.spent, caught.value.allowed) == (Decimal("0.3"), Decimal("0.3"))


def test_the_host_apps_decimal_context_does_not_matter(place: Place) -> None:
    ledger = grown(place, policy(epsilon=1))
    with decimal.localcontext(prec=2, rounding=decimal.ROUND_DOWN):
        spend(ledger, charge(1, epsilon="0.123456789"))
        spend(ledger, charge(2, epsilon="0.1"))
        assert spent(ledger) == Decimal("0.223456789")
        assert standing(ledger, "device").remaining.epsilon == Decimal("0.776543211")
        doubled = charge(3, mechanism="symmetric", local_epsilon="1.2345")
        assert doubled.replacement_epsilon == Decimal("2.469")


A, FIELD = "analyses.a.budget", f"analyses.a.fields.{NGRAM}"


@pytest.mark.parametrize(
    ("device", "own", "field", "named", "fits"),
    [
        ({"epsilon": Decimal("0.1")}, {}, {}, "device.epsilon", 1),
        ({"delta": Decimal("2e-7")}, {}, {}, "device.delta", 2),
        ({"reports": 3}, {}, {}, "device.reports", 3),
        ({}, {"epsilon": Decimal("0.2")}, {}, f"{A}.epsilon", 2),
        ({}, {"delta": Decimal("1e-7")}, {}, f"{A}.delta", 1),
        ({}, {"reports": 2}, {}, f"{A}.reports", 2),
        ({}, {"local_epsilon": Decimal("0.9")}, {}, f"{A}.local_epsilon", 0),
        ({}, {}, {"epsilon": Decimal("0.3")}, f"{FIELD}.epsilon", 3),
        ({}, {}, {"delta": Decimal("3e-7")}, f"{FIELD}.delta", 3),
        ({}, {}, {"reports": 1}, f"{FIELD}.reports", 1),
        ({}, {}, {"local_epsilon": Decimal("0.9")}, f"{FIELD}.local_epsilon", 0),
        # All at once: device-wide first, then the analysis, then the field.
        ({"reports": 1}, {"reports": 1}, {"reports": 1}, "device.reports", 1),
        ({}, {"reports": 1}, {"reports": 1}, f"{A}.reports", 1),
    ],
)
def test_the_limit_that_refuses_is_named(
    place: Place,
    device: dict[str, Any],
    own: dict[str, Any],
    field: dict[str, Any],
    named: str,
    fits: int,
) -> None:
    whose, _, what = named.rpartition(".")
    names = {"device": "the whole device", A: "the analysis a", FIELD: f"the field {NGRAM}"}
    words = names[whose], what.replace("_", " ")
    ledger = grown(place, policy({"a": analysis(fields={NGRAM: field}, **own)}, **device))
    for i in range(fits):
        spend(ledger, charge(i))
    before = ledger.entries()
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, charge("one too many"))
    assert caught.value.field == named
    assert all(word in str(caught.value) for word in words)
    assert ledger.entries() == before


def test_every_field_that_is_read_is_charged(place: Place) -> None:
    ledger = grown(place, policy({"a": analysis(fields={NGRAM: {}, AGE_FIELD: {"reports": 1}})}))
    spend(ledger, charge(1, fields=(NGRAM, AGE_FIELD)))
    spend(ledger, charge(2, fields=(NGRAM,)))
    with pytest.raises(BudgetExceeded, match=f"the field {AGE_FIELD} 1 reports"):
        spend(ledger, charge(3, fields=(NGRAM, AGE_FIELD)))
    assert spent(ledger, f"analyses.a.fields.{NGRAM}") == Decimal("0.2")
    assert spent(ledger, f"analyses.a.fields.{AGE_FIELD}") == Decimal("0.1")


def test_a_fields_budget_is_one_analysis(place: Place) -> None:
    """The paper's Table 1b: "per analysis". The device-wide limit adds them up."""
    its = policy({name: analysis(fields={NGRAM: {"reports": 1}}) for name in "ab"}, reports=2)
    ledger = grown(place, its)
    spend(ledger, charge(1, to="a"))
    spend(ledger, charge(2, to="b"))
    with pytest.raises(BudgetExceeded, match="the whole device 2 reports"):
        spend(ledger, charge(3, to="b"))


def test_what_the_policy_does_not_have_is_refused(place: Place) -> None:
    ledger = grown(place, policy())
    with pytest.raises(QueryRefused) as caught:
        spend(ledger, charge(1, to="b"))
    assert caught.value.check == "analysis"
    with pytest.raises(QueryRefused) as caught:
        spend(ledger, charge(1, fields=(AGE_FIELD,)))
    assert caught.value.check == "fields"


def test_charges_that_no_accountant_can_judge_do_not_exist() -> None:
    with pytest.raises(ValueError, match="min_cohort"):
        charge(1, min_cohort=2 * 10**9)
    with pytest.raises(ValueError, match="occurs twice"):
        charge(1, fields=(NGRAM, NGRAM))


# --- the renyi filter ----------------------------------------------------------------------------

RENYI: dict[str, Any] = {"renyi": 32}
STRONG: dict[str, Any] = {
    "local_epsilon": "3",
    "min_cohort": 10_000,
    "epsilon": "0.2",
    "delta": "0.0000005",
}


def renyi_total(count: int, delta: Decimal) -> Decimal:
    """The same by the filter alone."""
    empty = filters.RenyiFilter(epsilon=Decimal(1), delta=delta, orders=(32,))
    return empty.after(charge(i, **STRONG).filtered for i in range(count)).spent.epsilon


def test_renyi_spends_what_the_filter_says(place: Place) -> None:
    delta = Decimal("1e-6")
    ledger = grown(place, policy(epsilon=1, delta=delta, composition=RENYI))
    for i in range(16):
        spend(ledger, charge(i, **STRONG))
    found = standing(ledger, "device")
    assert found.spent.epsilon == renyi_total(16, delta)
    # The best order would cost .5241 without noise; basic composition costs 3.2.
    assert Decimal("0.5") < found.spent.epsilon < Decimal("0.6")
    assert found.spent.delta == delta
    assert spent(ledger, "analyses.a.budget") == Decimal("3.2")  # its own composition is basic


def test_renyi_refuses_at_the_same_charge_as_the_filter(place: Place) -> None:
    delta, limit = Decimal("1e-6"), Decimal("0.45")
    ledger = grown(place, policy(epsilon=limit, delta=delta, composition=RENYI))
    fits = next(n for n in range(1, 100) if renyi_total(n, delta) > limit) - 1
    assert fits > 3
    for i in range(fits):
        spend(ledger, charge(i, **STRONG))
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, charge("one too many", **STRONG))
    assert caught.value.field == "device.epsilon"


def test_several_orders_share_delta(place: Place) -> None:
    delta = Decimal("1e-6")
    its = policy(epsilon=1, delta=delta, composition={"renyi": [16, 32, 64]})
    ledger = grown(place, its)
    state: filters.Filter = filters.RenyiFilter(
        epsilon=Decimal(1), delta=delta, orders=(16, 32, 64)
    )
    for i in range(3):
        spend(ledger, charge(i, **STRONG))
        state = state.add(charge(i, **STRONG).filtered)
    assert spent(ledger) == state.spent.epsilon


def test_renyi_sets_delta_aside_for_bounded_reports(place: Place) -> None:
    """A thousandth of 1e-12 pays (1 + e^20) 2^-80 = 4.0e-16 a report: it has room for two."""
    device: dict[str, Any] = {"epsilon": 20, "delta": Decimal("1e-12"), "composition": RENYI}
    ledger = grown(place, policy(**device))
    small: dict[str, Any] = {"epsilon": "0.1", "delta": "0.000000000002"}
    spend(ledger, charge(1, **small))
    spend(ledger, charge(2, **small))
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, charge(3, **small))
    assert caught.value.field == "device.delta"
    assert standing(ledger, "device").reports == 2


def test_what_bounded_reports_add_grows_with_the_crowd_and_the_total(place: Place) -> None:
    """m (1 + e^epsilon) 2^-80 = 9e5 e^20 2^-80 = 3.6e-10 a report, of 4e-10."""
    honest: dict[str, Any] = {
        "crowd": "honest", "honest_fraction": "9/10", "min_cohort": 1_000_000,
        "delta": "0.0000000001",
    }  # fmt: skip
    crowds = {**analysis(), "crowds": ["honest"], "honest_fraction": "9/10"}
    device: dict[str, Any] = {"epsilon": 20, "delta": Decimal("4e-7"), "composition": RENYI}
    ledger = grown(place, policy({"a": crowds}, **device))
    spend(ledger, charge(1, **honest))
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, charge(2, **honest))
    assert caught.value.field == "device.delta"
    # A limit that was lowered below what is set aside has nothing left, and says so.
    lowered = place.ledger(policy({"a": crowds}, **{**device, "delta": Decimal("1e-7")}))
    lowered.settle(START)
    assert standing(lowered, "device").remaining.delta == 0
    with pytest.raises(BudgetExceeded) as caught:
        lowered.check(charge(3, **honest), START)
    assert caught.value.field == "device.delta"


def test_deltas_that_add_up_to_one_refuse_all(place: Place) -> None:
    """Absurd budgets of many past periods, all of which a policy without a period takes back in."""
    renewing = analysis(period="1d")
    ledger = grown(place, policy({"a": renewing}, period="1d"))
    for day in range(11):
        spend(ledger, charge(day, delta="0.1"), START + day * 86_400)
    ledger = place.ledger(policy())
    ledger.settle(START + 11 * 86_400)
    with pytest.raises(BudgetExceeded) as caught:
        ledger.check(charge("more"), START + 11 * 86_400)
    assert caught.value.field == "device.delta"
    assert standing(ledger, "device").remaining.delta == 0


def test_charging_is_for_transactions(place: Place) -> None:
    ledger = grown(place, policy())
    with pytest.raises(InvalidInput, match="inside transaction"):
        ledger.append(charge(1), START)
