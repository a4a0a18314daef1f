"""Check 3: what epsilon the aggregate of a minimum cohort is certified to have."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final

from chorister.errors import InvalidInput
from chorister.policy.model import Crowd, ReportKind
from chorister.privacy import amplification
from chorister.privacy.randomizers import Mechanism

__all__ = ["BOUNDED_DELTA", "Claim"]

BOUNDED_DELTA: Final = Decimal("1e-12")
"""The part of delta that bounded reports use up."""

_BOUNDED_LIMIT: Final = Decimal("1.2e12")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A release that is said to be (epsilon, delta)-DP once the cohort is large enough."""

    mechanism: Mechanism
    local_epsilon: Decimal  # eps0, the mechanism's parameter
    epsilon: Decimal
    delta: Decimal
    crowd: Crowd
    honest_fraction: Fraction | None  # with an honest crowd, and only then
    report: ReportKind

    def certified_epsilon(self, min_cohort: int) -> float:
        """The certified upper bound on epsilon at this delta, to be compared with `epsilon`.

        That bounded reports add less than `BOUNDED_DELTA` is proven for m e^epsilon <= 1.2e12 (with
        m honest devices, or m = 1 with aggregator noise); beyond that this refuses.
        """
        setting = self._setting()
        if self.report == "bounded":
            honest = 1 if setting.noised else setting.members(min_cohort)
            if honest * self.epsilon.exp() > _BOUNDED_LIMIT:
                raise InvalidInput("bounded reports are proven for m e^epsilon of at most 1.2e12")
        return amplification.epsilon(setting, cohort=min_cohort, delta=self._delta()).upper

    def holds(self, min_cohort: int) -> bool:
        """Whether the claim is certified for this cohort."""
        return Decimal(self.certified_epsilon(min_cohort)) <= self.epsilon

    def least_cohort(self) -> int:
        """The smallest cohort found for which the claim is certified; raises if there is none."""
        cohort = amplification.min_cohort(
            self._setting(), epsilon=self.epsilon, delta=self._delta()
        )
        cohort = max(cohort, 2)
        # The search certifies delta, `holds` epsilon: rounding can part them by a device or two.
        while not self.holds(cohort):
            cohort += 1 + cohort // 100_000
        return cohort

    def _delta(self) -> Decimal:
        if self.report == "plain":
            return self.delta
        if self.delta <= BOUNDED_DELTA:
            raise InvalidInput(f"bounded reports use {BOUNDED_DELTA} of delta: ask for more")
        return self.delta - BOUNDED_DELTA

    def _setting(self) -> amplification.Setting:
        if (self.crowd == "honest") != (self.honest_fraction is not None):
            raise InvalidInput("an honest fraction is given if, and only if, the crowd is honest")
        return amplification.Setting(
            local_epsilon=self.local_epsilon,
            mechanism=self.mechanism,
            crowd=self.crowd,
            honest_fraction=self.honest_fraction or Fraction(1),
        )
