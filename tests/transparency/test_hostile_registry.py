"""A registry that answers with floods, bombs, redirects and silence: its clients stay small."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from chorister.errors import ChoristerError, LogWithheld, ServiceError
from chorister.transparency.client import HTTPSource, RegistryClient
from chorister.transparency.note import SignatureLine
from tests.logworld import hpke_entry

LINE = SignatureLine(name="helper.example", blob=bytes(76))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

Say = Callable[[socket.socket], None]


@contextlib.contextmanager
def registry(say: Say, *, times: int = 1) -> Iterator[str]:
    """Its URL; what it says to each of its first clients, once they have asked."""

    def serve(listener: socket.socket) -> None:
        for _ in range(times):
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(20)
                    connection.recv(65_536)
                    say(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # whoever was never asked need not wait
    thread.join(60)
    assert not thread.is_alive()


def cosign(url: str, seconds: float) -> None:
    with RegistryClient(url, timeout=seconds) as client:
        client.cosign(LINE)


def submit(url: str, seconds: float) -> None:
    with RegistryClient(url, timeout=seconds) as client:
        client.submit(hpke_entry("helper.example"))


def read(url: str, seconds: float) -> None:
    with HTTPSource(url, timeout=seconds) as source:
        source.read("checkpoint", limit=10_000)


EVERY_CALL = pytest.mark.parametrize("call", [cosign, submit, read])


@EVERY_CALL
def test_a_bomb_is_not_unpacked(call: Callable[[str, float], None]) -> None:
    """100 kB that would become 100 MB."""
    bomb = gzip.compress(bytes(100_000_000))

    def say(connection: socket.socket) -> None:
        head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(bomb) + bomb)

    with registry(say) as url:
        tracemalloc.start()
        try:
            with pytest.raises((ServiceError, LogWithheld)):
                call(url, 20)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 5_000_000


@EVERY_CALL
def test_a_flood_is_cut(call: Callable[[str, float], None]) -> None:
    sent = []

    def say(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Content-Length: 1000000000\r\n\r\n")
        for _ in range(1_000):
            connection.sendall(bytes(1_000_000))
            sent.append(1)

    with registry(say) as url, pytest.raises((ServiceError, LogWithheld), match="than"):
        call(url, 20)
    assert len(sent) < 100


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"", b""),
        (b"", b"H"),
        (HEAD, b"A: b\r\n"),
        (HEAD + b"Content-Length: 1000\r\n\r\n", b" "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["silence", "a status line", "header fields", "a body", "chunks", "continue"],
)
@EVERY_CALL
def test_an_exchange_has_one_deadline(
    call: Callable[[str, float], None], first: bytes, drip: bytes
) -> None:
    """However much time a server takes over each byte."""

    def say(connection: socket.socket) -> None:
        connection.sendall(first)
        for _ in range(300):  # half a minute
            time.sleep(0.1)
            if drip:
                connection.sendall(drip)
            elif not connection.recv(65_536):
                return

    begun = time.monotonic()
    with registry(say) as url:
        with pytest.raises((ServiceError, LogWithheld), match=r"takes more than 0\.5 s"):
            call(url, 0.5)
        assert time.monotonic() - begun < 20


@EVERY_CALL
def test_no_proxy_of_the_environment_is_asked(
    call: Callable[[str, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[socket.socket] = []

    def say(connection: socket.socket) -> None:
        answer = b'{"index": 1, "waiting_for": []}'
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(answer) + answer)

    with (
        registry(asked.append) as proxy,
        registry(say) as url,
    ):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        call(url, 20)
    assert not asked


@EVERY_CALL
def test_a_redirect_is_not_followed(call: Callable[[str, float], None]) -> None:
    asked: list[socket.socket] = []
    with registry(asked.append) as other:

        def say(connection: socket.socket) -> None:
            head = f"HTTP/1.1 307 Go\r\nLocation: {other}/x\r\nContent-Length: 2\r\n\r\n{{}}"
            connection.sendall(head.encode())

        with registry(say) as url, pytest.raises((ServiceError, LogWithheld)):
            call(url, 20)
    assert not asked


@pytest.mark.parametrize(
    "answer",
    [
        b'{"waiting_for": 5}',
        b'{"waiting_for": {"a": 1}}',
        b'{"waiting_for": null}',
        b"[1]",
        b"[" * 60_000,
        b"\xff",
        b"",
        b'{"index": "1"}',
        b'{"index": true}',
        b'{"index": -1}',
    ],
)
@pytest.mark.parametrize("call", [cosign, submit])
def test_whatever_it_answers_the_error_is_typed(
    call: Callable[[str, float], None], answer: bytes
) -> None:
    def say(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(answer) + answer)

    with registry(say) as url, pytest.raises(ServiceError):
        call(url, 20)


def test_its_words_are_fit_for_a_terminal() -> None:
    detail = "no\\u001b[2J\\u202e" + "x" * 10_000

    def say(connection: socket.socket) -> None:
        answer = b'{"detail": "%s"}' % detail.encode()
        head = b"HTTP/1.1 422 No\r\nContent-Length: %d\r\n\r\n" % len(answer)
        connection.sendall(head + answer)

    with registry(say) as url, pytest.raises(ChoristerError) as caught:
        submit(url, 20)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1_000


def test_a_connection_is_kept_for_the_next_request() -> None:
    """Reading a log takes a request per entry."""
    accepted = []

    def say(connection: socket.socket) -> None:
        accepted.append(connection)
        for _ in range(3):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            if not connection.recv(65_536):
                return

    with registry(say) as url, HTTPSource(url, timeout=20) as source:
        for _ in range(3):
            assert source.read("checkpoint", limit=10) == b"ok"
    assert len(accepted) == 1


def test_a_kept_connection_has_its_deadline_too() -> None:
    """The second request is sent on a connection that the first one opened."""

    def say(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        connection.recv(65_536)
        for _ in range(300):
            connection.sendall(b"H")
            time.sleep(0.1)

    with registry(say) as url, HTTPSource(url, timeout=1) as source:
        assert source.read("checkpoint", limit=10) == b"ok"
        time.sleep(0.3)
        begun = time.monotonic()
        with pytest.raises(LogWithheld, match="takes more than 1 s"):
            source.read("checkpoint", limit=10)
        assert 0.9 < time.monotonic() - begun < 20
