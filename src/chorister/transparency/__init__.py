"""The public log as everyone sees it: Merkle tree, entries, checkpoints, who checks what.

A device calls `read_log`, an aggregator `Cosigner.cosign`, an auditor `audit`. What the log
protects, and every format to the byte: docs/concepts/log.md, docs/reference/log.md.
"""

from __future__ import annotations

from chorister.transparency.auditor import Audit, audit, read_policies
from chorister.transparency.checkpoint import Checkpoint, SignedCheckpoint
from chorister.transparency.client import RegistryClient
from chorister.transparency.cosigner import (
    Cosigner,
    CosignerIdentity,
    adopt_head,
    create_head,
)
from chorister.transparency.entries import (
    EndReason,
    Entry,
    HPKEConfigEntry,
    KeyRevocation,
    RecipeEnd,
    RecipeEntry,
    parse_entry,
)
from chorister.transparency.head import Head
from chorister.transparency.listing import CurrentList, ListedRecipe
from chorister.transparency.reader import (
    Current,
    Reading,
    accept_list,
    check_cosigned,
    read_current,
    read_log,
)
from chorister.transparency.sources import FolderSource, HTTPSource, Source
from chorister.transparency.state import Logged, LogState
from chorister.transparency.trust import Authority, CosignerKeys, Trust

__all__ = [
    "Audit",
    "Authority",
    "Checkpoint",
    "Cosigner",
    "CosignerIdentity",
    "CosignerKeys",
    "Current",
    "CurrentList",
    "EndReason",
    "Entry",
    "FolderSource",
    "HPKEConfigEntry",
    "HTTPSource",
    "Head",
    "KeyRevocation",
    "ListedRecipe",
    "LogState",
    "Logged",
    "Reading",
    "RecipeEnd",
    "RecipeEntry",
    "RegistryClient",
    "SignedCheckpoint",
    "Source",
    "Trust",
    "accept_list",
    "adopt_head",
    "audit",
    "check_cosigned",
    "create_head",
    "parse_entry",
    "read_current",
    "read_log",
    "read_policies",
]
