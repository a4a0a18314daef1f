"""What a policy can cost one device at most: the sums behind its explanation and its differences.

The paper's bound: an analysis' reports cost at most eps_local x k locally, a field's at most its
own eps_local x k (section 4.3). In the aggregate, the budgets themselves are the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from chorister.policy.model import Analysis, Budget, FieldBudget, Policy
from chorister.privacy.decimals import UP

__all__ = ["Cost", "analysis_cost", "device_cost", "field_cost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The most that one device can lose in a period (or ever, without one)."""

    epsilon: Decimal  # to anyone who does not control both aggregators
    delta: Decimal
    reports: int
    local_epsilon: Decimal  # of any one report, to both aggregators together
    period: int | None  # seconds

    @property
    def local_total(self) -> Decimal:
        """eps_local x k: what both aggregators together could learn at most."""
        return UP.multiply(self.local_epsilon, self.reports)


def field_cost(policy: Policy, analysis: Analysis, field: FieldBudget) -> Cost:
    """A field within its analysis: the stricter of both, and of the device's."""
    whole = analysis_cost(policy, analysis)
    return Cost(
        epsilon=min(field.epsilon, whole.epsilon),
        delta=min(field.delta, whole.delta),
        reports=min(field.reports, whole.reports),
        local_epsilon=min(field.local_epsilon, whole.local_epsilon),
        period=whole.period,
    )


def analysis_cost(policy: Policy, analysis: Analysis) -> Cost:
    """An analysis within the device's budget."""
    most = max(field.local_epsilon for field in analysis.fields.values())
    device, own = policy.device, analysis.budget
    # Where both renew alike the device's limits cap the analysis'; otherwise its own are the bound.
    caps: tuple[Budget, ...] = (device, own) if device.period == own.period else (own,)
    return Cost(
        epsilon=min(budget.epsilon for budget in caps),
        delta=min(budget.delta for budget in caps),
        reports=min(budget.reports for budget in caps),
        local_epsilon=min(own.local_epsilon, most),
        period=own.period,
    )


def device_cost(policy: Policy) -> Cost:
    """All analyses together."""
    costs = [analysis_cost(policy, analysis) for analysis in policy.analyses.values()]
    device = policy.device
    return Cost(
        epsilon=device.epsilon,
        delta=device.delta,
        reports=device.reports,
        local_epsilon=max(cost.local_epsilon for cost in costs),
        period=device.period,
    )
