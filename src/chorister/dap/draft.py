"""All that is peculiar to draft-ietf-ppm-dap-18: its tag, code points, media types and errors.

A later draft changes this module, and no other constant anywhere.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

__all__ = [
    "ERROR_PREFIX",
    "PROBLEM",
    "TASKPROV_HEADER",
    "UPLOAD_ERRORS",
    "UPLOAD_REQUEST",
    "VERSION_TAG",
    "BatchMode",
    "Problem",
    "ReportError",
    "Role",
    "TaskExtensionType",
    "VDAFType",
    "input_share_info",
]

VERSION_TAG: Final = b"dap-18"
"""Begins the HPKE info and VDAF context strings of this draft."""

UPLOAD_REQUEST: Final = "application/ppm-dap;message=upload-req"
UPLOAD_ERRORS: Final = "application/ppm-dap;message=upload-errors"
PROBLEM: Final = "application/problem+json"
"""RFC 9457."""
ERROR_PREFIX: Final = "urn:ietf:params:ppm:dap:error:"
"""Begins the type of a problem that DAP defines."""
TASKPROV_HEADER: Final = "DAP-Taskprov"
"""draft-ietf-ppm-dap-taskprov: advertises the task's configuration with a request."""


class Role(IntEnum):
    """Section "Basic Type Definitions"."""

    COLLECTOR = 0
    CLIENT = 1
    LEADER = 2
    HELPER = 3


def input_share_info(recipient: Role) -> bytes:
    """The HPKE info of an input share (section "Client Behavior")."""
    return VERSION_TAG + b" input share" + bytes([Role.CLIENT, recipient])


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


class ReportError(IntEnum):
    """Section "Report Errors Registry": what became of one report."""

    BATCH_COLLECTED = 1
    REPORT_REPLAYED = 2
    REPORT_DROPPED = 3
    HPKE_UNKNOWN_CONFIG_ID = 4
    HPKE_DECRYPT_ERROR = 5
    VDAF_VERIFY_ERROR = 6
    TASK_EXPIRED = 7
    INVALID_MESSAGE = 8
    REPORT_TOO_EARLY = 9
    TASK_NOT_STARTED = 10
    OUTDATED_CONFIG = 11


class Problem(StrEnum):
    """Section "Errors", and taskprov's: what became of a whole request, as far as clients care."""

    INVALID_MESSAGE = "invalidMessage"
    UNRECOGNIZED_TASK = "unrecognizedTask"
    INVALID_TASK = "invalidTask"
    UNSUPPORTED_EXTENSION = "unsupportedExtension"
    INVALID_EXTENSION = "invalidExtension"
