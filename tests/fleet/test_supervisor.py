"""The supervisor: one a folder, and a server that ends is started again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from chorister.errors import InvalidInput
from chorister.fleet import supervisor
from chorister.fleet.deployment import Server
from chorister.fleet.supervisor import Supervisor, running_pid, stop_running
from tests.fleet.local import create


class Fake(Server):
    """Ends at once, and stops everything when it is started again."""

    stop_all: threading.Event

    def start(self) -> None:
        self.stop_all.set()

    @property
    def alive(self) -> bool:
        return False


def test_a_server_that_ended_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RESTART_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.01)
    deployment = create(tmp_path / "here")
    # The log is there now: it must not be created twice.
    (deployment.folder / "registry" / "log").mkdir()
    said: list[str] = []
    server = Fake(name="registry", arguments=("--create",), log=deployment.log("registry"))
    server.stop_all = threading.Event()
    Supervisor(deployment=deployment, say=said.append)._watch([server], server.stop_all)
    assert said[0].startswith("registry ended")
    assert said[1] == "registry was restarted"
    assert "--create" not in server.arguments


def test_of_one_folder_one_runs(tmp_path: Path) -> None:
    deployment = create(tmp_path / "here")
    assert running_pid(deployment) is None
    assert not stop_running(deployment)
    first, second = Supervisor(deployment=deployment), Supervisor(deployment=deployment)
    with first._locked():
        assert running_pid(deployment)
        with pytest.raises(InvalidInput, match="already running"), second._locked():
            pass
    assert running_pid(deployment) is None
