"""The agent, from recipe to upload, with real databases, noise, shares and seals."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorister.canonical import b64url_encode
from chorister.dap.draft import PROBLEM, UPLOAD_ERRORS, ReportError
from chorister.device.audit import Event
from chorister.device.outbox import Report, make_report
from chorister.device.records import AttemptState
from chorister.device.run import RunStep
from chorister.device.transport import Answer
from chorister.errors import Unreachable
from chorister.recipe import Recipe
from tests.device.home import Home, at_home
from tests.device.world import (
    ANALYSIS,
    DAY,
    REGISTRY,
    a_generous_policy,
    a_policy,
    a_recipe,
    bits_of,
    ids,
)
from tests.keyboard import REMOVE
from tests.logworld import public


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        yield home


def test_a_recipe_becomes_one_verified_report(home: Home) -> None:
    home.donate()
    recipe = a_recipe("one")
    home.ask(recipe)
    assert not home.network.posts
    home.deliver()
    (report,) = home.network.reports
    task, bits = bits_of(home.policy, recipe, report)
    assert dict(task.group.values) == {"user.locale": "de_DE"}
    assert sum(bits) <= recipe.randomizer.max_weight
    assert home.device.status().outbox == ()
    assert home.device.status().recipes == {AttemptState.SENT: 1}
    assert home.events()[-3:] == [Event.CHARGED, Event.REPORTED, Event.UPLOADED]
    reported = home.last(Event.REPORTED)
    assert reported.sent is not None
    assert list(reported.sent.ones) == [i for i, bit in enumerate(bits) if bit]
    assert reported.sent.report == ids(report).hex()
    home.device.audit.verify()


def test_nothing_is_asked_twice(home: Home) -> None:
    recipe = a_recipe("one")
    for _ in range(3):
        home.ask(recipe)
        home.deliver()
        home.restart()
    assert len(home.network.posts) == 1
    assert home.events().count(Event.CHARGED) == 1


def test_all_bodies_are_fetched_whether_answered_or_not_and_once_for_each_list(home: Home) -> None:
    recipes = [a_recipe("one"), a_recipe("two", {"privacy/min_cohort": 2})]
    for expected in (["list.tlog-proof", "list", *["body"] * 4], ["list.tlog-proof", "list"]):
        home.network.gets.clear()
        home.ask(*recipes)
        fetched = [url.removeprefix(REGISTRY).split("/")[0] for url in home.network.gets]
        assert fetched == expected


def test_a_device_without_data_reports_too(home: Home) -> None:
    recipe = a_recipe("one")
    home.ask(recipe)
    home.deliver()
    task, _ = bits_of(home.policy, recipe, home.network.reports[0])
    assert dict(task.group.values) == {"user.locale": "other"}


def test_without_consent_nothing_runs_and_what_waits_is_dropped(home: Home) -> None:
    home.ask(a_recipe("one"))
    assert len(home.device.status().outbox) == 1
    home.device.opt_out()
    assert home.device.status().outbox == ()
    home.network.gets.clear()
    assert home.run().silent == "the person has not opted in"
    home.clock.advance(DAY)
    home.run()
    assert not home.network.gets
    assert not home.network.posts
    assert home.events()[-1] is Event.DROPPED


@pytest.mark.parametrize("step", [RunStep.CHARGED, RunStep.QUEUED, RunStep.UPLOADING])
def test_consent_withdrawn_in_the_middle_of_a_run(step: RunStep, tmp_path: Path) -> None:
    """From that moment on no query runs and no further report leaves."""
    with at_home(tmp_path, a_generous_policy()) as home:
        seen: list[RunStep] = []

        def hook(at: RunStep) -> None:
            seen.append(at)
            if at is step:
                home.device.opt_out()

        home.restart(hook=hook)
        home.ask(*(a_recipe(f"r{i}", {"study": f"s{i}"}) for i in range(3)))
        home.deliver()
        after = seen[seen.index(step) + 1 :]
        assert RunStep.QUERIED not in after or step is RunStep.UPLOADING
        assert len(home.network.posts) == (1 if step is RunStep.UPLOADING else 0)
        home.run()
        assert home.device.status().outbox == ()
        assert home.device._opened().attempts.unfinished() == []


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "crash between the databases"])
@pytest.mark.parametrize("state", [AttemptState.QUEUED, AttemptState.CHARGED])
def test_a_report_of_an_earlier_consent_never_leaves(
    home: Home, state: AttemptState, whole: bool
) -> None:
    """All within one second, so that no time tells the two consents apart."""

    def hook(step: RunStep) -> None:
        if step is RunStep.CHARGED and state is AttemptState.CHARGED:
            raise KeyboardInterrupt

    home.donate()
    home.restart(hook=hook)
    with contextlib.suppress(KeyboardInterrupt):
        home.ask(a_recipe("one"))
    assert home.device.status().recipes == {state: 1}
    if whole:
        home.device.opt_out()
    else:  # the process ends when the events' database has it, and the ledger's not yet
        home.device._opened().store.opt_out(purge=True)
    home.restart()
    home.device.opt_in()
    home.device.opt_in()
    assert home.device.status().recipes == {AttemptState.DROPPED: 1}
    home.run()
    home.deliver()
    home.clock.advance(DAY)
    home.run()
    assert not home.network.posts
    assert home.events().count(Event.DROPPED) == 1


@pytest.mark.parametrize("step", [RunStep.RECIPE_ARRIVED, RunStep.CHARGED, RunStep.QUERIED])
def test_consent_withdrawn_and_given_again_in_the_middle_of_a_run(
    home: Home, step: RunStep
) -> None:
    other = home.build()

    def hook(at: RunStep) -> None:
        if at is step:
            other.opt_out()
            other.opt_in()

    home.donate()
    home.restart(hook=hook)
    run = home.ask(a_recipe("one"))
    other.close()
    home.deliver()
    late = step is not RunStep.RECIPE_ARRIVED
    assert run.answered == (() if late else ("one",))
    assert len(home.network.posts) == (0 if late else 1)


def test_consenting_once_more_drops_nothing(home: Home) -> None:
    home.ask(a_recipe("one"))
    home.device.opt_in()
    home.deliver()
    assert len(home.network.posts) == 1


def test_a_paused_device_does_nothing_until_it_goes_on(home: Home) -> None:
    home.ask(a_recipe("one"))
    home.device.pause()
    home.network.gets.clear()
    home.clock.advance(DAY)
    assert home.run().silent == "paused"
    home.restart()
    home.clock.advance(home.device.quiet_seconds())
    assert home.device.upload_due().silent == "paused"
    assert not home.network.gets
    assert not home.network.posts
    home.device.resume()
    home.clock.advance(home.device.quiet_seconds())
    home.network.log.publish([], time=home.clock.now())
    home.run()
    home.deliver()
    assert len(home.network.posts) == 1


@pytest.mark.parametrize(
    "step", [RunStep.RECIPE_ARRIVED, RunStep.CHARGED, RunStep.QUEUED, RunStep.UPLOADING]
)
def test_a_pause_by_another_process_in_the_middle_of_a_run(step: RunStep, tmp_path: Path) -> None:
    """From that moment on nothing is charged, queried or sent."""
    with at_home(tmp_path, a_generous_policy()) as home:
        other = home.build()
        after: list[RunStep] = []

        def hook(at: RunStep) -> None:
            if other.paused:
                after.append(at)
            elif at is step:
                other.pause()

        home.restart(hook=hook)
        home.ask(*(a_recipe(f"r{i}", {"study": f"s{i}"}) for i in range(3)))
        home.deliver()
        other.close()
        assert not {RunStep.CHARGED, RunStep.QUERIED, RunStep.UPLOADING} & set(after)
        assert len(home.network.posts) == (1 if step is RunStep.UPLOADING else 0)
        assert home.charges() == {RunStep.RECIPE_ARRIVED: 0, RunStep.CHARGED: 1}.get(step, 3)


@pytest.mark.parametrize("how", ["opted in", "opted out", "paused", "no network"])
def test_every_poll_deletes_what_is_older_than_its_retention(home: Home, how: str) -> None:
    home.donate()
    if how == "opted out":
        home.device.opt_out(purge=False)
    if how == "paused":
        home.device.pause()
    home.network.down = how == "no network"
    for days, kept in ((1, True), (4000, False)):
        home.clock.advance(days * DAY)
        home.network.log.publish([], time=home.clock.now())
        home.run()
        connection = home.device._opened().store._connection
        rows = connection.execute("SELECT count(*) FROM stream_keyboard").fetchall()
        assert rows == [(int(kept),)]


def test_the_coin_is_flipped_once_and_remembered(home: Home) -> None:
    recipe = a_recipe("one", {"participation/probability": "0.000000000000000000000001"})
    for _ in range(3):
        home.ask(recipe)
        home.restart()
    assert home.events().count(Event.NOT_DRAWN) == 1
    assert home.device.status().recipes == {AttemptState.DECLINED: 1}
    assert not home.device.status().outbox


def test_a_jump_of_the_clock_flips_no_coin_again(home: Home, monkeypatch: Any) -> None:
    flips: list[object] = []

    def tails(probability: object, **_: object) -> bool:
        flips.append(probability)
        return False

    monkeypatch.setattr("chorister.device.agent.flip", tails)
    recipe = a_recipe("one", {"participation/probability": "0.5"})
    assert home.ask(recipe).declined == ("one",)
    now = home.clock.now()
    for jump in (400 * DAY, 7 * DAY, -400 * DAY):
        home.clock.set(now + jump)
        home.run()
        home.clock.set(now)
        home.run()
    assert len(flips) == 1
    # With its window closed by the cosigners' time as well, it is forgotten.
    home.clock.set(recipe.window.closes + 1)
    home.ask()
    assert home.device.status().recipes == {}


def test_no_coin_is_flipped_for_a_recipe_that_ends_too_soon(home: Home, monkeypatch: Any) -> None:
    monkeypatch.setattr("chorister.device.agent.flip", lambda *_, **__: pytest.fail("flipped"))
    recipe = a_recipe("one")
    home.clock.set(recipe.window.closes - 3)
    assert home.ask(recipe).refused == ("one",)
    assert home.last(Event.REFUSED).check == "time"


def test_the_arm_is_drawn_by_the_device_and_kept(home: Home) -> None:
    arms = [{"name": "a", "weight": 1}, {"name": "b", "weight": 1}]
    recipe = a_recipe("one", {"arms": arms, "group_by": []})
    home.ask(recipe)
    home.deliver()
    task, _ = bits_of(home.policy, recipe, home.network.reports[0])
    sent = home.last(Event.REPORTED).sent
    assert sent is not None
    assert task.group.arm == sent.arm
    assert sent.arm in ("a", "b")


def test_a_study_is_answered_once_where_it_says_so(tmp_path: Path) -> None:
    with at_home(tmp_path, a_generous_policy()) as home:
        once = {"participation/once_per_study": True}
        study = [a_recipe(name, once) for name in ("one", "two", "three")]
        home.ask(*study, a_recipe("other", {**once, "study": "other"}))
        assert home.events().count(Event.CHARGED) == 2
        refused = [r.entry for r in home.device.audit.records() if r.entry.event is Event.REFUSED]
        assert [entry.check for entry in refused] == ["participation"] * 2


@pytest.mark.parametrize("interrupted", [False, True], ids=["at once", "after a crash"])
def test_a_report_that_can_t_be_made_stops_no_other(
    tmp_path: Path, monkeypatch: Any, interrupted: bool
) -> None:
    def fail_for_one(recipe: Recipe, *rest: Any) -> Report:
        if recipe.id == "one":
            raise ValueError("an error of a kind that nobody thought of")
        return make_report(recipe, *rest)

    def hook(step: RunStep) -> None:
        if step is RunStep.QUERIED and interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr("chorister.device.agent.make_report", fail_for_one)
    with at_home(tmp_path, a_generous_policy()) as home:
        home.restart(hook=hook)
        with contextlib.suppress(KeyboardInterrupt):
            home.ask(a_recipe("one"), a_recipe("two"))
        home.restart()
        home.run()
        assert home.device.status().recipes == {AttemptState.DROPPED: 1, AttemptState.QUEUED: 1}
        assert "ValueError" in home.last(Event.DROPPED).why


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
    assert "try 6" in home.why()


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
