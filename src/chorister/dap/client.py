"""The client's part of DAP: a privatized vector -> a sealed `Report`; the upload and its answer.

Two departures from the draft, both because a report was paid for with privacy budget:

- a report that the leader refuses with `outdated_config` is not made anew. Fresh noise on the same
  data would be a second answer for one charge;
- the HPKE configurations are never asked of the aggregators. They come from the cosigned log, or
  an aggregator could hand every device a key of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from chorister._native import hpke_seal
from chorister.dap.binding import task_binding
from chorister.dap.draft import (
    REPORT_ID_BYTES,
    UPLOAD_ERRORS,
    UPLOAD_REQUEST,
    Problem,
    ReportError,
    reports_path,
)
from chorister.dap.media import is_media_type
from chorister.dap.messages import UploadErrors
from chorister.dap.problems import parse_problem
from chorister.dap.task import TaskConfiguration, task_id
from chorister.dap.taskprov import advertise
from chorister.dap.urls import resource_url
from chorister.errors import DecodeError, UploadFailed

__all__ = [
    "MAX_ANSWER",
    "Upload",
    "check_answer",
    "check_hpke_config",
    "new_report_id",
    "seal_report",
    "upload",
]

MAX_ANSWER: Final = 16_384
"""What is read of an answer: one error of 17 bytes, or a problem document."""

# The draft lets a client send these again later; all others are the leader's last word.
_LATER: Final = {ReportError.REPORT_TOO_EARLY, ReportError.TASK_NOT_STARTED}
# The leader has the report already: this is a resend whose first answer was lost.
_STORED: Final = {ReportError.REPORT_REPLAYED}
_FINAL: Final = {
    Problem.INVALID_MESSAGE,
    Problem.UNSUPPORTED_EXTENSION,
    Problem.INVALID_EXTENSION,
}


def new_report_id() -> bytes:
    """16 bytes of the operating system's generator, as the draft demands."""
    return secrets.token_bytes(REPORT_ID_BYTES)


def check_hpke_config(config: bytes) -> None:
    """Raise `DecodeError` or `HPKEError` unless shares can be sealed to this `HpkeConfig`."""
    hpke_seal(config, b"", b"", b"")


def seal_report(
    task: TaskConfiguration,
    measurement: bytes,
    *,
    report_id: bytes,
    leader_config: bytes,
    helper_config: bytes,
) -> bytes:
    """Shard a privatized vector (a byte a bit) and seal its two shares: an encoded `Report`.

    Its time is the one bucket of the task, the same for every device.
    """
    interval = task.task_interval
    if interval is None:
        raise DecodeError("a task without task_interval is none of Chorister's")
    (report,) = task_binding(task).seal_reports(
        measurement,
        report_ids=report_id,
        time=interval.start,
        leader_config=leader_config,
        helper_config=helper_config,
        threads=1,
    )
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """One POST."""

    url: str
    headers: Mapping[str, str]
    body: bytes


def upload(configuration: bytes, report: bytes) -> Upload:
    """The request that uploads one report under an encoded `TaskConfiguration`.

    The task is advertised each time (taskprov): the leader may meet it here for the first time.
    """
    decoded = TaskConfiguration.decode(configuration)
    return Upload(
        url=resource_url(decoded.leader_aggregator_endpoint, reports_path(task_id(decoded))),
        headers={"Content-Type": UPLOAD_REQUEST, **advertise(configuration)},
        body=report,
    )


def check_answer(report_id: bytes, *, status: int, content_type: str, body: bytes) -> None:
    """Return if the leader has the report; raise `UploadFailed`, `final` or not, if it has not."""
    if 200 <= status < 300:
        _check_upload_errors(report_id, content_type, body)
        return
    refusal = parse_problem(status, content_type, body) if 400 <= status < 500 else None
    if refusal is None or refusal.problem is None:
        # Redirects too: what follows one tells a stranger that this device answered.
        raise UploadFailed(f"the leader answers {status}", final=False)
    final = refusal.problem in _FINAL
    raise UploadFailed(f"the leader answers {status}, {refusal.problem}", final=final)


def _check_upload_errors(report_id: bytes, content_type: str, body: bytes) -> None:
    if not body:
        return
    if not is_media_type(content_type, UPLOAD_ERRORS):
        raise UploadFailed("the leader's answer is no DAP message", final=False)
    try:
        statuses = UploadErrors.decode(body).statuses
    except DecodeError as error:
        raise UploadFailed(str(error), final=False) from None
    if len(statuses) != 1 or statuses[0].report_id != report_id:
        raise UploadFailed("the leader's answer is about another report", final=False)
    code = statuses[0].error
    try:
        error_code = ReportError(code)
    except ValueError:
        raise UploadFailed(f"the leader refuses the report with code {code}", final=True) from None
    if error_code in _STORED:
        return
    why = f"the leader refuses the report: {error_code.name.lower()}"
    raise UploadFailed(why, final=error_code not in _LATER)
