"""Would devices answer this, and does it pay? The one check before anything is asked.

A rehearsal, a notebook, the console and `chorister recipe explain` all ask here, and so does
`Study.ask` before it publishes anything: a question that fails is never charged to any device.

- *Checks*: everything that a device checks without its ledger, compiled as a device compiles it,
  and whether features fit the types of their columns (`chorister.device.verifier.dry_run`).
- *Budget*: whether any device has enough left after all questions that we know of.
- *Warnings*: devices would answer, but the answer could show nothing or would never be released.
- *Remarks*: what to expect, what others may have spent, and what can't be known.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from chorister.analyst.allowance import others_in_words
from chorister.analyst.spending import (
    LedgerClasses,
    expect_answers,
    expected_ledgers,
    with_others,
    without_budget,
)
from chorister.device import Sandbox
from chorister.device.verifier import check_types, dry_run, result_columns
from chorister.encoding import AnyFeature
from chorister.errors import BudgetExceeded, CohortTooSmall, QueryRefused, SandboxUnavailable
from chorister.policy import Policy
from chorister.recipe import Check, Recipe, check
from chorister.recipe.outlook import expiring, smallest_share, spread_thin, wasted

if TYPE_CHECKING:
    from chorister.analyst.fleet import Fleet
    from chorister.analyst.study import Study

_STARTING: Final = threading.Lock()
_SIGMAS: Final = 6.0  # by which fewer devices may answer than expected, or more

_HINTS: Final = {
    "query": "give a query that the policy permits",
    "query-class": "give a query that devices can run",
    "types": "choose features that fit",
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
    "series": "choose `every`, `windows` and `answers_per_device` within these limits",
    "amplification": "leave out `min_cohort` to have it computed, or raise `epsilon`",
}


@lru_cache(maxsize=1)
def _started_sandbox() -> Sandbox:
    return Sandbox()


def shared_sandbox() -> Sandbox:
    """The sandbox in which this process compiles queries; started on first use."""
    with _STARTING:
        return _started_sandbox()


def device_checks(recipe: Recipe, policy: Policy) -> tuple[Check, ...]:
    """What a device with this policy checks before it looks at its ledger."""
    try:
        sandbox = shared_sandbox()
    except SandboxUnavailable as error:
        why = f"not compiled, because no sandbox starts here: {error}"
        return (*check(recipe, policy), Check(name="query-class", passed=True, why=why))
    return tuple(dry_run(recipe, policy, sandbox))


def refusal(checks: Sequence[Check]) -> QueryRefused | None:
    """Return the first check that fails as an error that says what to do; None if none does."""
    for outcome in checks:
        if not outcome.passed:
            hint = _HINTS.get(outcome.name)
            why = f"{outcome.why}; {hint}" if hint else outcome.why
            return QueryRefused(check=outcome.name, why=why, field=outcome.field)
    return None


def require_fitting(
    study: Study, features: Sequence[AnyFeature], query: str, reads: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise `QueryRefused` unless devices can run the query, and the features fit its columns.

    For algorithms, before they plan any round.
    """
    terms, policy = study.terms, study.fleet.policy
    if terms.query_class == "exact" and query not in terms.queries:
        raise QueryRefused(check="query", why="the policy does not list this query", field="query")
    columns = result_columns(policy, terms, query, reads, shared_sandbox())
    known = {name for name, _ in columns}
    for column in (column for each in features for column in each.columns_read):
        if column not in known:
            why = f"the features read the column {column}, which the query does not select"
            raise QueryRefused(check="query-class", why=why, field="features")
    if (refused := refusal((check_types(query, features, columns),))) is not None:
        raise refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Whether devices would answer a recipe, and whether it pays."""

    checks: tuple[Check, ...]  # against the policy
    exhausted: BudgetExceeded | None  # why no device would answer
    expected: float | None  # reports per window; None if refused, or of a fleet of unknown size
    too_small: CohortTooSmall | None  # why nothing could be released
    warnings: tuple[str, ...]  # why it would be a waste although devices would answer
    remarks: tuple[str, ...]  # what to expect, and what can't be known

    @property
    def allowed(self) -> bool:
        """Whether devices would answer."""
        return self.exhausted is None and all(outcome.passed for outcome in self.checks)

    def require(self) -> None:
        """Raise if devices would refuse the recipe, or be charged for nothing."""
        if (refused := refusal(self.checks)) is not None:
            raise refused
        for error in (self.exhausted, self.too_small):
            if error is not None:
                raise error


def preflight(
    fleet: Fleet, recipe: Recipe, *, target: int | None = None, reports: int | None = None
) -> Preflight:
    """Check a recipe against the policy, the budgets as they are now, and what can be seen.

    `reports` is how many to expect, for a fleet of unknown size.
    """
    checks = device_checks(recipe, fleet.policy)
    if any(not outcome.passed for outcome in checks):
        return Preflight(
            checks=checks, exhausted=None, expected=None, too_small=None, warnings=(), remarks=()
        )
    ledgers, others = expected_ledgers(fleet), fleet.others()
    exhausted = ledgers.why_nobody(recipe)
    bound = with_others(ledgers, others.recipes, fleet.clock.now())
    crowded_out = None if exhausted is not None else bound.why_nobody(recipe)
    spent = "" if exhausted is not None else without_budget(ledgers, recipe)
    expected = _expected(fleet, ledgers, recipe)
    too_small = None if exhausted is not None else _too_small(fleet, recipe, expected, spent)
    assumed = reports if expected is None else expected
    warnings = [] if too_small is None else [str(too_small)]
    if exhausted is None and too_small is None:
        warnings.extend(wasted(recipe, fleet.policy, assumed, target))
    hopeless = warnings or exhausted is not None
    remarks = () if hopeless else spread_thin(recipe, assumed)
    if spent and too_small is None:
        remarks = (spent, *remarks)
    return Preflight(
        checks=checks,
        exhausted=exhausted,
        expected=expected,
        too_small=too_small,
        warnings=tuple(warnings),
        remarks=(*remarks, *expiring(recipe, fleet.policy), *others_in_words(others, crowded_out)),
    )


def _expected(fleet: Fleet, ledgers: LedgerClasses[float], recipe: Recipe) -> float | None:
    share = expect_answers(ledgers, recipe)
    often = recipe.answers / recipe.window_count
    return None if fleet.devices is None else share * often * fleet.devices


def _too_small(
    fleet: Fleet, recipe: Recipe, expected: float | None, spent: str
) -> CohortTooSmall | None:
    """Nothing would be released: too few devices would answer, even with luck."""
    devices, least = fleet.devices, recipe.privacy.min_cohort
    if devices is None or expected is None:
        return None
    # All may be in one group. Where the fleet is known exactly, only participation is luck.
    part = expected * smallest_share(recipe.arms)
    chance = part / devices if fleet.margin == 1.0 and devices else 0.0
    if part + _SIGMAS * (part * (1.0 - chance)) ** 0.5 >= least:
        return None
    remedy = (
        ": ask a larger share, or lower the minimum cohort with a smaller local epsilon or a "
        "larger epsilon"
    )
    if spent:
        remedy = f". {spent.rstrip('.')}"
    return CohortTooSmall(
        f"At most about {part:,.0f} of {devices:,} devices would answer, but nothing is released "
        f"below {least:,}{remedy}",
        reports=round(part),
        needed=least,
    )
