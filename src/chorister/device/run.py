"""What one run of a device did, and the named steps at which tests can end it.

A device calls the hook that it was built with at each step. In production that hook does nothing,
and nothing outside the process can set another. Tests end the process there, with SIGKILL, to show
that whatever is on disk at that moment is enough to continue safely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one run did, in recipe identifiers."""

    silent: str | None = None  # why nothing was done at all
    problems: tuple[str, ...] = ()  # what was wrong with the log, pair by pair
    refused: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    uploaded: int = 0
    postponed: int = 0
    dropped: int = 0
    waiting: bool = False  # nothing was done, because data may be touched until `busy_until`
    busy_until: int | None = None  # nothing is sent before; by then all work on data is over


@dataclass(slots=True)
class Tally:
    """What a run has done so far."""

    problems: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    uploaded: int = 0
    postponed: int = 0
    dropped: int = 0
    busy_until: int | None = None

    def run(self, *, silent: str | None = None) -> Run:
        return Run(
            silent=silent,
            problems=tuple(self.problems),
            refused=tuple(self.refused),
            declined=tuple(self.declined),
            answered=tuple(self.answered),
            uploaded=self.uploaded,
            postponed=self.postponed,
            dropped=self.dropped,
            busy_until=self.busy_until,
        )


class RunStep(StrEnum):
    """The steps of one report, in order, after those that are rarer."""

    CONSENT_CHANGED = "consent or data changed, not yet in the audit log"
    CONSENT_WRITTEN = "consent event written to the audit log, not committed"
    CONSENT_RECORDED = "consent event in the audit log, not yet marked as recorded"
    SETTLE_WRITTEN = "recovered ledger entry written, not committed"
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


Hook: TypeAlias = Callable[[RunStep], None]


def no_hook(step: RunStep) -> None:
    """Do nothing: the hook of production."""
    del step
