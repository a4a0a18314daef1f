"""Requests with a credential: what is sent, what is read, how each failure is told."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.clock import SettableClock
from chorister.dap.draft import PROBLEM, Problem
from chorister.dap.http import MIN_LIMIT, HTTPClient, Response
from chorister.dap.problems import problem_document
from chorister.errors import InvalidInput, ProblemError, Unreachable
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
    assert time.monotonic() - start < 2


def test_an_authority_of_one_s_own(tmp_path: Path) -> None:
    key, chain = a_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    with serve(lambda _: Reply(body=b"ok"), tls=context) as server:
        assert HTTPClient(ca_file=chain).request("GET", server.url).body == b"ok"
        with pytest.raises(Unreachable, match="ConnectError"):
            HTTPClient().request("GET", server.url)


def test_a_file_without_authorities(tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.write_text("nothing")
    for file in (empty, tmp_path / "missing.pem"):
        with pytest.raises(InvalidInput, match="authorities"):
            HTTPClient(ca_file=file)


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
    assert response.retry_after(SettableClock(1000)) == seconds


@given(
    st.one_of(
        st.text(max_size=40),
        st.text(alphabet="0123456789 :,+-", max_size=20).map(lambda text: f"Thu, 01 Jan {text}"),
        st.builds("{}, {} Jan {} {}:00:00 {}".format, *[st.text("0159GMT+-", max_size=5)] * 5),
    )
)
def test_any_retry_after(value: str) -> None:
    response = Response(status=200, headers={"retry-after": value}, body=b"")
    seconds = response.retry_after(SettableClock(1000))
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
