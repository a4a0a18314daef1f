"""Rows of a query -> one bin -> noisy bits -> a sealed report.

Nothing here can fail on data in a way that shows: whatever goes wrong before the noise is drawn
ends in bin 0, OOV in every feature, which is a report like any other.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

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

The clock is asked between blocks of rows; this bounds what a block may take, most of which is
normalising.
"""
_ROWS_PER_BLOCK: Final = 5_000
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
    until: float = math.inf,
    randbelow: Callable[[int], int] = secrets.randbelow,
) -> int:
    """The one bin that a device reports, of the rows that its query returned.

    Raises `InvalidInput` if that is not done at the time `until` of the monotonic clock.
    """
    encoding, room = recipe.encoding, MAX_ENCODED
    for name in encoding.columns:
        room -= sum(_weight(value) for value in columns.get(name, ()) if isinstance(value, str))
    if room < 0:
        raise InvalidInput("the query's result is too long to be encoded in time")
    rows = max((len(column) for column in columns.values()), default=0)
    found = [encoding.find(_rows(columns, 0))]
    for first in range(_ROWS_PER_BLOCK, rows, _ROWS_PER_BLOCK):
        _check_time(until)
        found.append(encoding.find(_rows(columns, first)))
    bin_ = encoding.select(np.concatenate(found), recipe.selection, randbelow=randbelow)
    _check_time(until)
    return bin_


def _rows(columns: Mapping[str, Sequence[object]], first: int) -> dict[str, Sequence[object]]:
    last = first + _ROWS_PER_BLOCK
    return {name: column[first:last] for name, column in columns.items()}


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise InvalidInput("the query's result was not encoded in time")


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
