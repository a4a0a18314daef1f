"""A leader that answers wrongly, over real HTTP: nothing makes a second report, or a trail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from chorister.dap.draft import UPLOAD_ERRORS, ReportError
from chorister.device import HTTPTransport
from chorister.device.audit import Event
from chorister.device.records import AttemptState
from chorister.device.transport import Answer
from tests.device.home import Home, at_home
from tests.device.loopback import Loopback, Reply, Seen, serve
from tests.device.world import Network, a_policy, a_recipe

COOKIE = {"Set-Cookie": "device=42", "ETag": '"42"', "Retry-After": "1"}


class Leader:
    """Answers as it is told, then takes everything."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def __call__(self, _: Seen) -> Reply:
        if self.replies:
            return self.replies.pop(0)
        return Reply(headers=COOKIE)


class Mixed(Network):
    """The log from memory, the leader over the network."""

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, limit: int) -> Answer:
        self.posts.append((url, dict(headers), body))
        return HTTPTransport().post(url, headers=headers, body=body, limit=limit)


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
def server(leader: Leader) -> Iterator[Loopback]:
    with serve(leader) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, server: Loopback) -> Iterator[Home]:
    """A policy whose leader is on this machine, and cosigns under that name."""
    url = f"{server.url}/dap/"
    mixed = Mixed()
    mixed.log.rename_leader(url)
    with at_home(tmp_path, a_policy({"aggregators/0/leader/url": url}), mixed) as home:
        home.ask(a_recipe("one", {"aggregators/leader": url}))
        yield home


def last_words(home: Home) -> tuple[Event, str]:
    record = list(home.device.audit.records())[-1]
    return record.entry.event, record.entry.why


def test_redirects_cookies_and_500s(home: Home, leader: Leader, server: Loopback) -> None:
    leader.replies = [
        Reply(status=500, headers=COOKIE),
        Reply(status=307, headers={**COOKIE, "Location": f"{server.url}/device-42"}),
        Reply(status=503, headers=COOKIE, body=b"later"),
        Reply(status=200, headers={"Content-Type": "text/html"}, body=b"<html>"),
    ]
    words: list[tuple[Event, str]] = []
    for _ in range(5):
        home.deliver()
        words.append(last_words(home))
        home.restart()
    # Each time the audit log tells why the report waits; a cookie is nothing to tell of.
    assert [event for event, _ in words] == [*[Event.POSTPONED] * 4, Event.UPLOADED]
    for (_, why), said in zip(words[:4], ["500", "307", "503", "not a DAP message"], strict=True):
        assert said in why
        assert "42" not in why
    assert len(server.seen) == 5
    assert len({(seen.path, seen.body, str(seen.headers)) for seen in server.seen}) == 1
    assert len({seen.connection for seen in server.seen}) == 5
    assert not any("cookie" in name.lower() for seen in server.seen for name, _ in seen.headers)
    assert last_words(home)[0] is Event.UPLOADED


@pytest.mark.parametrize(
    "error",
    [ReportError.OUTDATED_CONFIG, ReportError.HPKE_UNKNOWN_CONFIG_ID, ReportError.REPORT_DROPPED],
)
def test_a_refused_report_is_dropped_and_never_made_again(
    error: ReportError, home: Home, leader: Leader, server: Loopback
) -> None:
    (queued,) = home.device._opened().outbox.all()
    body = queued.report_id + bytes([error])
    leader.replies = [Reply(headers={"Content-Type": UPLOAD_ERRORS}, body=body)]
    for _ in range(4):
        home.deliver()
        home.clock.advance(3600)
        home.ask(a_recipe("one", {"aggregators/leader": f"{server.url}/dap/"}))
        home.restart()
    assert len(server.seen) == 1
    assert home.charges() == 1
    assert home.device.status().recipes == {AttemptState.DROPPED: 1}
    event, why = last_words(home)
    assert event is Event.DROPPED
    assert error.name.lower() in why


def test_a_leader_that_never_takes_it_gets_the_same_bytes_until_the_window_ends(
    home: Home, leader: Leader, server: Loopback
) -> None:
    leader.replies = [Reply(status=500)] * 10_000
    while home.device.status().outbox:
        home.deliver()
        if home.clock.now() >= a_recipe("one").window.closes:
            home.device.upload_due()
    # About 48 tries; 60 or more in one of 2,000 runs, and each ten more are 5,000 times rarer.
    assert 10 < len(server.seen) < 100
    assert home.events().count(Event.POSTPONED) == 1, "the same reason is told once"
    assert "500" in home.last(Event.POSTPONED).why
    assert len({seen.body for seen in server.seen}) == 1
    assert last_words(home) == (Event.DROPPED, "its answer period is over")
