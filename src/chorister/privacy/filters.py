"""Filters: the only compositions that a device may enforce.

An analyst chooses each question after seeing the last answer, its parameters included. A *filter*
still bounds the total. Two are known to:

- **basic**: sums of epsilon and of delta (Rogers et al. 2016). Always valid; the default.
- **renyi**: the sum of D_alpha at orders written down beforehand (Feldman and Zrnic 2021). With
  several orders each guards its own share of delta, and the budget holds while one of them holds.

Exact and advanced composition are *not* filters (five options for a second question, each within
delta 1e-6 if fixed, exceed it if chosen after the first answer). They live in
:mod:`chorister.privacy.composition`, take a :class:`FixedSequence`, and share no type with this
module: a ledger that asks for a :class:`Filter` cannot be given one.

A filter is a frozen value; adding a charge gives the next one and touches no earlier charge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Self, final

from chorister.errors import BudgetExceeded, InvalidInput
from chorister.privacy.certified import (
    Setting,
    check_order,
    renyi_divergence,
    renyi_to_epsilon,
)
from chorister.privacy.decimals import DOWN, UP, as_delta, rounded_up
from chorister.privacy.weights import WEIGHT_TAIL

_UNIT = Decimal("1e-12")
_BOUNDING_SHARE = Decimal("0.001")  # of a Renyi budget's delta: what bounded reports may cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What determines the privacy loss of one answer: nothing in it depends on data."""

    setting: Setting  # mechanism, local epsilon, crowd
    cohort: int  # min_cohort

    def __post_init__(self) -> None:
        self.setting.members(self.cohort)  # raises where nobody would be honest


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedCost:
    """What one answer costs: the stated guarantee, and the release that justifies it."""

    release: Release
    epsilon: Decimal
    delta: Decimal

    def __post_init__(self) -> None:
        if not (self.epsilon.is_finite() and self.epsilon >= 0):
            raise InvalidInput(f"a charge's epsilon must be at least 0, not {self.epsilon}")
        if not (self.delta.is_finite() and 0 <= self.delta < 1):
            raise InvalidInput(f"a charge's delta must lie in [0, 1), not {self.delta}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """A total guarantee."""

    epsilon: Decimal
    delta: Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter(ABC):
    """A budget together with what was charged to it. Only this module defines filters."""

    epsilon: Decimal  # the budget's epsilon
    delta: Decimal  # the budget's delta
    charges: int = 0  # how many have been added

    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__:
            raise TypeError("a filter needs a proof of its own: it cannot be defined elsewhere")

    def __post_init__(self) -> None:
        if not (self.epsilon.is_finite() and self.epsilon > 0):
            raise InvalidInput(f"a budget's epsilon must be above 0, not {self.epsilon}")
        if not (self.delta.is_finite() and 0 < self.delta < 1):
            raise InvalidInput(f"a budget's delta must lie strictly in (0, 1), not {self.delta}")

    @property
    @abstractmethod
    def spent(self) -> Spent:
        """The total guarantee so far."""

    @abstractmethod
    def after(self, charges: Iterable[StatedCost]) -> Self:
        """The filter after charges that were already made, whether or not it would allow them.

        For a ledger whose policy changed: what was spent under other limits still counts.
        """

    def add(self, charge: StatedCost) -> Self:
        """The filter after this charge; raises BudgetExceeded if the budget does not allow it."""
        after = self.after((charge,))
        total, before = after.spent, self.spent
        if total.epsilon > self.epsilon:
            raise BudgetExceeded(
                spent=before.epsilon, asked=charge.epsilon, allowed=self.epsilon, field="epsilon"
            )
        if total.delta > self.delta:
            raise BudgetExceeded(
                spent=before.delta, asked=charge.delta, allowed=self.delta, field="delta"
            )
        return after


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BasicFilter(Filter):
    """Sums of epsilon and delta, in exact decimal arithmetic."""

    total_epsilon: Decimal = Decimal(0)
    total_delta: Decimal = Decimal(0)

    @property
    def spent(self) -> Spent:
        """Both sums."""
        return Spent(epsilon=self.total_epsilon, delta=self.total_delta)

    def after(self, charges: Iterable[StatedCost]) -> Self:
        """Both sums, with these charges."""
        epsilon, delta, count = self.total_epsilon, self.total_delta, self.charges
        for charge in charges:
            epsilon, delta = UP.add(epsilon, charge.epsilon), UP.add(delta, charge.delta)
            count += 1
        return replace(self, total_epsilon=epsilon, total_delta=delta, charges=count)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RenyiFilter(Filter):
    """Sums of certified Renyi divergences at orders fixed in the policy.

    **Bounded reports.** The divergences describe plain reports. With m honest reports in a release
    (1 in a noised crowd, where nobody else's report matters) a bounded release is the plain one
    conditioned on an event of chance at least 1 - m tau, whatever was asked before. So the whole
    transcript, P or Q, moves by a total variation of at most s, where s bounds the sum of m tau
    along every course that the questions can take, and from `P(A) <= e^eps Q(A) + d` follows
    `P'(A) <= e^eps (Q'(A) + s) + d + s = e^eps Q'(A) + d + (1 + e^eps) s`: the price is
    `(1 + e^eps) m tau` per charge, at the *budget's* epsilon. How much is charged depends on the
    answers, so delta is split beforehand: a thousandth pays these prices and nothing else, the
    divergences have the rest, and neither gets what the other leaves.
    """

    orders: tuple[int, ...] = (32,)
    totals: tuple[Decimal, ...] = ()  # one sum per order; empty before the first charge
    bounding: Decimal = Decimal(0)  # sum of what bounded reports cost in delta

    def __post_init__(self) -> None:
        # super() would name the class that slots=True replaced.
        Filter.__post_init__(self)
        if not self.orders or len(set(self.orders)) != len(self.orders):
            raise InvalidInput("a Renyi filter needs at least one order, and each only once")
        for order in self.orders:
            check_order(order)
        if self.totals and len(self.totals) != len(self.orders):
            raise InvalidInput("a Renyi filter keeps one total per order")

    @property
    def spent(self) -> Spent:
        """Epsilon at the budget's delta, by the best order, each with its share of delta.

        Which order is best may depend on what was asked, and so on earlier answers: that is why
        they share delta. Where bounded reports cost more than is reserved for them, delta is
        above the budget's by the difference.
        """
        if not self.charges:
            return Spent(epsilon=Decimal(0), delta=Decimal(0))
        reserve = DOWN.multiply(self.delta, _BOUNDING_SHARE)
        share = as_delta(DOWN.subtract(self.delta, reserve)) / len(self.orders)
        best = min(
            renyi_to_epsilon(float(total), order, share)
            for order, total in zip(self.orders, self.totals, strict=True)
        )
        excess = max(Decimal(0), UP.subtract(self.bounding, reserve))
        return Spent(epsilon=rounded_up(best, _UNIT), delta=UP.add(self.delta, excess))

    def after(self, charges: Iterable[StatedCost]) -> Self:
        """The sum of divergences at every order, with these charges."""
        totals = self.totals or (Decimal(0),) * len(self.orders)
        bounding, count = self.bounding, self.charges
        for charge in charges:
            setting, cohort = charge.release.setting, charge.release.cohort
            members = setting.members(cohort)
            totals = tuple(
                UP.add(total, _divergence(setting, members, order))
                for order, total in zip(self.orders, totals, strict=True)
            )
            price = self._price_of_bounding(setting.bounded_reports(cohort))
            bounding = UP.add(bounding, price)
            count += 1
        return replace(self, totals=totals if count else (), bounding=bounding, charges=count)

    def _price_of_bounding(self, honest: int) -> Decimal:
        """`(1 + e^eps) m 2^-80`, rounded up."""
        # e^100 times 2^-80 is beyond any delta; a larger power would only take longer.
        growth = UP.exp(min(self.epsilon, Decimal(100))).next_plus(UP)
        return UP.multiply(UP.multiply(UP.add(growth, Decimal(1)), Decimal(honest)), WEIGHT_TAIL)


def _divergence(setting: Setting, members: int, order: int) -> Decimal:
    divergence = renyi_divergence(
        members, setting.mechanism, setting.parameter, order, noised=setting.noised
    )
    return rounded_up(divergence, _UNIT)


def require_filter(composition: object) -> Filter:
    """Return the filter, or raise: what a ledger calls on whatever it is handed at run time."""
    if not isinstance(composition, Filter):
        raise InvalidInput(
            f"{type(composition).__name__} is not a filter: a ledger composes by `basic` or "
            "`renyi` only, because the analyst chooses each question after the last answer"
        )
    return composition
