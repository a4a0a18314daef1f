"""What answering can cost a device: the bounds of a policy, and the epsilon of one release.

The paper's bound: an analysis' reports cost at most eps_local x k locally, a field's at most its
own eps_local x k (section 4.3). In the aggregate, the budgets themselves are the bounds. What one
release costs is check 3: the epsilon that is certified for the aggregate of a minimum cohort.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from chorister.errors import InvalidInput
from chorister.policy.model import Analysis, Budget, Crowd, FieldBudget, Policy, ReportKind
from chorister.privacy import amplification
from chorister.privacy.certified import Setting
from chorister.privacy.decimals import UP
from chorister.privacy.randomizers import Mechanism
from chorister.privacy.weights import delta_before_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class CostBound:
    """The most that one device can lose in a period (or ever, without one)."""

    epsilon: Decimal  # to anyone who does not control both aggregators
    delta: Decimal
    reports: int
    local_epsilon: Decimal  # of any one report, to both aggregators together
    period: int | None  # seconds

    @property
    def local_total(self) -> Decimal:
        """eps_local x k: the most that both aggregators together could learn."""
        return UP.multiply(self.local_epsilon, self.reports)


def field_cost(policy: Policy, analysis: Analysis, field: FieldBudget) -> CostBound:
    """Bound a field by its own budget, its analysis' and the device's."""
    whole = analysis_cost(policy, analysis)
    return CostBound(
        epsilon=min(field.epsilon, whole.epsilon),
        delta=min(field.delta, whole.delta),
        reports=min(field.reports, whole.reports),
        local_epsilon=min(field.local_epsilon, whole.local_epsilon),
        period=whole.period,
    )


def analysis_cost(policy: Policy, analysis: Analysis) -> CostBound:
    """Bound an analysis by its own budget and the device's."""
    most = max(field.local_epsilon for field in analysis.fields.values())
    device, own = policy.device, analysis.budget
    # If both renew together, the device's limits apply as well.
    caps: tuple[Budget, ...] = (device, own) if device.period == own.period else (own,)
    return CostBound(
        epsilon=min(budget.epsilon for budget in caps),
        delta=min(budget.delta for budget in caps),
        reports=min(budget.reports for budget in caps),
        local_epsilon=min(own.local_epsilon, most),
        period=own.period,
    )


def series_cost(policy: Policy, analysis: Analysis) -> CostBound | None:
    """Bound one whole series, which may last for several periods; None if there are none."""
    series = analysis.series
    if series is None:
        return None
    own, device = analysis_cost(policy, analysis), policy.device
    # Budgets renew by checkpoints that may be as old as the policy permits.
    span = series.longest + policy.checkpoint_max_age
    times, together = _periods(span, own.period), _periods(span, device.period)
    most = min(series.answers, times)
    return CostBound(
        epsilon=min(UP.multiply(own.epsilon, most), UP.multiply(device.epsilon, together)),
        delta=min(UP.multiply(own.delta, most), UP.multiply(device.delta, together)),
        reports=min(series.answers, times * own.reports, together * device.reports),
        local_epsilon=own.local_epsilon,
        period=None,
    )


def _periods(span: int, period: int | None) -> int:
    """Into how many periods of a budget a time can fall."""
    return 1 if period is None else -(-span // period) + 1


def device_cost(policy: Policy) -> CostBound:
    """Bound all analyses together."""
    costs = [analysis_cost(policy, analysis) for analysis in policy.analyses.values()]
    device = policy.device
    return CostBound(
        epsilon=device.epsilon,
        delta=device.delta,
        reports=device.reports,
        local_epsilon=max(cost.local_epsilon for cost in costs),
        period=device.period,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The claim that a release is (epsilon, delta)-DP once the cohort is large enough."""

    mechanism: Mechanism
    local_epsilon: Decimal  # eps0, the mechanism's parameter
    epsilon: Decimal
    delta: Decimal
    crowd: Crowd
    honest_fraction: Fraction | None  # only with an honest crowd
    report: ReportKind

    @property
    def setting(self) -> Setting:
        """The parameters that do not depend on the cohort."""
        if (self.crowd == "honest") != (self.honest_fraction is not None):
            raise InvalidInput("give an honest fraction if, and only if, the crowd is honest")
        return Setting(
            local_epsilon=self.local_epsilon,
            mechanism=self.mechanism,
            crowd=self.crowd,
            honest_fraction=self.honest_fraction or Fraction(1),
        )

    def certified_epsilon(self, min_cohort: int) -> float:
        """Return the certified upper bound on epsilon at this delta, to compare with `epsilon`."""
        setting = self.setting
        delta = self._delta(setting.bounded_reports(min_cohort))
        return amplification.epsilon(setting, cohort=min_cohort, delta=delta).upper

    def holds(self, min_cohort: int) -> bool:
        """Return whether the claim is certified for this cohort."""
        return Decimal(self.certified_epsilon(min_cohort)) <= self.epsilon

    def least_cohort(self) -> int:
        """Return the smallest cohort found for which the claim is certified; raise if none is."""
        cohort = amplification.min_cohort(
            self.setting, epsilon=self.epsilon, delta=self._delta(honest=1)
        )
        return max(cohort, 2)

    def _delta(self, honest: int) -> Decimal:
        """Return what is left of delta after bounding the reports."""
        if self.report == "plain":
            return self.delta
        return delta_before_bound(self.delta, self.epsilon, honest)
