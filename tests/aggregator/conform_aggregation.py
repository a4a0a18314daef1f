"""Section 4.5 of the draft: aggregation jobs, as the leader makes and the helper serves them."""

from __future__ import annotations

import os
from collections.abc import Callable

import httpx2

from chorister._native import scan_verify_inits
from chorister.aggregator.known_tasks import KnownTask
from chorister.dap.draft import (
    AGGREGATION_JOB_RESPONSE,
    Problem,
    ReportError,
    VerifyRespType,
    aggregation_jobs_path,
)
from chorister.dap.helper_client import HelperClient
from chorister.dap.http import HTTPClient
from chorister.dap.messages import (
    AggregationJobInitReq,
    AggregationJobResp,
    Extension,
)
from tests.aggregator.apps import MIN_COHORT, Answer, Apps, problem, share_request
from tests.aggregator.conform_upload import counted, errors, helper_errors
from tests.aggregator.crafted import craft
from tests.aggregator.world import HELPER_URL


def init(verify_inits: bytes, **changes: object) -> AggregationJobInitReq:
    return AggregationJobInitReq(verify_inits=verify_inits, **changes)  # type: ignore[arg-type]


# --- extensions ---------------------------------------------------------------------------------


def unknown_job_extensions_are_refused(apps: Apps) -> None:
    task = apps.task()
    inits = apps.verify_inits(task, *apps.reports(task, 1))
    for kind in (1, 2, 0xFFFF):  # 1 is known to the draft, but not in the time-interval mode
        answer = apps.create_job(task, init(inits, extensions=(Extension(kind, bytes(32)),)))
        assert problem(answer) == Problem.UNSUPPORTED_EXTENSION
    assert apps.verified(task) == (0, 0)


def job_extensions_are_in_order(apps: Apps) -> None:
    task = apps.task()
    inits = apps.verify_inits(task, *apps.reports(task, 1))
    for kinds in ((9, 8), (8, 8)):
        extensions = tuple(Extension(kind, b"") for kind in kinds)
        answer = apps.create_job(task, init(inits, extensions=extensions))
        assert problem(answer) == Problem.INVALID_MESSAGE
    apps.upload(task, *apps.reports(task, 1))
    apps.work(task)
    (sent,) = apps.sent(aggregation_jobs_path(task.task_id))
    assert AggregationJobInitReq.decode(sent.content).extensions == ()


# --- the leader ---------------------------------------------------------------------------------


def sent_ids(apps: Apps, task: KnownTask) -> list[bytes]:
    """The ids of all reports that the leader has sent to the helper for a task."""
    found = []
    for request in apps.sent(aggregation_jobs_path(task.task_id)):
        headers = scan_verify_inits(AggregationJobInitReq.decode(request.content).verify_inits)
        found += [headers.ids[at : at + 16] for at in range(0, len(headers.ids), 16)]
    return found


def only_what_can_be_committed_is_sent(apps: Apps) -> None:
    task = apps.task()
    reports = apps.reports(task)
    apps.upload(task, *reports)
    apps.upload(task, *reports)
    apps.work(task)
    apps.upload(task, *reports)
    apps.work(task)
    assert sorted(sent_ids(apps, task)) == sorted(each[:16] for each in reports)


def the_leader_sends_prio3_s_parameter(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task, 1))
    apps.work(task)
    (sent,) = apps.sent(aggregation_jobs_path(task.task_id))
    request = AggregationJobInitReq.decode(sent.content)
    assert (request.agg_param, request.verification_key_id) == (b"", 0)


def a_retry_is_identical(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task))

    def lose_the_answer(request: httpx2.Request, honest: Answer) -> httpx2.Response:
        honest(request)
        raise httpx2.ReadError("cut", request=request)

    with apps.tampered(lose_the_answer):
        for _ in range(2):
            assert len(apps.work(task)) == 1
    assert apps.work(task) == []
    bodies = {each.content for each in apps.sent(aggregation_jobs_path(task.task_id))}
    assert len(bodies) == 1
    assert apps.verified(task) == (MIN_COHORT, MIN_COHORT)


def _responses(answer: httpx2.Response) -> list[bytes]:
    """Each `VerifyResp` of an answer, encoded."""
    encoded = []
    for each in AggregationJobResp.decode(answer.content).responses():
        assert each.kind is VerifyRespType.CONTINUE
        size = len(each.payload).to_bytes(4, "big")
        encoded.append(each.report_id + bytes([each.kind]) + size + each.payload)
    return encoded


def _answer_with(body: bytes) -> httpx2.Response:
    return httpx2.Response(200, headers={"Content-Type": AGGREGATION_JOB_RESPONSE}, content=body)


def other_reports_in_an_answer_end_the_exchange(apps: Apps) -> None:
    """Nothing is committed. The reports may be sent again, and are: in the same job."""
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    changes: tuple[Callable[[list[bytes]], list[bytes]], ...] = (
        lambda parts: parts[:-1],
        lambda parts: [*parts, parts[0]],
        lambda parts: parts[::-1],
        lambda parts: [os.urandom(16) + parts[0][16:], *parts[1:]],
        lambda parts: parts[:0],
    )
    for change in changes:

        def tamper(request: httpx2.Request, honest: Answer) -> httpx2.Response:
            return _answer_with(b"".join(change(_responses(honest(request)))) or b"\0")  # noqa: B023

        with apps.tampered(tamper):
            assert len(apps.work(task)) == 1
        assert apps.verified(task)[0] == 0
    assert apps.work(task) == []
    assert apps.verified(task) == (MIN_COHORT, MIN_COHORT)


def rejected_reports_are_not_sent_again(apps: Apps) -> None:
    task = apps.task()
    strange = craft(apps, task, helper_private=[(7, b"")])
    good = apps.reports(task, 1)[0]
    # Its length would give it away at the upload, so it goes into the leader's store as it is.
    helper_says = helper_errors(apps.job_of(task, strange.report))
    assert helper_says == [ReportError.INVALID_MESSAGE]

    def reject(request: httpx2.Request, honest: Answer) -> httpx2.Response:
        ids = [each[:16] for each in _responses(honest(request))]
        return _answer_with(
            b"".join(
                each + bytes([VerifyRespType.REJECT, ReportError.VDAF_VERIFY_ERROR]) for each in ids
            )
        )

    apps.upload(task, good)
    with apps.tampered(reject):
        assert apps.work(task) == []
    assert errors(apps.upload(task, good)) == [(good[:16], ReportError.REPORT_REPLAYED)]
    apps.work(task)
    assert sent_ids(apps, task) == [good[:16]]
    assert apps.verified(task)[0] == 0


def a_wrong_type_of_answer_ends_the_exchange(apps: Apps) -> None:
    task = apps.task()
    (report,) = apps.reports(task, 1)
    apps.upload(task, report)

    def finish(request: httpx2.Request, honest: Answer) -> httpx2.Response:
        honest(request)
        return _answer_with(report[:16] + bytes([VerifyRespType.FINISH]))

    with apps.tampered(finish):
        assert len(apps.work(task)) == 1
    assert apps.verified(task)[0] == 0
    assert apps.work(task) == []
    assert apps.verified(task) == (1, 1)


def a_look_at_a_job_names_its_step(apps: Apps) -> None:
    """A helper that answers later is asked with the step that it named."""
    task = apps.task()
    asked: list[str] = []
    location = f"/dap/{aggregation_jobs_path(task.task_id, bytes(16))}?step=0"

    def later(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        if len(asked) < 3:
            return httpx2.Response(200, headers={"Location": location, "Retry-After": "1"})
        return _answer_with(b"answer")

    http = HTTPClient(transport=httpx2.MockTransport(later))
    client = HelperClient(lambda _: http, sleep=lambda _: None)
    assert client.create_aggregation_job(task, b"request") == b"answer"
    assert asked[1:] == [HELPER_URL + location.removeprefix("/dap/")] * 2


# --- the helper ---------------------------------------------------------------------------------


def a_job_has_a_location(apps: Apps) -> None:
    task = apps.task()
    answer = apps.job_of(task, *apps.reports(task, 1))
    assert answer.headers["content-type"] == AGGREGATION_JOB_RESPONSE
    looked = apps.resource("GET", answer, HELPER_URL)
    assert looked.content == answer.content
    assert looked.headers["content-type"] == AGGREGATION_JOB_RESPONSE


def jobs_of_unknown_tasks_are_refused(apps: Apps) -> None:
    url = HELPER_URL + aggregation_jobs_path(os.urandom(32))
    media = "application/ppm-dap;message=aggregation-job-init-req"
    answer = apps.ask("POST", url, b"", media=media, token=apps.helper_token)
    assert problem(answer) == Problem.UNRECOGNIZED_TASK


def malformed_jobs_are_refused(apps: Apps) -> None:
    task = apps.task()
    inits = apps.verify_inits(task, *apps.reports(task, 2))
    whole = init(inits).encode()
    for body in (b"", whole[:6], whole[:-1], whole + b"\0", init(b"").encode()):
        assert problem(apps.create_job(task, body)) == Problem.INVALID_MESSAGE
    assert problem(apps.create_job(task, init(inits, verification_key_id=1))) == (
        Problem.INVALID_MESSAGE
    )
    assert apps.verified(task) == (0, 0)


def other_parameters_are_refused(apps: Apps) -> None:
    task = apps.task()
    inits = apps.verify_inits(task, *apps.reports(task, 1))
    answer = apps.create_job(task, init(inits, agg_param=b"\0"))
    assert problem(answer) == Problem.INVALID_AGGREGATION_PARAMETER


def two_shares_of_one_report_are_refused(apps: Apps) -> None:
    task = apps.task()
    inits = apps.verify_inits(task, *apps.reports(task, 1))
    assert problem(apps.create_job(task, init(inits * 2))) == Problem.INVALID_MESSAGE
    assert apps.verified(task) == (0, 0)


def answers_are_in_the_request_s_order(apps: Apps) -> None:
    task = apps.task()
    good, bad = apps.reports(task, 4), apps.reports(task, 1, time=task.interval.start + 1)
    sent = [good[2], bad[0], good[0], good[3], good[1]]
    answer = apps.job_of(task, *sent)
    said = [each.report_id for each in AggregationJobResp.decode(answer.content).responses()]
    assert said == [each[:16] for each in sent]


def a_job_that_comes_twice_is_one_job(apps: Apps) -> None:
    task = apps.task()
    request = init(apps.verify_inits(task, *apps.reports(task)))
    first, second = (apps.create_job(task, request) for _ in range(2))
    assert first.headers["location"] == second.headers["location"]
    assert first.content == second.content
    assert helper_errors(first) == [0] * MIN_COHORT
    assert apps.verified(task)[1] == MIN_COHORT


# --- batch buckets, deletion --------------------------------------------------------------------


def the_helper_takes_nothing_for_a_collected_batch(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    apps.work(task)
    assert apps.collected(task).status_code == 200
    fresh = apps.reports(task, 2)
    assert helper_errors(apps.job_of(task, *fresh)) == [ReportError.BATCH_COLLECTED] * 2
    assert apps.verified(task) == (MIN_COHORT, MIN_COHORT)


def the_helper_takes_no_report_twice(apps: Apps) -> None:
    task = apps.task()
    reports = apps.reports(task, 3)
    assert helper_errors(apps.job_of(task, *reports)) == [0, 0, 0]
    new = apps.reports(task, 1)
    # Another job, as its order and company are others.
    assert helper_errors(apps.job_of(task, reports[2], *new, reports[0])) == [
        ReportError.REPORT_REPLAYED,
        0,
        ReportError.REPORT_REPLAYED,
    ]
    assert apps.verified(task)[1] == 4


def the_leader_takes_no_report_twice(apps: Apps) -> None:
    task = apps.task()
    reports = apps.reports(task, 2)
    apps.upload(task, *reports, *reports)
    apps.upload(task, *reports)
    assert counted(apps, task) == (2, 2)
    assert sorted(sent_ids(apps, task)) == sorted(each[:16] for each in reports)


def what_was_not_committed_still_counts(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task))

    def refuse(request: httpx2.Request, _: Answer) -> httpx2.Response:
        raise httpx2.ConnectError("away", request=request)

    with apps.tampered(refuse):
        assert len(apps.work(task)) == 1
    assert apps.verified(task) == (0, 0)
    assert counted(apps, task) == (MIN_COHORT, MIN_COHORT)


def a_deleted_job_is_still_no_news(apps: Apps) -> None:
    task = apps.task()
    reports = apps.reports(task)
    created = apps.job_of(task, *reports)
    assert apps.resource("DELETE", created, HELPER_URL).status_code == 200
    assert problem(apps.resource("GET", created, HELPER_URL)) == (
        Problem.UNRECOGNIZED_AGGREGATION_JOB
    )
    assert helper_errors(apps.job_of(task, *reports)) == [ReportError.REPORT_REPLAYED] * 3
    assert apps.verified(task)[1] == MIN_COHORT
    asked = share_request(task, report_count=2 * MIN_COHORT)
    assert problem(apps.create_share(task, asked)) == Problem.BATCH_MISMATCH
