"""What is specific to draft-ietf-ppm-dap-18: tag, code points, media types, paths, errors.

A later draft changes this module. The native module, which reads and writes the messages that exist
once per report, has the codes of report errors; they are imported from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final

from chorister._native import ReportError as ReportError
from chorister.canonical import b64url_encode

VERSION_TAG: Final = b"dap-18"
"""Begins the HPKE info and VDAF context strings of this draft."""

TASK_ID_BYTES: Final = 32
REPORT_ID_BYTES: Final = 16
CHECKSUM_BYTES: Final = 32
VERIFICATION_KEY_ID: Final = 0
"""The only verification key of a task, because it never changes."""

# Section "Protocol Message Media Type".
_MESSAGE: Final = "application/ppm-dap;message="
HPKE_CONFIG_LIST: Final = _MESSAGE + "hpke-config-list"
UPLOAD_REQUEST: Final = _MESSAGE + "upload-req"
UPLOAD_ERRORS: Final = _MESSAGE + "upload-errors"
AGGREGATION_JOB_INIT_REQUEST: Final = _MESSAGE + "aggregation-job-init-req"
AGGREGATION_JOB_RESPONSE: Final = _MESSAGE + "aggregation-job-resp"
AGGREGATION_JOB_CONTINUE_REQUEST: Final = _MESSAGE + "aggregation-job-continue-req"
AGGREGATE_SHARE_REQUEST: Final = _MESSAGE + "aggregate-share-req"
AGGREGATE_SHARE: Final = _MESSAGE + "aggregate-share"
COLLECTION_JOB_REQUEST: Final = _MESSAGE + "collection-job-req"
COLLECTION_JOB_RESPONSE: Final = _MESSAGE + "collection-job-resp"
PROBLEM: Final = "application/problem+json"  # RFC 9457
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
    """Return the HPKE info of an input share (section "Client Behavior")."""
    return VERSION_TAG + b" input share" + bytes([Role.CLIENT, recipient])


def aggregate_share_info(sender: Role) -> bytes:
    """Return the HPKE info of an aggregate share (section "Aggregate Share Encryption")."""
    return VERSION_TAG + b" aggregate share" + bytes([sender, Role.COLLECTOR])


class BatchMode(IntEnum):
    """Section "Batch Modes Registry"."""

    TIME_INTERVAL = 1
    LEADER_SELECTED = 2


class TaskExtensionType(IntEnum):
    """Section "Task Extensions Registry"."""

    TASK_INTERVAL = 1


class VerifyRespType(IntEnum):
    """Section "Helper Initialization"."""

    CONTINUE = 0
    FINISH = 1
    REJECT = 2


class VDAFType(IntEnum):
    """The entries that we use of draft-irtf-cfrg-vdaf's registry of VDAF identifiers."""

    PRIO3_SUM_VEC = 0x00000003
    PRIO3_MULTIHOT_COUNT_VEC = 0x00000005


class Problem(StrEnum):
    """Section "Errors", and taskprov's `invalidTask`: what became of a whole request."""

    INVALID_MESSAGE = "invalidMessage"
    UNRECOGNIZED_TASK = "unrecognizedTask"
    UNRECOGNIZED_AGGREGATION_JOB = "unrecognizedAggregationJob"
    BATCH_INVALID = "batchInvalid"
    INVALID_BATCH_SIZE = "invalidBatchSize"
    INVALID_AGGREGATION_PARAMETER = "invalidAggregationParameter"
    BATCH_MISMATCH = "batchMismatch"
    STEP_MISMATCH = "stepMismatch"
    BATCH_OVERLAP = "batchOverlap"
    UNSUPPORTED_EXTENSION = "unsupportedExtension"
    INVALID_EXTENSION = "invalidExtension"
    INVALID_TASK = "invalidTask"


TITLES: Final[Mapping[Problem, str]] = MappingProxyType(
    {
        Problem.INVALID_MESSAGE: "The message can't be read",
        Problem.UNRECOGNIZED_TASK: "No such task is known here",
        Problem.UNRECOGNIZED_AGGREGATION_JOB: "No such aggregation job is known here",
        Problem.BATCH_INVALID: "The query is not for a batch of this task",
        Problem.INVALID_BATCH_SIZE: "Too few verified reports",
        Problem.INVALID_AGGREGATION_PARAMETER: "The aggregation parameter is not empty",
        Problem.BATCH_MISMATCH: "The aggregators did not add up the same reports",
        Problem.STEP_MISMATCH: "The aggregation job is not at this step",
        Problem.BATCH_OVERLAP: "The batch was already collected, by another request",
        Problem.UNSUPPORTED_EXTENSION: "An extension is not known here",
        Problem.INVALID_EXTENSION: "Extensions are out of order, or one is malformed",
        Problem.INVALID_TASK: "This aggregator does not take part in the task",
    }
)
"""Titles for people; programs read the type."""

HPKE_CONFIG_PATH: Final = "hpke_config"


def reports_path(task_id: bytes) -> str:
    """Return where to upload reports, below the leader's endpoint."""
    return f"tasks/{b64url_encode(task_id)}/reports"


def aggregation_jobs_path(task_id: bytes, job_id: bytes | None = None) -> str:
    """Return the path of all aggregation jobs, or of one, below the helper's endpoint."""
    return _resource_path(task_id, "aggregation_jobs", job_id)


def collection_jobs_path(task_id: bytes, job_id: bytes | None = None) -> str:
    """Return the path of all collection jobs, or of one, below the leader's endpoint."""
    return _resource_path(task_id, "collection_jobs", job_id)


def aggregate_shares_path(task_id: bytes, share_id: bytes | None = None) -> str:
    """Return the path of all aggregate shares, or of one, below the helper's endpoint."""
    return _resource_path(task_id, "aggregate_shares", share_id)


def _resource_path(task_id: bytes, kind: str, identifier: bytes | None) -> str:
    path = f"tasks/{b64url_encode(task_id)}/{kind}"
    return path if identifier is None else f"{path}/{b64url_encode(identifier)}"
