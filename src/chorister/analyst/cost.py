"""What a question costs and gives, before it is asked."""

from __future__ import annotations

import html as escaping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from chorister.analyst.fleet import expected_reports, foreseen
from chorister.analyst.ledgers import Ledger
from chorister.canonical import decimal_text
from chorister.errors import BudgetExceeded
from chorister.recipe import Check, check

if TYPE_CHECKING:
    from chorister.analyst.question import Question

__all__ = ["QuestionCost", "price"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionCost:
    """What one question would spend, need and give."""

    epsilon: Decimal  # charged to every device that answers
    delta: Decimal
    local_epsilon: Decimal  # of one report, to both aggregators together (replacement value)
    min_cohort: int  # fewer reports release nothing
    expected: int | None  # reports to expect, with the budgets as they are
    reports: int  # at which the errors below are stated
    bins: int
    bytes_per_report: int  # that each device uploads, about
    std_error: float  # devices, of a bin that nobody holds
    relative_error: float  # the same as a share of the reports
    more: int  # such questions that a device which answered everything so far could still answer
    fresh_devices: float  # share of the fleet that answered nothing in this study yet
    checks: tuple[Check, ...]  # the policy's rules
    exhausted: BudgetExceeded | None  # why no device would answer

    @property
    def allowed(self) -> bool:
        """Whether the policy permits it and a budget is left for it."""
        return self.exhausted is None and all(outcome.passed for outcome in self.checks)

    def explain(self) -> str:
        """In words."""
        lines = [
            f"Each device that answers is charged epsilon {decimal_text(self.epsilon)}, delta "
            f"{decimal_text(self.delta)}, and one report of {self.bins:,} bins "
            f"(about {self.bytes_per_report:,} bytes). A device that answered all it could may "
            f"answer {self.more:,} such questions more, this one included; "
            f"{self.fresh_devices:.0%} of the devices answered nothing in this study yet.",
            f"It needs {self.min_cohort:,} devices"
            + (f"; about {self.expected:,} are expected." if self.expected is not None else "."),
            f"With {self.reports:,} reports a bin that nobody holds reads 0 ± "
            f"{self.std_error:,.1f} devices ({self.relative_error:.3%} of the reports).",
        ]
        lines.extend(
            f"Refused ({outcome.name}): {outcome.why}."
            for outcome in self.checks
            if not outcome.passed
        )
        if self.exhausted is not None:
            lines.append(f"No device would answer: {self.exhausted}.")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escaping.escape(line)}</p>" for line in self.explain().split("\n"))


def price(question: Question, reports: int | None) -> QuestionCost:
    """Price a question with the budgets as the study's rounds leave them."""
    fleet = question.study.fleet
    recipe = question.recipe(number=question.study.next_number, opens=fleet.clock.now())
    outcomes = tuple(check(recipe, fleet.policy))
    ledgers = foreseen(fleet)
    refused = any(not outcome.passed for outcome in outcomes)
    exhausted = None if refused else ledgers.why_nobody(recipe)
    most = max(ledgers.ledgers, key=lambda ledger: len(ledger.charges))
    fresh = sum(
        weight
        for ledger, weight in ledgers.classes.values()
        if all(charge.study != recipe.study for charge in ledger.charges)
    )
    expected = None if refused else expected_reports(fleet, recipe)
    at = reports or max(recipe.privacy.min_cohort, round(expected or 0))
    trials = recipe.privacy.min_cohort - 1 if recipe.privacy.crowd == "noised" else 0
    error = float(recipe.randomizer.std_error(at, 0.0, trials))
    return QuestionCost(
        epsilon=recipe.privacy.epsilon,
        delta=recipe.privacy.delta,
        local_epsilon=recipe.randomizer.replacement_epsilon,
        min_cohort=recipe.privacy.min_cohort,
        expected=None if expected is None else round(expected),
        reports=at,
        bins=recipe.encoding.size,
        bytes_per_report=16 * recipe.encoding.size + 1000,
        std_error=error,
        relative_error=error / at,
        more=0 if refused else _more(most, question, ledgers_empty=Ledger.empty(fleet.policy)),
        fresh_devices=fresh,
        checks=outcomes,
        exhausted=exhausted,
    )


def _more(most: Ledger, question: Question, *, ledgers_empty: Ledger) -> int:
    """For disjoint cohorts a device answers once at most; otherwise what its budget allows."""
    recipe = question.recipe(number=1, opens=0)
    if question.participation.once_per_study:
        return min(1, ledgers_empty.more(recipe))
    return most.more(recipe)
