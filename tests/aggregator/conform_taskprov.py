"""draft-ietf-ppm-dap-taskprov: how a task is advertised, known by its hash, and opted into."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import httpx2
import pytest

from chorister.aggregator.known_tasks import KnownTask
from chorister.canonical import sha256
from chorister.dap.collector import Collector
from chorister.dap.draft import (
    AGGREGATION_JOB_INIT_REQUEST,
    UPLOAD_REQUEST,
    Problem,
    ReportError,
    aggregate_shares_path,
    aggregation_jobs_path,
    collection_jobs_path,
    reports_path,
)
from chorister.dap.messages import AggregationJobInitReq
from chorister.dap.task import TaskConfiguration, advertise, advertised, task_id, verify_key
from chorister.errors import InvalidInput
from tests.aggregator.apps import MIN_COHORT, Apps, problem
from tests.aggregator.conform_upload import counted, errors, helper_errors
from tests.aggregator.world import HELPER_URL, LEADER_URL, collector_keys


def upload_with(apps: Apps, identity: bytes, field: str | None, report: bytes) -> httpx2.Response:
    """An upload with any advertisement."""
    headers = {"Chorister-Upload-Credential": apps.credential}
    if field is not None:
        headers["DAP-Taskprov"] = field
    url = LEADER_URL + reports_path(identity)
    return apps.ask("POST", url, report, media=UPLOAD_REQUEST, headers=headers)


def _field(configuration: TaskConfiguration) -> str:
    (field,) = advertise(configuration.encode()).values()
    return field


def _unknown(task: KnownTask, **changes: Any) -> TaskConfiguration:
    """A configuration that no logged recipe has."""
    return dataclasses.replace(task.configuration, **{"task_info": b"unknown"} | changes)


def advertisements_are_byte_sequences(apps: Apps) -> None:
    task = apps.task()
    field = _field(task.configuration)
    assert field == f":{base64.b64encode(task.configuration.encode()).decode()}:"
    assert advertised(field) == task.configuration


def other_types_are_ignored(apps: Apps) -> None:
    """The request is served as one without an advertisement is."""
    task = apps.task()
    encoded = base64.b64encode(task.configuration.encode()).decode()
    for field in ("17", f'"{encoded}"', "?1", "token", f"(:{encoded}:)"):
        report = apps.reports(task, 1)[0]
        assert errors(upload_with(apps, task.task_id, field, report)) == []


def values_that_are_no_task_are_ignored(apps: Apps) -> None:
    task = apps.task()
    encoded = task.configuration.encode()
    for value in (b"", b"x", encoded[:-1], encoded + b"\0"):
        field = f":{base64.b64encode(value).decode()}:"
        report = apps.reports(task, 1)[0]
        assert errors(upload_with(apps, task.task_id, field, report)) == []
        # But they provision nothing.
        identity = sha256(sha256(b"dap-taskprov task id") + value)
        answer = upload_with(apps, identity, field, report)
        assert problem(answer) == Problem.UNRECOGNIZED_TASK


def parameters_are_ignored(apps: Apps) -> None:
    task = apps.task()
    field = f"{_field(task.configuration)};a=1;b"
    report = apps.reports(task, 1)[0]
    assert errors(upload_with(apps, task.task_id, field, report)) == []


def task_ids_are_hashes(apps: Apps) -> None:
    task = apps.task()
    salt = sha256(b"dap-taskprov task id")
    assert task.task_id == sha256(salt + task.configuration.encode())


def both_derive_the_verify_key(apps: Apps) -> None:
    """A job begun with the derived key verifies at the helper, one with another key does not."""
    task, other = apps.task(), apps.task()
    apps.upload(task, *apps.reports(task))
    assert counted(apps, task) == (MIN_COHORT, MIN_COHORT)
    assert apps.job_of(other, *apps.reports(other)).status_code == 200
    assert apps.verified(other)[1] == MIN_COHORT
    wrong = apps.verify_inits(other, *apps.reports(other, 2), key=bytes(32))
    answer = apps.create_job(other, AggregationJobInitReq(verify_inits=wrong))
    assert helper_errors(answer) == [ReportError.VDAF_VERIFY_ERROR] * 2


def the_shared_secret_has_32_bytes(apps: Apps) -> None:
    assert len(apps.verify_key_init) == 32
    for size in (0, 16, 31, 33):
        with pytest.raises(InvalidInput):
            verify_key(bytes(size), bytes(32))


def ended_and_unknown_kinds_of_tasks_are_left(apps: Apps) -> None:
    task = apps.task()
    (report,) = apps.reports(task, 1)
    with apps.at(task.ends):
        answer = upload_with(apps, task.task_id, _field(task.configuration), report)
        assert problem(answer) == Problem.INVALID_TASK
    for changes in (
        {"batch_mode": 2},
        {"vdaf_type": 1, "vdaf_configuration": b""},
        {"vdaf_type": 0xFFFF0000},
    ):
        other = _unknown(task, **changes)
        answer = upload_with(apps, task_id(other), _field(other), report)
        assert problem(answer) == Problem.INVALID_TASK


def unknown_tasks_are_unrecognized(apps: Apps) -> None:
    """Without an advertisement."""
    task = apps.task()
    (report,) = apps.reports(task, 1)
    answer = upload_with(apps, bytes(32), None, report)
    assert problem(answer) == Problem.UNRECOGNIZED_TASK


def the_leader_compares_id_and_advertisement(apps: Apps) -> None:
    task, other = apps.task(), apps.task()
    (report,) = apps.reports(task, 1)
    answer = upload_with(apps, task.task_id, _field(other.configuration), report)
    assert problem(answer) == Problem.UNRECOGNIZED_TASK


def the_leader_opts_out(apps: Apps) -> None:
    task = apps.task()
    other = _unknown(task)
    (report,) = apps.reports(task, 1)
    before = len(apps.leader.core.tasks.all())
    assert problem(upload_with(apps, task_id(other), _field(other), report)) == (
        Problem.INVALID_TASK
    )
    assert len(apps.leader.core.tasks.all()) == before


def every_request_to_the_helper_advertises(apps: Apps) -> None:
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    apps.work(task)
    assert apps.collected(task).status_code == 200
    requests = apps.sent(aggregation_jobs_path(task.task_id))
    requests += apps.sent(aggregate_shares_path(task.task_id))
    assert len(requests) == 2
    for request in requests:
        assert request.headers["DAP-Taskprov"] == _field(task.configuration)


def _job_with(apps: Apps, identity: bytes, configuration: TaskConfiguration | None) -> str | None:
    return problem(
        apps.ask(
            "POST",
            HELPER_URL + aggregation_jobs_path(identity),
            b"",
            media=AGGREGATION_JOB_INIT_REQUEST,
            token=apps.helper_token,
            advertised=configuration,
        )
    )


def the_helper_knows_no_unknown_task(apps: Apps) -> None:
    assert _job_with(apps, bytes(32), None) == Problem.UNRECOGNIZED_TASK


def the_helper_compares_id_and_advertisement(apps: Apps) -> None:
    task, other = apps.task(), apps.task()
    assert _job_with(apps, task.task_id, other.configuration) == Problem.UNRECOGNIZED_TASK


def the_helper_opts_out(apps: Apps) -> None:
    other = _unknown(apps.task())
    before = len(apps.helper.core.tasks.all())
    assert _job_with(apps, task_id(other), other) == Problem.INVALID_TASK
    assert len(apps.helper.core.tasks.all()) == before


def _collector(apps: Apps, asked: list[httpx2.Request]) -> Collector:
    def remember(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return apps.wire.honest(request)

    transport = httpx2.MockTransport(remember)
    return Collector(
        LEADER_URL, apps.collector_token, collector_keys(), transport=transport, clock=apps.clock
    )


def the_collector_opts_out(apps: Apps) -> None:
    task = apps.task()
    asked: list[httpx2.Request] = []
    with apps.at(task.bucket_end), pytest.raises(InvalidInput, match="ended"):
        _collector(apps, asked).create(task)
    assert asked == []


def the_collector_derives_and_advertises(apps: Apps) -> None:
    task = apps.task()
    asked: list[httpx2.Request] = []
    analyst = _collector(apps, asked)
    handle = analyst.create(task)
    analyst.poll(handle)
    analyst.delete(handle)
    assert [each.method for each in asked] == ["POST", "GET", "DELETE"]
    for request in asked:
        assert str(request.url).startswith(LEADER_URL + collection_jobs_path(task.task_id))
        assert request.headers["DAP-Taskprov"] == _field(task.configuration)
    wrong = dataclasses.replace(task, task_id=bytes(32))
    with pytest.raises(InvalidInput, match="id"):
        analyst.create(wrong)


def who_takes_part_goes_on(apps: Apps) -> None:
    """Until the last second, and after the caches were lost."""
    task = apps.task()
    apps.upload(task, *apps.reports(task))
    apps.work(task)
    for service in apps.services:
        service.core.tasks.clear_cache()
    with apps.at(task.ends - 1):
        assert apps.collected(task).status_code == 200
