"""One bin -> noisy bits -> a sealed report.

Nothing here meets data: the sandbox chooses the bin. Whatever goes wrong there ends in bin 0, OOV
in every feature, which is a report like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chorister.dap.task import TaskConfiguration
from chorister.dap.upload_client import seal_report
from chorister.device.attempts import Attempt
from chorister.device.run import Hook, Step
from chorister.device.sandbox.wire import MAX_ENCODING_BYTES
from chorister.errors import InvalidInput, QueryRefused
from chorister.recipe import Recipe

__all__ = ["OOV_BIN", "Outcome", "Report", "make_report", "prepare"]

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

    bits: bytes  # after the noise, a byte a bit
    sealed: bytes


def prepare(recipe: Recipe) -> None:
    """Do what encoding and noise need, on no data at all; raises `QueryRefused`.

    Before the charge: what can fail without data fails then, and the less is left to do after it,
    the less a crash can cost.
    """
    try:
        size = len(recipe.encoding.canonical)
    except (InvalidInput, MemoryError) as error:
        why = str(error) or "its tables need more memory than there is"
        raise QueryRefused(check="encoding", why=why, field="features") from None
    if size > MAX_ENCODING_BYTES:
        why = f"{size:,} bytes of features and deny lists, where {MAX_ENCODING_BYTES:,} are read"
        raise QueryRefused(check="encoding", why=why, field="features")
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
