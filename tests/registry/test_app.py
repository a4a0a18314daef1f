"""The registry over HTTP on a real socket: caching, limits, submissions, cosignatures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorister.errors import LogWithheld, ServiceError, SubmissionRefused
from chorister.http_server import Deadlines
from chorister.registry.app import Limits
from chorister.registry.registry import CANDIDATE_LIFETIME
from chorister.transparency.auditor import audit
from chorister.transparency.client import PROOF, HTTPSource, RegistryClient, body_path, list_path
from chorister.transparency.note import SignatureLine
from chorister.transparency.reader import read_current
from chorister.transparency.tiles import Source
from tests.aggregator.operators import free_port
from tests.logworld import (
    HELPER,
    HELPER_NAME,
    LEADER,
    LEADER_NAME,
    World,
    authority,
    body_of,
    hpke_entry,
    identity,
    recipe_entry,
    submission,
    trust,
)
from tests.registry.serving import ask, serving

LIMITS = Limits(entry_bytes=20_000)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def port(world: World) -> Iterator[int]:
    with serving(world, limits=LIMITS) as port:
        yield port


@pytest.fixture
def source(port: int) -> Iterator[HTTPSource]:
    with HTTPSource(f"http://127.0.0.1:{port}/", timeout=60) as source:
        yield source


@pytest.fixture
def client(port: int) -> Iterator[RegistryClient]:
    with RegistryClient(f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def publish(world: World, source: Source, client: RegistryClient) -> None:
    """Let both cosigners sign over HTTP the candidate that covers everything."""
    world.clock.advance(CANDIDATE_LIFETIME)
    deadline = time.monotonic() + 60
    while world.registry.issue().checkpoint.size != world.registry.status().size:
        assert time.monotonic() < deadline
    for side in (world.leader, world.helper):
        client.cosign(side.cosigner.cosign(source))


def test_from_submission_to_device_over_http(
    world: World, source: HTTPSource, client: RegistryClient
) -> None:
    entry = recipe_entry("one")
    # Before them is the list that closes the empty log.
    assert client.submit(hpke_entry(LEADER)) == 1
    assert client.submit(hpke_entry(HELPER)) == 2
    assert client.submit(entry, body_of(entry).jws) == 3
    assert client.submit(entry, body_of(entry).jws) == 3
    publish(world, source, client)
    current = read_current(source, trust=trust(), clock=world.clock)
    assert current.recipes == (body_of(entry),)
    found = audit(source, authority=authority(), clock=world.clock)
    assert found.checkpoint == current.checkpoint


def test_what_never_changes_is_read_once(
    world: World,
    source: HTTPSource,
    client: RegistryClient,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chorister.registry.public_files._CACHED_FILES", 1)
    entries = [recipe_entry("one"), recipe_entry("two")]
    for entry in entries:
        client.submit(entry, body_of(entry).jws)
    publish(world, source, client)
    before = ask(port, "GET", "/checkpoint")[2]
    world.clock.advance(1)
    publish(world, source, client)
    assert ask(port, "GET", "/checkpoint")[2] != before
    first, second = (body_path(entry.body_digest) for entry in entries)
    for path in (first, second):
        body = (world.public / path).read_bytes()
        assert ask(port, "GET", f"/{path}")[2] == body
    # Of the two, there is room for one; no other file is read from memory.
    for path in (first, second):
        (world.public / path).unlink()
    assert ask(port, "GET", f"/{second}")[::2] == (200, body)
    assert ask(port, "GET", f"/{first}")[0] == 404


def test_caching(world: World, source: HTTPSource, client: RegistryClient, port: int) -> None:
    entry = recipe_entry("one")
    client.submit(entry, body_of(entry).jws)
    publish(world, source, client)
    immutable = [
        body_path(entry.body_digest),
        list_path(world.proof().entry.digest),
        "tile/0/000.p/3",
        "tile/entries/000.p/3",
    ]
    for path in immutable:
        status, headers, body = ask(port, "GET", f"/{path}")
        assert (status, headers["cache-control"]) == (200, "public, max-age=31536000, immutable")
        tag = headers["etag"]
        assert tag == f'"{hashlib.sha256(body).hexdigest()}"'
        again = ask(port, "GET", f"/{path}", if_none_match=f'"other", {tag}')
        assert again[0] == 304
        assert again[2] == b""
        assert ask(port, "HEAD", f"/{path}")[2] == b""
    for brief in ("checkpoint", PROOF):
        assert ask(port, "GET", f"/{brief}")[1]["cache-control"] == "public, max-age=5"
    assert ask(port, "GET", "/candidate")[1]["cache-control"] == "no-store"
    status, headers, _ = ask(port, "GET", f"/body/{'00' * 32}")
    assert (status, headers["cache-control"]) == (404, "no-store")
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/leaves",
        "/../leaves",
        "/%2e%2e/leaves",
        "/entries.new",
        "/body/../../leaves",
        "/body/..%2f..%2fleaves",
        "/body/.x.new",
        "/body/" + "0" * 63,
        "/body/" + "A" * 64,
        "/tile/64/000",
        "/tile/entries/000.p/0",
        "//etc/passwd",
        "/tile/0/",
        "/",
    ],
)
def test_only_the_logs_files_are_served(port: int, path: str) -> None:
    status, headers, body = ask(port, "GET", path)
    assert status == 404
    assert headers["content-type"] == "application/problem+json"
    assert json.loads(body)["status"] == 404


def test_refusals_are_problem_documents(client: RegistryClient, port: int) -> None:
    for entry, status, name in (
        (submission(recipe_entry("x", author="other author")).encode(), 403, "not-authorized"),
        (b"noise", 422, "entry-refused"),
        (b"", 422, "entry-refused"),
    ):
        got, headers, body = ask(port, "POST", "/entries", entry)
        problem = json.loads(body)
        assert (got, problem["status"]) == (status, status)
        assert headers["content-type"] == "application/problem+json"
        assert problem["type"] == f"urn:chorister:problem:{name}"
        assert problem["detail"]
    one, again = recipe_entry("one"), recipe_entry("one", author="second author")
    client.submit(one, body_of(one).jws)
    with pytest.raises(SubmissionRefused, match="already in the log, as entry 1") as caught:
        client.submit(again, body_of(again).jws)
    assert caught.value.problem == "urn:chorister:problem:duplicate-entry"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/entries", {"POST"}),
        ("PUT", "/cosignatures", {"POST"}),
        ("POST", "/status", {"GET", "HEAD"}),
        ("POST", "/checkpoint", {"GET", "HEAD"}),
        ("PATCH", "/no/such/thing", {"GET", "HEAD"}),
    ],
)
def test_wrong_methods_get_problem_documents(
    port: int, method: str, path: str, allowed: set[str]
) -> None:
    status, headers, body = ask(port, method, path)
    assert (status, headers["content-type"]) == (405, "application/problem+json")
    assert set(headers["allow"].split(", ")) == allowed
    assert headers["cache-control"] == "no-store"
    problem = json.loads(body)
    assert (problem["status"], problem["type"]) == (405, "urn:chorister:problem:method-not-allowed")
    assert problem["detail"] == f"{path} does not support {method}"


def test_cosignatures_are_checked(world: World, client: RegistryClient, port: int) -> None:
    candidate = world.registry.issue().checkpoint
    good = identity("leader").sign(candidate, world.clock.now())
    with pytest.raises(SubmissionRefused, match="does not verify"):
        client.cosign(SignatureLine(name=LEADER_NAME, blob=good.blob[:-1] + b"\x00"))
    assert client.cosign(good) == (HELPER_NAME,)
    status: dict[str, Any] = json.loads(ask(port, "GET", "/status")[2])
    assert status["waiting_for"] == [HELPER_NAME]
    assert status["published"] is None
    assert ask(port, "POST", "/cosignatures", b"x" * 1025)[0] == 413


# --- Limits --------------------------------------------------------------------------------------


def test_oversized_bodies_are_refused(port: int) -> None:
    """By their declared length before they are sent, and by what arrives when none is declared."""
    assert ask(port, "POST", "/entries", b"x" * 20_001)[0] == 413
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(
            b"POST /entries HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
        )
        assert connection.recv(64).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        head = b"POST /entries HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"7530\r\n" + b"x" * 30_000 + b"\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_slow_bodies_are_refused(world: World) -> None:
    with (
        serving(world, limits=Limits(body_seconds=0.5)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
    ):
        connection.sendall(b"POST /entries HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        for _ in range(99):  # never the whole body
            connection.sendall(b"x")
            time.sleep(0.05)
            connection.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(64)
                break
            connection.settimeout(20)
        else:
            pytest.fail("the registry went on listening")
        assert answer.startswith(b"HTTP/1.1 408")


def test_slow_senders_do_not_keep_readers_waiting(world: World) -> None:
    world.registry.issue()
    limits, deadlines = Limits(body_seconds=300), Deadlines(body=300, stall=300)
    with (
        serving(world, limits=limits, deadlines=deadlines) as port,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(6):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"POST /entries HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        assert ask(port, "GET", "/candidate")[0] == 200


# --- The reading side ----------------------------------------------------------------------------


def test_a_source_sends_nothing_that_identifies(tmp_path: Path) -> None:
    """A server that sets a cookie and a validator gets neither back; a redirect is not followed."""
    seen: list[bytes] = []
    answers = [
        b'HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nETag: "victim"\r\nContent-Length: 2\r\n\r\nok',
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 302 Found\r\nLocation: /victim\r\nContent-Length: 0\r\n\r\n",
    ]

    def answer(listener: socket.socket) -> None:
        for data in answers:
            connection, _ = listener.accept()
            seen.append(connection.recv(4096))
            connection.sendall(data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with HTTPSource(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as source:
            assert source.read("checkpoint", limit=10) == b"ok"
            assert source.read("checkpoint", limit=10) == b"ok"
            with pytest.raises(LogWithheld, match="302"):
                source.read("checkpoint", limit=10)
        thread.join(5)
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    headers = {line.split(b":")[0].lower() for line in seen[0].split(b"\r\n")[1:] if line}
    assert headers == {b"host", b"accept", b"accept-encoding", b"connection", b"user-agent"}


def test_endless_and_trickling_files_are_given_up() -> None:
    def answer(listener: socket.socket) -> None:
        for pause in (0.0, 0.1):
            connection, _ = listener.accept()
            connection.recv(4096)
            with contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                for _ in range(100):
                    connection.sendall(b"x" * (1 if pause else 1000))
                    time.sleep(pause)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for seconds, problem in ((60, "longer than the 5000 bytes"), (2, "takes more than 2 s")):
            with (
                HTTPSource(url, timeout=seconds) as source,
                pytest.raises(LogWithheld, match=problem),
            ):
                source.read("checkpoint", limit=5000)
        thread.join(15)


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with HTTPSource(url) as source, pytest.raises(LogWithheld, match="can't be fetched"):
        source.read("checkpoint", limit=10)
    with RegistryClient(url) as client, pytest.raises(ServiceError, match="can't be reached"):
        client.submit(recipe_entry("one"))
    with HTTPSource("http://[::1") as source, pytest.raises(LogWithheld):
        source.read("checkpoint", limit=10)
