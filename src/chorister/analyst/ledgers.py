"""What devices' ledgers look like after some rounds: the same checks that a device makes.

Devices differ in which rounds they answered, and that decides what else they may answer. Whoever
answered the same rounds has the same ledger: one *class*. A class carries a weight, a share of the
fleet when planning, or numbers of simulated devices in a rehearsal. Everything is taken to happen
within one budget period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np

from chorister.device.budget import Charge, Limit
from chorister.device.counting import Counts, PolicyTerms
from chorister.errors import BudgetExceeded, QueryRefused
from chorister.policy import Policy
from chorister.recipe import Recipe, check

__all__ = ["Ledger", "Ledgers", "refusal"]

_TIME: Final = 0
_MOST_MORE: Final = 10_000
Weight = TypeVar("Weight")
_Key: TypeAlias = tuple[tuple[str, ...], frozenset[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The ledger of devices that answered the same rounds."""

    policy: Policy
    counts: Counts
    charges: tuple[Charge, ...] = ()

    @classmethod
    def empty(cls, policy: Policy) -> Ledger:
        """Of a device that answered nothing."""
        return cls(policy=policy, counts=Counts(offset=0).with_policy(PolicyTerms.of(policy)))

    @property
    def key(self) -> _Key:
        """What decides what else may be answered: charges, and studies taken part in."""
        spent = (
            f"{charge.analysis} {charge.fields} {charge.privacy.canonical()!r}"
            for charge in self.charges
        )
        return tuple(sorted(spent)), frozenset(charge.study for charge in self.charges)

    def check(self, recipe: Recipe) -> None:
        """Raise `BudgetExceeded` where a device with this ledger would not answer."""
        self.counts.check(Charge.of(recipe), self.policy, _TIME)

    def takes_part(self, recipe: Recipe) -> bool:
        """Whether the recipe is meant for devices with this ledger."""
        if not recipe.participation.once_per_study:
            return True
        return all(charge.study != recipe.study for charge in self.charges)

    def after(self, recipe: Recipe) -> Ledger:
        """The ledger once this recipe was answered."""
        charge = Charge.of(recipe)
        return replace(
            self,
            counts=self.counts.with_charge(charge, _TIME),
            charges=(*self.charges, charge),
        )

    def more(self, recipe: Recipe) -> int:
        """How many more recipes that cost as much a device with this ledger may answer."""
        ledger = self
        for count in range(_MOST_MORE):
            try:
                ledger.check(recipe)
            except BudgetExceeded:
                return count
            ledger = ledger.after(recipe)
        return _MOST_MORE

    def limits(self, analysis: str) -> list[Limit]:
        """The limits that bind an analysis: the device's, its own, its fields'."""
        prefix = f"analyses.{analysis}."
        return [
            limit
            for limit in self.counts.limits(self.policy, _TIME)
            if limit.path == "device" or limit.path.startswith(prefix)
        ]


@dataclass(slots=True)
class Ledgers(Generic[Weight]):
    """All classes of devices with their weights. Mutable: it follows the rounds."""

    policy: Policy
    fresh: Weight  # of the devices that answered nothing yet
    classes: dict[_Key, tuple[Ledger, Weight]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        empty = Ledger.empty(self.policy)
        self.classes[empty.key] = (empty, self.fresh)

    def answer(
        self,
        recipe: Recipe,
        take: Callable[[Weight], tuple[Weight, Weight]],
        join: Callable[[Weight, Weight], Weight],
    ) -> list[Weight]:
        """Let a recipe be answered: `take` splits a class into who answers and who does not."""
        answering: list[Weight] = []
        after: dict[_Key, tuple[Ledger, Weight]] = {}
        for ledger, weight in self.classes.values():
            parts = [(ledger, weight)]
            if self.would_answer(ledger, recipe):
                taken, left = take(weight)
                answering.append(taken)
                parts = [(ledger, left), (ledger.after(recipe), taken)]
            for each, amount in parts:
                if not np.any(np.asarray(amount)):
                    continue  # nobody is left in this class
                known = after.get(each.key)
                joined = amount if known is None else join(known[1], amount)
                after[each.key] = (each, joined)
        self.classes = after
        return answering

    @staticmethod
    def would_answer(ledger: Ledger, recipe: Recipe) -> bool:
        """Whether devices with this ledger answer."""
        if not ledger.takes_part(recipe):
            return False
        try:
            ledger.check(recipe)
        except (BudgetExceeded, QueryRefused):
            return False
        return True

    def why_nobody(self, recipe: Recipe) -> BudgetExceeded | None:
        """The budget that keeps every class from answering; None if one would answer."""
        found: BudgetExceeded | None = None
        for ledger, _ in self.classes.values():
            if not ledger.takes_part(recipe):
                continue
            try:
                ledger.check(recipe)
            except BudgetExceeded as error:
                found = error
            else:
                return None
        return found

    @property
    def ledgers(self) -> Iterable[Ledger]:
        """Of all classes."""
        return (ledger for ledger, _ in self.classes.values())


_HINTS: Final = {
    "query": "give a query that the policy permits",
    "fields": "read only the fields that are open to this analysis",
    "groups": "form no groups, or those that the policy permits",
    "cells": "group by fewer fields, or with fewer arms",
    "bins": "ask about fewer cells at a time",
    "prefixes": "send the prefixes in clear",
    "window": "choose `window` and `grace` within these limits",
    "cohort": "change `min_cohort`, or leave it out: it follows from epsilon and local epsilon",
    "mechanism": "leave out `mechanism`",
    "report": "leave out `report`",
    "crowd": "leave out `crowd`",
    "local-epsilon": "lower `local_epsilon`, or leave it out",
    "budget": "lower `epsilon` or `delta`, or leave them out",
    "field-budgets": "lower what is named, or leave it out",
    "amplification": "leave out `min_cohort`, and it follows; or raise `epsilon`",
}


def refusal(recipe: Recipe, policy: Policy) -> QueryRefused | None:
    """Why a policy does not allow a recipe, whatever was spent, and what to do; None if it does."""
    for outcome in check(recipe, policy):
        if not outcome.passed:
            hint = _HINTS.get(outcome.name)
            why = f"{outcome.why}; {hint}" if hint else outcome.why
            return QueryRefused(check=outcome.name, why=why, field=outcome.field)
    return None
