"""DAP over HTTP against hostile servers: requests, problem documents, media types, URLs."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.clock import SettableClock
from chorister.dap.draft import AGGREGATE_SHARE, PROBLEM, UPLOAD_REQUEST, Problem
from chorister.dap.http import (
    MIN_LIMIT,
    HTTPClient,
    check_url,
    created_resource,
    invalid_message,
    is_media_type,
    parse_problem,
    problem_document,
    retry_after,
)
from chorister.errors import DecodeError, InvalidInput, ProblemError, Unreachable
from chorister.http_client import Response
from tests.adversary.test_trickling import HEAD, trickling
from tests.certificates import a_certificate
from tests.device.loopback import Reply, Seen, serve

CREDENTIAL = "secret-token"
URL = "https://helper.example.com/x"


def client(answer: Callable[[httpx2.Request], httpx2.Response]) -> HTTPClient:
    return HTTPClient(token=CREDENTIAL, transport=httpx2.MockTransport(answer))


def test_what_a_request_carries() -> None:
    def answer(seen: Seen) -> Reply:
        return Reply(body=b"pong", headers={"Retry-After": "7", "Set-Cookie": "a=b"})

    with serve(answer) as server:
        http = HTTPClient(token=CREDENTIAL)
        for _ in range(2):
            response = http.request("POST", f"{server.url}/x", headers={"A": "b"}, body=b"ping")
    assert (response.status, response.body) == (200, b"pong")
    assert response.headers["retry-after"] == "7"
    for seen in server.seen:
        fields = {name.lower(): value for name, value in seen.headers}
        assert fields["authorization"] == "Bearer secret-token"
        assert fields["a"] == "b"
        assert "cookie" not in fields
        assert (seen.method, seen.body) == ("POST", b"ping")


def test_a_token_never_shows() -> None:
    assert "secret-token" not in repr(client(lambda _: httpx2.Response(200)))
    with pytest.raises(InvalidInput) as caught:
        HTTPClient(token=f"{CREDENTIAL} \r\n")
    assert "secret" not in str(caught.value)


def test_a_redirect_is_not_followed() -> None:
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        return httpx2.Response(307, headers={"Location": "https://evil.example.com/"})

    with pytest.raises(Unreachable, match="answers 307"):
        client(answer).request("POST", URL, body=b"x")
    assert asked == [URL]


@pytest.mark.parametrize("url", ["http://helper.example.com/", "file:///etc/passwd", "helper"])
def test_tokens_travel_by_https_only(url: str) -> None:
    with pytest.raises(InvalidInput, match="https"):
        client(lambda _: httpx2.Response(200)).request("GET", url)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 499])
def test_a_refusal(status: int) -> None:
    document = problem_document(ProblemError(Problem.BATCH_OVERLAP, "twice", status=status))
    http = client(
        lambda _: httpx2.Response(status, headers={"Content-Type": PROBLEM}, content=document)
    )
    with pytest.raises(ProblemError) as caught:
        http.request("GET", URL)
    assert (caught.value.problem, caught.value.status) == (Problem.BATCH_OVERLAP, status)


@pytest.mark.parametrize("status", [101, 304, 408, 425, 429, 500, 503, 599])
def test_what_may_be_otherwise_next_time(status: int) -> None:
    document = problem_document(ProblemError(None, "overloaded", status=503))
    http = client(
        lambda _: httpx2.Response(status, headers={"Content-Type": PROBLEM}, content=document)
    )
    with pytest.raises(Unreachable, match=f"answers {status}: overloaded"):
        http.request("GET", URL)


def test_an_answer_has_a_limit() -> None:
    http = client(lambda _: httpx2.Response(200, content=bytes(MIN_LIMIT + 10)))
    with pytest.raises(Unreachable, match="more than"):
        http.request("GET", URL, limit=10)
    assert len(http.request("GET", URL, limit=MIN_LIMIT + 10).body) == MIN_LIMIT + 10


def test_nobody_there() -> None:
    with pytest.raises(Unreachable, match="can't be reached"):
        HTTPClient().request("GET", "http://127.0.0.1:9/")


def test_a_transport_that_breaks() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ReadError("cut", request=request)

    with pytest.raises(Unreachable, match="ReadError"):
        client(answer).request("GET", URL)


def test_a_server_that_trickles_is_left() -> None:
    start = time.monotonic()
    with (
        trickling(HEAD, lambda count: b"X-%d: 1\r\n" % count) as port,
        pytest.raises(Unreachable, match=r"takes more than 0\.5 s"),
    ):
        HTTPClient(timeout=0.5).request("GET", f"http://127.0.0.1:{port}/")
    assert time.monotonic() - start < 15  # it would never end


def test_an_authority_of_one_s_own(tmp_path: Path) -> None:
    key, chain = a_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    with serve(lambda _: Reply(body=b"ok"), tls=context) as server:
        assert HTTPClient(ca_bundle=chain).request("GET", server.url).body == b"ok"
        with pytest.raises(Unreachable, match="ConnectError"):
            HTTPClient().request("GET", server.url)


def test_a_file_without_authorities(tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.write_text("nothing")
    for file in (empty, tmp_path / "missing.pem"):
        with pytest.raises(InvalidInput, match="authorities"):
            HTTPClient(ca_bundle=file)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("300", 300),
        (" 5 ", 5),
        ("Thu, 01 Jan 1970 00:20:00 GMT", 200),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("soon", None),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("٣", None),
        ("9" * 40, None),
        ("Thu, 99 Jan 1970 00:00:00 GMT", None),
    ],
)
def test_retry_after(value: str, seconds: int | None) -> None:
    response = Response(status=200, headers={"retry-after": value}, body=b"")
    assert retry_after(response, SettableClock(1000)) == seconds


@given(
    st.one_of(
        st.text(max_size=40),
        st.text(alphabet="0123456789 :,+-", max_size=20).map(lambda text: f"Thu, 01 Jan {text}"),
        st.builds("{}, {} Jan {} {}:00:00 {}".format, *[st.text("0159GMT+-", max_size=5)] * 5),
    )
)
def test_any_retry_after(value: str) -> None:
    response = Response(status=200, headers={"retry-after": value}, body=b"")
    seconds = retry_after(response, SettableClock(1000))
    assert seconds is None or seconds >= 0


@given(
    status=st.integers(200, 599),
    headers=st.dictionaries(
        st.sampled_from(["Location", "Retry-After", "Content-Type", "Content-Encoding"]),
        st.text(alphabet="abz019/:;=?,-_. ", max_size=40),
    ),
    body=st.binary(max_size=40),
)
def test_any_answer_is_an_answer_a_refusal_or_none(
    status: int, headers: dict[str, str], body: bytes
) -> None:
    http = client(lambda _: httpx2.Response(status, headers=headers, stream=Chunks(body)))
    try:
        response = http.request("POST", URL, body=b"x")
    except (ProblemError, Unreachable):
        assert not 200 <= status < 300
        return
    assert (response.status, response.body) == (status, body)


class Chunks(httpx2.SyncByteStream):
    """A body as the network brings it, whatever its header fields say."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self._body[:7]
        yield self._body[7:]


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
    begun = time.thread_time()  # not what other processes take
    assert not is_media_type(text, UPLOAD_REQUEST)
    assert time.thread_time() - begun < 0.1


CREATION = "https://helper.example.com/dap/tasks/AAA/aggregation_jobs"


@pytest.mark.parametrize(
    "location",
    [
        "/dap/tasks/AAA/aggregation_jobs/lc7a_-K?step=0",
        "https://helper.example.com/dap/tasks/AAA/aggregation_jobs/lc7a_-K?step=0",
        "/tasks/AAA/aggregation_jobs/lc7a_-K?step=0",  # it does not know what its proxy adds
        "tasks/AAA/aggregation_jobs/lc7a_-K?step=0",
        "https://evil.example.com/tasks/AAA/aggregation_jobs/lc7a_-K?step=0",
    ],
)
def test_a_location_gives_a_name_and_never_a_place(location: str) -> None:
    assert created_resource(CREATION, location) == f"{CREATION}/lc7a_-K?step=0"


@pytest.mark.parametrize(
    "location",
    [
        "",
        "/",
        "lc7a",
        "/dap/tasks/BBB/aggregation_jobs/lc7a",
        "/dap/tasks/AAA/collection_jobs/lc7a",
        "/dap/tasks/AAA/aggregation_jobs/",
        "/dap/tasks/AAA/aggregation_jobs/..",
        "/dap/tasks/AAA/aggregation_jobs/a/b",
        "/dap/tasks/AAA/aggregation_jobs/a#b",
        "/dap/tasks/AAA/aggregation_jobs/a?b c",
        "/dap/tasks/AAA/aggregation_jobs/a?b#c",
        "/dap/tasks/AAA/aggregation_jobs/a\r\nX: y",
        "/dap/tasks/AAA/aggregation_jobs/a\n",
        "https://evil.example.com/",
        "/dap/Xtasks/AAA/aggregation_jobs/a",
        "/dap/tasks/AAA/aggregation_jobs/" + "a" * 201,
    ],
)
def test_a_location_of_something_else(location: str) -> None:
    with pytest.raises(Unreachable, match="location"):
        created_resource(CREATION, location)


@given(st.one_of(st.text(), st.text().map(lambda text: f"/tasks/AAA/aggregation_jobs/{text}")))
def test_any_location(location: str) -> None:
    try:
        url = created_resource(CREATION, location)
    except Unreachable:
        return
    assert url.startswith(f"{CREATION}/")
    assert url.isascii()
    assert url.isprintable()
    assert " " not in url


@pytest.mark.parametrize("url", ["http://example.com/", "ftp://localhost/", "https://", "x", ""])
def test_only_https_leaves_the_machine(url: str) -> None:
    with pytest.raises(InvalidInput):
        check_url(url)
