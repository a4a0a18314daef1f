"""A live fleet: publish, wait, collect; crashes, cancelling, and whatever may be late."""

from __future__ import annotations

import dataclasses
import json
import os
import ssl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import chorister as ch
from chorister.analyst.live_fleet import FleetAccess, LiveFleet, Profile
from chorister.analyst.rounds import RoundState
from chorister.canonical import b64url_encode
from chorister.clock import SettableClock, SystemClock
from chorister.dap.collector import Collector, RecipeStatus
from chorister.dap.task import task_configurations
from chorister.errors import (
    CohortTooSmall,
    InvalidInput,
    LogWithheld,
    ProblemError,
    QuestionWithdrawn,
    ResultPending,
    ServiceError,
    WindowOver,
)
from chorister.recipe import Recipe
from chorister.transparency.entries import SignedEntry
from tests.aggregator.inprocess_pair import InProcessPair, a_pair, wait_until
from tests.aggregator.operators import TOKENS, OperatorAddresses, Operators
from tests.aggregator.server_processes import server_processes
from tests.certificates import a_certificate
from tests.device.loopback import Reply, Seen, serve
from tests.logworld import ANALYSIS, key


class LiveWorld:
    """A pair of aggregators, and an analyst whose process may end at any time."""

    def __init__(self, pair: InProcessPair, clock: SettableClock, folder: Path) -> None:
        self.pair = pair
        self.clock = clock
        self.folder = folder
        self.access = FleetAccess(
            policy=pair.operators.policy,
            registry=pair.operators.at.registry,
            author_key=key("author"),
            collector_key=pair.operators.collector,
            token=TOKENS["collector"],
        )

    def connection(self, **options: Any) -> LiveFleet:
        return LiveFleet(
            self.access,
            folder=self.folder,
            transport=self.pair.network,
            clock=self.clock,
            pause=self.pause,
            **{"finish_seconds": 300, **options},
        )

    def pause(self, seconds: float) -> None:
        time.sleep(0.05)
        self.clock.advance(max(1, int(seconds)))

    def study(self) -> ch.Study:
        return self.connection().study("live", analysis=ANALYSIS)

    def question(self, study: ch.Study, **options: Any) -> ch.Question:
        chosen = {"local_epsilon": 8, "epsilon": 8, "delta": "1e-6", "min_cohort": 3, **options}
        return study.histogram(
            ch.intervals("age", [10, 20, 30, 40]), reads={"user": ["age"]}, **chosen
        )

    def upload(self, recipe: Recipe, bins: list[int]) -> None:
        """To the first group or arm."""
        task = next(iter(task_configurations(self.pair.operators.policy, recipe)))

        def ready() -> bool:
            self.clock.advance(1)
            for service in (self.pair.leader, self.pair.helper):
                assert service.cosigning is not None
                service.cosigning.run()
            return all(
                service.core.tasks.find(task.task_id) is not None and service.core.keys.published()
                for service in (self.pair.leader, self.pair.helper)
            )

        wait_until(ready, "the recipe to be cosigned")
        for report in self.pair.seal(task, bins):
            assert self.pair.upload(task, report).status_code == 200


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LiveWorld]:
    clock = SettableClock(SystemClock().now())
    servers = tmp_path / "servers"
    servers.mkdir()
    with a_pair(servers, clock=clock) as pair:
        yield LiveWorld(pair, clock, tmp_path / "studies")


def test_a_round_survives_crashes_of_the_collector(
    world: LiveWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = world.study()
    round_ = study.post(world.question(study))
    assert "0% of the minimum cohort" in study.status().explain()
    world.upload(round_.recipe, [2, 2, 2, 1])
    wait_until(
        lambda: "the end of the window; the minimum cohort is reached" in study.status().explain(),
        "verified reports",
    )

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    # It ends while it waits; after it asked for the batch; after the batch was released.
    for name in ("_await_cohort", "_await_batches", "acknowledge"):
        with monkeypatch.context() as patch:
            patch.setattr(LiveFleet, name, crash)
            doomed = world.study()
            with pytest.raises(KeyboardInterrupt):
                doomed.ask(world.question(doomed), target=3)
        world.clock.set(max(world.clock.now(), round_.recipe.window.closes))
    resumed = world.study()
    assert resumed.rounds[0].state is RoundState.COLLECTED
    result = resumed.ask(world.question(resumed))
    assert result.n_reports == 4
    assert result.noise_trials == 2
    # Without noise of devices, and with 4 coins a bin that are almost always 0.
    assert (result.parts[0].sums >= np.array([0, 1, 3, 0], dtype=np.uint64)).all()
    assert len(resumed.rounds) == 1


def test_a_target_ends_the_recipe_early(world: LiveWorld) -> None:
    study = world.study()
    question = world.question(study)
    round_ = study.post(question, target=3)
    world.upload(round_.recipe, [1, 1, 1])
    result = study.ask(question, target=3)
    assert result.n_reports == 3
    assert world.clock.now() < round_.recipe.window.closes
    with pytest.raises(ch.errors.ChoristerError):  # nobody may upload any more
        study.cancel()


def test_a_registry_that_is_busy_when_the_target_is_reached_is_told_later(
    world: LiveWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = world.study()
    question = world.question(study)
    round_ = study.post(question, target=3)
    world.upload(round_.recipe, [1, 1, 1])
    submit, calls = LiveFleet._submit, []

    def busy_twice(fleet: LiveFleet, entry: SignedEntry, body: bytes = b"") -> None:
        calls.append(entry)
        if len(calls) < 3:
            raise ServiceError("the registry can't take it now")
        submit(fleet, entry, body)

    monkeypatch.setattr(LiveFleet, "_submit", busy_twice)
    assert study.ask(question, target=3).n_reports == 3
    assert len(calls) == 3
    assert world.clock.now() < round_.recipe.window.closes


def test_an_unfillable_group_does_not_double_the_time(world: LiveWorld) -> None:
    """Once the window is over and all reports are verified, nobody waits for what can't come."""
    # Five seconds of this clock take 0.05 real ones: jobs get 90 of these, on a busy machine, too.
    study = world.connection(finish_seconds=18_000).study("live", analysis=ANALYSIS)
    question = world.question(study, arms=["first", "second"])
    round_ = study.post(question)
    world.upload(round_.recipe, [1, 1, 2, 2])
    closes = round_.recipe.window.closes
    world.clock.set(closes)
    result = study.ask(question)
    assert [part.group for part in result.parts] == [("first",)]
    assert result.missing == (("second",),)
    assert world.clock.now() < closes + 9_000  # and not all the time that jobs may take


def test_a_group_that_is_still_released_is_waited_for(world: LiveWorld) -> None:
    """A leader that has not released a full batch yet is not finished, whatever it lacks."""
    study = world.study()
    question = world.question(study, arms=["first", "second"])
    round_ = study.post(question)
    world.upload(round_.recipe, [1, 1, 2, 2])
    world.clock.set(round_.recipe.window.closes)
    wait_until(lambda: world.connection().progress(round_).filled >= 0.5, "verified reports")
    assert not world.connection()._finishing(study.rounds[0])[1]


def test_a_helper_that_is_down_when_the_window_closes_loses_nothing(world: LiveWorld) -> None:
    """A round stays open until the leader has finished, or the grace period is over."""
    study = world.connection(finish_seconds=20).study("live", analysis=ANALYSIS)
    question = world.question(study)
    round_ = study.post(question)
    world.upload(round_.recipe, [1, 1, 2, 2])
    world.pair.stop(world.pair.helper)
    closes = round_.recipe.window.closes
    world.clock.set(closes)
    with pytest.raises(ResultPending, match="not released the result yet"):
        study.collect_round(round_, lambda _: None)
    assert closes + 20 <= world.clock.now() < round_.recipe.window.ends
    assert study.rounds[0].state is RoundState.ASKED
    world.pair.helper = world.pair.start("helper")
    assert study.ask(question).n_reports == 4  # however often it has to try


def test_a_group_is_missing_only_if_the_leader_has_finished(
    world: LiveWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = world.connection(finish_seconds=20).study("live", analysis=ANALYSIS)
    question = world.question(study, arms=["first", "second"])
    round_ = study.post(question)
    world.upload(round_.recipe, [1, 1, 2, 2])
    world.clock.set(round_.recipe.window.closes)

    def refuses(*_: object) -> RecipeStatus:
        raise ProblemError(None, "not now", status=429)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "status", refuses)
        with pytest.raises(ResultPending):
            study.collect_round(round_, lambda _: None)
        assert study.rounds[0].state is RoundState.ASKED
    # The first group's result is there, however busy the machine is.
    wait_until(lambda: world.connection()._finishing(study.rounds[0])[1], "a released batch")
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "status", refuses)
        world.clock.set(round_.recipe.window.ends - 10)
        last = study.ask(question)  # what there is when the grace period ends
    assert [part.group for part in last.parts] == [("first",)]
    assert last.missing == (("second",),)


def test_the_expected_time_follows_the_reports(world: LiveWorld) -> None:
    """Without a target: shortly after the window. With one: when reports go on as they came."""
    fleet = world.connection()
    study = fleet.study("live", analysis=ANALYSIS)
    round_ = study.post(world.question(study))
    window = round_.recipe.window

    def expected(target: int | None, **status: Any) -> int | None:
        known = RecipeStatus(tasks=1, state="collecting", **status)
        return fleet._expected(dataclasses.replace(round_, target=target), known)

    assert expected(None, filled=0.5) == window.closes + 10
    quarter = (window.closes - window.opens) // 4
    world.clock.set(window.opens + quarter)
    assert expected(6, filled=1.0, reports=3) == window.opens + 2 * quarter + 10
    assert expected(3_000, filled=1.0, reports=3) == window.closes + 10
    assert expected(6, filled=0.0) == window.closes + 10
    world.clock.set(window.closes + 50)
    assert expected(6, filled=1.0, reports=3) == window.closes + 60


def test_too_few_reports_and_too_late(world: LiveWorld) -> None:
    study = world.study()
    few = study.post(world.question(study))
    world.upload(few.recipe, [1])
    world.clock.set(few.recipe.window.closes)
    with pytest.raises(CohortTooSmall, match=r"larger share.*recipe explain") as caught:
        study.ask(world.question(study))
    assert caught.value.needed == 3
    late = study.post(world.question(study, repeat=1))
    world.clock.set(late.recipe.window.ends)
    with pytest.raises(WindowOver, match="again"):
        study.ask(world.question(study, repeat=1))


def test_cancelling(world: LiveWorld) -> None:
    study = world.study()
    question = world.question(study)
    study.post(question)
    study.cancel()
    with pytest.raises(QuestionWithdrawn):
        study.ask(question)
    log = (world.pair.operators.folder / "log" / "entries").read_bytes()
    assert log.count(study.rounds[0].recipe.digest) == 2  # in its entry, and in its end


@pytest.mark.parametrize("arrived", [True, False])
def test_cancelling_a_question_that_may_be_published(
    world: LiveWorld, monkeypatch: pytest.MonkeyPatch, *, arrived: bool
) -> None:
    """The registry's answer was lost, or the question itself: devices must not go on."""
    study = world.study()
    submit = LiveFleet._submit

    def lost(fleet: LiveFleet, entry: SignedEntry, body: bytes = b"") -> None:
        if arrived:
            submit(fleet, entry, body)
        raise ServiceError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(LiveFleet, "_submit", lost)
        with pytest.raises(ServiceError):
            study.post(world.question(study))
    assert not study.rounds[0].published
    study.cancel()
    assert study.rounds[0].state is RoundState.WITHDRAWN
    log = (world.pair.operators.folder / "log" / "entries").read_bytes()
    assert log.count(study.rounds[0].recipe.digest) == (2 if arrived else 0)


def test_a_leader_that_says_nothing(world: LiveWorld) -> None:
    study = world.study()
    study.post(world.question(study))
    world.pair.stop(world.pair.leader)
    assert "leader can't say yet" in study.status().explain()
    world.pair.leader = world.pair.start("leader")


def test_a_leader_that_does_not_know_the_question_yet(
    world: LiveWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = world.study()
    study.post(world.question(study))

    def unknown(*_: object) -> None:
        raise ProblemError(None, "no recipe of this collector", status=404)

    monkeypatch.setattr(Collector, "status", unknown)
    words = study.status().explain()
    assert "the leader does not know the question yet" in words
    assert "404" not in words


def test_a_key_that_the_policy_does_not_list(world: LiveWorld) -> None:
    from chorister._native import HPKEKeypair

    stranger = dataclasses.replace(world.access, collector_key=HPKEKeypair.generate(3))
    connection = LiveFleet(stranger, folder=None)
    study = connection.study("stranger", analysis=ANALYSIS)
    with pytest.raises(InvalidInput, match="does not list our collector key"):
        world.question(study).run()


# --- A profile, and real sockets ----------------------------------------------------------------


def write_profile(operators: Operators, **changes: str) -> Path:
    folder = operators.folder
    pem = key("author").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    keys = operators.collector
    document = {
        "config_id": keys.config_id,
        "public_key": b64url_encode(keys.public_key),
        "private_key": b64url_encode(keys.private_key()),
    }
    for name, data in (
        ("author.key", pem),
        ("collector.json", json.dumps(document).encode()),
        ("collector.token", TOKENS["collector"].encode()),
    ):
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(data)
    values = {
        "policy": "policy.toml",
        "registry": f"{operators.at.registry.rstrip('/')}/",
        "author_key": "author.key",
        "collector_key": "collector.json",
        "token": "collector.token",
        **changes,
    }
    path = folder / "profile.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return path


def test_a_profile(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    profile = Profile.load(write_profile(operators))
    assert profile.folder == str(tmp_path / "studies")
    connection = ch.connect(profile)
    assert connection.policy == operators.policy
    assert connection.collector(ANALYSIS) == operators.digest.hex()
    os.environ["STUDY_TOKEN"] = TOKENS["collector"]
    profile = Profile.load(write_profile(operators, token="env:STUDY_TOKEN"))  # noqa: S106
    assert profile.access().token == TOKENS["collector"]
    del os.environ["STUDY_TOKEN"]


def test_profiles_that_make_no_sense(tmp_path: Path) -> None:
    operators = Operators(tmp_path)
    with pytest.raises(InvalidInput, match="can't read"):
        ch.connect(tmp_path / "missing.toml")
    with pytest.raises(InvalidInput, match="registry"):
        ch.connect(write_profile(operators, registry="nowhere"))
    with pytest.raises(InvalidInput, match="unknown field"):
        ch.connect(write_profile(operators, colour="blue"))
    path = write_profile(operators)
    (tmp_path / "collector.json").write_text("{}")
    with pytest.raises(InvalidInput, match="keygen collector"):
        ch.connect(path)
    (tmp_path / "collector.json").chmod(0o644)
    with pytest.raises(InvalidInput, match="others can read"):
        ch.connect(path)


def test_a_profiles_authorities_are_believed_by_every_client(tmp_path: Path) -> None:
    """By the one that publishes, the one that reads the log, and the leader's; by no other."""
    key_file, chain = a_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key_file)

    def answer(request: Seen) -> Reply:
        if "/dap/" in request.path:
            return Reply(body=b'{"tasks": 1, "state": "collecting", "filled": 0.3}')
        return Reply(body=b'{"index": 0}' if request.method == "POST" else b"a file")

    with serve(answer, tls=context) as server:
        operators = Operators(
            tmp_path, OperatorAddresses(leader=f"{server.url}/dap/", registry=f"{server.url}/")
        )
        fleet = ch.connect(write_profile(operators, ca_bundle=chain.name))
        study = fleet.study("private", analysis=ANALYSIS)
        question = study.histogram(
            ch.intervals("age", [10, 20]), reads={"user": ["age"]},
            local_epsilon=8, epsilon=8, delta="1e-6", min_cohort=2,
        )  # fmt: skip
        round_ = study.post(question)
        with fleet.log_source() as source:
            assert source.read("checkpoint", limit=100) == b"a file"
        assert fleet.progress(round_).filled == 0.3
        status = f"/dap/chorister/recipes/{round_.recipe.digest.hex()}"
        reached = [seen.path for seen in server.seen]
        # Before it is asked, what others have asked is read from the log.
        assert reached == ["/checkpoint", "/entries", "/checkpoint", status]

        stranger = ch.connect(write_profile(operators))
        with pytest.raises(ServiceError, match="can't be reached"):
            stranger.publish(round_)
        with stranger.log_source() as source, pytest.raises(LogWithheld):
            source.read("checkpoint", limit=100)
        assert "can't" in stranger.progress(round_).waiting_for
        assert len(server.seen) == len(reached)


def test_connect_to_real_servers(tmp_path: Path) -> None:
    """Three processes and sockets; the reports are sealed here, as devices would."""
    operators = Operators(tmp_path, OperatorAddresses.local())
    with server_processes(operators):
        study = ch.connect(write_profile(operators)).study("sockets", analysis=ANALYSIS)
        question = study.histogram(
            ch.intervals("age", [10, 20, 30, 40]), reads={"user": ["age"]},
            local_epsilon=8, epsilon=8, delta="1e-6", min_cohort=2,
        )  # fmt: skip
        round_ = study.post(question, target=2)
        upload_over_sockets(operators, round_.recipe, [1, 3])
        result = study.ask(question, target=2)
    assert result.n_reports == 2
    assert (result.parts[0].sums >= np.array([0, 1, 0, 1], dtype=np.uint64)).all()


def upload_over_sockets(operators: Operators, recipe: Recipe, bins: list[int]) -> None:
    import secrets

    import httpx2

    from chorister.dap.messages import HpkeConfigList
    from chorister.dap.task import task_binding
    from chorister.dap.upload_client import upload

    (task,) = task_configurations(operators.policy, recipe)

    def config(url: str) -> bytes | None:
        answer = httpx2.get(f"{url}hpke_config", timeout=60)
        if answer.status_code != 200:
            return None
        found = HpkeConfigList.decode(answer.content).configs
        return bytes(found[0]) if found else None

    leader, helper = (
        wait_until(partial(config, url), "an HPKE key", 60)
        for url in (operators.at.leader, operators.at.helper)
    )
    bits = np.zeros((len(bins), task.configuration.vdaf.length), np.uint8)
    bits[np.arange(len(bins)), bins] = 1
    interval = task.configuration.task_interval
    assert interval is not None
    for report in task_binding(task.configuration).seal_reports(
        bits,
        report_ids=secrets.token_bytes(16 * len(bins)),
        time=interval.start,
        leader_config=leader,
        helper_config=helper,
    ):
        request = upload(task.configuration.encode(), report)

        def sent(request: Any = request) -> bool:
            answer = httpx2.post(
                request.url, headers=dict(request.headers), content=request.body, timeout=60
            )
            return answer.status_code == 200 and not answer.content

        wait_until(sent, "the leader to know the task", 60)


def test_item_1_questions_of_others_are_read_from_the_public_log(
    world: LiveWorld, tmp_path: Path
) -> None:
    """From another folder they are somebody else's; where the log is away, they are unknown."""
    study = world.study()
    assert study.fleet.others().recipes == ()
    round_ = study.post(world.question(study))
    world.upload(round_.recipe, [1, 2, 3])
    assert study.fleet.others().recipes == ()
    other = LiveWorld(world.pair, world.clock, tmp_path / "other").connection()
    assert [recipe.digest for recipe in other.others().recipes] == [round_.recipe.digest]
    budget = other.study("mine", analysis=ANALYSIS).budget
    assert budget.others == 1
    assert budget.limits[0].spent.epsilon == 8
    away = LiveFleet(
        dataclasses.replace(world.access, registry="https://nobody.invalid/"),
        folder=None,
        transport=world.pair.network,
        clock=world.clock,
    )
    assert "can't be read" in away.others().problem
