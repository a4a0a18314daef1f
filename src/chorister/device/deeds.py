"""What the person said, from the events' database into the audit log: each deed once.

Consent and deletion change the events' database, the audit log is in the ledger's. So a deed is
noted in the transaction that does it, and told later, however often the process ends in between.
"""

from __future__ import annotations

from typing import Final

import apsw

from chorister.device.attempts import Attempts
from chorister.device.audit import Event
from chorister.device.courier import withdraw
from chorister.device.database import transaction
from chorister.device.journal import Journal
from chorister.device.outbox import Outbox
from chorister.device.steps import Hook, Step
from chorister.device.store import Deed, EventStore

__all__ = ["tell_deeds"]

_NOTHING: Final = "no recipe runs and nothing is sent any more"
_WORDS: Final = {
    Deed.OPTED_IN: (Event.OPTED_IN, "donations are kept, and recipes may run"),
    Deed.OPTED_OUT: (
        Event.OPTED_OUT,
        f"{_NOTHING}; events are kept until their retention ends",
    ),
    Deed.OPTED_OUT_AND_PURGED: (Event.OPTED_OUT, f"{_NOTHING}; all events were deleted"),
    Deed.PURGED: (Event.PURGED, "every event and profile; what was spent stays spent"),
}


def tell_deeds(
    store: EventStore,
    connection: apsw.Connection,
    attempts: Attempts,
    outbox: Outbox,
    journal: Journal,
    hook: Hook,
) -> None:
    """Tell what was not told yet; reports of someone who opted out are dropped with the telling."""
    for name, deed in store.deeds():
        event, why = _WORDS[deed]
        told = f"deed {name}"
        with transaction(connection):
            if not attempts.recall(told):
                attempts.remember(told, 1)
                journal.told(event, why)
                if event is Event.OPTED_OUT:
                    withdraw(attempts, outbox, journal)
            hook(Step.DEED_WRITTEN)
        hook(Step.DEED_TOLD)
        store.forget_deed(name)
        attempts.disremember(told)
