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
from chorister.dap.task import TaskConfiguration
from chorister.device.attempts import Attempt
from chorister.device.steps import Hook, Step
from chorister.errors import InvalidInput
from chorister.recipe import Recipe

__all__ = ["OOV_BIN", "Outcome", "Report", "choose_bin", "make_report", "prepare"]

OOV_BIN: Final = 0
"""OOV in every feature: what a device reports that has no data, or whose query failed."""


MAX_ENCODED: Final = 8_000_000
"""Characters, in all columns that the features read; one of a text beyond ASCII counts as four.

Encoding has no deadline of its own, so what it gets is bounded: normalising takes most of its time.
"""
_EXPANDING: Final = {"\ufdfa": 64, "\ufdfb": 28}  # NFKC makes 18 and 8 characters of one


class Outcome(StrEnum):
    """How a report's bin was found. Only the device's own audit log ever tells."""

    RAN = "ran"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A report, with what the audit log keeps of it."""

    bits: bytes  # after the noise, a byte a bit
    sealed: bytes


def choose_bin(
    recipe: Recipe,
    columns: Mapping[str, Sequence[object]],
    *,
    randbelow: Callable[[int], int] = secrets.randbelow,
) -> int:
    """The one bin that a device reports, of the rows that its query returned."""
    room = MAX_ENCODED
    for name in recipe.encoding.columns:
        room -= sum(_weight(value) for value in columns.get(name, ()) if isinstance(value, str))
    if room < 0:
        raise InvalidInput("the query's result is too long to be encoded in time")
    bins = recipe.encoding.find(columns)
    return recipe.encoding.select(bins, recipe.selection, randbelow=randbelow)


def _weight(text: str) -> int:
    if text.isascii():
        return len(text)
    return 4 * len(text) + sum(more * text.count(char) for char, more in _EXPANDING.items())


def prepare(recipe: Recipe) -> None:
    """Build what encoding and noise need, on no data at all.

    Before the charge: what can fail without data fails then, and the less is left to do after it,
    the less a crash can cost.
    """
    choose_bin(recipe, dict.fromkeys(recipe.encoding.columns, ()))
    _ = recipe.randomizer.max_weight


def make_report(recipe: Recipe, attempt: Attempt, bin_: int, hook: Hook) -> Report:
    """Draw the noise, shard and seal: once for every charge."""
    bits = recipe.randomizer.randomize(bin_, bounded=recipe.privacy.report == "bounded")
    hook(Step.RANDOMIZED)
    sealed = seal_report(
        TaskConfiguration.decode(attempt.configuration),
        bits,
        report_id=attempt.report_id,
        leader_config=attempt.leader_config,
        helper_config=attempt.helper_config,
    )
    hook(Step.SEALED)
    return Report(bits=bits, sealed=sealed)
