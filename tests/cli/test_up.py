"""`chorister up`, again, `down`, and up once more: it goes on where it was."""

from __future__ import annotations

import json
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chorister.cli import app
from chorister.cli.up import _terms
from chorister.fleet.deployment import Deployment
from chorister.fleet.simulated_fleet import devices_ready
from chorister.fleet.supervisor import running_pid
from tests.compatibility.opening import FIXTURES, unpack

RUNNER = CliRunner()


def call(*arguments: str, code: int = 0) -> dict[str, Any]:
    run = RUNNER.invoke(app, [*arguments, "--json"])
    assert run.exit_code == code, run.output + run.stderr
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


def entries(up: dict[str, Any]) -> int:
    with urllib.request.urlopen(f"{up['registry']}status") as answer:  # noqa: S310 (loopback)
        return int(json.load(answer)["entries"])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "here"
    yield folder
    if Deployment.exists(folder):
        RUNNER.invoke(app, ["down", str(folder)])


def test_it_goes_on_where_it_was(folder: Path) -> None:
    where = str(folder)
    first = call("up", where, "--fleet", "3")
    assert first["new"]
    assert first["devices"] == 3
    assert devices_ready(folder / "fleet") == 3  # a question asked now reaches all of them
    assert Path(first["token"]).stat().st_mode & 0o777 == 0o600
    logged = entries(first)
    assert logged >= 2  # both aggregators' keys

    again = call("up", where)  # it runs: nothing is started twice
    assert again == {**first, "new": False}
    pid = running_pid(Deployment.open(folder))
    assert pid
    healthy = call("doctor", where)
    assert healthy["healthy"]
    assert {each["what"] for each in healthy["findings"]} >= {"processes", "log", "sandbox"}

    assert call("down", where) == {"stopped": True}
    assert call("down", where) == {"stopped": False}
    assert running_pid(Deployment.open(folder)) is None
    assert not call("doctor", where, code=1)["healthy"]

    second = call("up", where)
    assert second == {**first, "new": False}
    assert running_pid(Deployment.open(folder)) != pid
    assert entries(second) == logged
    assert call("down", where) == {"stopped": True}


def test_a_port_that_another_program_took(folder: Path) -> None:
    deployment = Deployment.create(folder, _terms())
    with socket.socket() as other:
        other.bind(("127.0.0.1", deployment.ports["console"]))
        other.listen()
        run = RUNNER.invoke(app, ["up", str(folder)])
    assert run.exit_code == 2
    words = " ".join(run.stderr.split())
    assert f"another program uses port {deployment.ports['console']}" in words
    assert "stop that program" in words
    deployment.check_ports()  # it has gone


def test_a_folder_with_a_log_of_the_former_format(folder: Path, tmp_path: Path) -> None:
    """Refused at once, with nothing started or changed; and it goes on as the guide says."""
    Deployment.create(folder, _terms())
    unpack(FIXTURES / "2026-11-16", "servers", tmp_path / "former")
    outdated = {"log": "registry/log", "leader-head": "leader/head", "helper-head": "helper/head"}
    for kept, place in outdated.items():
        shutil.move(tmp_path / "former" / kept, folder / place)
    before = files(folder)
    for options in ((), ("--foreground",), ("--fleet", "2"), ("--json",)):
        run = RUNNER.invoke(app, ["up", str(folder), *options])
        assert run.exit_code == 2
        words = " ".join(run.stderr.split())
        assert "earlier version of Chorister" in words
        assert "delete this one" in words
        assert "upgrade-the-log.md" in words
    assert files(folder) == before
    assert call("down", str(folder)) == {"stopped": False}
    for place in outdated.values():
        shutil.move(folder / place, f"{folder / place}-former")
    assert entries(call("up", str(folder))) >= 3
    assert call("down", str(folder)) == {"stopped": True}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_can_not_be_is_said_in_one_line(folder: Path) -> None:
    for command in ("down", "doctor"):
        run = RUNNER.invoke(app, [command, str(folder)])
        assert run.exit_code == 2
        assert "there is no deployment" in run.stderr
    taken = folder.parent / "a-file"
    taken.write_text("no folder")
    run = RUNNER.invoke(app, ["up", str(taken)])
    assert run.exit_code == 2
    assert "choose another folder" in run.stderr
    run = RUNNER.invoke(app, ["doctor", str(folder), "--config", "x.toml"])
    assert run.exit_code == 2
    assert "not both" in run.stderr


def test_the_doctor_checks_an_installation_without_a_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RUNNER.invoke(app, ["doctor"])
    assert "sandbox: " in run.stdout
    assert "only this installation was checked" in " ".join(run.stdout.split())


def test_a_series_is_for_simulated_devices(folder: Path) -> None:
    run = RUNNER.invoke(app, ["up", str(folder), "--track"])
    assert run.exit_code != 0
    assert "add --fleet" in run.output + run.stderr
