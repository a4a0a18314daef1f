"""Sections 4.2.3 and 4.4 of the draft: what devices do, and what a leader takes from them."""

from __future__ import annotations

import os

import httpx2
import pytest

from chorister._native import Prio3
from chorister.aggregator.known_tasks import KnownTask
from chorister.dap.draft import (
    HPKE_CONFIG_LIST,
    UPLOAD_ERRORS,
    UPLOAD_REQUEST,
    Problem,
    ReportError,
    aggregation_jobs_path,
    reports_path,
)
from chorister.dap.messages import (
    AggregationJobInitReq,
    AggregationJobResp,
    CollectionJobReq,
    Extension,
    HpkeConfigList,
    Query,
)
from chorister.dap.upload_client import check_hpke_config, new_report_id
from chorister.dap.upload_messages import UploadErrors
from chorister.errors import DecodeError, UnsupportedSuite
from tests.aggregator.apps import MIN_COHORT, Apps, problem
from tests.aggregator.crafted import craft
from tests.aggregator.world import HELPER_URL, LEADER_URL


def errors(response: httpx2.Response) -> list[tuple[bytes, int]]:
    """The reports that an upload's answer refuses, and why."""
    assert response.status_code == 200, response.content
    if response.content:
        assert response.headers["content-type"] == UPLOAD_ERRORS
    return [(id_, code) for id_, code in UploadErrors.decode(response.content).statuses]


def helper_errors(response: httpx2.Response) -> list[int]:
    """The helper's code for each report of a job, 0 for those it verified."""
    assert response.status_code == 200, response.content
    return [each.error for each in AggregationJobResp.decode(response.content).responses()]


def counted(apps: Apps, task: KnownTask) -> tuple[int, int]:
    apps.work(task)
    return apps.verified(task)


def reports_outside_the_interval_are_rejected(apps: Apps) -> None:
    task = apps.task()
    for time in (task.interval.start - 1, task.interval.start + 1, 0, 2**64 - 1):
        ((_, code),) = errors(apps.upload(task, *apps.reports(task, 1, time=time)))
        assert code == ReportError.REPORT_DROPPED
    early = apps.reports(task, 1, time=task.interval.start - 1)
    late = apps.reports(task, 1, time=task.interval.start + 1)
    assert helper_errors(apps.job_of(task, *early, *late)) == [
        ReportError.TASK_NOT_STARTED,
        ReportError.TASK_EXPIRED,
    ]
    assert counted(apps, task) == (0, 0)


# --- HPKE configurations ------------------------------------------------------------------------


def config_ids_are_distinct(apps: Apps) -> None:
    """Among all living keys, so also among those of any list."""
    for service, url in ((apps.leader, LEADER_URL), (apps.helper, HELPER_URL)):
        keys = service.core.keys
        for _ in range(3):
            keys.publish(keys.generate())
        ids = [each.config_id for each in keys.keypairs()]
        assert len(set(ids)) == len(ids) > 3
        answer = apps.ask("GET", f"{url}hpke_config")
        assert answer.headers["content-type"] == HPKE_CONFIG_LIST
        assert set(HpkeConfigList.decode(answer.content).ids) <= set(ids)


def clients_refuse_lists_that_are_none(apps: Apps) -> None:
    good = apps.ask("GET", f"{LEADER_URL}hpke_config").content
    assert len(HpkeConfigList.decode(good).configs) == 1
    for bad in (b"", b"\0\0", good[:-1], good + b"\0"):
        with pytest.raises(DecodeError):
            HpkeConfigList.decode(bad)
    config = bytearray(HpkeConfigList.decode(good).configs[0])
    config[2] = 0x10  # another KEM
    with pytest.raises(UnsupportedSuite):
        check_hpke_config(bytes(config))


# --- devices ------------------------------------------------------------------------------------


def report_ids_are_random(apps: Apps) -> None:
    ids = {new_report_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {16}


def uploads_may_need_a_credential(apps: Apps) -> None:
    task = apps.task()
    url = LEADER_URL + reports_path(task.task_id)
    (report,) = apps.reports(task, 1)
    for credential in ({}, {"Chorister-Upload-Credential": "wrong"}):
        answer = apps.ask("POST", url, report, media=UPLOAD_REQUEST, headers=credential)
        assert answer.status_code == 403
        assert problem(answer) is None
    assert errors(apps.upload(task, report)) == []


def sharding_is_random(apps: Apps) -> None:
    vdaf = Prio3.sum_vec(4, 1)
    shared = [vdaf.shard(b"ctx", bytes(4), bytes(16)) for _ in range(10)]
    for column in (1, 2):
        assert len({row[column] for row in shared}) == 10


# --- the leader ---------------------------------------------------------------------------------


def uploads_are_idempotent(apps: Apps) -> None:
    task = apps.task()
    reports = apps.reports(task)
    assert errors(apps.upload(task, *reports)) == []
    again = errors(apps.upload(task, *reports))
    assert again == [(each[:16], ReportError.REPORT_REPLAYED) for each in reports]
    assert counted(apps, task) == (MIN_COHORT, MIN_COHORT)


def errors_are_in_the_request_s_order(apps: Apps) -> None:
    task = apps.task()
    good = apps.reports(task, 3)
    early = apps.reports(task, 1, time=task.interval.start - 1)[0]
    late = apps.reports(task, 1, time=task.interval.start + 1)[0]
    strange = craft(apps, task, public=[(7, b"")]).report
    sent = [late, good[0], strange, good[1], good[1], early, good[2]]
    assert errors(apps.upload(task, *sent)) == [
        (late[:16], ReportError.REPORT_DROPPED),
        (strange[:16], ReportError.INVALID_MESSAGE),
        (good[1][:16], ReportError.REPORT_REPLAYED),
        (early[:16], ReportError.REPORT_DROPPED),
    ]


def a_known_id_is_discarded(apps: Apps) -> None:
    """Whatever else the second report says."""
    task = apps.task()
    report_id = os.urandom(16)
    first, second = (apps.reports(task, 1, ids=[report_id])[0] for _ in range(2))
    assert errors(apps.upload(task, first)) == []
    for _ in range(2):  # before it is aggregated, and afterwards
        assert errors(apps.upload(task, second)) == [(report_id, ReportError.REPORT_REPLAYED)]
        assert counted(apps, task) == (1, 1)


def reports_of_a_collected_batch_are_discarded(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    apps.work(task)
    assert apps.collected(task).status_code == 200
    ((_, code),) = errors(apps.upload(task, *apps.reports(task, 1)))
    assert code == ReportError.BATCH_COLLECTED
    before = len(apps.sent(aggregation_jobs_path(task.task_id)))
    apps.work(task)
    assert len(apps.sent(aggregation_jobs_path(task.task_id))) == before


def unknown_report_extensions_are_discarded(apps: Apps) -> None:
    task = apps.task()
    public = craft(apps, task, public=[(7, b"x")])
    assert errors(apps.upload(task, public.report)) == [
        (public.report_id, ReportError.INVALID_MESSAGE)
    ]
    private = craft(apps, task, leader_private=[(7, b"x")])
    apps.upload(task, private.report)
    assert counted(apps, task) == (0, 0)


def unsupported_extensions_are_named_by_number(apps: Apps) -> None:
    """The leader refuses single reports, so this shows where whole requests are refused."""
    task = apps.task()
    extensions = (Extension(23, b""), Extension(42, b""))
    job = AggregationJobInitReq(verify_inits=b"", extensions=extensions)
    collection = CollectionJobReq(query=Query.of(task.interval), extensions=extensions)
    for answer in (apps.create_job(task, job), apps.create_collection(task, collection)):
        assert problem(answer) == Problem.UNSUPPORTED_EXTENSION
        assert answer.json()["unsupported_extensions"] == [23, 42]


def repeated_report_extensions_are_discarded(apps: Apps) -> None:
    task = apps.task()
    for crafted in (
        craft(apps, task, public=[(7, b""), (7, b"")]),
        craft(apps, task, public=[(7, b"")], leader_private=[(7, b"")]),
        craft(apps, task, leader_private=[(7, b""), (7, b"")]),
    ):
        apps.upload(task, crafted.report)
    assert counted(apps, task) == (0, 0)
