"""Results in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chorister.canonical import decimal_text
from chorister.policy.explain import number_text

if TYPE_CHECKING:
    from chorister.analyst.result import Result

__all__ = ["explain"]


def explain(result: Result) -> str:
    """What was asked, of whom, what it cost, and what the numbers mean."""
    privacy = result.recipe.privacy
    parts = f" in {len(result.parts):,} groups" if result.recipe.group_by else ""
    lines = [
        f"{result.n_reports:,} devices{parts} each answered once with one of "
        f"{result.encoding.size:,} bins, in noise; a bin that nobody holds reads 0 ± "
        f"{result.noise_sigma:,.1f} devices.",
        f"Each of these devices was charged epsilon {decimal_text(privacy.epsilon)}, delta "
        f"{number_text(privacy.delta)}; its report alone, to both aggregators together, is "
        f"{decimal_text(result.recipe.randomizer.replacement_epsilon)}-DP.",
        _crowd(result),
        _intervals(result),
    ]
    if result.missing:
        names = "; ".join(", ".join(group) for group in result.missing)
        lines.append(
            f"Groups with fewer than {result.min_cohort:,} reports, of which nothing was "
            f"released: {names}."
        )
    bins, reach = result.hostile_influence
    lines.append(
        f"One hostile report can move at most {bins:,} bins, each by at most {reach:,.2f} devices."
    )
    lines.extend(check.explain() for check in result.weight)
    if result.steps:
        lines.append(f"Then: {'; '.join(result.steps)}.")
    return "\n".join(lines)


def _crowd(result: Result) -> str:
    if result.noise_trials:
        return (
            f"Each aggregator added noise to every bin, as of {result.noise_trials:,} more "
            "devices: epsilon holds if one of the two is honest, whoever else answered."
        )
    return (
        f"Epsilon holds if {result.recipe.privacy.honest_fraction} of at least "
        f"{result.min_cohort:,} devices are honest: the aggregators added no noise."
    )


def _intervals(result: Result) -> str:
    each = "each"
    if result.candidates > 1:
        each = f"all of {result.candidates:,} candidates at once"
    return (
        f"Intervals are of the noise: with {result.confidence:.0%} confidence, {each}, they hold "
        "the true count among the devices that answered. How well those stand for all others is "
        "another question."
    )
