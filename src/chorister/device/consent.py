"""Consent and deletion, from the events database into the audit log: each event exactly once.

They change the events database, but the audit log is in the ledger's. So an event is noted in the
transaction that makes the change, and recorded in the log later, however often the process ends in
between.
"""

from __future__ import annotations

from typing import Final

from chorister.device.audit import Event
from chorister.device.database import transaction
from chorister.device.databases import Databases
from chorister.device.run import Hook, Step
from chorister.device.store import ConsentEvent
from chorister.device.uploader import withdraw

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


def record_consent_events(databases: Databases, hook: Hook) -> None:
    """Write what is not in the audit log yet; opting out also drops every report not yet sent."""
    store, settings = databases.store, databases.settings
    for name, consent_event in store.consent_events():
        event, why = _WORDS[consent_event]
        recorded = f"deed {name}"
        with transaction(databases.connection):
            if not settings.get(recorded):
                settings.set(recorded, 1)
                databases.writer.record(event, why)
                if event is Event.OPTED_OUT:
                    withdraw(databases)
            hook(Step.CONSENT_WRITTEN)
        hook(Step.CONSENT_RECORDED)
        store.delete_consent_event(name)
        settings.delete(recorded)
