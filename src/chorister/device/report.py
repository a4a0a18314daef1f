"""Rows of a query -> one bin -> noisy bits -> a sealed report.

Nothing here can fail on data in a way that shows: whatever goes wrong before the noise is drawn
ends in bin 0, OOV in every feature, which is a report like any other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chorister.dap.client import seal_report
from chorister.dap.task import task_configuration
from chorister.device.attempts import Attempt
from chorister.device.steps import Hook, Step
from chorister.policy import Policy
from chorister.recipe import Recipe

__all__ = ["OOV_BIN", "Outcome", "Report", "choose_bin", "make_report"]

OOV_BIN: Final = 0
"""OOV in every feature: what a device reports that has no data, or whose query failed."""


class Outcome(StrEnum):
    """How a report's bin was found. Only the device's own audit log ever tells."""

    RAN = "ran"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A report, with what the audit log keeps of it."""

    configuration: bytes  # the task's
    bits: bytes  # after the noise, a byte a bit
    sealed: bytes


def choose_bin(
    recipe: Recipe,
    columns: Mapping[str, Sequence[object]],
    *,
    randbelow: Callable[[int], int] = secrets.randbelow,
) -> int:
    """The one bin that a device reports, of the rows that its query returned."""
    bins = recipe.encoding.find(columns)
    return recipe.encoding.select(bins, recipe.selection, randbelow=randbelow)


def make_report(policy: Policy, recipe: Recipe, attempt: Attempt, bin_: int, hook: Hook) -> Report:
    """Draw the noise, shard and seal: once for every charge."""
    task = task_configuration(policy, recipe, attempt.groups, attempt.arm)
    bits = recipe.randomizer.randomize(bin_, bounded=recipe.privacy.report == "bounded")
    hook(Step.RANDOMIZED)
    sealed = seal_report(
        task,
        bits,
        report_id=attempt.report_id,
        leader_config=attempt.leader_config,
        helper_config=attempt.helper_config,
    )
    hook(Step.SEALED)
    return Report(configuration=task.configuration.encode(), bits=bits, sealed=sealed)
