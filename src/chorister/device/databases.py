"""The two encrypted databases of a device, opened together, and everything that lives in them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from chorister.clock import Clock
from chorister.device.attempts import Attempts
from chorister.device.audit import AuditLog
from chorister.device.audit_writer import AuditWriter
from chorister.device.database import open_database
from chorister.device.device_clock import DeviceClock
from chorister.device.keys import SecretKey
from chorister.device.ledger import HeadStore, Ledger
from chorister.device.outbox import Outbox
from chorister.device.records import PolledFiles, Refusals, Settings
from chorister.device.schedule import Schedule, Timing
from chorister.device.store import EventStore
from chorister.policy import Policy

EVENTS: Final = "events.db"
LEDGER: Final = "ledger.db"


@dataclass(frozen=True, kw_only=True, slots=True)
class Databases:
    """Everything that is open while a device is. `store` has its own database; all else shares one.

    Whatever goes together is written in one `transaction(connection)`.
    """

    connection: apsw.Connection
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
        """When the first report leaves, including those that a crash left unfinished."""
        times = (self.outbox.next_time(), self.attempts.next_upload())
        return min((time for time in times if time is not None), default=None)


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
    """Open both databases; whoever calls this closes `stack`."""
    with ExitStack() as stack:
        store = EventStore(folder / EVENTS, key, policy, clock, create=create)
        stack.callback(store.close)
        connection = open_database(folder / LEDGER, key.derive("ledger"), create=create)
        stack.callback(connection.close)
        device_clock = DeviceClock(connection, clock)
        audit = AuditLog(connection)
        return Databases(
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
            stack=stack.pop_all(),
        )
