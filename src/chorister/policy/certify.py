"""Check 3: what epsilon the aggregate of a minimum cohort is certified to have."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from chorister.errors import InvalidInput
from chorister.policy.model import Crowd, ReportKind
from chorister.privacy import amplification
from chorister.privacy.randomizers import Mechanism
from chorister.privacy.settings import Setting
from chorister.privacy.weights import delta_before_bound

__all__ = ["Claim"]


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

    @property
    def setting(self) -> Setting:
        """What stays fixed while the cohort varies."""
        if (self.crowd == "honest") != (self.honest_fraction is not None):
            raise InvalidInput("an honest fraction is given if, and only if, the crowd is honest")
        return Setting(
            local_epsilon=self.local_epsilon,
            mechanism=self.mechanism,
            crowd=self.crowd,
            honest_fraction=self.honest_fraction or Fraction(1),
        )

    def certified_epsilon(self, min_cohort: int) -> float:
        """The certified upper bound on epsilon at this delta, to be compared with `epsilon`."""
        setting = self.setting
        delta = self._delta(1 if setting.noised else setting.members(min_cohort))
        return amplification.epsilon(setting, cohort=min_cohort, delta=delta).upper

    def holds(self, min_cohort: int) -> bool:
        """Whether the claim is certified for this cohort."""
        return Decimal(self.certified_epsilon(min_cohort)) <= self.epsilon

    def least_cohort(self) -> int:
        """The smallest cohort found for which the claim is certified; raises if there is none."""
        cohort = amplification.min_cohort(
            self.setting, epsilon=self.epsilon, delta=self._delta(honest=1)
        )
        cohort = max(cohort, 2)
        # The search certifies delta, `holds` epsilon: rounding can part them by a device or two.
        while not self.holds(cohort):
            cohort += 1 + cohort // 100_000
        return cohort

    def _delta(self, honest: int) -> Decimal:
        """What bounded reports leave of delta."""
        if self.report == "plain":
            return self.delta
        return delta_before_bound(self.delta, self.epsilon, honest)
