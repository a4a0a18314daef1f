"""A process that runs a device, and is killed where the test says.

`python -m tests.crash.killed_device` reads one JSON object a line, forks, lets the child run a
device on the folder that it names, and prints how the child ended. Everything that counts is in
files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chorister.clock import SettableClock
from chorister.device import Device, GivenKey, HeadFile, Timing
from chorister.device.run import RunStep
from chorister.device.sandbox import Sandbox
from chorister.device.store import Snapshot
from chorister.device.transport import Answer
from chorister.errors import DeviceBusy, Unreachable
from chorister.policy import Policy

REGISTRY = "https://registry.example/log/"
TIMING = Timing(query=5, slack=5, housekeeping=1, settle=0, spread=600, poll=600)


class DiskNetwork:
    """A log in a folder, and a leader that keeps what it gets in a file."""

    def __init__(self, folder: Path, *, down: bool = False) -> None:
        self._folder = folder
        self._down = down

    def get(self, url: str, *, limit: int) -> Answer:
        path = self._folder / "log" / url.removeprefix(REGISTRY)
        if not path.is_file() or path.stat().st_size > limit:
            return Answer(status=404, content_type="", body=b"")
        return Answer(status=200, content_type="", body=path.read_bytes())

    def post(self, url: str, *, headers: Mapping[str, str], body: bytes, limit: int) -> Answer:
        assert url.startswith("https://leader.example.org/")
        assert set(headers) == {"Content-Type", "DAP-Taskprov"}
        assert limit >= 17
        append(self._folder / "uploads", body.hex())
        if self._down:
            raise Unreachable("the answer was lost")
        return Answer(status=200, content_type="", body=b"")


class LoggingSandbox:
    """The real sandbox; every query that it runs leaves a line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sandbox = Sandbox()

    def choose(self, query: str, snapshot: Snapshot, **options: Any) -> int:
        append(self._folder / "queries", query)
        return self._sandbox.choose(query, snapshot, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def a_device(folder: Path, clock: SettableClock, policy: Policy, **changes: Any) -> Device:
    return Device(
        folder / "device",
        policy,
        GivenKey(bytes(range(32))),
        registry=REGISTRY,
        head=HeadFile(folder / "elsewhere" / "head"),
        clock=clock,
        timing=TIMING,
        **changes,
    )


def live(task: Mapping[str, Any]) -> None:
    """One life of a device: a run at `now`, then the uploads that it planned."""
    folder, clock = Path(task["folder"]), SettableClock(task["now"])

    def hook(step: RunStep) -> None:
        if step == task["step"]:
            os.kill(os.getpid(), signal.SIGKILL)

    device = a_device(
        folder,
        clock,
        Policy.model_validate_json((folder / "policy.json").read_text()),
        transport=DiskNetwork(folder, down=task["down"]),
        sandbox=LoggingSandbox(folder),
        hook=hook,
    )
    if task["act"]:
        getattr(device, task["act"])()
    clock.advance(device.quiet_seconds())
    device.run_once()
    if task["upload"] and (due := device.next_upload()) is not None:
        clock.set(max(due, clock.now()))
        device.upload_due()
    device.close()


def main() -> None:
    for line in sys.stdin:
        task = json.loads(line)
        children = [fork(task) for _ in range(task["copies"])]
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(ends), flush=True)


def fork(task: Mapping[str, Any]) -> int:
    """A process that lives one life and ends with 0, or with 2 if it found another at work."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        live(task)
        code = 0
    except DeviceBusy:
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
