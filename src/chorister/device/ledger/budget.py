"""What one answer costs, and whether a limit of the policy allows it: pure rules, no storage.

A device checks three kinds of limits before it answers (the paper's section 4.3, with delta): its
own, shared by all analyses; the analysis'; and each field's within the analysis. All three limit
epsilon and delta under a *filter* (`chorister.privacy.filters`), and the number of reports. Those
of analysis and fields also limit the local epsilon of a single report, in the replacement model.
`chorister.device.ledger.counting` decides which charges count against which limit, and for how
long. Check 3, that the cohort brings the local epsilon down to what the recipe states, needs no
ledger: `chorister.recipe.check` does it.

All arithmetic is decimal and exact: 0.1 + 0.2 fits into 0.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cached_property
from typing import Annotated, Final

from pydantic import Field, model_validator

from chorister.canonical import FieldError, Hex32, Int, Model
from chorister.errors import BudgetExceeded
from chorister.policy import Composition, FieldBudget
from chorister.policy.model import Budget, empty_filter
from chorister.policy.values import FieldRef, Identifier
from chorister.privacy import filters
from chorister.recipe import Privacy, Recipe

# The host app may have set another precision; 60 digits are never reached.
_EXACT: Final = Context(prec=60)
_ZERO: Final = Decimal(0)


class Charge(Model):
    """What one answer costs, and what it is charged to."""

    recipe: Hex32
    """SHA-256 of the recipe: none is charged twice, and each window of a series at most once."""
    window: Annotated[Int, Field(ge=0)] | None = None
    """The number of a series' window."""
    answers: Annotated[Int, Field(ge=1)] | None = None
    """How many windows of the series may be charged."""
    study: Identifier
    analysis: Identifier
    fields: Annotated[tuple[FieldRef, ...], Field(min_length=1)]
    privacy: Privacy
    """What the recipe states: mechanism, eps0, epsilon, the full delta, min_cohort, crowd."""

    @classmethod
    def of(cls, recipe: Recipe, number: int = 0) -> Charge:
        """Return what an answer in one window costs."""
        series = recipe.series
        return cls(
            recipe=recipe.digest.hex(),
            window=None if series is None else number,
            answers=None if series is None else series.answers,
            study=recipe.study,
            analysis=recipe.analysis,
            fields=recipe.fields_read,
            privacy=recipe.privacy,
        )

    @property
    def replacement_epsilon(self) -> Decimal:
        """The local epsilon that policies limit."""
        return self.privacy.replacement_epsilon

    @cached_property
    def filtered(self) -> filters.StatedCost:
        """This charge in the form that filters use."""
        return self.privacy.stated_cost

    @model_validator(mode="after")
    def _each_once(self) -> Charge:
        if len(set(self.fields)) != len(self.fields):
            raise FieldError("fields", "a field occurs twice")
        if (self.window is None) != (self.answers is None):
            raise FieldError("answers", "belongs to a window of a series, and only to one")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One limit: how much of it is spent now, and what it allows."""

    limit: str  # as in the policy: "device", "analyses.NAME.budget", "analyses.NAME.fields.REF"
    spent: filters.Spent  # the largest under any filter in force; with renyi, delta is all or none
    reports: int
    allowed: filters.Spent
    allowed_reports: int
    renews: int | None  # when all that is spent now will have renewed; None is never

    @property
    def remaining(self) -> filters.Spent:
        """What is left: never below 0, even if the limit was lowered since."""
        with localcontext(_EXACT):
            return filters.Spent(
                epsilon=max(_ZERO, self.allowed.epsilon - self.spent.epsilon),
                delta=max(_ZERO, self.allowed.delta - self.spent.delta),
            )

    @property
    def remaining_reports(self) -> int:
        return max(0, self.allowed_reports - self.reports)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit of the policy together with the charges that count against it now."""

    path: str
    budget: Budget | FieldBudget
    compositions: tuple[Composition, ...]  # never empty; the policy's own is first
    charges: tuple[Charge, ...]
    renews: int | None

    def admit(self, charge: Charge) -> None:
        """Raise `BudgetExceeded`, naming this limit, unless it allows one more charge."""
        self._admit_local(charge)
        for composition in self.compositions:
            try:
                self._after(composition).add(charge.filtered)
            except BudgetExceeded as error:
                raise BudgetExceeded(
                    spent=error.spent,
                    asked=error.asked,
                    allowed=Decimal(getattr(self.budget, error.field)),
                    field=f"{self.path}.{error.field}",
                ) from None
        used = len(self.charges)
        if used + 1 > self.budget.reports:
            raise BudgetExceeded(
                spent=Decimal(used),
                asked=Decimal(1),
                allowed=Decimal(self.budget.reports),
                field=f"{self.path}.reports",
            )

    def standing(self) -> Standing:
        spent = [self._after(each).spent for each in self.compositions]
        return Standing(
            limit=self.path,
            spent=filters.Spent(
                epsilon=max(each.epsilon for each in spent),
                delta=max(each.delta for each in spent),
            ),
            reports=len(self.charges),
            allowed=filters.Spent(epsilon=self.budget.epsilon, delta=self.budget.delta),
            allowed_reports=self.budget.reports,
            renews=self.renews,
        )

    def _admit_local(self, charge: Charge) -> None:
        allowed = getattr(self.budget, "local_epsilon", None)  # the device's budget has none
        if allowed is not None and charge.replacement_epsilon > allowed:
            raise BudgetExceeded(
                spent=_ZERO,
                asked=charge.replacement_epsilon,
                allowed=allowed,
                field=f"{self.path}.local_epsilon",
            )

    def _after(self, composition: Composition) -> filters.Filter:
        """Return the filter after all charges that count, whether or not they fit today."""
        empty = empty_filter(composition, self.budget.epsilon, self.budget.delta)
        return empty.after(charge.filtered for charge in self.charges)
