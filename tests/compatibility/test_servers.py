"""A registry, two aggregators and an analyst's study that an earlier version left go on.

**What every version owes to these files:** it opens them, with every report, every task and every
checkpoint that was cosigned; or it refuses them with an error of `chorister.errors` that says what
to do (see `test_refusals.py`). It never opens them by half: reports that were counted are not
counted again, a batch that was released is not released again, and a cosigner does not forget what
it signed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chorister as ch
from chorister.aggregator.config import load_config
from chorister.aggregator.service import Service
from chorister.analyst.rounds import RoundState
from chorister.clock import SettableClock
from chorister.dap.draft import Problem
from chorister.dap.messages import CollectionJobReq, Query
from chorister.errors import LogOutdated, ProblemError, QuestionWithdrawn
from chorister.policy import Policy
from chorister.registry.server import RegistryConfig, open_registry
from chorister.transparency.auditor import Audit, audit
from chorister.transparency.client import FolderSource
from chorister.transparency.entries import HPKEConfigEntry
from chorister.transparency.trust import Authority
from tests.compatibility.opening import Servers, start_log_again, unpack
from tests.logworld import ANALYSIS, DAY, entry_with, submission


class RestartedServers:
    """A deployment of an earlier version, whose log was started again as the guide says."""

    def __init__(self, kept: Path, folder: Path) -> None:
        self.expected: dict[str, Any] = unpack(kept, "servers", folder)
        self.folder = folder
        self.clock = SettableClock(self.expected["time"])
        start_log_again(folder)
        self.servers = Servers(folder, self.clock, begin=True)
        self.servers.publish()
        self.servers.publish()  # with the keys that both submitted to the new log

    def pause(self, seconds: float) -> None:
        """The servers work while the analyst waits."""
        self.servers.work()
        self.clock.advance(max(1, int(seconds)))

    def study(self) -> ch.Study:
        return self.servers.connection(self.pause).study("ages", analysis=ANALYSIS)

    def audited(self) -> Audit:
        authority = Authority.of([Policy.load(self.folder / "policy.toml")])
        return audit(FolderSource(self.servers.public), authority=authority)


@pytest.fixture
def old(kept: Path, tmp_path: Path) -> Iterator[RestartedServers]:
    found = RestartedServers(kept, tmp_path)
    yield found
    found.servers.close()


def sums(result: ch.Result) -> list[int]:
    (part,) = result.parts
    return [int(each) for each in part.sums]


def test_a_log_of_the_former_format_is_refused_and_left_alone(kept: Path, tmp_path: Path) -> None:
    expected = unpack(kept, "servers", tmp_path)
    clock = SettableClock(expected["time"])
    before = (tmp_path / "log" / "public" / "checkpoint").read_bytes()
    with (
        pytest.raises(LogOutdated, match=r"upgrade-the-log\.md"),
        open_registry(RegistryConfig.load(tmp_path / "registry.toml"), clock),
    ):
        pass
    for role in ("leader", "helper"):
        with pytest.raises(LogOutdated, match=r"upgrade-the-log\.md"):
            Service(load_config(tmp_path / f"{role}.toml", {}), clock)
    assert (tmp_path / "log" / "public" / "checkpoint").read_bytes() == before
    assert before.decode() == expected["checkpoint"]


def test_a_log_that_was_started_again_has_both_keys_and_new_entries(old: RestartedServers) -> None:
    found = old.audited()
    kinds = [type(logged.entry) for logged in found.entries]
    assert kinds.count(HPKEConfigEntry) == 2
    assert len(found.current.hpke_configs) == 2
    entry = submission(entry_with(old.expected["new_recipe"].encode())).encode()
    receipt = old.servers.registry.submit(entry)
    assert receipt.new
    assert not old.servers.registry.submit(entry).new
    old.servers.publish()
    found = old.audited()
    assert [logged.index for logged in found.entries if logged.leaf == receipt.leaf]
    assert len(found.cosignatures) == 2
    known = old.servers.leader.core.tasks.all()
    assert len(known) == len(old.expected["figures"]["leader"]) + 1


def test_cosigners_remember_what_they_signed(kept: Path, tmp_path: Path) -> None:
    old = RestartedServers(kept, tmp_path)
    old.servers.close()
    shutil.rmtree(tmp_path / "log")
    clock = SettableClock(old.clock.now() + DAY)
    config = RegistryConfig.load(tmp_path / "registry.toml")
    with open_registry(config, clock, create=True) as (registry, _):
        registry.issue()  # another history, under the same keys
    servers = Servers(tmp_path, clock)
    try:
        for service in (servers.leader, servers.helper):
            assert service.cosigning is not None
            assert not service.cosigning.run()
        assert not (servers.public / "checkpoint").exists()
    finally:
        servers.close()


def test_reports_that_waited_are_counted_once_and_the_sum_is_right(old: RestartedServers) -> None:
    assert old.servers.figures() == old.expected["figures"]
    study = old.study()
    (third,) = [each for each in study.rounds if each.number == 3]
    assert third.state is RoundState.ASKED
    old.servers.work()
    task = old.servers.task(third.recipe).task_id.hex()
    right = old.expected["sums"][2]
    for role in ("leader", "helper"):
        _, _, verified = old.servers.figures()[role][task]
        assert verified == sum(right)
    old.clock.set(third.recipe.window.closes)
    assert sums(study.wait(third)) == right
    # Both work off what they have, once: the rest is as it was.
    for role, tasks in old.servers.figures().items():
        for name, figures in old.expected["figures"][role].items():
            if name != task:
                assert tasks[name] == figures


def test_results_are_there_and_none_is_released_twice(old: RestartedServers) -> None:
    study = old.study()
    states = [each.state for each in study.rounds]
    assert states == [
        RoundState.COLLECTED,
        RoundState.ASKED,
        RoundState.ASKED,
        RoundState.WITHDRAWN,
    ]
    first, second, _, last = study.rounds
    assert sums(study.result(1)) == old.expected["sums"][0]
    # The leader had the second result; nobody fetched it before.
    assert sums(study.wait(second)) == old.expected["sums"][1]
    with pytest.raises(QuestionWithdrawn):
        study.wait(last)
    leader = old.servers.leader.leader
    for round_ in (first, second):  # both were handed over, so the jobs are deleted
        task = old.servers.task(round_.recipe)
        request = CollectionJobReq(query=Query.of(task.interval)).encode()
        with pytest.raises(ProblemError) as refused:
            leader.collection.create(task, request, task.collector)
        assert refused.value.problem is Problem.BATCH_OVERLAP


def test_a_new_question_is_answered_by_the_old_deployment(old: RestartedServers) -> None:
    study = old.study()
    question = study.histogram(
        ch.intervals("age", [10, 20, 30, 40]), reads={"user": ["age"]}, local_epsilon=8, epsilon=8,
        delta="1e-6", min_cohort=3, crowd="honest", window=10 * DAY, grace=DAY, repeat=9,
    )  # fmt: skip
    round_ = study.post(question, target=3)
    old.servers.publish()
    old.servers.upload(round_.recipe, [3, 1, 3])
    old.servers.work()
    assert sums(study.wait(round_)) == [0, 1, 0, 2]
