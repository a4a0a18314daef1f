"""Against which limits a charge counts, and for how long: a fold over the ledger's entries.

**Periods.** A budget with a period P renews at offset + kP, where the offset was drawn once, when
the ledger was created. A charge made at t *counts until* the end of the period that contains t. A
budget without a period never renews. So the guarantee is per period.

**A policy update never refunds.** Nothing is ever removed from the ledger. Each policy that the
device had is one of its entries, so what a charge counts against follows from the entries alone.
Every rule is a maximum, or a union, over the policies since the charge: one more policy never
lowers anything.

- *Changed period*: a charge counts until the latest end over the periods of all policies since it
  was made. A shorter period does not renew early what was charged under a longer one, a longer one
  counts again what had renewed, and a policy without a period makes charges count forever.
- *Changed composition*: a filter that was in force while a charge counted stays in force, in
  addition to the new one, until that charge no longer counts. (Switching filters after seeing
  answers is not a valid filter: each branch would have a different bound. So one filter spans all
  branches.)
- *Renamed or removed analysis*: a charge whose analysis is gone is inherited by every analysis that
  may read a field that it read, and stays with them even if the old name comes back. An analysis
  that reads none of these fields asks about other data; the device-wide limit still counts it.
- *Removed and re-added field*: charges name their fields, and fields that left the policy are
  remembered. A renamed field is another column, covered by the analysis' and the device's limits.
- *Lowered, then raised limit*: limits are compared with the sum of the entries; below that, nothing
  is allowed. Raising a limit allows the difference, as its author could have from the start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from chorister.canonical import Hex32, Model
from chorister.device.ledger.budget import Charge, Limit
from chorister.errors import InvalidInput, QueryRefused
from chorister.policy import AnalysisBudget, Composition, DeviceBudget, FieldBudget, Policy
from chorister.policy.model import Budget
from chorister.policy.values import Duration, FieldRef, Identifier


class Terms(Model):
    """What a policy says about how a budget renews and composes."""

    period: Duration | None = None
    composition: Composition = "basic"


class AnalysisTerms(Terms):
    """The same for an analysis, with the fields that it may read."""

    fields: Annotated[tuple[FieldRef, ...], Field(min_length=1)]


class PolicyTerms(Model):
    """What the ledger remembers of a policy: everything that decides how long a charge counts."""

    digest: Hex32
    device: Terms
    analyses: dict[Identifier, AnalysisTerms]

    @classmethod
    def of(cls, policy: Policy) -> PolicyTerms:
        return cls(
            digest=policy.digest.hex(),
            device=Terms(period=policy.device.period, composition=policy.device.composition),
            analyses={
                name: AnalysisTerms(
                    period=analysis.budget.period,
                    composition=analysis.budget.composition,
                    fields=tuple(sorted(analysis.fields)),
                )
                for name, analysis in policy.analyses.items()
            },
        )


def period_end(time: int, period: int | None, offset: int) -> int | None:
    """Return when the period that contains `time` ends and the budget renews; None is never."""
    if period is None:
        return None
    return ((time + offset) // period + 1) * period - offset


def later(one: int | None, other: int | None) -> int | None:
    """Return the later of two times, where None is never."""
    return None if one is None or other is None else max(one, other)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    """How a charge counts against the device's budget, or against its analysis' and fields'."""

    until: int | None  # None: forever
    compositions: frozenset[Composition]  # of all policies since the charge

    def under(self, terms: Terms, time: int, offset: int) -> _Level:
        """Return the same after one more policy."""
        return _Level(
            until=later(self.until, period_end(time, terms.period, offset)),
            compositions=self.compositions | {terms.composition},
        )

    def counts(self, now: int) -> bool:
        return self.until is None or now < self.until


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """A charge, and what the policies since have made of it."""

    charge: Charge
    time: int
    owners: frozenset[str]  # the analyses that it counts against
    device: _Level
    analysis: _Level

    def under(self, terms: PolicyTerms, offset: int) -> _Counted:
        owners = self.owners
        if not owners & terms.analyses.keys():
            read = set(self.charge.fields)
            owners |= {name for name, its in terms.analyses.items() if read & set(its.fields)}
        analysis = self.analysis
        for name in owners & terms.analyses.keys():
            analysis = analysis.under(terms.analyses[name], self.time, offset)
        device = self.device.under(terms.device, self.time, offset)
        return replace(self, owners=owners, device=device, analysis=analysis)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What counts against which limit, computed from the ledger's entries in order."""

    offset: int  # the device's own, in seconds
    terms: PolicyTerms | None = None  # of the newest policy
    counted: tuple[_Counted, ...] = ()

    def with_policy(self, terms: PolicyTerms) -> Counts:
        """Return the counts after a policy took effect."""
        counted = tuple(each.under(terms, self.offset) for each in self.counted)
        return replace(self, terms=terms, counted=counted)

    def with_charge(self, charge: Charge, time: int) -> Counts:
        """Return the counts after a charge made at `time` under the newest policy."""
        fresh = _Level(until=time, compositions=frozenset())
        new = _Counted(
            charge=charge,
            time=time,
            owners=frozenset({charge.analysis}),
            device=fresh,
            analysis=fresh,
        )
        if self.terms is None or charge.analysis not in self.terms.analyses:
            raise InvalidInput(f"a charge to {charge.analysis}, which the policy does not have")
        return replace(self, counted=(*self.counted, new.under(self.terms, self.offset)))

    @property
    def clear(self) -> int | None:
        """The time from which none of the charges counts against anything; None is never."""
        latest: int | None = 0
        for each in self.counted:
            latest = later(latest, later(each.device.until, each.analysis.until))
        return latest

    def check(self, charge: Charge, policy: Policy, now: int) -> None:
        """Make checks 1 and 2, device-wide first; raise `BudgetExceeded`, which names the limit."""
        analysis = policy.analyses.get(charge.analysis)
        if analysis is None:
            why = f"policy {policy.name} has no analysis {charge.analysis}"
            raise QueryRefused(check="analysis", why=why, field="analysis")
        self._device(policy.device, now).admit(charge)
        self._analysis(charge.analysis, analysis.budget, now).admit(charge)
        for ref in charge.fields:
            field = analysis.fields.get(ref)
            if field is None:
                why = f"{ref} is not open to this analysis"
                raise QueryRefused(check="fields", why=why, field="reads")
            self._field(charge.analysis, analysis.budget, ref, field, now).admit(charge)

    def limits(self, policy: Policy, now: int) -> list[Limit]:
        """Return all limits of the policy, device-wide first."""
        found = [self._device(policy.device, now)]
        for name, analysis in policy.analyses.items():
            found.append(self._analysis(name, analysis.budget, now))
            found.extend(
                self._field(name, analysis.budget, ref, field, now)
                for ref, field in analysis.fields.items()
            )
        return found

    def _device(self, budget: DeviceBudget, now: int) -> Limit:
        found = [(each.charge, each.device) for each in self.counted]
        return self._limit("device", budget, budget, found, now)

    def _analysis(self, name: str, budget: AnalysisBudget, now: int) -> Limit:
        found = [(each.charge, each.analysis) for each in self.counted if name in each.owners]
        return self._limit(f"analyses.{name}.budget", budget, budget, found, now)

    def _field(
        self, name: str, budget: AnalysisBudget, ref: str, field: FieldBudget, now: int
    ) -> Limit:
        found = [
            (each.charge, each.analysis)
            for each in self.counted
            if name in each.owners and ref in each.charge.fields
        ]
        return self._limit(f"analyses.{name}.fields.{ref}", field, budget, found, now)

    def _limit(
        self,
        path: str,
        budget: Budget | FieldBudget,
        renewal: Budget,  # a field's budget renews, and composes, as its analysis'
        found: list[tuple[Charge, _Level]],
        now: int,
    ) -> Limit:
        counting = [(charge, level) for charge, level in found if level.counts(now)]
        carried = {each for _, level in counting for each in level.compositions}
        renews: int | None = period_end(now, renewal.period, self.offset)
        if counting:
            renews = 0
            for _, level in counting:
                renews = later(renews, level.until)
        return Limit(
            path=path,
            budget=budget,
            compositions=(
                renewal.composition,
                *sorted(carried - {renewal.composition}, key=str),
            ),
            charges=tuple(charge for charge, _ in counting),
            renews=renews,
        )
