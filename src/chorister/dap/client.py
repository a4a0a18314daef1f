"""The client's part of DAP: a privatized vector -> a sealed `Report`; the upload and its answer.

Two departures from the draft, both because a report was paid for with privacy budget:

- a report that the leader refuses with `outdated_config` is not made anew. Fresh noise on the same
  data would be a second answer for one charge;
- the HPKE configurations are never asked of the aggregators. They come from the cosigned log, or
  an aggregator could hand every device a key of its own.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from chorister._native import hpke_seal
from chorister.canonical import b64url_encode
from chorister.dap.binding import task_binding
from chorister.dap.codec import Reader
from chorister.dap.draft import (
    ERROR_PREFIX,
    TASKPROV_HEADER,
    UPLOAD_ERRORS,
    UPLOAD_REQUEST,
    Problem,
    ReportError,
)
from chorister.dap.task import TaskConfiguration, task_id
from chorister.errors import DecodeError, UploadFailed

__all__ = [
    "MAX_ANSWER",
    "REPORT_ID_BYTES",
    "Upload",
    "check_answer",
    "check_hpke_config",
    "new_report_id",
    "seal_report",
    "upload",
]

REPORT_ID_BYTES: Final = 16
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
    advertised = base64.b64encode(configuration).decode("ascii")
    task = b64url_encode(task_id(decoded))
    return Upload(
        url=f"{decoded.leader_aggregator_endpoint}tasks/{task}/reports",
        headers={"Content-Type": UPLOAD_REQUEST, TASKPROV_HEADER: f":{advertised}:"},
        body=report,
    )


def check_answer(report_id: bytes, *, status: int, content_type: str, body: bytes) -> None:
    """Return if the leader has the report; raise `UploadFailed`, `final` or not, if it has not."""
    if 200 <= status < 300:
        _check_upload_errors(report_id, content_type, body)
        return
    problem = _problem(body) if 400 <= status < 500 else None
    if problem is None:
        # Redirects too: what follows one tells a stranger that this device answered.
        raise UploadFailed(f"the leader answers {status}", final=False)
    raise UploadFailed(f"the leader answers {status}, {problem}", final=problem in _FINAL)


def _check_upload_errors(report_id: bytes, content_type: str, body: bytes) -> None:
    if not body:
        return
    if _media_type(content_type) != UPLOAD_ERRORS:
        raise UploadFailed("the leader's answer is no DAP message", final=False)
    try:
        with Reader(body, "UploadErrors") as reader:
            named = reader.opaque(REPORT_ID_BYTES)
            code = reader.uint8()
    except DecodeError as error:
        raise UploadFailed(str(error), final=False) from None
    if named != report_id:
        raise UploadFailed("the leader's answer is about another report", final=False)
    try:
        error_code = ReportError(code)
    except ValueError:
        raise UploadFailed(f"the leader refuses the report with code {code}", final=True) from None
    if error_code in _STORED:
        return
    why = f"the leader refuses the report: {error_code.name.lower()}"
    raise UploadFailed(why, final=error_code not in _LATER)


def _media_type(text: str) -> str:
    return ";".join(part.strip() for part in text.lower().split(";"))


def _problem(body: bytes) -> Problem | None:
    """The DAP error that a problem document names; None for any other body."""
    try:
        document = json.loads(body)
        kind = document["type"]
        return Problem(kind.removeprefix(ERROR_PREFIX)) if kind.startswith(ERROR_PREFIX) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
