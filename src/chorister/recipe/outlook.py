"""Whether an answer could show anything: noise, cohort and target against what can be expected.

Devices answer a hopeless question like any other, at full cost. So whoever asks or reviews one
should know before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from chorister.policy import Policy
from chorister.policy.values import duration_text
from chorister.recipe.model import Arm, Recipe

_SIGMAS: Final = 3.0  # standard errors that stand out


def smallest_share(arms: Sequence[Arm]) -> float:
    """The share of the answering devices that draw the smallest arm."""
    if not arms:
        return 1.0
    return min(arm.weight for arm in arms) / sum(arm.weight for arm in arms)


def hides_everything(std_error: float, reports: float) -> bool:
    """Whether noise hides a bin that every single device holds."""
    return _SIGMAS * std_error >= reports


def noise_of(recipe: Recipe, reports: float) -> float:
    """The standard error of a bin that nobody holds, in devices."""
    return float(recipe.randomizer.std_error(round(reports), 0.0, recipe.privacy.noise_trials))


def wasted(
    recipe: Recipe, policy: Policy, expected: float | None, target: int | None = None
) -> Iterator[str]:
    """Say why asking would be a waste although devices would answer.

    `expected` is how many reports to expect; None: unknown, and then as many as are needed.
    """
    least = recipe.privacy.min_cohort
    parts = policy.cells(recipe.group_by, 0)
    if expected is not None:
        part = expected * smallest_share(recipe.arms) / parts
        if part < least:
            each = " in each part of the fleet" if parts > 1 or recipe.arms else ""
            yield (
                f"About {part:,.0f} devices are expected{each}, and nothing is released below "
                f"{least:,}. Ask more devices, split the fleet into fewer parts, or choose a "
                "smaller local epsilon, which needs a smaller cohort."
            )
        if target is not None and target > part:
            yield (
                f"The target of {target:,} reports is above the {part:,.0f} that are expected, so "
                "devices would answer until the window ends. Lower it, or leave it out."
            )
    reports = least if expected is None else max(expected, 1.0)
    error = noise_of(recipe, reports)
    if hides_everything(error, reports):
        yield (
            f"Even a bin that all {reports:,.0f} devices hold would not stand out from the noise "
            f"of ±{error:,.0f} devices. Use more epsilon, or wait for more devices."
        )


def expiring(recipe: Recipe, policy: Policy) -> Iterator[str]:
    """Say which events of a period have expired on devices that answer late in a window."""
    for stream, period in (recipe.periods or {}).items():
        kept = policy.streams[stream].retention
        left = kept - recipe.window.answer_seconds
        if left < period:
            rest = f"only {duration_text(left)} of them" if left > 0 else "none of them"
            yield (
                f"Events of {stream} count for {duration_text(period)} before a window opens, but "
                f"devices keep them for {duration_text(kept)}: one that answers at the end of the "
                f"window has {rest} left. Choose a shorter `period` or `window`."
            )


def spread_thin(recipe: Recipe, expected: float | None) -> tuple[str, ...]:
    """Say how many devices have to hold a bin before it shows, where that is more than average."""
    reports = recipe.privacy.min_cohort if expected is None else max(expected, 1.0)
    error, bins = noise_of(recipe, reports), recipe.encoding.size
    average = reports / bins
    if 2.0 * error <= average:
        return ()
    return (
        f"Spread evenly, {reports:,.0f} devices would be {average:,.1f} in each of {bins:,} bins, "
        f"below the noise of ±{error:,.1f}. Only bins with more than about {_SIGMAS * error:,.0f} "
        "devices stand out: use fewer bins to see the rest.",
    )
