"""The steps between a recipe and its uploaded report, by name.

A device does one thing at each of them: it calls the hook that it was built with. In production
that hook does nothing, and nothing outside the process can set another. Tests end the process
there, with SIGKILL, to show that whatever is on disk at that moment is enough to go on safely.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

__all__ = ["Hook", "Step", "pass_by"]


class Step(StrEnum):
    """In the order of one report's life; before it, what is rarer."""

    DEED_DONE = "consent or data changed, not told"
    DEED_WRITTEN = "what the person said written, not committed"
    DEED_TOLD = "what the person said in the audit log, not noted as told"
    SETTLE_WRITTEN = "entry that brings the ledger into step written, not committed"
    POLL_WRITTEN = "checkpoint and bodies written, not committed"
    RECIPE_ARRIVED = "recipe arrived"
    CHARGE_WRITTEN = "charge written, not committed"
    CHARGED = "charge, coin, upload time and attempt committed"
    QUERIED = "query answered"
    RANDOMIZED = "noise drawn"
    SEALED = "report sealed"
    QUEUE_WRITTEN = "audit entry and report written, not committed"
    QUEUED = "report in the outbox"
    UPLOADING = "upload begins"
    ANSWERED = "leader answered, not noted"
    NOTED = "leader's answer noted"


Hook: TypeAlias = Callable[[Step], None]


def pass_by(step: Step) -> None:
    """The hook of production: nothing happens."""
    del step
