"""Problem documents: what we write, we read; what others write does no harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.dap.draft import PROBLEM, Problem
from chorister.dap.problems import invalid_message, parse_problem, problem_document
from chorister.errors import DecodeError, ProblemError

TASK = bytes(range(32))


@pytest.mark.parametrize("problem", [None, *Problem])
def test_both_ways(problem: Problem | None) -> None:
    error = ProblemError(problem, "because", status=403, task_id=TASK, extra={"more": [1]})
    parsed = parse_problem(403, PROBLEM, problem_document(error))
    assert vars(parsed) == vars(error)
    assert str(parsed) == str(error)


def test_what_the_draft_says_of_the_document() -> None:
    error = ProblemError(
        Problem.UNSUPPORTED_EXTENSION,
        "unknown",
        task_id=TASK,
        extra={"unsupported_extensions": [23, 42]},
    )
    assert json.loads(problem_document(error)) == {
        "type": "urn:ietf:params:ppm:dap:error:unsupportedExtension",
        "title": "An extension is not known here",
        "status": 400,
        "detail": "unknown",
        "taskid": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8",
        "unsupported_extensions": [23, 42],
    }


def test_types_that_dap_does_not_define_stay_out_of_its_namespace() -> None:
    assert json.loads(problem_document(ProblemError(None, "no credential", status=401))) == {
        "type": "about:blank",
        "status": 401,
        "detail": "no credential",
    }
    with pytest.raises(ValueError, match="somethingNew"):
        problem_document(ProblemError("somethingNew", ""))


def test_extra_members_never_replace_the_others() -> None:
    error = ProblemError(Problem.BATCH_INVALID, "why", extra={"status": 200, "type": "x"})
    document = json.loads(problem_document(error))
    assert (document["status"], document["type"][-12:]) == (400, "batchInvalid")


def test_a_message_that_does_not_decode() -> None:
    error = invalid_message(DecodeError("Query at byte 3: nonsense"), task_id=TASK)
    assert error.problem == Problem.INVALID_MESSAGE
    assert (error.status, error.task_id) == (400, TASK)
    assert "byte 3" in error.detail


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/html", b'{"type": "urn:ietf:params:ppm:dap:error:batchInvalid"}'),
        (PROBLEM, b"<html>"),
        (PROBLEM, b"[]"),
        (PROBLEM, b"[" * 100_000),
        (PROBLEM, b'{"type": 7, "detail": [], "taskid": {}}'),
        (PROBLEM, b'{"type": "urn:ietf:params:ppm:dap:error:new", "taskid": "="}'),
        (PROBLEM, b'{"type": "https://example.org/batchInvalid"}'),
        (PROBLEM, b"\xff"),
        ("", b""),
    ],
)
def test_what_is_not_understood_is_left_out(content_type: str, body: bytes) -> None:
    parsed = parse_problem(404, content_type, body)
    assert (parsed.problem, parsed.task_id, parsed.status) == (None, None, 404)
    assert parsed.detail == "no reason is given"


def test_a_stranger_s_words_are_short_and_printable() -> None:
    body = json.dumps({"detail": "\x1b[31mred\n" + "x" * 10_000}).encode()
    detail = parse_problem(400, PROBLEM, body).detail
    assert detail.isprintable()
    assert len(detail) == 500


@given(st.sampled_from(["", PROBLEM, "application/problem+json; charset=utf-8"]), st.binary())
def test_any_body(content_type: str, body: bytes) -> None:
    parsed = parse_problem(400, content_type, body)
    assert parsed.status == 400
    assert parsed.problem is None or parsed.problem in set(Problem)


@given(
    st.dictionaries(
        st.sampled_from(["type", "detail", "taskid", "status", "title", "x"]),
        st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text()), st.booleans()),
    )
)
def test_any_document(document: dict[str, object]) -> None:
    parsed = parse_problem(400, PROBLEM, json.dumps(document).encode())
    assert parsed.status == 400
    assert parsed.detail
