"""Sections 4.6 and 5.1 of the draft: collection jobs, and the helper's aggregate shares."""

from __future__ import annotations

import os

import httpx2

from chorister.aggregator.known_tasks import KnownTask
from chorister.canonical import sha256
from chorister.dap.draft import (
    AGGREGATE_SHARE,
    COLLECTION_JOB_REQUEST,
    COLLECTION_JOB_RESPONSE,
    BatchMode,
    Problem,
    ReportError,
    aggregate_shares_path,
    collection_jobs_path,
)
from chorister.dap.messages import (
    AggregateShareReq,
    BatchSelector,
    CollectionJobReq,
    CollectionJobResp,
    Extension,
    Query,
)
from chorister.dap.task import Interval
from tests.aggregator.apps import (
    MIN_COHORT,
    Answer,
    Apps,
    collection_request,
    problem,
    share_request,
)
from tests.aggregator.conform_upload import errors, helper_errors
from tests.aggregator.world import HELPER_URL, LEADER_URL


def full(apps: Apps, count: int = MIN_COHORT) -> tuple[KnownTask, AggregateShareReq]:
    """A task whose reports both have verified, and the leader's honest request for the share."""
    task = apps.task()
    reports = apps.reports(task, count)
    apps.upload(task, *reports)
    apps.work(task)
    assert apps.verified(task) == (count, count)
    checksum = bytes(32)
    for report in reports:
        digest = sha256(report[:16])
        checksum = bytes(a ^ b for a, b in zip(checksum, digest, strict=True))
    return task, share_request(task, report_count=count, checksum=checksum)


def ready(response: httpx2.Response) -> CollectionJobResp:
    assert response.status_code == 200
    assert response.headers["content-type"] == COLLECTION_JOB_RESPONSE
    return CollectionJobResp.decode(response.content)


OTHER_INTERVALS = [(1, 1), (-1, 1), (0, 2), (-1, 2), (-1, 3), (0, 0), (0, 2**64 - 1)]


def _intervals(task: KnownTask) -> list[Interval]:
    """Every kind of interval that is not the task's; the last two are not well-formed."""
    return [Interval(task.interval.start + by, length) for by, length in OTHER_INTERVALS]


# --- collection jobs ----------------------------------------------------------------------------


def collections_of_unknown_tasks_are_refused(apps: Apps) -> None:
    request = collection_request(apps.task()).encode()
    url = LEADER_URL + collection_jobs_path(os.urandom(32))
    token = apps.collector_token
    answer = apps.ask("POST", url, request, media=COLLECTION_JOB_REQUEST, token=token)
    assert problem(answer) == Problem.UNRECOGNIZED_TASK


def collections_in_another_mode_are_refused(apps: Apps) -> None:
    task = apps.task()
    request = CollectionJobReq(query=Query(BatchMode.LEADER_SELECTED, b""))
    assert problem(apps.create_collection(task, request)) == Problem.INVALID_MESSAGE


def malformed_collections_are_refused(apps: Apps) -> None:
    task = apps.task()
    whole = collection_request(task).encode()
    for body in (b"", b"\x03" + whole[1:], whole[:-1], whole + b"\0"):
        assert problem(apps.create_collection(task, body)) == Problem.INVALID_MESSAGE


def collections_with_a_parameter_are_refused(apps: Apps) -> None:
    task = apps.task()
    request = CollectionJobReq(query=Query.of(task.interval), agg_param=b"\0")
    answer = apps.create_collection(task, request)
    assert problem(answer) == Problem.INVALID_AGGREGATION_PARAMETER


def collections_of_other_intervals_are_refused(apps: Apps) -> None:
    task, _ = full(apps)
    for interval in _intervals(task):
        answer = apps.create_collection(task, CollectionJobReq(query=Query.of(interval)))
        assert problem(answer) == Problem.BATCH_INVALID


def nothing_is_collected_twice(apps: Apps) -> None:
    task, _ = full(apps)
    created = apps.collected(task)
    ready(created)
    apps.resource("DELETE", created, LEADER_URL)
    assert problem(apps.create_collection(task)) == Problem.BATCH_OVERLAP


def unknown_collection_extensions_are_refused(apps: Apps) -> None:
    task = apps.task()
    request = CollectionJobReq(query=Query.of(task.interval), extensions=(Extension(5, b"x"),))
    assert problem(apps.create_collection(task, request)) == Problem.UNSUPPORTED_EXTENSION


def pending_jobs_come_first(apps: Apps) -> None:
    """Enough reports are verified, others are not yet: the helper's share is not asked for."""
    task, _ = full(apps)
    apps.upload(task, *apps.reports(task, 1))
    leader = apps.leader.leader
    assert leader.aggregation.create_jobs(16)
    apps.create_collection(task)
    for each in leader.collection.pending():
        leader.collection.step(each)
    assert not apps.sent(aggregate_shares_path(task.task_id))
    apps.work(task)
    assert ready(apps.create_collection(task)).report_count == MIN_COHORT + 1


def too_few_reports_are_never_released(apps: Apps) -> None:
    """Neither when too few came, nor when some of those that came are not valid."""
    task = apps.task()
    tampered = bytearray(apps.reports(task, 1)[0])
    tampered[-1] ^= 1
    apps.upload(task, *apps.reports(task, MIN_COHORT - 1), bytes(tampered))
    apps.work(task)
    for _ in range(2):
        answer = apps.collected(task)
        assert (answer.status_code, answer.content) == (202, b"")
        assert int(answer.headers["retry-after"]) > 0
    assert not apps.sent(aggregate_shares_path(task.task_id))
    apps.upload(task, *apps.reports(task, 1))
    apps.work(task)
    assert ready(apps.create_collection(task)).report_count == MIN_COHORT


def the_helper_s_refusal_is_the_job_s(apps: Apps) -> None:
    task, asked = full(apps)
    # A leader that lies to its helper; then the honest request comes too late.
    assert apps.create_share(task, asked).status_code == 200
    changed = CollectionJobReq(query=Query.of(task.interval))
    assert changed == collection_request(task)

    def lie(request: httpx2.Request, honest: Answer) -> httpx2.Response:
        message = AggregateShareReq.decode(request.content)
        other = share_request(
            task, report_count=message.report_count + 1, checksum=message.checksum
        )
        headers = dict(request.headers)
        headers.pop("content-length")
        url = str(request.url)
        return honest(httpx2.Request("POST", url, headers=headers, content=other.encode()))

    with apps.tampered(lie):
        assert problem(apps.collected(task)) == Problem.BATCH_OVERLAP


def a_collected_batch_takes_no_more(apps: Apps) -> None:
    task, _ = full(apps)
    first = ready(apps.collected(task))
    ((_, code),) = errors(apps.upload(task, *apps.reports(task, 1)))
    assert code == ReportError.BATCH_COLLECTED
    apps.work(task)
    assert ready(apps.create_collection(task)) == first
    assert apps.verified(task) == (MIN_COHORT, MIN_COHORT)


def a_collection_that_comes_twice_is_one(apps: Apps) -> None:
    task, _ = full(apps)
    early = [apps.create_collection(task) for _ in range(2)]
    apps.work(task)
    late = [apps.create_collection(task) for _ in range(2)]
    assert len({each.headers["location"] for each in early + late}) == 1
    assert len({each.content for each in late}) == 1
    assert apps.resource("GET", early[0], LEADER_URL).content == late[0].content


# --- collection job extensions ------------------------------------------------------------------


def _both(apps: Apps, *kinds: int) -> list[str | None]:
    """What leader and helper say to extensions of a collection job."""
    task, asked = full(apps)
    extensions = tuple(Extension(kind, b"") for kind in kinds)
    request = CollectionJobReq(query=Query.of(task.interval), extensions=extensions)
    share = share_request(
        task,
        collection_job_req=request,
        report_count=asked.report_count,
        checksum=asked.checksum,
    )
    return [
        problem(apps.create_collection(task, request)),
        problem(apps.create_share(task, share)),
    ]


def both_refuse_unknown_extensions(apps: Apps) -> None:
    assert _both(apps, 5) == [Problem.UNSUPPORTED_EXTENSION] * 2
    assert _both(apps, 5, 6) == [Problem.UNSUPPORTED_EXTENSION] * 2


def the_collector_sends_no_extension(apps: Apps) -> None:
    """So those that are sent are in order."""
    task, _ = full(apps)
    ready(apps.collected(task))
    (asked,) = apps.sent(aggregate_shares_path(task.task_id))
    assert AggregateShareReq.decode(asked.content).collection_job_req == collection_request(task)


def both_refuse_extensions_out_of_order(apps: Apps) -> None:
    assert _both(apps, 6, 5) == [Problem.INVALID_EXTENSION] * 2
    assert _both(apps, 5, 5) == [Problem.INVALID_EXTENSION] * 2


def a_deleted_collection_is_still_collected(apps: Apps) -> None:
    task, asked = full(apps)
    created = apps.collected(task)
    assert apps.resource("DELETE", created, LEADER_URL).status_code == 200
    assert apps.resource("GET", created, LEADER_URL).status_code == 404
    assert problem(apps.create_collection(task)) == Problem.BATCH_OVERLAP
    ((_, code),) = errors(apps.upload(task, *apps.reports(task, 1)))
    assert code == ReportError.BATCH_COLLECTED
    other = share_request(task, report_count=asked.report_count)
    assert problem(apps.create_share(task, other)) == Problem.BATCH_OVERLAP


# --- aggregate shares ---------------------------------------------------------------------------


def shares_of_unknown_tasks_are_refused(apps: Apps) -> None:
    url = HELPER_URL + aggregate_shares_path(os.urandom(32))
    body = share_request(apps.task()).encode()
    media = "application/ppm-dap;message=aggregate-share-req"
    answer = apps.ask("POST", url, body, media=media, token=apps.helper_token)
    assert problem(answer) == Problem.UNRECOGNIZED_TASK


def shares_in_another_mode_are_refused(apps: Apps) -> None:
    task, asked = full(apps)
    other_selector = share_request(
        task,
        batch_selector=BatchSelector(BatchMode.LEADER_SELECTED, bytes(32)),
        report_count=asked.report_count,
        checksum=asked.checksum,
    )
    other_query = share_request(
        task,
        collection_job_req=CollectionJobReq(query=Query(BatchMode.LEADER_SELECTED, b"")),
        report_count=asked.report_count,
        checksum=asked.checksum,
    )
    for request in (other_selector, other_query):
        assert problem(apps.create_share(task, request)) == Problem.INVALID_MESSAGE


def malformed_share_requests_are_refused(apps: Apps) -> None:
    task, asked = full(apps)
    whole = asked.encode()
    for body in (b"", whole[:-1], whole + b"\0", b"\0" + whole[1:]):
        assert problem(apps.create_share(task, body)) == Problem.INVALID_MESSAGE


def shares_of_other_intervals_are_refused(apps: Apps) -> None:
    task, asked = full(apps)
    for interval in _intervals(task):
        selector = share_request(
            task,
            batch_selector=BatchSelector.of(interval),
            report_count=asked.report_count,
            checksum=asked.checksum,
        )
        assert problem(apps.create_share(task, selector)) == Problem.BATCH_INVALID
    # The selector must also lie in what the collector asked for.
    elsewhere = share_request(
        task,
        collection_job_req=CollectionJobReq(query=Query.of(Interval(task.interval.start + 1, 1))),
        report_count=asked.report_count,
        checksum=asked.checksum,
    )
    assert problem(apps.create_share(task, elsewhere)) == Problem.BATCH_INVALID


def no_share_is_released_twice(apps: Apps) -> None:
    task, asked = full(apps)
    first = apps.create_share(task, asked)
    assert first.headers["content-type"] == AGGREGATE_SHARE
    other = share_request(task, report_count=asked.report_count + 1, checksum=asked.checksum)
    assert problem(apps.create_share(task, other)) == Problem.BATCH_OVERLAP


def the_helper_counts_for_itself(apps: Apps) -> None:
    """Whatever count a leader claims."""
    task, asked = full(apps, MIN_COHORT - 1)
    for count in (MIN_COHORT - 1, MIN_COHORT, 1000):
        request = share_request(task, report_count=count, checksum=asked.checksum)
        assert problem(apps.create_share(task, request)) == Problem.INVALID_BATCH_SIZE


def shares_with_a_parameter_are_refused(apps: Apps) -> None:
    """Prio3's jobs have the empty one."""
    task, asked = full(apps)
    request = share_request(
        task,
        collection_job_req=CollectionJobReq(query=Query.of(task.interval), agg_param=b"\0"),
        report_count=asked.report_count,
        checksum=asked.checksum,
    )
    assert problem(apps.create_share(task, request)) == Problem.INVALID_MESSAGE


def other_reports_are_a_mismatch(apps: Apps) -> None:
    task, asked = full(apps)
    for count, checksum in (
        (asked.report_count + 1, asked.checksum),
        (asked.report_count - 1, asked.checksum),
        (asked.report_count, bytes(32)),
    ):
        request = share_request(task, report_count=count, checksum=checksum)
        assert problem(apps.create_share(task, request)) == Problem.BATCH_MISMATCH
    assert apps.create_share(task, asked).status_code == 200


def a_released_share_takes_no_more(apps: Apps) -> None:
    task, asked = full(apps)
    before = apps.create_share(task, asked).content
    fresh = apps.reports(task, 1)
    assert helper_errors(apps.job_of(task, *fresh)) == [ReportError.BATCH_COLLECTED]
    assert apps.verified(task)[1] == MIN_COHORT
    assert apps.create_share(task, asked).content == before


def a_share_that_is_asked_for_twice_is_one(apps: Apps) -> None:
    task, asked = full(apps)
    first, second = (apps.create_share(task, asked) for _ in range(2))
    assert first.headers["location"] == second.headers["location"]
    assert first.content == second.content == apps.resource("GET", first, HELPER_URL).content


def a_deleted_share_is_still_released(apps: Apps) -> None:
    task, asked = full(apps)
    created = apps.create_share(task, asked)
    assert apps.resource("DELETE", created, HELPER_URL).status_code == 200
    assert apps.resource("GET", created, HELPER_URL).status_code == 404
    assert problem(apps.create_share(task, asked)) == Problem.BATCH_OVERLAP
    assert helper_errors(apps.job_of(task, *apps.reports(task, 1))) == [ReportError.BATCH_COLLECTED]


def intervals_are_well_formed(apps: Apps) -> None:
    task, asked = full(apps)
    for duration in (0, 2**64 - 1):
        interval = Interval(task.interval.start, duration)
        answer = apps.create_collection(task, CollectionJobReq(query=Query.of(interval)))
        assert problem(answer) == Problem.BATCH_INVALID
    assert asked.report_count == MIN_COHORT
