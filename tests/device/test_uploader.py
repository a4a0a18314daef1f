"""The uploader: what is sent again, postponed or dropped, and what an app and a policy decide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorister.canonical import b64url_encode
from chorister.dap.draft import PROBLEM, UPLOAD_ERRORS, ReportError
from chorister.device.audit import Event
from chorister.device.records import AttemptState
from chorister.device.transport import Answer
from chorister.errors import Unreachable
from tests.device.home import Home, at_home
from tests.device.world import (
    ANALYSIS,
    DAY,
    a_policy,
    a_recipe,
)
from tests.keyboard import REMOVE
from tests.logworld import public


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        yield home


# --- The outbox ---


LATER: list[Answer | Exception] = [
    Answer(status=500, content_type="", body=b""),
    Answer(status=302, content_type="", body=b""),
    Answer(
        status=403,
        content_type=PROBLEM,
        body=json.dumps({"type": "urn:ietf:params:ppm:dap:error:invalidTask"}).encode(),
    ),
    Unreachable("no network"),
]


@pytest.mark.parametrize("answer", LATER, ids=["500", "302", "invalidTask", "unreachable"])
def test_a_resend_is_byte_identical(home: Home, answer: Answer | Exception) -> None:
    home.ask(a_recipe("one"))
    home.network.answers.extend([answer] * 5)
    for tries in range(1, 6):
        home.deliver()
        home.restart()
        (waiting,) = home.device.status().outbox
        assert waiting.tries == tries
        assert waiting.next_try > home.clock.now()
    home.deliver()
    assert len(home.network.posts) == 6
    assert len(set(map(repr, home.network.posts))) == 1
    assert home.events()[-1] is Event.UPLOADED
    assert "attempt 6" in home.why()


def test_a_postponement_is_told_once_for_each_reason(home: Home) -> None:
    recipe = a_recipe("one")
    home.ask(recipe)
    home.network.answers.extend(each for each in (LATER[0], LATER[1], LATER[3]) for _ in range(3))
    for _ in range(9):
        home.deliver()
        home.ask(recipe)
    assert home.events().count(Event.POSTPONED) == 3
    assert "no network" in home.last(Event.POSTPONED).why
    home.deliver()
    assert home.events()[-1] is Event.UPLOADED


def test_a_ledger_s_silence_is_told_again_when_it_comes_back(home: Home) -> None:
    head = home.folder / "elsewhere" / "head"
    good = head.read_bytes()
    told = []
    for _ in range(2):
        before = home.events().count(Event.SILENT)
        head.write_bytes(b"x" * 100)
        for _ in range(3):
            assert home.run().silent
        told.append(home.events().count(Event.SILENT) - before)
        head.write_bytes(good)
        home.clock.advance(DAY)
        assert home.ask().silent is None
        good = head.read_bytes()
    assert told == [1, 1]


def test_outdated_config_drops_the_report_and_makes_no_other(home: Home) -> None:
    recipe = a_recipe("one")
    home.ask(recipe)
    (queued,) = home.device._opened().outbox.all()
    body = queued.report_id + bytes([ReportError.OUTDATED_CONFIG])
    home.network.answers.append(Answer(status=200, content_type=UPLOAD_ERRORS, body=body))
    home.deliver()
    for _ in range(3):
        home.clock.advance(3600)
        home.ask(recipe)
        home.deliver()
    assert len(home.network.posts) == 1
    assert home.device.status().recipes == {AttemptState.DROPPED: 1}
    assert home.events()[-1] is Event.DROPPED
    assert "outdated_config" in home.why()


def test_a_report_that_can_t_be_delivered_ends_with_its_window(home: Home) -> None:
    recipe = a_recipe("one")
    home.ask(recipe)
    home.network.down = True
    tries = 0
    while home.device.status().outbox:
        home.deliver()
        tries += 1
        if home.clock.now() >= recipe.window.closes:
            home.device.upload_due()
        assert tries < 200
    assert tries > 20
    assert home.events()[-1] is Event.DROPPED
    assert home.why() == "its answer period is over"


def test_a_report_to_a_pair_that_the_policy_no_longer_trusts_stays_here(home: Home) -> None:
    home.ask(a_recipe("one"))
    home.policy = a_policy({"aggregators/0/leader/url": "https://new.example.org/"})
    home.restart()
    home.deliver()
    assert not home.network.posts
    assert home.events()[-1] is Event.DROPPED


# --- The host app's credential ---


def test_an_upload_shows_the_app_s_credential_and_a_poll_none(home: Home) -> None:
    home.restart(upload_credential=lambda: "keyboard-app-2026")
    home.ask(a_recipe("one"))
    home.deliver()
    ((_, headers, _),) = home.network.posts
    assert headers["Chorister-Upload-Credential"] == "keyboard-app-2026"
    assert set(headers) == {"Content-Type", "DAP-Taskprov", "Chorister-Upload-Credential"}


def test_without_one_there_is_no_such_header(home: Home) -> None:
    home.ask(a_recipe("one"))
    home.deliver()
    ((_, headers, _),) = home.network.posts
    assert set(headers) == {"Content-Type", "DAP-Taskprov"}


@pytest.mark.parametrize("value", ["", " x", "a\r\nX: 1", "ä", "x" * 9000])
def test_a_credential_that_is_none_postpones_the_report(home: Home, value: str) -> None:
    home.restart(upload_credential=lambda: value)
    home.ask(a_recipe("one"))
    home.deliver()
    assert not home.network.posts
    assert "credential" in home.last(Event.POSTPONED).why
    home.restart(upload_credential=lambda: "good")
    home.deliver()
    assert len(home.network.posts) == 1


def test_an_app_that_fails_to_give_one_postpones_the_report(home: Home) -> None:
    def fail() -> str:
        raise RuntimeError("secret words")

    home.restart(upload_credential=fail)
    home.ask(a_recipe("one"))
    home.deliver()
    assert not home.network.posts
    assert "secret words" not in home.last(Event.POSTPONED).why


# --- A policy update, with a report in the outbox ---

STRANGER = b64url_encode(public("stranger"))
FORBIDDING: dict[str, tuple[dict[str, Any], str]] = {
    "another leader": ({"aggregators/0/leader/url": "https://other.example/dap/"}, "pair"),
    "another key of the leader": ({"aggregators/0/leader/cosigning_keys": [STRANGER]}, "sealed to"),
    "another key of the helper": ({"aggregators/0/helper/cosigning_keys": [STRANGER]}, "sealed to"),
    "no such analysis": ({f"analyses/{ANALYSIS}": REMOVE}, "analysis"),
    "another collector": ({f"analyses/{ANALYSIS}/collectors": ["00" * 32]}, "collector"),
    "a field closed": ({f"analyses/{ANALYSIS}/fields/user.age": REMOVE}, "field"),
}


@pytest.mark.parametrize("name", FORBIDDING)
def test_what_a_policy_update_forbids_does_not_leave(name: str, home: Home) -> None:
    changes, words = FORBIDDING[name]
    home.donate()
    home.ask(a_recipe("one"))
    home.policy = a_policy(changes)
    home.restart()
    home.deliver()
    assert not home.network.posts
    assert home.charges() == 1
    assert words in home.last(Event.DROPPED).why


def test_what_a_policy_update_leaves_alone_is_sent(home: Home) -> None:
    """A key added beside the old one, as when keys are rotated, and another budget."""
    both = [b64url_encode(public("leader")), STRANGER]
    home.ask(a_recipe("one"))
    home.policy = a_policy({"aggregators/0/leader/cosigning_keys": both, "device/reports": 3})
    home.restart()
    home.deliver()
    assert len(home.network.posts) == 1
