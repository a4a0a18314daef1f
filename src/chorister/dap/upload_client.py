"""A device's part of DAP: a privatized vector -> a sealed `Report`; the upload and its answer.

Two departures from the draft, both because a report was paid for with privacy budget:

- a report that the leader refuses with `outdated_config` is not created again. Fresh noise on the
  same data would be a second answer for one charge;
- HPKE configurations are never fetched from the aggregators. They come from the cosigned log, or
  else an aggregator could give every device a different key.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from chorister._native import hpke_seal
from chorister.dap.draft import (
    REPORT_ID_BYTES,
    UPLOAD_ERRORS,
    UPLOAD_REQUEST,
    Problem,
    ReportError,
    reports_path,
)
from chorister.dap.http import is_media_type, parse_problem, resource_url
from chorister.dap.task import TaskConfiguration, advertise, task_binding, task_id
from chorister.dap.upload_messages import UploadErrors
from chorister.errors import DecodeError, UploadFailed

MAX_ANSWER_BYTES: Final = 16_384
"""As much of an answer as is read: one error of 17 bytes, or a problem document."""

# The draft lets a client send these again later; all others are final.
_RETRYABLE: Final = {ReportError.REPORT_TOO_EARLY, ReportError.TASK_NOT_STARTED}
# The leader already has the report: the answer to an earlier attempt was lost.
_ALREADY_STORED: Final = {ReportError.REPORT_REPLAYED}
_FINAL_PROBLEMS: Final = {
    Problem.INVALID_MESSAGE,
    Problem.UNSUPPORTED_EXTENSION,
    Problem.INVALID_EXTENSION,
}


def new_report_id() -> bytes:
    """Return 16 bytes from the operating system's generator, as the draft demands."""
    return secrets.token_bytes(REPORT_ID_BYTES)


@lru_cache(maxsize=16)  # an aggregator has the same one for all its recipes; errors are not kept
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
    """Shard a privatized vector (one byte per bit) and seal its shares; return the `Report`.

    Its time is the task's only bucket, the same for every device.
    """
    interval = task.task_interval
    if interval is None:
        raise DecodeError("the task has no task_interval, so it is not one of Chorister's")
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
    """A POST request that uploads one report."""

    url: str
    headers: Mapping[str, str]
    body: bytes


def upload(configuration: bytes, report: bytes) -> Upload:
    """Return the request that uploads one report under an encoded `TaskConfiguration`.

    The task is advertised each time (taskprov), in case the leader does not know it yet.
    """
    decoded = TaskConfiguration.decode(configuration)
    return Upload(
        url=resource_url(decoded.leader_aggregator_endpoint, reports_path(task_id(decoded))),
        headers={"Content-Type": UPLOAD_REQUEST, **advertise(configuration)},
        body=report,
    )


def check_answer(report_id: bytes, *, status: int, content_type: str, body: bytes) -> None:
    """Return if the leader has the report; otherwise raise `UploadFailed`, `final` or not."""
    if 200 <= status < 300:
        _check_upload_errors(report_id, content_type, body)
        return
    refusal = parse_problem(status, content_type, body) if 400 <= status < 500 else None
    if refusal is None or refusal.problem is None:
        # Redirects too: following one would tell a stranger that this device answered.
        raise UploadFailed(f"the leader answers {status}", final=False)
    final = refusal.problem in _FINAL_PROBLEMS
    raise UploadFailed(f"the leader answers {status}, {refusal.problem}", final=final)


def _check_upload_errors(report_id: bytes, content_type: str, body: bytes) -> None:
    if not body:
        return
    if not is_media_type(content_type, UPLOAD_ERRORS):
        raise UploadFailed("the leader's answer is not a DAP message", final=False)
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
    if error_code in _ALREADY_STORED:
        return
    why = f"the leader refuses the report: {error_code.name.lower()}"
    raise UploadFailed(why, final=error_code not in _RETRYABLE)
