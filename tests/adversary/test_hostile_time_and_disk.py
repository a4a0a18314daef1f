"""Clocks that lie, ledgers that are deleted or restored, policies that would refund."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorister.device import HeadFile
from chorister.device.audit import Event
from chorister.device.ledger.counting import period_end
from chorister.device.ledger.ledger_entries import Created
from chorister.device.run import RunStep
from chorister.transparency.checkpoint import MAX_SKEW
from tests.device.home import Home, at_home
from tests.device.world import ANALYSIS, DAY, NOW, a_generous_policy, a_policy, a_recipe
from tests.keyboard import REMOVE
from tests.logworld import OTHER_ANALYSIS

PERIOD = 180 * DAY
FOREVER: dict[str, Any] = {
    "device/period": REMOVE,
    f"analyses/{ANALYSIS}/budget/period": REMOVE,
}
"""Budgets that never renew: a period could end between two questions, at the device's own time."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        home.donate()
        yield home


def spend(home: Home) -> None:
    home.ask(a_recipe("first"))
    home.deliver()
    assert (home.charges(), len(home.network.posts)) == (1, 1)


def test_a_clock_set_forward_renews_nothing(home: Home) -> None:
    spend(home)
    home.clock.set(NOW + PERIOD)
    home.network.log.publish([a_recipe("second")], time=NOW + 60)
    run = home.run()
    assert run.problems
    assert home.charges() == 1
    assert home.last(Event.SILENT).check == "CheckpointTime"


def test_a_clock_set_back_makes_no_old_checkpoint_fresh(home: Home) -> None:
    home.ask()
    home.clock.set(NOW - 30 * DAY)
    home.network.log.publish([a_recipe("first")], time=NOW - 30 * DAY)
    assert home.run().problems
    assert home.charges() == 0
    assert home.last(Event.SILENT).check == "LogRewound"


def test_a_clock_that_jumps_a_period_and_back(home: Home) -> None:
    spend(home)
    home.clock.set(NOW + PERIOD)
    home.run()
    home.clock.set(NOW + 120)
    home.ask(a_recipe("second", {"study": "another"}))
    assert home.charges() == 1
    assert (home.last(Event.REFUSED).check or "").startswith(f"analyses.{ANALYSIS}")


def test_time_that_the_aggregators_vouch_for_does_renew(home: Home) -> None:
    spend(home)
    later = NOW + PERIOD
    home.clock.set(later)
    window = {"opens": later - DAY, "closes": later + 6 * DAY, "ends": later + 7 * DAY}
    home.ask(a_recipe("second", {"window": window}))
    assert home.charges() == 2


def test_a_registry_that_shows_old_checkpoints_gains_no_third_budget(home: Home) -> None:
    """As old as the policy permits at the end of a period, then two new ones, a period apart.

    By the checkpoints' times alone that would be three budgets within 178 days.
    """
    age = home.policy.checkpoint_max_age
    created = home.device._opened().ledger.entries()[0]
    assert isinstance(created, Created)
    end = period_end(NOW, PERIOD, created.offset)
    assert end is not None
    charged_at = []
    for real, checkpoint in (
        (end + age - 1, end - 1),
        (end + age - 1, end),
        (end + PERIOD - MAX_SKEW, end + PERIOD),
    ):
        home.clock.set(real)
        window = {"opens": real - DAY, "closes": real + 6 * DAY, "ends": real + 7 * DAY}
        before = home.charges()
        recipe = a_recipe(f"question-{len(home.events())}", {"window": window})
        home.network.log.publish([recipe], time=checkpoint)
        assert not home.device.run_once().problems
        charged_at += [real] * (home.charges() - before)
    assert charged_at[-1] - charged_at[0] < PERIOD - age + 1
    assert len(charged_at) == 2


def test_a_new_ledger_is_silent_for_its_age_whatever_the_registry_shows(tmp_path: Path) -> None:
    """A checkpoint of two days ago would make a ledger seem two days older than it is."""
    with at_home(tmp_path, a_policy({"device/min_ledger_age": "7d"})) as home:
        home.device.close()
        shutil.rmtree(tmp_path / "device")
        (tmp_path / "elsewhere" / "head").unlink()
        home.device = home.build(create=True)
        home.device.opt_in()
        age, silence = home.policy.checkpoint_max_age, home.policy.device.min_ledger_age
        home.network.log.publish([], time=NOW - age)
        assert not home.device.run_once().problems
        for real, charges in ((NOW + silence - 1, 0), (NOW + silence, 1)):
            home.clock.set(real)
            window = {"opens": real - DAY, "closes": real + 6 * DAY, "ends": real + 7 * DAY}
            home.ask(a_recipe(f"question-{real}", {"window": window}))
            assert home.charges() == charges


@pytest.fixture
def frugal(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path, a_policy(FOREVER)) as home:
        home.donate()
        yield home


def test_a_restored_backup_answers_nothing(frugal: Home, tmp_path: Path) -> None:
    home = frugal
    home.device.close()
    shutil.copytree(tmp_path / "device", tmp_path / "backup")
    home.restart()
    home.ask(a_recipe("first"))
    home.ask(a_recipe("first"), a_recipe("second", {"privacy/epsilon": "0.1"}))
    home.deliver()
    sent = len(home.network.posts)
    home.device.close()
    shutil.rmtree(tmp_path / "device")
    shutil.copytree(tmp_path / "backup", tmp_path / "device")
    home.restart()
    run = home.ask(a_recipe("first"), a_recipe("third"))
    home.deliver()
    # One entry behind is completed from the head, and its recipe is never answered.
    assert len(home.network.posts) == sent
    assert home.charges() == 1
    assert run.answered == ()


def test_a_backup_of_two_charges_ago_silences_the_device(tmp_path: Path) -> None:
    with at_home(tmp_path, a_generous_policy()) as home:
        home.device.close()
        shutil.copytree(tmp_path / "device", tmp_path / "backup")
        home.restart()
        home.ask(a_recipe("first"))
        home.ask(a_recipe("first"), a_recipe("second"))
        assert home.charges() == 2
        home.device.close()
        shutil.rmtree(tmp_path / "device")
        shutil.copytree(tmp_path / "backup", tmp_path / "device")
        home.restart()
        run = home.ask(a_recipe("third"))
        assert run.silent is not None
        home.deliver()
        assert not home.network.posts
        assert home.charges() == 0
        assert home.last(Event.SILENT).check == "LedgerBehind"


def test_a_backup_from_before_a_coin_flips_it_again_and_pays(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coin that said no is in no ledger: the restored device flips it again, for the price."""
    home.device.close()
    shutil.copytree(tmp_path / "device", tmp_path / "backup")
    home.restart()
    monkeypatch.setattr("chorister.device.agent.flip", lambda *_, **__: False)
    assert home.ask(a_recipe("one")).declined == ("one",)
    assert home.ask(a_recipe("one")).declined == ()
    home.device.close()
    shutil.rmtree(tmp_path / "device")
    shutil.copytree(tmp_path / "backup", tmp_path / "device")
    home.restart()
    monkeypatch.setattr("chorister.device.agent.flip", lambda *_, **__: True)
    for _ in range(2):
        home.ask(a_recipe("one"))
        home.deliver()
    assert (home.charges(), len(home.network.posts)) == (1, 1)
    home.device.verify()


def test_a_deleted_ledger_silences_the_device(home: Home, tmp_path: Path) -> None:
    spend(home)
    home.device.close()
    for file in (tmp_path / "device").glob("ledger.db*"):
        file.unlink()
    home.device = home.build(create=True)
    run = home.ask(a_recipe("second"))
    assert run.silent is not None
    assert home.charges() == 0
    assert home.last(Event.SILENT).check == "LedgerBehind"


def test_a_head_that_can_t_be_read_means_silence(home: Home, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "head").write_bytes(b"not a head")
    run = home.ask(a_recipe("first"))
    assert run.silent is not None
    assert home.charges() == 0
    assert home.last(Event.SILENT).check == "HeadUnavailable"


def test_a_new_ledger_is_silent_for_its_first_days(tmp_path: Path) -> None:
    with at_home(tmp_path, a_policy({"device/min_ledger_age": "7d"})) as home:
        home.ask(a_recipe("first"))
        assert home.charges() == 0
        assert home.last(Event.REFUSED).check == "LedgerYoung"


def test_a_policy_update_refunds_nothing(home: Home) -> None:
    """At the beginning of a period, so that four days later only the shorter one has renewed."""
    created = home.device._opened().ledger.entries()[0]
    assert isinstance(created, Created)
    begin = (period_end(NOW, PERIOD, created.offset) or 0) + DAY
    window = {"window": {"opens": begin - DAY, "closes": begin + 6 * DAY, "ends": begin + 7 * DAY}}
    home.clock.set(begin)
    home.ask(a_recipe("first", window))
    home.deliver()
    assert (home.charges(), len(home.network.posts)) == (1, 1)
    renamed = {"device/reports": 100, f"analyses/{ANALYSIS}/budget/period": "2d"}
    home.policy = a_policy(renamed)
    home.restart()
    home.clock.set(begin + 4 * DAY)
    home.ask(a_recipe("second", window))
    assert home.charges() == 1
    assert (home.last(Event.REFUSED).check or "").startswith(f"analyses.{ANALYSIS}")
    assert Event.POLICY in home.events()


def test_an_analysis_removed_and_brought_back_remembers(frugal: Home) -> None:
    home = frugal
    spend(home)
    home.policy = a_policy({"device/period": REMOVE, f"analyses/{ANALYSIS}": REMOVE})
    home.restart()
    home.ask()
    home.policy = a_policy(FOREVER)
    home.restart()
    home.ask(a_recipe("second"))
    assert home.charges() == 1
    assert OTHER_ANALYSIS in home.policy.analyses


def test_a_restored_attempt_is_finished_without_its_data(home: Home, tmp_path: Path) -> None:
    """A copy made between charge and report, put back after the report left: OOV, same id."""

    class Copied(Exception):
        pass

    def hook(step: RunStep) -> None:
        if step is RunStep.CHARGED:
            raise Copied

    recipe = a_recipe("first")
    home.restart(hook=hook)
    with pytest.raises(Copied):
        home.ask(recipe)
    home.device.close()
    shutil.copytree(tmp_path / "device", tmp_path / "copy")
    queries: list[RunStep] = []
    home.restart()
    home.run()
    home.deliver()
    home.device.close()
    shutil.rmtree(tmp_path / "device")
    shutil.copytree(tmp_path / "copy", tmp_path / "device")
    home.restart(hook=lambda step: queries.append(step) if step is RunStep.QUERIED else None)
    home.run()
    home.deliver()
    assert not queries
    headers = {post[2][:16] for post in home.network.posts}
    assert len(headers) == 1  # one report id: the leader takes the first, and no other


def test_without_a_head_store_the_status_says_so(home: Home) -> None:
    home.restart(head=None)
    assert home.device.status().head == "none"
    assert any("restored backup" in words for words in home.device.status().weaknesses)
    home.restart(head=HeadFile(home.folder / "elsewhere" / "head"))
    assert home.device.status().head == "file"
