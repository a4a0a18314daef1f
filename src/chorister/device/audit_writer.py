"""Writes what the agent does to the audit log, in words that a person understands."""

from __future__ import annotations

from typing import Final

from chorister.canonical import sha256
from chorister.clock import SECOND, Clock, utc_minute, utc_text
from chorister.device.audit import AuditEntry, AuditLog, Event, RecipeSummary, Sent, pack_bits
from chorister.device.ledger.budget import Charge
from chorister.device.ledger.ledger_entries import (
    Charged,
    Created,
    Entry,
    PolicyTaken,
    Restarted,
    Resumed,
)
from chorister.device.outbox import QueryOutcome, Report
from chorister.device.records import Attempt, Draw
from chorister.errors import BudgetExceeded, ChoristerError, InternalError, QueryRefused
from chorister.recipe import Recipe

_REPORTED: Final = {
    QueryOutcome.RAN: "the query ran; noise hides the row that it reported, or that it found none",
    QueryOutcome.FAILED: "the query failed here: no row is reported, and noise hides that",
    QueryOutcome.INTERRUPTED: (
        "the device was interrupted after the charge and does not run the query again: no row is "
        "reported, and noise hides that"
    ),
}


def rule_of(error: ChoristerError) -> str:
    """Return the rule or limit that refuses a recipe."""
    if isinstance(error, QueryRefused):
        return error.check
    return error.field if isinstance(error, BudgetExceeded) else type(error).__name__


class AuditWriter:
    """Writes entries, each inside the caller's transaction."""

    def __init__(self, audit: AuditLog, clock: Clock) -> None:
        self._audit = audit
        self._clock = clock

    def refused(self, question: RecipeSummary, error: ChoristerError) -> None:
        """Record a recipe that is not answered."""
        why = error.why if isinstance(error, QueryRefused) else str(error)
        self._write(Event.REFUSED, why, check=rule_of(error), question=question)

    def declined(self, question: RecipeSummary, recipe: Recipe) -> None:
        """Record that the coin came up no."""
        probability = recipe.participation.probability
        why = f"a coin with probability {probability} of yes came up no; it is not flipped again"
        self._write(Event.NOT_DRAWN, why, check="participation", question=question)

    def drawn(self, question: RecipeSummary, recipe: Recipe, draw: Draw) -> None:
        """Record in which windows of a series this device answers, if nothing forbids it then."""
        opening = [recipe.window_at(number).opens for number in draw.windows]
        coming = [utc_minute(time) for time in opening if time > self._clock.now()]
        why = (
            f"of {recipe.window_count:,} windows this device drew {len(draw.windows):,}, at random "
            f"and only once; still to open: {', '.join(coming) or 'none'}. Every check is made "
            "again in each, and each answer is charged"
        )
        self._write(Event.DRAWN, why, check="participation", question=question)

    def charged(self, question: RecipeSummary, charge: Charge, upload_at: int) -> None:
        """Record a recipe that will be answered."""
        when = utc_text(upload_at // SECOND)
        why = f"every check passed; the report will leave at {when} or later"
        self._write(Event.CHARGED, why, question=question, charge=charge)

    def reported(
        self, recipe: Recipe, attempt: Attempt, report: Report, outcome: QueryOutcome
    ) -> None:
        """Record a report in the outbox, with every bit that leaves."""
        sent = Sent(
            report=attempt.report_id.hex(),
            leader=recipe.aggregators.leader,
            group=attempt.groups,
            arm=attempt.arm,
            length=len(report.bits),
            bits=pack_bits(report.bits),
            digest=sha256(report.sealed).hex(),
        )
        self._write(Event.REPORTED, _REPORTED[outcome], question=attempt.question, sent=sent)

    def uploaded(self, question: RecipeSummary, tries: int) -> None:
        """Record that the leader has the report."""
        times = (
            "at the first attempt"
            if tries == 1
            else f"at attempt {tries}, with the same bytes each time"
        )
        self._write(Event.UPLOADED, f"the leader accepted the report {times}", question=question)

    def postponed(self, question: RecipeSummary, error: ChoristerError) -> None:
        """Record that the leader has not accepted a report yet."""
        why = f"the same bytes are sent again later, until the window closes: {error}"
        self._write(Event.POSTPONED, why[:20_000], check=type(error).__name__, question=question)

    def dropped(self, question: RecipeSummary, why: str) -> None:
        """Record a report that will never be sent. What it cost stays spent."""
        self._write(Event.DROPPED, why, question=question)

    def unreadable(self, address: bytes, error: ChoristerError) -> None:
        """Record an entry of the public log that is not a recipe."""
        why = f"this device can't read entry {address.hex()} of the log as a recipe: {error}"
        self._write(Event.REFUSED, why[:20_000], check="recipe")

    def silent(self, error: ChoristerError, *, pair: str | None = None) -> None:
        """Record that nothing is answered: the public log or the ledger can't be trusted now."""
        why = str(error) if pair is None else f"aggregators {pair}: {error}"
        self._write(Event.SILENT, why, check=type(error).__name__)

    def settled(self, entry: Entry) -> None:
        """Record what the ledger added to itself before the first decision."""
        match entry:
            case Charged():
                why = "a crash came between the charge and its commit: it counts, without an answer"
                self._write(Event.RECOVERED, why, charge=entry.charge)
            case PolicyTaken():
                why = f"policy {entry.terms.digest} took effect; what was spent before stays spent"
                self._write(Event.POLICY, why)
            case Created():
                self._write(
                    Event.SILENT,
                    "a new ledger was created, and its age begins",
                    check="ledger",
                )
            case Restarted():
                why = f"{entry.why}: the ledger's age begins again, what is known stays charged"
                self._write(Event.SILENT, why, check="ledger")
            case Resumed():
                why = f"entries up to {entry.lost} were lost; none of them counts any more"
                self._write(Event.SILENT, why, check="ledger")
            case _:
                raise InternalError(f"the ledger added {entry.kind}, which has no description here")

    def record(self, event: Event, why: str) -> None:
        """Record what the person or the host app did."""
        self._write(event, why)

    def _write(
        self,
        event: Event,
        why: str,
        *,
        check: str | None = None,
        question: RecipeSummary | None = None,
        charge: Charge | None = None,
        sent: Sent | None = None,
    ) -> None:
        self._audit.append(
            AuditEntry(
                time=self._clock.now(),
                event=event,
                why=why,
                check=check,
                question=question,
                charge=charge,
                sent=sent,
            )
        )
