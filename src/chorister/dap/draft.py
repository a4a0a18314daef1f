"""All that is peculiar to draft-ietf-ppm-dap-18: its tag and code points.

A later draft changes this module, and no other constant anywhere.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["VERSION_TAG", "BatchMode", "TaskExtensionType", "VDAFType"]

VERSION_TAG: Final = b"dap-18"
"""Begins the HPKE info and VDAF context strings of this draft."""


class BatchMode(IntEnum):
    """Section "Batch Modes Registry"."""

    TIME_INTERVAL = 1
    LEADER_SELECTED = 2


class TaskExtensionType(IntEnum):
    """Section "Task Extensions Registry"."""

    TASK_INTERVAL = 1


class VDAFType(IntEnum):
    """The VDAF Identifiers registry of draft-irtf-cfrg-vdaf, as far as we use it."""

    PRIO3_SUM_VEC = 0x00000003
    PRIO3_MULTIHOT_COUNT_VEC = 0x00000005
