"""What planned questions cost, and what it costs to reach an accuracy.

Planning only: nothing here charges a ledger. Standard errors are those of the count of one rare bin
(true count 0), including the aggregators' noise where the crowd is noised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce

from chorister.errors import BudgetExceeded, InvalidInput
from chorister.privacy.amplification import epsilon, min_cohort
from chorister.privacy.certified import MAX_COHORT, Setting
from chorister.privacy.composition import Composed, FixedSequence, compose
from chorister.privacy.decimals import DOWN, Number, as_decimal, as_delta, rounded_up
from chorister.privacy.filters import Filter, Release, StatedCost
from chorister.privacy.randomizers import (
    MAX_LOCAL_EPSILON,
    MIN_LOCAL_EPSILON,
    OneHotRandomizer,
)
from chorister.privacy.weights import BOUND_DELTA, delta_before_bound

_STEP = Decimal("0.0001")
_MOST_MORE = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedQuestion:
    """A question before it is asked."""

    setting: Setting  # mechanism, local epsilon, crowd
    epsilon: Decimal  # of the aggregate
    delta: Decimal
    length: int  # number of bins, OOV included
    bounded: bool = True  # bounded reports: 1e-12 of delta is set aside
    reports: int | None = None  # how many reports to expect; the minimum cohort if None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one question costs, and how accurate it is."""

    charge: StatedCost  # what a ledger would write
    local_epsilon: Decimal  # replacement value: what local limits compare
    min_cohort: int  # the smallest cohort that gives this epsilon
    reports: int  # at which the standard error is stated
    std_error: float  # of a rare bin's count
    relative_error: float  # the same as a share of the reports
    more: int | None  # how many more such questions the budget allows; None without a budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Planned questions, each and all."""

    each: tuple[Cost, ...]
    total: Composed | None  # if the sequence is fixed in advance, at the sum of the deltas
    remaining: Filter | None  # the budget after all of them


def _randomizer(setting: Setting, length: int) -> OneHotRandomizer:
    return OneHotRandomizer(
        mechanism=setting.mechanism, local_epsilon=setting.local_epsilon, length=length
    )


def cost(
    questions: Sequence[PlannedQuestion], budget: Filter | None = None, *, total: bool = True
) -> Plan:
    """Price each question in turn and all together; raises where the budget does not allow one."""
    if not questions:
        raise InvalidInput("a plan needs at least one question")
    each: list[Cost] = []
    for question in questions:
        priced, budget = _price(question, budget)
        each.append(priced)
    composed = None
    if total:
        releases = tuple(priced.charge.release for priced in each)
        whole = reduce(DOWN.add, (question.delta for question in questions))
        bounded = sum(question.bounded for question in questions)
        composed = compose(FixedSequence(releases=releases), whole, bounded=bounded)
    return Plan(each=tuple(each), total=composed, remaining=budget)


def _price(question: PlannedQuestion, budget: Filter | None) -> tuple[Cost, Filter | None]:
    setting = question.setting
    delta = _left(question.delta, bounded=question.bounded)
    cohort = min_cohort(setting, epsilon=question.epsilon, delta=delta)
    reports = cohort if question.reports is None else question.reports
    if question.bounded:  # raises if this many reports would cost more than is set aside
        delta_before_bound(question.delta, question.epsilon, setting.bounded_reports(reports))
    if reports < cohort:
        raise InvalidInput(
            f"epsilon {question.epsilon} needs a cohort of at least {cohort:,}, not {reports:,}"
        )
    randomizer = _randomizer(setting, question.length)
    error = float(randomizer.std_error(reports, 0.0, setting.noise_trials(cohort)))
    charge = StatedCost(
        release=Release(setting=setting, cohort=cohort),
        epsilon=question.epsilon,
        delta=question.delta,
    )
    more = None
    if budget is not None:
        budget = budget.add(charge)
        more = _how_many(budget, charge)
    priced = Cost(
        charge=charge,
        local_epsilon=randomizer.replacement_epsilon,
        min_cohort=cohort,
        reports=reports,
        std_error=error,
        relative_error=error / reports,
        more=more,
    )
    return priced, budget


def _how_many(budget: Filter, charge: StatedCost) -> int:
    """How many more such charges fit, counted by charging."""
    for count in range(_MOST_MORE):
        try:
            budget = budget.add(charge)
        except BudgetExceeded:
            return count
    return _MOST_MORE


def cost_of_accuracy(
    setting: Setting,
    *,
    relative_error: float,
    delta: Number,
    length: int = 1000,
    bounded: bool = True,
) -> Cost:
    """The cohort at which a rare bin's standard error is this share of it, and its epsilon.

    The share falls as 1/sqrt(n), so the cohort is found directly; every member of it hides the
    device, so min_cohort is that cohort and epsilon is what it certifies (with bounded reports, at
    the delta that they leave).
    """
    if not 0.0 < relative_error < 1.0:
        raise InvalidInput(
            f"relative_error must lie strictly between 0 and 1, not {relative_error}"
        )
    randomizer = _randomizer(setting, length)

    def share(n: int) -> float:
        return float(randomizer.std_error(n, 0.0, setting.noise_trials(n))) / n

    root = min(share(10**6) * 1000.0 / relative_error, math.sqrt(MAX_COHORT))
    cohort = max(2, min(math.ceil(root**2), MAX_COHORT))
    while share(cohort) > relative_error:
        if cohort >= MAX_COHORT:
            raise InvalidInput(
                f"a relative error of {relative_error:g} needs more than {MAX_COHORT:,} reports at "
                f"local epsilon {setting.local_epsilon}: ask for a larger one"
            )
        cohort = min(MAX_COHORT, cohort + max(1, cohort // 1000))
    return _stated(setting, cohort, delta, share(cohort) * cohort, bounded=bounded)


def accuracy_for_cohort(
    setting: Setting,
    *,
    std_error: float,
    reports: int,
    delta: Number,
    length: int = 1000,
    bounded: bool = True,
) -> Cost:
    """The least local epsilon with this standard error at this many reports, and its epsilon.

    `setting` gives mechanism and crowd; its local epsilon is replaced by the least sufficient one.
    """
    if not std_error > 0.0:
        raise InvalidInput(f"std_error must be above 0, not {std_error}")

    def at(steps: int) -> tuple[Setting, float]:
        trial = Setting(
            local_epsilon=DOWN.multiply(_STEP, steps),
            mechanism=setting.mechanism,
            crowd=setting.crowd,
            honest_fraction=setting.honest_fraction,
        )
        trials = trial.noise_trials(reports)
        return trial, float(_randomizer(trial, length).std_error(reports, 0.0, trials))

    low = int(DOWN.divide_int(MIN_LOCAL_EPSILON, _STEP))
    high = int(DOWN.divide_int(MAX_LOCAL_EPSILON, _STEP))
    if at(high)[1] > std_error:
        raise InvalidInput(
            f"a standard error of {std_error:g} at {reports:,} reports needs a local epsilon above "
            f"{MAX_LOCAL_EPSILON}: ask for more reports or a larger error"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle)[1] <= std_error else (middle, high)
    chosen, error = at(high)
    return _stated(chosen, reports, delta, error, bounded=bounded)


def _left(delta: Decimal, *, bounded: bool) -> Decimal:
    """What amplification may use of a delta."""
    if not bounded:
        return delta
    if delta <= BOUND_DELTA:
        raise InvalidInput(f"bounded reports use {BOUND_DELTA} of delta: ask for more than {delta}")
    return DOWN.subtract(delta, BOUND_DELTA)


def _stated(setting: Setting, cohort: int, delta: Number, error: float, *, bounded: bool) -> Cost:
    as_delta(delta)  # raises unless it is one
    whole = as_decimal(delta)
    found = epsilon(setting, cohort=cohort, delta=_left(whole, bounded=bounded)).upper
    # Rounded up to what people write: the certified bound holds for anything above it.
    stated = rounded_up(found, Decimal("1e-6"))
    if bounded:  # raises where this many reports would cost more than is set aside
        delta_before_bound(whole, stated, setting.bounded_reports(cohort))
    charge = StatedCost(
        release=Release(setting=setting, cohort=cohort), epsilon=stated, delta=whole
    )
    return Cost(
        charge=charge,
        local_epsilon=_randomizer(setting, 2).replacement_epsilon,
        min_cohort=cohort,
        reports=cohort,
        std_error=error,
        relative_error=error / cohort,
        more=None,
    )
