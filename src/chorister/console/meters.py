"""Budgets as meters: device-wide, of the analysis, and of each field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from chorister.analyst.planning import StudyBudget
from chorister.device.budget import Standing

__all__ = ["Meter", "device_meters", "meters"]

_DEVICE: Final = "The whole device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """One limit of the policy, and how much of it a device may have spent."""

    title: str
    kind: str  # device, analysis, field
    standing: Standing

    @property
    def fullest(self) -> float:
        """The share of whatever is used up most: epsilon, delta or reports."""
        spent, allowed = self.standing.spent, self.standing.allowed
        shares = [
            float(spent.epsilon / allowed.epsilon),
            float(spent.delta / allowed.delta),
            self.standing.reports / self.standing.allowed_reports,
        ]
        return min(max(shares), 1.0)


def device_meters(standings: Iterable[Standing]) -> list[Meter]:
    """All limits of one device: its own, then each analysis with its fields."""
    found = []
    for standing in standings:
        rest = standing.limit.removeprefix("analyses.")
        if standing.limit == "device":
            title, kind = _DEVICE, "device"
        elif rest.endswith(".budget"):
            title, kind = rest.removesuffix(".budget"), "analysis"
        else:
            title, kind = rest.partition(".fields.")[2], "field"
        found.append(Meter(title=title, kind=kind, standing=standing))
    return found


def meters(budget: StudyBudget, analysis: str) -> list[Meter]:
    """All limits that bind an analysis, the widest first."""
    found = []
    for standing in budget.limits:
        prefix = f"analyses.{analysis}."
        rest = standing.limit.removeprefix(prefix)
        if standing.limit == "device":
            title, kind = _DEVICE, "device"
        elif rest == "budget":
            title, kind = "This analysis", "analysis"
        else:
            title, kind = rest.removeprefix("fields."), "field"
        found.append(Meter(title=title, kind=kind, standing=standing))
    return found
