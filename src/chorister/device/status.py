"""The status of a device, for the person, the host app and `chorister device status`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from chorister.canonical import decimal_text
from chorister.clock import SECOND
from chorister.device.databases import Databases
from chorister.device.ledger.budget import Standing
from chorister.device.records import AttemptState
from chorister.device.store import Consent
from chorister.errors import LedgerError
from chorister.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingReport:
    """A report in the outbox."""

    recipe: str
    next_try: int
    closes: int
    tries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComingWindows:
    """In which windows of a series this device may still answer, as it drew."""

    recipe: str
    opens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The status of a device. Times are in POSIX seconds."""

    policy: str
    policy_digest: str
    registry: str
    consent: Consent
    paused: bool
    silent: str | None  # why the ledger allows no answer now
    checkpoint_time: int | None  # of the newest checkpoint that was accepted
    budgets: tuple[Standing, ...]  # empty if the ledger can't be read
    recipes: dict[AttemptState, int]  # decided so far
    outbox: tuple[WaitingReport, ...]
    series: tuple[ComingWindows, ...]
    head: str  # where the ledger's head is kept: none, file or keyring
    weaknesses: tuple[str, ...]  # what this system does not let the device protect against

    def as_json(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "policy_digest": self.policy_digest,
            "registry": self.registry,
            "opted_in": self.consent.opted_in,
            "paused": self.paused,
            "silent": self.silent,
            "checkpoint_time": self.checkpoint_time,
            "budgets": [_budget(standing) for standing in self.budgets],
            "recipes": {state.value: count for state, count in self.recipes.items()},
            "outbox": [asdict(waiting) for waiting in self.outbox],
            "series": [asdict(coming) for coming in self.series],
            "head": self.head,
            "weaknesses": list(self.weaknesses),
        }


def _budget(standing: Standing) -> dict[str, object]:
    return {
        "limit": standing.limit,
        "epsilon": decimal_text(standing.remaining.epsilon),
        "delta": decimal_text(standing.remaining.delta),
        "reports": standing.remaining_reports,
        "allowed_epsilon": decimal_text(standing.allowed.epsilon),
        "allowed_delta": decimal_text(standing.allowed.delta),
        "allowed_reports": standing.allowed_reports,
        "renews": standing.renews,
    }


def read_status(
    *,
    policy: Policy,
    registry: str,
    databases: Databases,
    weaknesses: tuple[str, ...],
) -> Status:
    """Read the status, and write nothing."""
    ledger, attempts, head = databases.ledger, databases.attempts, databases.head
    silent: str | None = None
    checkpoint_time: int | None = None
    budgets: tuple[Standing, ...] = ()
    try:
        checkpoint_time = databases.clock.decision_time()
        if checkpoint_time < (until := ledger.silent_until()):
            silent = f"the ledger is new: nothing is answered until {until}"
        budgets = ledger.remaining(checkpoint_time)
    except LedgerError as error:
        silent = str(error)
    notes = [] if head else ["no head store: a restored backup of the ledger is not noticed"]
    if any(pair.one_operator for pair in policy.aggregators):
        notes.append("one operator runs both aggregators: no protection against it")
    return Status(
        policy=policy.name,
        policy_digest=policy.digest.hex(),
        registry=registry,
        consent=databases.store.consent,
        paused=databases.settings.paused,
        silent=silent,
        checkpoint_time=checkpoint_time,
        budgets=budgets,
        recipes=attempts.counts(),
        outbox=tuple(
            WaitingReport(
                recipe=attempts.question(queued.recipe).id,
                next_try=-(-queued.next_try // SECOND),
                closes=queued.closes,
                tries=queued.tries,
            )
            for queued in databases.outbox.all()
        ),
        series=tuple(
            ComingWindows(recipe=question.id, opens=opens)
            for question, opens in attempts.coming(databases.clock.now())
        ),
        head="none" if head is None else head.kind,
        weaknesses=(*notes, *weaknesses),
    )
