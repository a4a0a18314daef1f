"""What the draft's text says, as far as it gives examples."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from chorister import _native
from chorister.dap import draft
from chorister.dap.draft import (
    ERROR_PREFIX,
    TITLES,
    Problem,
    Role,
    aggregate_share_info,
    aggregate_shares_path,
    aggregation_jobs_path,
    collection_jobs_path,
    input_share_info,
    reports_path,
)
from chorister.dap.http import resource_url

TASK = bytes.fromhex("f0163447364ccf1bc0e3affcca6873c9c381f64acdf9020662f83f46c07219e7")
JOB = bytes.fromhex("95ceda51e1a9752368b0d961f9466128")
TASK_TEXT = "8BY0RzZMzxvA46_8ymhzycOB9krN-QIGYvg_RsByGec"
JOB_TEXT = "lc7aUeGpdSNosNlh-UZhKA"


@pytest.mark.parametrize(
    "endpoint", ["https://example.com/api/dap", "https://example.com/api/dap/"]
)
def test_the_url_of_section_3(endpoint: str) -> None:
    assert resource_url(endpoint, aggregation_jobs_path(TASK, JOB)) == (
        f"https://example.com/api/dap/tasks/{TASK_TEXT}/aggregation_jobs/{JOB_TEXT}"
    )


def test_the_paths_of_the_examples() -> None:
    assert reports_path(TASK) == f"tasks/{TASK_TEXT}/reports"
    assert aggregation_jobs_path(TASK) == f"tasks/{TASK_TEXT}/aggregation_jobs"
    assert collection_jobs_path(TASK) == f"tasks/{TASK_TEXT}/collection_jobs"
    assert collection_jobs_path(TASK, JOB) == f"tasks/{TASK_TEXT}/collection_jobs/{JOB_TEXT}"
    assert aggregate_shares_path(TASK) == f"tasks/{TASK_TEXT}/aggregate_shares"
    assert aggregate_shares_path(TASK, JOB) == f"tasks/{TASK_TEXT}/aggregate_shares/{JOB_TEXT}"
    assert draft.HPKE_CONFIG_PATH == "hpke_config"


def test_the_infos_name_sender_and_recipient() -> None:
    assert input_share_info(Role.LEADER) == b"dap-18 input share\x01\x02"
    assert input_share_info(Role.HELPER) == b"dap-18 input share\x01\x03"
    assert aggregate_share_info(Role.LEADER) == b"dap-18 aggregate share\x02\x00"
    assert aggregate_share_info(Role.HELPER) == b"dap-18 aggregate share\x03\x00"


def test_media_types_are_those_of_section_9() -> None:
    messages = {
        value.removeprefix("application/ppm-dap;message=")
        for name, value in vars(draft).items()
        if name.isupper() and name[0] != "_" and isinstance(value, str) and "ppm-dap;" in value
    }
    assert messages == {
        "hpke-config-list",
        "upload-req",
        "upload-errors",
        "aggregation-job-init-req",
        "aggregation-job-resp",
        "aggregation-job-continue-req",
        "aggregate-share-req",
        "aggregate-share",
        "collection-job-req",
        "collection-job-resp",
    }


def test_every_problem_has_its_urn_and_a_title() -> None:
    assert set(TITLES) == set(Problem)
    assert ERROR_PREFIX + Problem.INVALID_MESSAGE == "urn:ietf:params:ppm:dap:error:invalidMessage"
    assert set(Problem) == {
        *("invalidMessage", "unrecognizedTask", "unrecognizedAggregationJob", "batchInvalid"),
        *("invalidBatchSize", "invalidAggregationParameter", "batchMismatch", "stepMismatch"),
        *("batchOverlap", "unsupportedExtension", "invalidExtension", "invalidTask"),
    }


def test_report_errors_are_those_of_section_9() -> None:
    codes = [
        *("BATCH_COLLECTED", "REPORT_REPLAYED", "REPORT_DROPPED", "HPKE_UNKNOWN_CONFIG_ID"),
        *("HPKE_DECRYPT_ERROR", "VDAF_VERIFY_ERROR", "TASK_EXPIRED", "INVALID_MESSAGE"),
        *("REPORT_TOO_EARLY", "TASK_NOT_STARTED", "OUTDATED_CONFIG"),
    ]
    found = {error.name: error.value for error in draft.ReportError}
    assert found == {name: code for code, name in enumerate(codes, start=1)}


def test_report_errors_are_stated_once() -> None:
    """Rust has the codes, Python imports them, and the type stub has the names alone."""
    assert draft.ReportError is _native.ReportError
    stub = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())
    (listed,) = (
        node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "ReportError"
    )
    members = {
        ast.unparse(each.targets[0]): ast.unparse(each.value)
        for each in listed.body
        if isinstance(each, ast.Assign)
    }
    assert members == {error.name: "..." for error in draft.ReportError}
