"""Sections 4.5.3.4 and 4.5.4 of the draft: input shares, and the continuation that Prio3 lacks."""

from __future__ import annotations

import os

import httpx2

from chorister.aggregator.known_tasks import KnownTask
from chorister.canonical import b64url_encode
from chorister.dap.draft import (
    AGGREGATION_JOB_CONTINUE_REQUEST,
    Problem,
    ReportError,
    aggregation_jobs_path,
)
from chorister.dap.messages import AggregationJobContinueReq
from tests.aggregator.apps import Apps, problem
from tests.aggregator.conform_aggregation import init
from tests.aggregator.conform_upload import counted, helper_errors
from tests.aggregator.crafted import craft, payload_of
from tests.aggregator.world import HELPER_URL

# --- input shares -------------------------------------------------------------------------------


def every_input_share_is_checked(apps: Apps) -> None:
    """Good and bad ones in one job: each gets its own answer, only the good one counts."""
    task = apps.task()
    (good,) = apps.reports(task, 1)
    bad = craft(apps, task, helper_private=[(7, b"")]).report
    late = apps.reports(task, 1, time=task.interval.start + 1)[0]
    sealed_to_another = bytearray(apps.reports(task, 1)[0])
    sealed_to_another[-1] ^= 1  # the helper's ciphertext is at the end
    assert helper_errors(apps.job_of(task, bad, good, late, bytes(sealed_to_another))) == [
        ReportError.INVALID_MESSAGE,
        0,
        ReportError.TASK_EXPIRED,
        ReportError.HPKE_DECRYPT_ERROR,
    ]
    assert apps.verified(task)[1] == 1


def _helper_on(apps: Apps, task: KnownTask, **changes: object) -> list[int]:
    """The helper's word on a crafted report; the leader's message is another report's."""
    payload = payload_of(apps.verify_inits(task, *apps.reports(task, 1)))
    crafted = craft(apps, task, **changes)  # type: ignore[arg-type]
    return helper_errors(apps.create_job(task, init(crafted.verify_init(payload))))


def _leader_counts(apps: Apps, task: KnownTask, **changes: object) -> int:
    crafted = craft(apps, task, **changes)  # type: ignore[arg-type]
    apps.upload(task, crafted.report)
    return counted(apps, task)[0]


def shares_that_do_not_decode_are_invalid(apps: Apps) -> None:
    task = apps.task()
    for cut in (1, 16):
        assert _helper_on(apps, task, cut=cut) == [ReportError.INVALID_MESSAGE]
        assert _leader_counts(apps, task, cut=cut) == 0


def reports_before_the_task_are_invalid(apps: Apps) -> None:
    task = apps.task()
    early = task.interval.start - 1
    assert _helper_on(apps, task, time=early) == [ReportError.TASK_NOT_STARTED]
    assert _leader_counts(apps, task, time=early) == 0


def reports_after_the_task_are_invalid(apps: Apps) -> None:
    task = apps.task()
    late = task.interval.start + task.interval.duration
    assert _helper_on(apps, task, time=late) == [ReportError.TASK_EXPIRED]
    assert _leader_counts(apps, task, time=late) == 0


def unknown_report_extensions_are_invalid(apps: Apps) -> None:
    task = apps.task()
    assert _helper_on(apps, task, public=[(7, b"")]) == [ReportError.INVALID_MESSAGE]
    assert _helper_on(apps, task, helper_private=[(7, b"")]) == [ReportError.INVALID_MESSAGE]
    assert _leader_counts(apps, task, public=[(7, b"")]) == 0
    assert _leader_counts(apps, task, leader_private=[(7, b"")]) == 0


def repeated_report_extensions_are_invalid(apps: Apps) -> None:
    task = apps.task()
    twice = {"public": [(7, b"")], "helper_private": [(7, b"")], "leader_private": [(7, b"")]}
    assert _helper_on(apps, task, **twice) == [ReportError.INVALID_MESSAGE]
    assert _leader_counts(apps, task, **twice) == 0


def report_extensions_out_of_order_are_invalid(apps: Apps) -> None:
    task = apps.task()
    for pair in ([(9, b""), (8, b"")], [(8, b""), (8, b"")]):
        for where in ("public", "helper_private"):
            assert _helper_on(apps, task, **{where: pair}) == [ReportError.INVALID_MESSAGE]
        for where in ("public", "leader_private"):
            assert _leader_counts(apps, task, **{where: pair}) == 0


# --- continuation, which Prio3 does not have ----------------------------------------------------


def _continue(apps: Apps, task: KnownTask, url: str, request: bytes) -> httpx2.Response:
    return apps.ask(
        "POST",
        url,
        request,
        media=AGGREGATION_JOB_CONTINUE_REQUEST,
        token=apps.helper_token,
        advertised=task.configuration,
    )


def _finished_job(apps: Apps) -> tuple[KnownTask, str, bytes]:
    task = apps.task()
    (report,) = apps.reports(task, 1)
    created = apps.job_of(task, report)
    url = str(httpx2.URL(HELPER_URL).join(created.headers["location"]))
    return task, url, report[:16]


def continuing_an_unknown_task_is_refused(apps: Apps) -> None:
    url = HELPER_URL + aggregation_jobs_path(os.urandom(32), bytes(16))
    request = AggregationJobContinueReq(step=1, continues=()).encode()
    answer = apps.ask(
        "POST",
        url,
        request,
        media=AGGREGATION_JOB_CONTINUE_REQUEST,
        token=apps.helper_token,
    )
    assert problem(answer) == Problem.UNRECOGNIZED_TASK


def continuing_an_unknown_job_is_refused(apps: Apps) -> None:
    task = apps.task()
    request = AggregationJobContinueReq(step=1, continues=()).encode()
    for job in (b64url_encode(os.urandom(16)), "AA", "="):
        url = f"{HELPER_URL}{aggregation_jobs_path(task.task_id)}/{job}"
        answer = _continue(apps, task, url, request)
        assert problem(answer) == Problem.UNRECOGNIZED_AGGREGATION_JOB


def malformed_continuations_are_refused(apps: Apps) -> None:
    task, url, report_id = _finished_job(apps)
    whole = AggregationJobContinueReq(step=1, continues=((report_id, b"x"),)).encode()
    for body in (b"", b"\0", whole[:-1], whole + b"\0"):
        assert problem(_continue(apps, task, url, body)) == Problem.INVALID_MESSAGE


def continuing_to_step_0_is_refused(apps: Apps) -> None:
    task, url, _ = _finished_job(apps)
    body = AggregationJobContinueReq(step=0, continues=()).encode()
    assert problem(_continue(apps, task, url, body)) == Problem.INVALID_MESSAGE


def continuing_reports_that_do_not_wait_is_refused(apps: Apps) -> None:
    """None does: the job is finished."""
    task, url, report_id = _finished_job(apps)
    for continues in (((report_id, b"x"),), ((report_id, b"x"),) * 2, ((bytes(16), b"x"),)):
        body = AggregationJobContinueReq(step=1, continues=continues).encode()
        assert problem(_continue(apps, task, url, body)) == Problem.INVALID_MESSAGE


def other_steps_are_refused(apps: Apps) -> None:
    task, url, _ = _finished_job(apps)
    for step in (1, 2, 0xFFFF):
        body = AggregationJobContinueReq(step=step, continues=()).encode()
        assert problem(_continue(apps, task, url, body)) == Problem.STEP_MISMATCH
    assert apps.ask("GET", url, token=apps.helper_token).status_code == 200
