"""Fixed compositions: reference values, dp-accounting, and why they are no filters."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import textwrap
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chorister.errors import BudgetExceeded, InvalidInput
from chorister.privacy import (
    BasicFilter,
    ExactTotal,
    Filter,
    FixedSequence,
    Release,
    RenyiFilter,
    Setting,
    StatedCost,
    compose,
    epsilon,
    min_cohort,
    require_filter,
)
from chorister.privacy.certified import renyi_divergence, renyi_to_epsilon
from chorister.privacy.composition import CompositionName, compose_exact
from chorister.privacy.losses import PrivacyLoss, exact_envelope, release_loss
from chorister.privacy.randomizers import Mechanism

RELEASE = Release(setting=Setting(local_epsilon=3), cohort=10_000)
CHARGE = StatedCost(release=RELEASE, epsilon=Decimal("0.11001"), delta=Decimal("1e-6"))


def test_the_reference_compositions() -> None:
    four = compose(FixedSequence.repeated(RELEASE, 4), "1e-6")
    assert four.basic == pytest.approx(0.4793, abs=6e-5)
    assert four.advanced == pytest.approx(1.4036, abs=6e-5)
    assert four.renyi == pytest.approx(0.2509, abs=6e-5)
    assert four.exact == pytest.approx(0.23084, abs=1.5e-5)
    assert four.best == (CompositionName.EXACT, four.exact)
    sixteen = compose(FixedSequence.repeated(RELEASE, 16), "1e-6")
    assert sixteen.basic == pytest.approx(2.064, abs=6e-4)
    assert sixteen.renyi == pytest.approx(0.5241, abs=6e-5)
    assert sixteen.exact == pytest.approx(0.48426, abs=1.5e-5)


def test_advanced_is_worse_than_basic_below_twenty_seven_releases() -> None:
    few = compose(FixedSequence.repeated(RELEASE, 20), "1e-6")
    assert few.advanced > few.basic
    many = compose(FixedSequence.repeated(RELEASE, 60), "1e-6")
    assert many.advanced < many.basic


def test_one_release_composes_to_itself() -> None:
    alone = compose_exact(FixedSequence.repeated(RELEASE, 1), "1e-6")
    direct = epsilon(RELEASE.setting, cohort=10_000, delta="1e-6")
    assert direct.lower is not None
    assert direct.lower <= alone <= direct.upper * (1 + 1e-4)


@pytest.mark.parametrize("crowd", ["honest", "noised"])
@pytest.mark.parametrize("mechanism", ["asymmetric", "symmetric"])
def test_adding_one_by_one_equals_composing_at_once(mechanism: str, crowd: str) -> None:
    """Mixed releases, one grid; adding does not look at the earlier ones again."""
    first = Release(setting=Setting(local_epsilon=3, mechanism=mechanism, crowd=crowd), cohort=3000)
    second = Release(
        setting=Setting(local_epsilon="1.5", mechanism=mechanism, crowd=crowd), cohort=2000
    )
    total = ExactTotal.of(FixedSequence(releases=(first,)), "1e-6")
    for release in (second, first, second):
        total = total.add(release)
    at_once = compose_exact(FixedSequence(releases=(first, second, first, second)), "1e-6")
    assert total.epsilon("1e-6") == pytest.approx(at_once, rel=2e-3)
    assert total.delta(at_once) == pytest.approx(1e-6, rel=5e-2)


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("count", [1, 7])
def test_dp_accounting_agrees(mechanism: Mechanism, count: int) -> None:
    """Google's accountant, connect-the-dots, on the very pair of a noised crowd.

    Its grid of 1e-4 rounds losses up; both are upper bounds, so they may differ by its rounding.
    """
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    from tests.privacy.former import coordinate, probabilities

    q, h = probabilities(mechanism, 3.0)
    pair = coordinate(1999, 0, q, h, 1e-18)
    other = pair.reference_mass
    own = other * pair.ratio
    upper = {i: math.log(p) for i, p in enumerate(own) if p > 0}
    lower = {i: math.log(p) for i, p in enumerate(other) if p > 0}

    def distribution(one: dict[int, float], two: dict[int, float]) -> Any:
        return pld.from_two_probability_mass_functions(
            one, two, pessimistic_estimate=True, value_discretization_interval=1e-4
        )

    total = distribution(upper, lower).compose(distribution(lower, upper))
    theirs = total.self_compose(count).get_epsilon_for_delta(1e-6)
    setting = Setting(local_epsilon=3, mechanism=mechanism, crowd="noised")
    ours = compose_exact(
        FixedSequence.repeated(Release(setting=setting, cohort=2000), count), "1e-6"
    )
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours <= theirs * (1 + 1e-4)


# --- Why exact composition is not a filter -------------------------------------------------------


def loss_of(local: str, cohort: int, spacing: float) -> PrivacyLoss:
    envelope = exact_envelope(cohort, Mechanism.ASYMMETRIC, float(local), 1e-9, noised=True)
    return release_loss(envelope, spacing, 1e-15)


def test_choosing_the_second_question_after_the_first_answer_exceeds_delta() -> None:
    """The counterexample: each second question is within delta(1.5) <= 1e-6 if fixed in advance.

    After the first answer with loss l the analyst takes the question that is worst at 1.5 - l.
    """
    target, spacing = 1.5, 2e-3
    first = loss_of("3", 300, spacing)
    options = []
    for local in ("1.5", "3", "5", "7", "9"):
        low, high = 2, 400_000
        while high - low > 1:
            cohort = (low + high) // 2
            if first.then(loss_of(local, cohort, spacing), 1e-15).delta(target) <= 1e-6:
                high = cohort
            else:
                low = cohort
        options.append(loss_of(local, high, spacing))
    fixed = [first.then(option, 1e-15).delta(target) for option in options]
    assert max(fixed) <= 1e-6
    losses = first.spacing * (first.first + np.arange(first.mass.size))
    worst = np.array([max(option.delta(target - loss) for option in options) for loss in losses])
    adaptive = float(np.dot(first.mass, worst)) + first.infinite
    assert adaptive > 1.005e-6


# --- Why the two filters are ---------------------------------------------------------------------

Law = tuple[Fraction, ...]


def small_releases(seed: int) -> list[tuple[Law, Law]]:
    """Pairs of laws over three answers, one for each of two neighbours."""
    source = random.Random(seed)
    found = []
    for _ in range(3):
        one, other = ([source.randint(1, 9) for _ in range(3)] for _ in range(2))
        found.append(
            (
                tuple(Fraction(each, sum(one)) for each in one),
                tuple(Fraction(each, sum(other)) for each in other),
            )
        )
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_best_analyst_stays_within_a_basic_filter_in_exact_rationals(seed: int) -> None:
    """Every way to choose up to three questions by the answers so far, and to stop."""

    # Each question at two prices: e^epsilon is a fraction, delta what is then left.
    def excess(one: Law, other: Law, ratio: Fraction) -> Fraction:
        each = (max(p - ratio * q, Fraction(0)) for p, q in zip(one, other, strict=True))
        return sum(each, Fraction(0))

    options = [
        (one, other, ratio, excess(one, other, ratio))
        for one, other in small_releases(seed)
        for ratio in (Fraction(11, 10), Fraction(3, 2))
    ]
    limit, total = Fraction(5, 2), 2 * max(delta for _, _, _, delta in options)

    def best(p: Fraction, q: Fraction, ratio: Fraction, delta: Fraction, left: int) -> Fraction:
        found = max(p - limit * q, Fraction(0))
        for one, other, its_ratio, its_delta in options if left else ():
            if its_ratio <= ratio and its_delta <= delta:
                after = (
                    best(p * a, q * b, ratio / its_ratio, delta - its_delta, left - 1)
                    for a, b in zip(one, other, strict=True)
                )
                found = max(found, sum(after, Fraction(0)))
        return found

    assert best(Fraction(1), Fraction(1), limit, total, 3) <= total


@pytest.mark.parametrize("seed", range(8))
def test_the_best_analyst_stays_within_a_renyi_filter_in_exact_rationals(seed: int) -> None:
    """Order 2: the sum of p^2 / q, whose logarithm is the divergence."""
    options = [
        (one, other, sum((p * p / q for p, q in zip(one, other, strict=True)), Fraction(0)))
        for one, other in small_releases(seed)
    ]
    limit = max(moment for _, _, moment in options) ** 2

    def best(p: Fraction, q: Fraction, room: Fraction, left: int) -> Fraction:
        found = p * p / q
        for one, other, moment in options if left else ():
            if moment <= room:
                after = (
                    best(p * a, q * b, room / moment, left - 1)
                    for a, b in zip(one, other, strict=True)
                )
                found = max(found, sum(after, Fraction(0)))
        return found

    assert 1 < best(Fraction(1), Fraction(1), limit, 4) <= limit


# --- Filters --------------------------------------------------------------------------------


def test_basic_sums_exactly_and_checks_both() -> None:
    budget = BasicFilter(epsilon=Decimal("0.3"), delta=Decimal("1e-5"))
    tenth = StatedCost(release=RELEASE, epsilon=Decimal("0.1"), delta=Decimal("1e-6"))
    for _ in range(3):  # in binary, 0.1 + 0.1 + 0.1 exceeds 0.3
        budget = budget.add(tenth)
    assert budget.spent.epsilon == Decimal("0.3")
    assert budget.charges == 3
    with pytest.raises(BudgetExceeded) as refused:
        budget.add(tenth)
    error = refused.value
    assert (error.field, error.spent, error.allowed) == ("epsilon", Decimal("0.3"), Decimal("0.3"))
    assert budget.charges == 3
    costly = StatedCost(release=RELEASE, epsilon=Decimal(0), delta=Decimal("9e-6"))
    with pytest.raises(BudgetExceeded, match="delta"):
        budget.add(costly)


def test_the_renyi_filter_at_the_stated_order() -> None:
    """T = 16: .524 where exact is at .484 and basic far above."""
    budget = RenyiFilter(epsilon=Decimal(1), delta=Decimal("1e-6"), orders=(38,))
    assert budget.spent.epsilon == 0
    for _ in range(16):
        budget = budget.add(CHARGE)
    assert float(budget.spent.epsilon) == pytest.approx(0.5241, abs=6e-5)
    assert budget.spent.delta == Decimal("1e-6")


def test_the_renyi_filter_sets_delta_aside_for_bounded_reports() -> None:
    """A charge costs (1 + e^eps) m tau at the budget's epsilon; a thousandth of delta pays it."""
    release = Release(setting=Setting(local_epsilon=3), cohort=10**6)
    charge = StatedCost(release=release, epsilon=Decimal("0.01"), delta=Decimal("1e-6"))
    price = (1 + math.exp(19)) * 1e6 * 2.0**-80  # 1.5e-10, far above 1e-12
    budget = RenyiFilter(epsilon=Decimal(19), delta=Decimal("1e-6"), orders=(32,))
    for count in range(1, 7):
        budget = budget.add(charge)
        assert float(budget.bounding) == pytest.approx(count * price, rel=1e-12)
        assert budget.bounding > Decimal(count) * 178482301 * 10**6 * Decimal(2) ** -80
        assert budget.spent.delta == budget.delta
    with pytest.raises(BudgetExceeded) as refused:  # 7 x 1.5e-10 is above 1e-9
        budget.add(charge)
    assert refused.value.field == "delta"


def test_a_noised_release_bounds_one_report_only() -> None:
    release = Release(setting=Setting(local_epsilon=3, crowd="noised"), cohort=10**9)
    charge = StatedCost(release=release, epsilon=Decimal("0.001"), delta=Decimal("1e-6"))
    budget = RenyiFilter(epsilon=Decimal(12), delta=Decimal("1e-6"), orders=(32,)).add(charge)
    assert float(budget.bounding) == pytest.approx((1 + math.exp(12)) * 2.0**-80, rel=1e-12)


def test_the_reserve_for_bounded_reports_is_fixed_beforehand() -> None:
    """What the divergences may use does not depend on how many charges there were."""
    budget = RenyiFilter(epsilon=Decimal(1), delta=Decimal("1e-6"), orders=(38,)).add(CHARGE)
    divergence = float(budget.totals[0])
    expected = renyi_to_epsilon(divergence, 38, 0.999e-6)
    assert float(budget.spent.epsilon) == pytest.approx(expected, abs=2e-12)
    budget = budget.add(CHARGE)
    expected = renyi_to_epsilon(float(budget.totals[0]), 38, 0.999e-6)
    assert float(budget.spent.epsilon) == pytest.approx(expected, abs=2e-12)


@pytest.mark.parametrize("crowd", ["honest", "noised"])
@pytest.mark.parametrize("epsilon", [27, 40, 10**6])
def test_a_renyi_budget_refuses_at_any_local_epsilon_without_failing(
    epsilon: int, crowd: str
) -> None:
    setting = Setting(local_epsilon=18, mechanism="symmetric", crowd=crowd)
    release = Release(setting=setting, cohort=2)
    charge = StatedCost(release=release, epsilon=Decimal(36), delta=Decimal("1e-6"))
    budget = RenyiFilter(epsilon=Decimal(epsilon), delta=Decimal("1e-6"), orders=(32,))
    with pytest.raises(BudgetExceeded):
        budget.add(charge)


def test_a_grid_that_is_too_large_leaves_the_other_compositions() -> None:
    setting = Setting(local_epsilon=20, mechanism="symmetric", crowd="noised")
    composed = compose(FixedSequence.repeated(Release(setting=setting, cohort=2), 2), "1e-6")
    assert math.isinf(composed.exact)
    ((name, why),) = composed.refusals
    assert name is CompositionName.EXACT
    assert "grid of" in why
    assert composed.best == (CompositionName.BASIC, composed.basic)
    # One large loss among many tiny ones: refused before the grid takes any memory.
    tiny = Release(setting=Setting(local_epsilon="0.001", crowd="noised"), cohort=10**6)
    mixed = (Release(setting=setting, cohort=2), *(tiny,) * 99_999)
    with pytest.raises(InvalidInput, match="grid of"):
        compose_exact(FixedSequence(releases=mixed), "1e-6")


def test_bounded_reports_take_their_part_of_a_fixed_sequence() -> None:
    release = Release(setting=Setting(local_epsilon=3, crowd="noised"), cohort=586)
    sequence = FixedSequence.repeated(release, 4)
    bounded = compose(sequence, "5e-12", bounded=4)
    assert bounded == compose(sequence, "1e-12")
    assert compose(sequence, "5e-12", bounded=1) == compose(sequence, "4e-12")
    for count in (-1, 5):
        with pytest.raises(InvalidInput, match="from 0 to 4"):
            compose(sequence, "5e-12", bounded=count)
    with pytest.raises(InvalidInput, match="ask for more"):
        compose(sequence, "4e-12", bounded=4)


def test_where_the_price_of_bounding_is_not_covered_local_guarantees_stand() -> None:
    """e^28 x 2^-80 is above 1e-12."""
    setting = Setting(local_epsilon=20, mechanism="symmetric", crowd="noised")
    sequence = FixedSequence.repeated(Release(setting=setting, cohort=2), 2)
    assert compose(sequence, "1e-6").renyi < 80
    bounded = compose(sequence, "1e-6", bounded=2)
    assert bounded.basic == bounded.advanced == bounded.renyi == 80


def test_several_orders_share_delta() -> None:
    one = RenyiFilter(epsilon=Decimal(1), delta=Decimal("1e-6"), orders=(38,)).add(CHARGE)
    two = RenyiFilter(epsilon=Decimal(1), delta=Decimal("1e-6"), orders=(38, 140)).add(CHARGE)
    half = RenyiFilter(epsilon=Decimal(1), delta=Decimal("5e-7"), orders=(140,)).add(CHARGE)
    assert two.spent.epsilon == half.spent.epsilon < one.spent.epsilon


def test_a_filter_only_looks_at_the_new_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(*arguments: Any, **named: Any) -> float:
        seen.append(1)
        return renyi_divergence(*arguments, **named)

    monkeypatch.setattr("chorister.privacy.filters.renyi_divergence", counted)
    budget = RenyiFilter(epsilon=Decimal(3), delta=Decimal("1e-6"), orders=(20, 40))
    for _ in range(5):
        seen.clear()
        budget = budget.add(CHARGE)
        assert len(seen) == 2


def test_a_fixed_composition_is_not_a_filter_at_run_time() -> None:
    sequence = FixedSequence.repeated(RELEASE, 2)
    total = ExactTotal.of(sequence, "1e-6")
    for composition in (sequence, total, compose(sequence, "1e-6"), "exact", None):
        assert not isinstance(composition, Filter)
        with pytest.raises(InvalidInput, match="not a filter"):
            require_filter(composition)
    budget = BasicFilter(epsilon=Decimal(1), delta=Decimal("1e-6"))
    assert require_filter(budget) is budget
    with pytest.raises(TypeError, match="proof of its own"):
        type("ExactFilter", (Filter,), {})


def test_a_fixed_composition_is_not_a_filter_for_the_type_checker(tmp_path: Path) -> None:
    page = tmp_path / "ledger.py"
    page.write_text(
        textwrap.dedent(
            """
            from decimal import Decimal
            from chorister.privacy import BasicFilter, ExactTotal, Filter, FixedSequence

            def ledger(composition: Filter) -> None: ...

            def try_it(sequence: FixedSequence, total: ExactTotal) -> None:
                ledger(BasicFilter(epsilon=Decimal(1), delta=Decimal("1e-6")))
                ledger(sequence)
                ledger(total)
            """
        )
    )
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(page)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    wrong = [line for line in run.stdout.splitlines() if "ledger.py" in line and "error" in line]
    assert [int(line.split("ledger.py:")[1].split(":")[0]) for line in wrong] == [9, 10], run.stdout


def test_bad_budgets_and_charges_are_refused() -> None:
    for bad in ("0", "-1", "NaN", "Infinity"):
        with pytest.raises(InvalidInput, match="epsilon"):
            BasicFilter(epsilon=Decimal(bad), delta=Decimal("1e-6"))
    for bad in ("0", "1", "NaN"):
        with pytest.raises(InvalidInput, match="delta"):
            BasicFilter(epsilon=Decimal(1), delta=Decimal(bad))
    with pytest.raises(InvalidInput, match="epsilon"):
        StatedCost(release=RELEASE, epsilon=Decimal(-1), delta=Decimal("1e-6"))
    with pytest.raises(InvalidInput, match="delta"):
        StatedCost(release=RELEASE, epsilon=Decimal(1), delta=Decimal("NaN"))
    for orders in ((), (3, 3), (1,)):
        with pytest.raises(InvalidInput, match="order"):
            RenyiFilter(epsilon=Decimal(1), delta=Decimal("1e-6"), orders=orders)
    with pytest.raises(InvalidInput, match="1 to"):
        FixedSequence(releases=())
    assert min_cohort(RELEASE.setting, epsilon="0.5", delta="1e-6") == 586
