"""The agent when the person opts out or in again, or pauses the device, at any moment of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from chorister.device.audit import Event
from chorister.device.records import AttemptState
from chorister.device.run import RunStep
from tests.device.home import Home, at_home
from tests.device.world import (
    DAY,
    a_generous_policy,
    a_recipe,
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with at_home(tmp_path) as home:
        yield home


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
