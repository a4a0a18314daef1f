"""`chorister device`, against a registry and a leader on this machine, by the system's clock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chorister.cli import app
from chorister.device.audit import Event
from tests.certificates import a_certificate
from tests.cli.toml import dumps
from tests.device.loopback import Loopback, Reply, Seen, serve
from tests.device.world import DAY, ForgedLog, a_policy, a_recipe, an_entry
from tests.logworld import body_of


class Command:
    """The command line for one device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"CHORISTER_DEVICE": str(folder / "device"), "NO_COLOR": "1"}

    def __call__(self, *words: str, given: str = "", code: int = 0) -> str:
        runner = CliRunner()
        result = runner.invoke(app, ["device", *words], input=given, env=self.environment)
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def log() -> ForgedLog:
    return ForgedLog()


@pytest.fixture
def server(log: ForgedLog) -> Iterator[Loopback]:
    def answer(request: Seen) -> Reply:
        data = log.files.get(request.path.removeprefix("/"))
        return Reply(status=404) if data is None else Reply(body=data)

    with serve(answer) as server:
        yield server


@pytest.fixture
def device(tmp_path: Path, server: Loopback) -> Command:
    """Made, opted in, with data."""
    (tmp_path / "policy.toml").write_text(dumps(a_policy().model_dump(exclude_none=True)))
    command = Command(tmp_path)
    command(
        *("init", "--policy", str(tmp_path / "policy.toml"), "--registry", server.url),
        *("--key-file", str(tmp_path / "key"), "--head-file", str(tmp_path / "head"), "--opt-in"),
    )
    return command


def recipe_now(name: str, **changes: Any) -> Any:
    now = int(time.time())
    window = {"opens": now - DAY, "closes": now + 6 * DAY, "ends": now + 7 * DAY}
    return a_recipe(name, {"window": window, **changes})


def test_from_donation_to_the_audit_log(device: Command, log: ForgedLog) -> None:
    assert "stored 2" in device(
        *("donate", "keyboard"),
        given='{"ngram": "hello you", "perplexity": 2}\n\n{"ngram": null, "perplexity": null}\n',
    )
    assert "stored 1" in device("donate", "user", given='{"age": 33, "locale": "de_DE"}')
    log.publish([], time=int(time.time()) - 60)
    assert device.json("run", "--once")["silent"] is None
    recipe = recipe_now("one")
    # The ledger was created by the device's clock, and is silent for a second.
    log.publish([recipe], time=int(time.time()) + 2)
    done = device.json("run", "--once")
    assert done["answered"] == ["one"]
    assert done["problems"] == []
    status = device.json("status")
    assert status["opted_in"]
    (waiting,) = status["outbox"]
    assert waiting["recipe"] == "one"
    # Drawn from then on: it may have come already, once in a thousand runs of a slow machine.
    assert waiting["next_try"] > done["busy_until"] - 1
    assert status["budgets"][0]["limit"] == "device"
    assert status["budgets"][0]["epsilon"] == "0.8"
    assert "waiting: one" in device("status")
    records = json.loads(device("audit", "--json"))
    events = [record["entry"]["event"] for record in records]
    assert events[-2:] == [Event.CHARGED, Event.REPORTED]
    assert "hello world" not in device("audit", "--json").replace(recipe.query, "")
    assert device("audit", "--html").startswith("<!doctype html>")
    assert "Find words that follow each other" in device("audit")
    assert device("audit", "--newest", "1").count("why:") == 1
    assert device.json("audit", "verify")["records"] == len(records)


def test_the_audit_logs_commands_name_a_device(
    device: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHORISTER_DEVICE", raising=False)
    for words in (["audit"], ["audit", "verify"]):
        run = CliRunner().invoke(app, ["device", *words])
        assert run.exit_code == 2
        assert "--folder FOLDER" in run.stderr
        assert CliRunner().invoke(app, ["device", *words, "--help"]).exit_code == 0
    at = ["--folder", str(device.folder / "device")]
    for words in (["audit", *at, "verify"], ["audit", "verify", *at]):
        assert CliRunner().invoke(app, ["device", *words]).exit_code == 0


def test_pausing_consent_and_purging(device: Command) -> None:
    device("pause")
    assert device.json("status")["paused"]
    assert "nothing was done: paused" in device("run", "--once")
    device("pause", "--off")
    assert not device.json("status")["paused"]
    device("purge", given="n\n", code=1)
    device("purge", "--yes")
    device("consent", "--out")
    assert not device.json("status")["opted_in"]
    event = '{"ngram": "x", "perplexity": 1}'
    assert "not opted in" in device("donate", "keyboard", given=event, code=1)
    device("consent", "--in")
    device("donate", "keyboard", given=event)
    records = json.loads(device("audit", "--json"))
    assert [record["entry"]["event"] for record in records] == [
        *(Event.OPTED_IN, Event.PAUSED, Event.UNPAUSED),
        *(Event.PURGED, Event.OPTED_OUT, Event.OPTED_IN),
    ]


def test_explain_says_yes_or_no_and_why(device: Command, log: ForgedLog, tmp_path: Path) -> None:
    for age in (60, -2):
        log.publish([], time=int(time.time()) - age)
        device("run", "--once")
    (tmp_path / "good").write_bytes(body_of(an_entry(recipe_now("good"))).jws)
    assert device.json("explain", str(tmp_path / "good"))["allowed"]
    bad = an_entry(recipe_now("bad", **{"privacy/min_cohort": 10}), "stranger")
    (tmp_path / "bad").write_bytes(body_of(bad).jws)
    said = device("explain", str(tmp_path / "bad"), code=1)
    assert "no author" in said
    assert "no cohort" in said


def test_mistakes_are_explained(device: Command, tmp_path: Path) -> None:
    assert "not JSON" in device("donate", "keyboard", given="{", code=2)
    assert "JSON object" in device("donate", "keyboard", given="[]", code=2)
    wrong = '{"ngram": 7, "perplexity": 1}'
    assert "keyboard.ngram" in device("donate", "keyboard", given=wrong, code=2)
    assert "no such stream" in device("donate", "nowhere", given=wrong, code=2)
    again = ("init", "--policy", str(tmp_path / "policy.toml"), "--registry", "http://localhost/")
    assert "already" in device(*again, "--key-file", str(tmp_path / "k2"), code=2)
    assert "either --key-file or --keyring" in device(*again, code=2)
    other = Command(tmp_path / "nowhere")
    assert "device init" in other("status", code=2)
    inside = tmp_path / "other" / "device" / "key"
    said = Command(tmp_path / "other")(*again, "--key-file", str(inside), code=2)
    assert "elsewhere" in said
    (tmp_path / "device" / "device.json").write_text("{}")
    assert "device.json" in device("status", code=2)


def test_everything_in_the_folder_is_its_owner_s_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.toml").write_text(dumps(a_policy().model_dump(exclude_none=True)))
    folder = tmp_path / "device"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "policy.toml").write_text("left from an init that was interrupted")
    (folder / "policy.toml").chmod(0o644)
    init = (
        *("init", "--policy", str(tmp_path / "policy.toml"), "--registry", "http://localhost/"),
        *("--key-file", str(tmp_path / "key"), "--proxy", "http://me:secret@localhost:1"),
    )
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        assert "another user" in Command(tmp_path)(*init, code=2)
    before = os.umask(0o022)
    try:
        Command(tmp_path)(*init)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert {"device.json", "policy.toml", "events.db", "ledger.db"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_authorities_are_checked_when_a_device_is_created(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(dumps(a_policy().model_dump(exclude_none=True)))
    init = (
        *("init", "--policy", str(tmp_path / "policy.toml"), "--registry", "https://log.example/"),
        *("--key-file", str(tmp_path / "key"), "--ca-bundle", str(tmp_path / "authorities.pem")),
    )
    assert "authorities" in Command(tmp_path)(*init, code=2)
    _, certificate = a_certificate(tmp_path)
    certificate.rename(tmp_path / "authorities.pem")
    Command(tmp_path)(*init)
    assert "authorities.pem" in (tmp_path / "device" / "device.json").read_text()


def test_a_folder_that_can_t_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(dumps(a_policy().model_dump(exclude_none=True)))
    init = ("init", "--policy", str(tmp_path / "policy.toml"), "--registry", "http://localhost/")
    (tmp_path / "device").write_text("a file")
    said = Command(tmp_path)(*init, "--key-file", str(tmp_path / "key"), code=2)
    assert "as the device's folder" in said
