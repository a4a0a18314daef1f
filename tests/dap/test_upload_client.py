"""Sealed reports verify at both aggregators; every answer of a leader is understood, or refused."""

from __future__ import annotations

import base64
import json
import secrets

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister._native import HPKEKeypair, scan_reports
from chorister.canonical import b64url_encode
from chorister.dap.draft import PROBLEM, UPLOAD_ERRORS, UPLOAD_REQUEST, ReportError
from chorister.dap.task import (
    Task,
    TaskConfiguration,
    task_binding,
    task_configuration,
)
from chorister.dap.upload_client import (
    check_answer,
    check_hpke_config,
    new_report_id,
    seal_report,
    upload,
)
from chorister.errors import DecodeError, HPKEError, UploadFailed
from tests.keyboard import POLICY, RECIPE, recipe_at

LEADER, HELPER = HPKEKeypair.generate(1), HPKEKeypair.generate(2)
TASK = task_configuration(POLICY, RECIPE, {"user.locale": "de_DE"})
ID = bytes(range(16))


def sealed(task: Task, index: int = 5) -> tuple[bytes, bytes]:
    bits = RECIPE.randomizer.randomize(index)
    report = seal_report(
        task.configuration,
        bits,
        report_id=ID,
        leader_config=LEADER.config,
        helper_config=HELPER.config,
    )
    return bits, report


def aggregate(task: Task, reports: bytes) -> tuple[list[int], bytes]:
    binding, key = task_binding(task.configuration), secrets.token_bytes(32)
    job = binding.leader_initialize(key, [LEADER], reports)
    answers, helped = binding.helper_initialize(key, [HELPER], job.verify_inits)
    led = job.finish(answers)
    if not led.count:
        return [], led.errors
    vdaf = task.configuration.vdaf.native()
    entries = vdaf.unshard(led.share, helped.share, count=led.count)
    return np.frombuffer(entries, dtype=np.uint64).tolist(), led.errors


def test_a_report_verifies_at_both_aggregators_and_adds_up_to_its_bits() -> None:
    bits, report = sealed(TASK)
    assert aggregate(TASK, report) == (list(bits), b"\0")


def test_a_plain_report_does_too() -> None:
    recipe = recipe_at({"privacy/report": "plain"})
    task = task_configuration(POLICY, recipe, {"user.locale": "other"})
    bits, report = sealed(task)
    assert aggregate(task, report) == (list(bits), b"\0")


def test_a_report_carries_its_task_s_bucket_and_nothing_else() -> None:
    _, report = sealed(TASK)
    headers = scan_reports(report)
    assert headers.ids == ID
    assert np.frombuffer(headers.times, dtype=np.uint64).tolist() == [RECIPE.window.bucket.number]
    assert headers.extensions == b"\0"


def test_a_report_for_many_does_not_open_under_a_task_for_few() -> None:
    _, report = sealed(TASK)
    few = task_configuration(
        POLICY, recipe_at({"privacy/min_cohort": 10}), {"user.locale": "de_DE"}
    )
    assert aggregate(few, report) == ([], bytes([ReportError.HPKE_DECRYPT_ERROR]))


def test_a_config_that_nothing_can_be_sealed_to_is_refused_each_time() -> None:
    for _ in range(2):
        check_hpke_config(LEADER.config)
        with pytest.raises((DecodeError, HPKEError)):
            check_hpke_config(LEADER.config[:-1])


def test_report_ids_are_fresh() -> None:
    assert len({new_report_id() for _ in range(1000)}) == 1000


def test_an_upload_advertises_its_task() -> None:
    request = upload(TASK.configuration.encode(), b"report")
    leader = "https://leader.example.org/dap/"
    assert request.url == f"{leader}tasks/{b64url_encode(TASK.task_id)}/reports"
    assert request.headers["Content-Type"] == UPLOAD_REQUEST
    value = request.headers["DAP-Taskprov"]
    assert (value[0], value[-1]) == (":", ":")
    advertised = TaskConfiguration.decode(base64.b64decode(value[1:-1]))
    assert advertised == TASK.configuration
    assert request.body == b"report"


def errors(code: int, report_id: bytes = ID) -> bytes:
    return report_id + bytes([code])


def problem(kind: str) -> bytes:
    return json.dumps({"type": f"urn:ietf:params:ppm:dap:error:{kind}"}).encode()


@pytest.mark.parametrize("status", [200, 201, 202])
def test_an_empty_answer_means_stored(status: int) -> None:
    check_answer(ID, status=status, content_type="", body=b"")


def test_a_replayed_report_is_stored_already() -> None:
    body = errors(ReportError.REPORT_REPLAYED)
    check_answer(ID, status=200, content_type=UPLOAD_ERRORS, body=body)


FINAL = [
    (200, UPLOAD_ERRORS, errors(ReportError.OUTDATED_CONFIG)),
    (200, "application/ppm-dap; Message=upload-errors", errors(ReportError.REPORT_DROPPED)),
    (200, UPLOAD_ERRORS, errors(ReportError.TASK_EXPIRED)),
    (200, UPLOAD_ERRORS, errors(250)),
    (400, PROBLEM, problem("invalidMessage")),
    (400, PROBLEM, problem("unsupportedExtension")),
]
LATER = [
    (200, UPLOAD_ERRORS, errors(ReportError.REPORT_TOO_EARLY)),
    (200, UPLOAD_ERRORS, errors(ReportError.TASK_NOT_STARTED)),
    (200, UPLOAD_ERRORS, errors(ReportError.OUTDATED_CONFIG, bytes(16))),
    (200, UPLOAD_ERRORS, errors(ReportError.OUTDATED_CONFIG)[:-1]),
    (200, UPLOAD_ERRORS, errors(ReportError.OUTDATED_CONFIG) * 2),
    (200, "text/html", b"<html>Log in to this hotel's network"),
    (400, PROBLEM, problem("unrecognizedTask")),
    (403, PROBLEM, problem("invalidTask")),
    (400, PROBLEM, problem("somethingNew")),
    (404, "text/plain", b"not found"),
    (400, PROBLEM, b'{"type": 7}'),
    (400, PROBLEM, b"[" * 10_000),
    (301, "", b""),
    (302, PROBLEM, problem("invalidMessage")),
    (500, PROBLEM, problem("invalidMessage")),
    (503, "", b""),
    (101, "", b""),
]


@pytest.mark.parametrize(("status", "kind", "body"), FINAL)
def test_the_leader_s_last_word(status: int, kind: str, body: bytes) -> None:
    with pytest.raises(UploadFailed) as caught:
        check_answer(ID, status=status, content_type=kind, body=body)
    assert caught.value.final


@pytest.mark.parametrize(("status", "kind", "body"), LATER)
def test_what_may_be_sent_again(status: int, kind: str, body: bytes) -> None:
    with pytest.raises(UploadFailed) as caught:
        check_answer(ID, status=status, content_type=kind, body=body)
    assert not caught.value.final


@given(
    st.integers(100, 599),
    st.sampled_from(["", UPLOAD_ERRORS, PROBLEM, "text/plain", ";", "ü"]),
    st.one_of(st.binary(max_size=64), st.binary(max_size=3).map(lambda tail: ID + tail)),
)
def test_any_answer_is_understood_or_refused(status: int, kind: str, body: bytes) -> None:
    try:
        check_answer(ID, status=status, content_type=kind, body=body)
    except UploadFailed:
        return
    assert 200 <= status < 300
    assert body in (b"", ID + bytes([ReportError.REPORT_REPLAYED]))
