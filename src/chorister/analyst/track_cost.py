"""What a series would cost and show: per device, per window, and which shift it would find."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from chorister.analyst.arguments import as_count, as_exact
from chorister.analyst.preflight import preflight
from chorister.analyst.spending import LedgerModel
from chorister.analyst.tables import paragraphs
from chorister.analyst.trend_intervals import Levels, smallest_shift, step_weights, z_of
from chorister.canonical import decimal_text
from chorister.device.ledger.budget import Charge
from chorister.errors import BudgetExceeded, CohortTooSmall, InvalidInput
from chorister.policy.values import duration_text, number_text
from chorister.recipe import Check, Recipe
from chorister.recipe.outlook import smallest_share

if TYPE_CHECKING:
    from chorister.analyst.question import Question


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackCost:
    """What a series would spend, need and achieve."""

    windows: int
    every: int  # seconds
    answers: int  # of one device, at most
    epsilon: Decimal  # charged for each answer
    delta: Decimal
    whole_epsilon: Decimal  # of all answers of one device, as its ledger composes them
    whole_delta: Decimal
    min_cohort: int  # of each window: with fewer reports, nothing is released
    expected: int | None  # reports to expect in each window
    reports: int  # for which the errors below are stated, in each window
    bins: int
    level: float  # the share of devices for which they are stated
    level_error: float  # the standard error of that share
    change_error: float  # of the difference between two windows
    half_width: float  # of an interval of a difference, over the whole series
    chance: float  # with which the shifts below are found
    false_alarms: float  # over the whole series
    shift: float | None  # from one window to another, that is found; None: none is
    lasting_shift: float | None  # from the middle of the series on, that `steps` finds at its end
    checks: tuple[Check, ...]
    exhausted: BudgetExceeded | None  # why no device would answer all that it may
    warnings: tuple[str, ...] = ()
    too_small: CohortTooSmall | None = None
    remarks: tuple[str, ...] = ()
    asked: int | None = None  # the round that asked it already: asking again costs nothing

    @property
    def allowed(self) -> bool:
        """Whether the policy permits it and there is budget left for it."""
        return self.exhausted is None and all(outcome.passed for outcome in self.checks)

    def explain(self) -> str:
        if self.asked is not None:
            return (
                f"This series was asked already, in round {self.asked}. Asking it looks it up and "
                "costs nothing; `plan.again()` asks it again."
            )
        several = (
            f"; all {self.answers} together at most epsilon {decimal_text(self.whole_epsilon)}, "
            f"delta {number_text(self.whole_delta)}"
            if self.answers > 1
            else ""
        )
        expected = "" if self.expected is None else f"; about {self.expected:,} are expected"
        lines = [
            f"{self.windows} windows, one every {duration_text(self.every)}. Each device answers "
            f"{self.answers} of them, drawn at random, and is charged epsilon "
            f"{decimal_text(self.epsilon)}, delta {number_text(self.delta)} for each{several}.",
            f"Each window needs {self.min_cohort:,} devices{expected}.",
            f"With {self.reports:,} reports in each window, a share of {self.level:.0%} is known "
            f"to ± {self.level_error:.2%} (standard error), and the difference between two windows "
            f"to ± {self.change_error:.2%}. Intervals of differences that hold for the whole "
            f"series reach ± {self.half_width:.2%}.",
            self._power(),
        ]
        lines.extend(
            f"Refused ({outcome.name}): {outcome.why}."
            for outcome in self.checks
            if not outcome.passed
        )
        if self.exhausted is not None:
            lines.append(f"Devices do not have the budget for it: {self.exhausted}.")
        lines.extend((*(f"Don't ask it: {why}" for why in self.warnings), *self.remarks))
        return "\n".join(lines)

    def _power(self) -> str:
        rate = f"with a false alarm in at most {self.false_alarms:.3g} of such series"
        if self.shift is None:
            return (
                f"No rise from {self.level:.0%} between two windows is found with a chance of "
                f"{self.chance:.0%}, {rate}: ask with more devices, more epsilon or fewer windows."
            )
        lasting = (
            f"; one that lasts from the middle of the series on is found from "
            f'{self.lasting_shift:.2%} on (compare="steps")'
            if self.lasting_shift is not None
            else ""
        )
        return (
            f"A rise by {self.shift:.2%} from {self.level:.0%} between two windows is found with a "
            f"chance of {self.chance:.0%}, {rate}{lasting}."
        )

    def _repr_html_(self) -> str:
        return paragraphs(self.explain())


def price(
    question: Question,
    *,
    reports: int | None,
    level: float,
    chance: float,
    false_alarms: float,
) -> TrackCost:
    """Price a series with the budgets as they are now."""
    reports = as_count(reports, "reports")
    level, chance = float(as_exact(level, "level")), float(as_exact(chance, "chance"))
    false_alarms = float(as_exact(false_alarms, "false_alarms"))
    if not 0.0 <= level < 1.0:
        raise InvalidInput(f"level is a share of the devices from 0 to below 1, not {level}")
    study, fleet = question.study, question.study.fleet
    recipe = question.recipe(number=study.next_number, opens=fleet.clock.now())
    series = recipe.series
    if series is None:
        raise InvalidInput("this question has one window: plan a series with `study.track`")
    found = preflight(fleet, recipe, reports=reports)
    at = reports or max(recipe.privacy.min_cohort, round(found.expected or 0))
    cells = fleet.policy.cells(recipe.group_by, len(recipe.arms))
    groups = fleet.policy.cells(recipe.group_by, 0)
    part = max(1.0, at * smallest_share(recipe.arms) / groups)
    pairs = series.windows * (series.windows - 1) // 2
    z = z_of(false_alarms, pairs * cells * recipe.encoding.size)
    two = np.array([[-1.0, 1.0]])
    steady = _levels(recipe, part, np.array([level, level]))
    _, low, high = steady.contrasts(two, z)
    middle = series.windows // 2
    step = step_weights(series.windows)[[middle - 1]]
    ledger = LedgerModel.empty(fleet.policy)
    for _ in range(series.answers):
        ledger = ledger.after(Charge.of(recipe))
    whole = ledger.limits(study.analysis)[0].standing().spent
    asked = study.asked_before(question)
    return TrackCost(
        windows=series.windows,
        every=series.every,
        answers=series.answers,
        epsilon=recipe.privacy.epsilon,
        delta=recipe.privacy.delta,
        whole_epsilon=whole.epsilon,
        whole_delta=whole.delta,
        min_cohort=recipe.privacy.min_cohort,
        expected=None if found.expected is None else round(found.expected),
        reports=at,
        bins=recipe.encoding.size,
        level=level,
        level_error=float(steady.std_error[0, 0]),
        change_error=float(np.hypot(*steady.std_error[:, 0])),
        half_width=float(high[0, 0] - low[0, 0]) / 2.0,
        chance=chance,
        false_alarms=false_alarms,
        shift=smallest_shift(
            level, lambda a, b: (_levels(recipe, part, np.array([a, b])), two), z, chance
        ),
        lasting_shift=smallest_shift(
            level,
            lambda a, b: (
                _levels(recipe, part, np.where(np.arange(series.windows) < middle, a, b)),
                step,
            ),
            z,
            chance,
        ),
        checks=found.checks,
        exhausted=found.exhausted,
        warnings=found.warnings,
        too_small=found.too_small,
        remarks=found.remarks,
        asked=None if asked is None else asked.number,
    )


def _levels(recipe: Recipe, reports: float, shares: np.ndarray) -> Levels:
    series = recipe.series
    overlap = 0.0 if series is None else (series.answers - 1) / (series.windows - 1)
    return Levels(
        shares=np.asarray(shares, dtype=np.float64)[:, None],
        reports=np.full(len(shares), reports),
        law=recipe.randomizer,
        noise_trials=recipe.privacy.noise_trials,
        overlap=overlap,
    )
