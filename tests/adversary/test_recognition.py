"""A server that tries to know a device again: by cookies, redirects, validators, connections."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from pathlib import Path

import pytest

from chorister.dap.http import check_url
from chorister.device.transport import HTTPTransport, LogSource
from chorister.errors import InvalidInput, LogWithheld, Unreachable
from tests.certificates import a_certificate
from tests.device.loopback import Reply, Seen, serve

MARKS = {
    "Set-Cookie": "device=42; Max-Age=31536000",
    "ETag": '"device-42"',
    "Last-Modified": "Mon, 02 Nov 2026 00:00:42 GMT",
    "Retry-After": "42",
    "Alt-Svc": 'h2="device-42.example:443"; ma=31536000',
    "Strict-Transport-Security": "max-age=31536000",
    "Connection": "keep-alive",
    "Keep-Alive": "timeout=3600",
}


def test_nothing_that_a_server_sets_comes_back() -> None:
    transport = HTTPTransport()
    with serve(lambda _: Reply(headers=MARKS, body=b"file")) as server:
        for _ in range(2):
            transport.get(f"{server.url}/checkpoint", limit=100)
            transport.post(f"{server.url}/reports", headers={}, body=b"report", limit=100)
    polls, uploads = server.seen[::2], server.seen[1::2]
    assert polls[0].headers == polls[1].headers
    assert uploads[0].headers == uploads[1].headers
    sent = {name.lower() for request in server.seen for name, _ in request.headers}
    assert sent == {
        *("host", "user-agent", "accept", "accept-encoding", "connection", "content-length"),
    }


def test_no_two_requests_share_a_connection() -> None:
    transport = HTTPTransport()
    with serve(lambda _: Reply(headers=MARKS)) as server:
        for _ in range(3):
            transport.get(f"{server.url}/checkpoint", limit=100)
            transport.post(f"{server.url}/reports", headers={}, body=b"report", limit=100)
    assert len({request.connection for request in server.seen}) == len(server.seen) == 6


def test_a_connection_is_shared_within_one_poll_only(tmp_path: Path) -> None:
    key, chain = a_certificate(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(chain, key)
    transport = HTTPTransport(tls=lambda: ssl.create_default_context(cafile=str(chain)))
    with serve(lambda _: Reply(headers=MARKS, body=b"file"), tls=server_side) as server:
        log = LogSource(transport, server.url)
        for _ in range(2):
            with log.one_poll() as poll:
                for path in ("checkpoint", "list", "body"):
                    assert poll.read(path, limit=100) == b"file"
            transport.post(f"{server.url}/reports", headers={}, body=b"report", limit=100)
    first, second = server.seen[:4], server.seen[4:]
    assert [request.path for request in first] == ["/checkpoint", "/list", "/body", "/reports"]
    ours = [[request.connection for request in poll[:3]] for poll in (first, second)]
    assert all(len(set(poll)) == 1 for poll in ours)
    assert len({ours[0][0], first[3].connection, ours[1][0], second[3].connection}) == 4
    assert not any(request.resumed for request in server.seen)
    assert [request.headers for request in first] == [request.headers for request in second]


def test_the_connection_of_a_poll_ends_before_anything_is_decided() -> None:
    """A device that remembers a later checkpoint takes less time for its checks."""
    transport = HTTPTransport()
    with (
        serve(lambda _: Reply(headers=MARKS, body=b"file")) as server,
        LogSource(transport, server.url).one_poll() as poll,
    ):
        poll.read("checkpoint", limit=100)
        poll.close()  # as `read_log` calls it after the last request
        poll.read("checkpoint", limit=100)
    assert len({request.connection for request in server.seen}) == 2


def test_a_server_that_hangs_up_between_two_requests_is_asked_again() -> None:
    """Without a word: no header field announces it."""
    transport = HTTPTransport(timeout=10)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfile"
        asked: list[bytes] = []

        def answer_once_per_connection() -> None:
            for _ in range(2):
                peer, _ = listener.accept()
                with peer:
                    asked.append(peer.recv(10_000))
                    peer.sendall(answer)
                    # The second request arrives before the client can know that nobody reads it.
                    if len(asked) < 3:
                        asked.append(peer.recv(10_000))

        server = threading.Thread(target=answer_once_per_connection, daemon=True)
        server.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with LogSource(transport, url).one_poll() as poll:
            assert poll.read("one", limit=100) == b"file"
            assert poll.read("two", limit=100) == b"file"
        server.join(10)
        requests = [request.split()[1] for request in asked if request]
        assert requests[:3] == [b"/one", b"/two", b"/two"]


def test_the_user_agent_is_everybody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", "/nowhere")
    with serve(lambda _: Reply()) as server:
        HTTPTransport().get(f"{server.url}/x", limit=1)
    assert dict(server.seen[0].headers)["User-Agent"] == "chorister"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    def answer(request: Seen) -> Reply:
        return Reply(status=status, headers={"Location": "/device-42"})

    transport = HTTPTransport()
    with serve(answer) as server:
        assert transport.get(f"{server.url}/checkpoint", limit=10).status == status
        assert transport.post(f"{server.url}/r", headers={}, body=b"", limit=10).status == status
        with pytest.raises(LogWithheld, match=str(status)):
            LogSource(transport, server.url).read("checkpoint", limit=10)
    assert [request.path for request in server.seen] == ["/checkpoint", "/r", "/checkpoint"]


@pytest.mark.parametrize("status", [200, 404, 500])
def test_an_answer_without_end_is_cut(status: int) -> None:
    """A refusal too, though other clients read the beginning of one."""
    with (
        serve(lambda _: Reply(status=status, body=b"x" * 1000)) as server,
        pytest.raises(Unreachable, match="more than 10 bytes"),
    ):
        HTTPTransport().get(f"{server.url}/x", limit=10)


def test_a_server_that_is_not_there_says_so_in_a_typed_error() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it does not listen, and no other server gets the port
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(Unreachable, match="can't be reached"):
            HTTPTransport(timeout=60).get(url, limit=1)
        with pytest.raises(LogWithheld):
            LogSource(HTTPTransport(timeout=60), url).read("checkpoint", limit=1)


@pytest.mark.parametrize(
    "url",
    ["http://example.org/", "ftp://127.0.0.1/", "https:///x", "example.org", "http://[::", ""],
)
def test_only_https_leaves_the_machine(url: str) -> None:
    with pytest.raises(InvalidInput):
        check_url(url)
    with pytest.raises(InvalidInput):
        HTTPTransport().get(url, limit=1)


@pytest.mark.parametrize("url", ["https://example.org/x", "http://localhost:1/", "http://[::1]:1"])
def test_https_and_this_machine_are_fine(url: str) -> None:
    check_url(url)


# --- TLS ---


def test_no_tls_session_is_resumed(tmp_path: Path) -> None:
    key, chain = a_certificate(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(chain, key)
    transport = HTTPTransport(tls=lambda: ssl.create_default_context(cafile=str(chain)))
    with serve(lambda _: Reply(headers=MARKS), tls=server_side) as server:
        for _ in range(3):
            transport.get(f"{server.url}/checkpoint", limit=10)
            transport.post(f"{server.url}/reports", headers={}, body=b"", limit=10)
    assert [request.resumed for request in server.seen] == [False] * 6


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    key, chain = a_certificate(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(chain, key)
    with serve(lambda _: Reply(), tls=server_side) as server:
        with pytest.raises(Unreachable):
            HTTPTransport().get(f"{server.url}/checkpoint", limit=10)
        assert not server.seen


def test_authorities_of_the_environment_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, chain = a_certificate(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(chain, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(chain))
    with serve(lambda _: Reply(), tls=server_side) as server:
        with pytest.raises(Unreachable):
            HTTPTransport().get(f"{server.url}/checkpoint", limit=10)
        assert not server.seen


# --- Proxies ---


def test_a_proxy_that_is_given_is_used() -> None:
    with serve(lambda _: Reply(body=b"file")) as server:
        proxy = server.url.replace("://", "://person:p%40ss@")
        answer = HTTPTransport(proxy=proxy).get("http://localhost:9/checkpoint", limit=10)
    assert answer.body == b"file"
    (seen,) = server.seen
    assert seen.path == "http://localhost:9/checkpoint"
    credential = base64.b64encode(b"person:p@ss").decode()
    assert dict(seen.headers)["Proxy-Authorization"] == f"Basic {credential}"


@pytest.mark.parametrize("proxy", ["", "ftp://proxy.example", "proxy.example:3128", "http://"])
def test_a_proxy_that_is_none_is_refused(proxy: str) -> None:
    with pytest.raises(InvalidInput, match="proxy"):
        HTTPTransport(proxy=proxy)


@pytest.mark.parametrize(
    "url",
    [
        "https://ex\u00e4mple.org/",
        "https://example.org/\u00e4",
        "https://example.org/a b",
        "https://example.org/a\r\nX: 1",
        "https://example.org:99999/",
    ],
)
def test_a_url_that_can_t_be_written_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        HTTPTransport().get(url, limit=10)
