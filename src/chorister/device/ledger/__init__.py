"""The budget of one device: charges in an append-only ledger, and what is left of each limit."""

from __future__ import annotations

from chorister.device.ledger.budget import Charge, Standing
from chorister.device.ledger.head_store import FileHeadStore, HeadStore, KeyringHeadStore
from chorister.device.ledger.ledger import Ledger
from chorister.device.ledger.ledger_entries import (
    Charged,
    Created,
    Entry,
    PolicyTaken,
    Restarted,
    Resumed,
)

__all__ = [
    "Charge",
    "Charged",
    "Created",
    "Entry",
    "FileHeadStore",
    "HeadStore",
    "KeyringHeadStore",
    "Ledger",
    "PolicyTaken",
    "Restarted",
    "Resumed",
    "Standing",
]
