"""Media types as HTTP compares them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.dap.draft import AGGREGATE_SHARE, PROBLEM, UPLOAD_REQUEST
from chorister.dap.media import is_media_type


@pytest.mark.parametrize(
    "content_type",
    [
        UPLOAD_REQUEST,
        "application/ppm-dap; message=upload-req",
        "Application/PPM-DAP ; Message=Upload-Req",
        'application/ppm-dap;message="upload-req"',
        'application/ppm-dap;message="upload\\-req"',
        'application/ppm-dap;a=";message=other;";message=upload-req',
        "application/ppm-dap; ;message = upload-req;",
        "application/ppm-dap;message=upload-req;version=18",
        "application/ppm-dap;version=09; message=upload-req",
    ],
)
def test_the_same(content_type: str) -> None:
    assert is_media_type(content_type, UPLOAD_REQUEST)


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        ";",
        "application/ppm-dap",
        "application/ppm-dap;message=upload-errors",
        "application/ppm-dap;message=upload-req-2",
        "application/ppm-dap;message=aggregate-share;message=upload-req",
        "application/ppm-dap;messages=upload-req",
        "application/dap;message=upload-req",
        "text/plain;message=upload-req",
        "message=upload-req",
        "application/ppm-dap;message*=utf-8''upload-req",
        "application/ppm-dap,message=upload-req",
        'application/ppm-dap;message="upload-req',
        'application/ppm-dap;message="upload-req"x',
        'application/ppm-dap;a=";message=upload-req',
        f"{UPLOAD_REQUEST};version={'9' * 200}",
    ],
)
def test_another(content_type: str) -> None:
    assert not is_media_type(content_type, UPLOAD_REQUEST)


def test_a_type_without_parameters() -> None:
    assert is_media_type("application/problem+json; charset=utf-8", PROBLEM)
    assert not is_media_type("application/json", PROBLEM)


@given(
    st.one_of(st.text(max_size=40), st.text(alphabet=";=\" *'\\\r\nappm/-d", max_size=40)),
    st.sampled_from([UPLOAD_REQUEST, AGGREGATE_SHARE, PROBLEM]),
)
def test_any_text(text: str, expected: str) -> None:
    assert is_media_type(text, expected) in (True, False)
    assert is_media_type(f"{expected};{text.replace('message', '')}", expected) or '"' in text


@pytest.mark.parametrize("text", ['a/b;x="' + ";" * 60_000, '"\\' * 30_000, ';x="' * 15_000])
def test_a_long_text_takes_no_time(text: str) -> None:
    """It is read where all requests are served, and anybody can send one."""
    begun = time.perf_counter()
    assert not is_media_type(text, UPLOAD_REQUEST)
    assert time.perf_counter() - begun < 0.1
