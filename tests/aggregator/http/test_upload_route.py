"""Plain uploads, which the connection answers itself: over real sockets, beside the long way."""

from __future__ import annotations

import contextlib
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chorister.aggregator.http.app import build_starlette
from chorister.aggregator.http.report_writer import UploadQueue
from chorister.aggregator.http.request_checks import TaskLookup, upload_credential_checks
from chorister.aggregator.http.upload_route import UploadRoute
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.operations.metrics import Metrics
from chorister.canonical import b64url_encode, sha256
from chorister.dap.draft import UPLOAD_ERRORS, UPLOAD_REQUEST
from chorister.errors import ServiceError
from chorister.http_server import Deadlines, RawResponse, guarded_protocol
from tests.aggregator.inprocess_pair import wait_until
from tests.aggregator.world import Pair, one_bit, small_recipe

# Long enough for a busy machine; only one test waits until a body is cut off.
DEADLINES = Deadlines(header=10.0, body=6.0, answer=20.0)


@dataclass
class UploadServer:
    """A leader's uploads on a port."""

    pair: Pair
    task: KnownTask
    route: UploadRoute
    port: int
    server: uvicorn.Server
    direct: list[int]  # lengths of the bodies that did not go the long way

    def report(self) -> bytes:
        bins = self.task.vdaf.length
        return self.pair.reports(self.task, one_bit(bins, [1]))[0]

    def request(self, body: bytes, *fields: str, task: str | None = None) -> bytes:
        path = f"/dap/tasks/{task or b64url_encode(self.task.task_id)}/reports"
        head = [
            f"POST {path} HTTP/1.1",
            "Host: x",
            f"Content-Type: {UPLOAD_REQUEST}",
            f"Content-Length: {len(body)}",
            *fields,
        ]
        return "\r\n".join([*head, "", ""]).encode() + body

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            yield connection

    def stored(self) -> int:
        return self.pair.row_counts()[0]["report_ids"]


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One whole answer: status, fields, body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += receive(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    while len(body) < int(fields["content-length"]):
        body += receive(connection)
    assert len(body) == int(fields["content-length"])
    return int(status.split()[1]), fields, body


def receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 if connection.gettimeout() else 65_536)
    assert data, "the connection was closed"
    return data


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@contextlib.contextmanager
def a_door(folder: Path, **changes: Any) -> Iterator[UploadServer]:
    pair = Pair.in_folder(folder)
    (task,) = pair.accept(small_recipe())
    pair.set_clocks(task.opens)
    metrics = Metrics()
    route = UploadRoute(
        writer=pair.leader.writer,
        lookup=TaskLookup(pair.leader.tasks, pair.clock),
        queue=UploadQueue(lambda plans: pair.leader.writer.store(plans)),
        metrics=metrics,
        prefix="/dap/",
        **{"upload_bytes": 1 << 20, "held_bytes": 1 << 20} | changes,
    )
    direct: list[int] = []
    store = route.store

    def counted(task: KnownTask, body: bytes, respond: Callable[[RawResponse], None]) -> None:
        direct.append(len(body))
        store(task, body, respond)

    route.store = counted  # type: ignore[method-assign]

    @contextlib.asynccontextmanager
    async def lifespan() -> Any:
        yield
        await route.queue.close()

    app = build_starlette([route.route()], metrics, lifespan)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=guarded_protocol(DEADLINES, route),
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=10,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started, "the server")
        yield UploadServer(pair, task, route, listener.getsockname()[1], server, direct)
    finally:
        server.should_exit = True
        thread.join()
        pair.stop()
    assert route.held == 0


@pytest.fixture
def door(tmp_path: Path) -> Iterator[UploadServer]:
    with a_door(tmp_path) as door, door.connected() as connection:
        connection.sendall(door.request(door.report()))  # the task is remembered from here on
        assert answer(connection)[0] == 200
        assert not door.direct
        yield door


def test_both_ways_give_the_same_answers(door: UploadServer) -> None:
    report, other = door.report(), door.report()
    cases = [report, report, report[:-1], b"", other + report, bytes(50)]
    with door.connected() as connection:
        for body in cases:
            connection.sendall(door.request(body))
            plain = answer(connection)
            long = door.request(body, "Expect: 100-continue")
            connection.sendall(long)
            assert answer_after_continue(connection)[0] == plain[0], body
            if body in (report[:-1], bytes(50)):
                assert plain[0] == 400
                assert plain[1]["content-type"] == "application/problem+json"
    assert len(door.direct) == len(cases)
    assert door.stored() == 3


def answer_after_continue(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        data += connection.recv(1)
    assert data.startswith(b"HTTP/1.1 100")
    return answer(connection)


def test_a_replay_is_named_and_fields_are_the_servers(door: UploadServer) -> None:
    report = door.report()
    with door.connected() as connection:
        connection.sendall(door.request(report))
        status, fields, body = answer(connection)
        assert (status, body, fields["cache-control"]) == (200, b"", "no-store")
        assert "date" in fields
        assert "connection" not in fields
        connection.sendall(door.request(report))
        status, fields, body = answer(connection)
        assert (status, fields["content-type"]) == (200, UPLOAD_ERRORS)
        assert body[:16] == report[:16]
    assert len(door.direct) == 2


def test_pipelined_requests_are_answered_in_their_order(door: UploadServer) -> None:
    first, second = door.report(), door.report()
    with door.connected() as connection:
        connection.sendall(
            door.request(first)
            + b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
            + door.request(second)
            + door.request(bytes(9))
        )
        assert [answer(connection)[0] for _ in range(4)] == [200, 404, 200, 400]
        connection.sendall(door.request(door.report()))
        assert answer(connection)[0] == 200
    assert door.stored() == 4


def test_two_refusals_in_one_read(door: UploadServer) -> None:
    """Answered while the parser is at work, both; and the connection lives on."""
    with door.connected() as connection:
        connection.sendall(2 * door.request(bytes(9)) + door.request(door.report()))
        assert [answer(connection)[0] for _ in range(3)] == [400, 400, 200]
    assert len(door.direct) == 3


def test_answers_that_nobody_reads_do_not_pile_up(door: UploadServer) -> None:
    many = 500 * door.request(bytes(9))

    def unread() -> int:
        return max(
            each.transport.get_write_buffer_size()
            for each in door.server.server_state.connections
            if isinstance(each, HttpToolsProtocol)
        )

    with door.connected() as connection:
        connection.settimeout(1)
        sent = 0
        stuck = False
        while sent < 100_000_000 and not (stuck and unread()):
            stuck = False
            try:
                sent += connection.send(many)
            except TimeoutError:
                stuck = True
        assert sent < 100_000_000
        assert 0 < unread() < 1_000_000


def test_a_body_with_an_empty_line_at_its_start(door: UploadServer) -> None:
    """The first empty line ends the head, and the second does not."""
    with door.connected() as connection:
        for _ in range(3):
            connection.sendall(door.request(b"\r\n\r\n" + bytes(50)))
            assert answer(connection)[0] == 400
    assert door.direct == [54, 54, 54]


def test_a_body_in_many_parts(door: UploadServer) -> None:
    request = door.request(door.report())
    with door.connected() as connection:
        for place in range(0, len(request), 97):
            connection.sendall(request[place : place + 97])
        assert answer(connection)[0] == 200
    assert len(door.direct) == 1


def test_whoever_goes_away_holds_nothing(door: UploadServer) -> None:
    request = door.request(door.report())
    with door.connected() as connection:
        connection.sendall(request[:-1])
        wait_until(lambda: door.route.held > 0, "its body")
    wait_until(lambda: door.route.held == 0, "its end")
    with door.connected() as connection:  # or trickles, until it is cut off
        connection.sendall(request[:-1])
        assert closed(connection)
    assert door.route.held == 0
    assert not door.direct


def test_whoever_asks_to_close_is_answered_and_let_go(door: UploadServer) -> None:
    with door.connected() as connection:
        connection.sendall(door.request(door.report(), "Connection: close"))
        status, fields, _ = answer(connection)
        assert (status, fields["connection"]) == (200, "close")
        assert closed(connection)


def test_bodies_that_stop_keep_nobody_out(tmp_path: Path) -> None:
    """Bodies that came first kept their room until their deadline, and others got 503."""
    with a_door(tmp_path, held_bytes=100_000) as door:
        with door.connected() as connection:
            connection.sendall(door.request(door.report()))
            assert answer(connection)[0] == 200
        with contextlib.ExitStack() as stack:
            first, second, last = (stack.enter_context(door.connected()) for _ in range(3))
            first.sendall(door.request(bytes(90_000))[:50_000])
            wait_until(lambda: door.route.held > 45_000, "a body")
            second.sendall(door.request(bytes(90_000))[:50_000])
            wait_until(lambda: door.route.held > 90_000, "two bodies")
            whole = door.request(bytes(90_000))
            last.sendall(whole[:50_000])
            assert closed(first)
            last.sendall(whole[50_000:])
            assert b"invalidMessage" in answer(last)[2]  # there was room for it


def test_a_long_body_that_stops_is_refused_when_others_need_its_room(tmp_path: Path) -> None:
    with a_door(tmp_path, held_bytes=100_000) as door, contextlib.ExitStack() as stack:
        first, last = (stack.enter_context(door.connected()) for _ in range(2))
        first.sendall(door.request(bytes(200_000))[:60_000])
        wait_until(lambda: door.route.held > 55_000, "a body")
        last.sendall(door.request(bytes(60_000)))
        status, fields, _ = answer(first)
        assert (status, fields["retry-after"]) == (503, "1")
        assert b"invalidMessage" in answer(last)[2]


def test_a_body_larger_than_all_room_is_refused(tmp_path: Path) -> None:
    with a_door(tmp_path, held_bytes=100_000) as door, door.connected() as connection:
        connection.sendall(door.request(bytes(150_000)))
        assert answer(connection)[0] == 503


@pytest.mark.parametrize("error", [ServiceError("the disk is full"), ValueError("a bug")])
def test_an_upload_that_is_not_stored_is_not_acknowledged(
    door: UploadServer, error: Exception
) -> None:
    report = door.report()
    with pytest.MonkeyPatch.context() as patch, door.connected() as connection:

        def fails(plans: object) -> Any:
            raise error

        patch.setattr(door.pair.leader.writer, "store", fails)
        connection.sendall(door.request(report))
        assert answer(connection)[0] == (503 if isinstance(error, ServiceError) else 500)
        patch.undo()
        connection.sendall(door.request(report))
        assert answer(connection)[0] == 200
    assert len(door.direct) == 2


def test_a_failed_transaction_is_explained_as_briefly_to_the_last_upload_as_to_the_first(
    door: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ValueError("a bug")
    outcomes: list[Callable[[BaseException], None]] = []
    answers: list[int] = []
    depths: list[int] = []

    def logged(_event: str, error: BaseException, **_fields: object) -> None:
        depths.append(len(traceback.extract_tb(error.__traceback__)))

    monkeypatch.setattr("chorister.aggregator.http.app.log_failure", logged)
    monkeypatch.setattr(door.route.queue, "add", lambda _, __, done: outcomes.append(done))
    for _ in range(3):
        door.route.store(door.task, door.report(), lambda answer: answers.append(answer.status))
    try:
        raise error
    except ValueError:
        for done in outcomes:
            done(error)
    assert answers == [500, 500, 500]
    assert depths == [1, 1, 1]


def test_a_queue_that_takes_no_more(door: UploadServer) -> None:
    with pytest.MonkeyPatch.context() as patch, door.connected() as connection:
        patch.setattr(door.route.queue, "_max_waiting", 0)
        connection.sendall(door.request(door.report()))
        status, fields, _ = answer(connection)
        assert (status, fields["retry-after"]) == (503, "1")
        patch.undo()
        connection.sendall(door.request(door.report()))
        assert answer(connection)[0] == 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ((UPLOAD_REQUEST, "text/plain"), 415),
        (("POST", "PUT"), 405),
        (("/reports", "/reports/"), 404),
        (("Content-Length: ", "Content-Length: 9"), 413),
    ],
)
def test_other_requests_go_the_long_way(
    door: UploadServer, change: tuple[str, str], status: int
) -> None:
    old, new = change
    request = door.request(bytes(200_000)).replace(old.encode(), new.encode(), 1)
    with door.connected() as connection:
        connection.sendall(request[:300])
        assert answer(connection)[0] == status
    assert not door.direct


def test_an_unknown_task_goes_the_long_way(door: UploadServer) -> None:
    with door.connected() as connection:
        connection.sendall(door.request(door.report(), task=b64url_encode(bytes(32))))
        assert b"unrecognizedTask" in answer(connection)[2]
    assert not door.direct


def test_a_task_that_has_ended_is_refused(door: UploadServer) -> None:
    door.pair.set_clocks(door.task.ends)
    with door.connected() as connection:
        connection.sendall(door.request(door.report()))
        assert b"unrecognizedTask" in answer(connection)[2]
    assert not door.direct


def test_credentials_that_are_checked_at_once(tmp_path: Path) -> None:
    at_once, _ = upload_credential_checks(None, [sha256(b"good").hex()])
    with a_door(tmp_path, credential=at_once) as door, door.connected() as connection:
        for credential, status in (("good", 200), ("good", 200), ("bad", 403), (None, 403)):
            fields = [] if credential is None else [f"Chorister-Upload-Credential: {credential}"]
            connection.sendall(door.request(door.report(), *fields))
            assert answer(connection)[0] == status
        assert len(door.direct) == 1
        assert door.stored() == 2


def test_whoever_waits_is_answered_before_the_end(door: UploadServer) -> None:
    with pytest.MonkeyPatch.context() as patch, door.connected() as connection:
        begun, go_on = threading.Event(), threading.Event()
        store = door.pair.leader.writer.store

        def slowly(plans: Any) -> Any:
            begun.set()
            assert go_on.wait(20)
            return store(plans)

        patch.setattr(door.pair.leader.writer, "store", slowly)
        connection.sendall(door.request(door.report()))
        assert begun.wait(20)
        door.server.should_exit = True
        wait_until(lambda: not any(each.is_serving() for each in door.server.servers), "the end")
        go_on.set()
        status, fields, _ = answer(connection)
        assert (status, fields["connection"]) == (200, "close")
        assert closed(connection)
    assert door.stored() == 2
