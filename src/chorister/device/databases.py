"""A device's folder: two encrypted databases, opened together.

Events and consent are in one database, everything else is in the ledger's: whatever belongs
together there is written in one `transaction(connection)`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from chorister.clock import Clock
from chorister.device.audit import AuditLog, Event
from chorister.device.audit_writer import AuditWriter
from chorister.device.database import open_database, setting_up, transaction
from chorister.device.device_clock import DeviceClock
from chorister.device.keys import SecretKey
from chorister.device.ledger import HeadStore, Ledger
from chorister.device.outbox import Outbox
from chorister.device.records import Attempts, AttemptState, PolledFiles, Refusals, Settings
from chorister.device.run import Hook, RunStep
from chorister.device.schedule import Schedule, Timing
from chorister.device.store import ConsentEvent, EventStore
from chorister.policy import Policy

_EVENTS_FILE: Final = "events.db"
_LEDGER_FILE: Final = "ledger.db"
_NOTHING: Final = "no recipe runs and nothing is sent any more"
_WORDS: Final = {
    ConsentEvent.OPTED_IN: (Event.OPTED_IN, "donations are kept, and recipes may run"),
    ConsentEvent.OPTED_OUT: (
        Event.OPTED_OUT,
        f"{_NOTHING}; events are kept until their retention ends",
    ),
    ConsentEvent.OPTED_OUT_AND_PURGED: (Event.OPTED_OUT, f"{_NOTHING}; all events were deleted"),
    ConsentEvent.PURGED: (Event.PURGED, "every event and profile; what was spent stays spent"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Databases:
    """Everything that is open while a device is: `store` has the events, the ledger all else."""

    connection: apsw.Connection  # to the ledger's database
    store: EventStore
    ledger: Ledger
    audit: AuditLog
    writer: AuditWriter
    clock: DeviceClock
    attempts: Attempts
    refusals: Refusals
    files: PolledFiles
    settings: Settings
    outbox: Outbox
    schedule: Schedule
    head: HeadStore | None
    stack: ExitStack

    def next_upload(self) -> int | None:
        """Return when the first report leaves, including those that a crash left unfinished."""
        times = (self.outbox.next_time(), self.attempts.next_upload())
        return min((time for time in times if time is not None), default=None)

    def withdraw(self) -> int:
        """Drop every report that has not left, inside the caller's transaction; return how many."""
        waiting = [(attempt.recipe, AttemptState.CHARGED) for attempt in self.attempts.unfinished()]
        waiting += [(recipe, AttemptState.QUEUED) for recipe in self.outbox.recipes()]
        for recipe, state in waiting:
            self.outbox.remove(recipe)
            self.attempts.move(recipe, state, AttemptState.DROPPED)
            self.writer.dropped(self.attempts.question(recipe), "the person opted out")
        return len(waiting)

    def record_consent_events(self, hook: Hook) -> None:
        """Write consent and deletion to the audit log, each event exactly once.

        They change the events' database, but the audit log is in the ledger's. So an event is
        noted in the transaction that makes the change, and recorded here later, however often the
        process ends in between. Opting out also drops every report that has not left.
        """
        for name, consent_event in self.store.consent_events():
            event, why = _WORDS[consent_event]
            recorded = f"deed {name}"
            with transaction(self.connection):
                if not self.settings.get(recorded):
                    self.settings.set(recorded, 1)
                    self.writer.record(event, why)
                    if event is Event.OPTED_OUT:
                        self.withdraw()
                hook(RunStep.CONSENT_WRITTEN)
            hook(RunStep.CONSENT_RECORDED)
            self.store.delete_consent_event(name)
            self.settings.delete(recorded)


def open_databases(
    folder: Path,
    policy: Policy,
    key: SecretKey,
    clock: Clock,
    timing: Timing,
    head: HeadStore | None,
    *,
    create: bool,
) -> Databases:
    """Open both databases; the caller closes `stack`."""
    with ExitStack() as stack:
        store = EventStore(folder / _EVENTS_FILE, key, policy, clock, create=create)
        stack.callback(store.close)
        connection = open_database(folder / _LEDGER_FILE, key.derive("ledger"), create=create)
        stack.callback(connection.close)
        held = ExitStack()
        with setting_up(connection):
            device_clock = DeviceClock(connection, clock)
            audit = AuditLog(connection)
            found = Databases(
                connection=connection,
                store=store,
                ledger=Ledger(connection, policy, head, clock=device_clock),
                audit=audit,
                writer=AuditWriter(audit, device_clock),
                clock=device_clock,
                attempts=Attempts(connection),
                refusals=Refusals(connection),
                files=PolledFiles(connection),
                settings=Settings(connection),
                outbox=Outbox(connection),
                schedule=Schedule(connection, device_clock, timing),
                head=head,
                stack=held,
            )
        held.push(stack.pop_all())
        return found
