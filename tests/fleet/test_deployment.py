"""A deployment's folder: whole or not at all, and private."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from chorister.aggregator.config import load_config
from chorister.analyst.live_fleet import Profile
from chorister.console.config import ConsoleConfig
from chorister.errors import InvalidInput, LogForked, LogWithheld, ServiceError
from chorister.fleet.deployment import Deployment, Server
from chorister.policy.contradictions import findings
from chorister.registry.server import RegistryConfig
from tests.fleet.local import TERMS, create
from tests.logworld import body_of, recipe, recipe_entry


def test_everything_can_be_read_by_those_who_need_it(tmp_path: Path) -> None:
    deployment = create(tmp_path / "here", devices=70)
    assert RegistryConfig.load(deployment.settings("registry")).read_policies()
    assert load_config(deployment.settings("leader"), {}).role == "leader"
    assert load_config(deployment.settings("helper"), {}).role == "helper"
    assert ConsoleConfig.load(deployment.settings("console")).port == deployment.ports["console"]
    profile = Profile.load(deployment.profile)
    assert profile.devices == 70
    assert profile.access().policy == deployment.policy
    assert deployment.policy.aggregators[0].one_operator


def test_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    deployment = create(tmp_path / "here")
    secret = [*deployment.folder.rglob("*.key"), *deployment.folder.rglob("*token")]
    secret.append(deployment.folder / "analyst" / "collector.json")
    assert len(secret) >= 10
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secret)
    assert deployment.folder.stat().st_mode & 0o777 == 0o700


def test_ports_and_keys_stay(tmp_path: Path) -> None:
    deployment = create(tmp_path / "here")
    again = Deployment.open(tmp_path / "here")
    assert (again.ports, again.policy) == (deployment.ports, deployment.policy)
    assert len(set(again.ports.values())) == 4
    with pytest.raises(InvalidInput, match="already"):
        create(tmp_path / "here")


def test_a_start_that_was_interrupted_is_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    first = create(folder)
    (folder / "deployment.json").unlink()
    with pytest.raises(InvalidInput, match="chorister up"):
        Deployment.open(folder)
    assert create(folder).policy != first.policy


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 2, "ports": {}}', '{"version": 1}'])
def test_a_damaged_marker_is_refused(tmp_path: Path, text: str) -> None:
    create(tmp_path / "here")
    (tmp_path / "here" / "deployment.json").write_text(text)
    with pytest.raises(InvalidInput, match="damaged"):
        Deployment.open(tmp_path / "here")


def test_the_profile_learns_how_many_devices_there_are(tmp_path: Path) -> None:
    deployment = create(tmp_path / "here")
    assert Profile.load(deployment.profile).devices is None
    for devices in (20, 30):
        deployment.expect_devices(devices)
        assert Profile.load(deployment.profile).devices == devices
    assert deployment.profile.read_text().count("devices =") == 1


def test_the_sample_policy_does_not_contradict_itself(tmp_path: Path) -> None:
    found = findings(create(tmp_path / "here").policy)
    assert [each for each in found if each.kind == "contradiction"] == []
    assert TERMS.reports == 1


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    deployment = create(tmp_path / "here")
    (deployment.folder / "leader" / "verify.key").unlink()
    (server,) = [each for each in deployment.servers() if each.name == "leader"]
    server.start()
    try:
        with pytest.raises(ServiceError, match=r"verify\.key"):
            deployment.await_health("leader", server)
    finally:
        server.stop()
    assert not server.alive


def test_a_server_without_words_points_to_its_log(tmp_path: Path) -> None:
    server = Server(name="leader", arguments=(), log=tmp_path / "none.log")
    assert "none.log" in server.last_line()
    server.check()
    server.stop()


def test_a_look_at_the_log_that_fails_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that stands still for some seconds, for example."""
    deployment = create(tmp_path / "here")
    looks = [
        LogWithheld("no answer in time", path="checkpoint"),
        (),
        [body_of(recipe_entry("one"))],
    ]

    def current(_: Deployment) -> SimpleNamespace:
        found = looks.pop(0)
        if isinstance(found, LogWithheld):
            raise found
        return SimpleNamespace(recipes=found)

    monkeypatch.setattr(Deployment, "current", current)
    deployment.await_recipe(recipe("one"))
    assert looks == []
    monkeypatch.setattr("chorister.fleet.deployment._START_TIMEOUT_SECONDS", 0.1)
    looks += [LogWithheld("no answer in time", path="checkpoint")] * 2
    with pytest.raises(ServiceError, match=r"was not published \(no answer in time\)"):
        deployment.await_recipe(recipe("two"))


def test_a_log_that_is_wrong_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def current(_: Deployment) -> SimpleNamespace:
        raise LogForked("two different logs")

    deployment = create(tmp_path / "here")
    monkeypatch.setattr(Deployment, "current", current)
    with pytest.raises(LogForked):
        deployment.await_recipe(recipe("one"))
