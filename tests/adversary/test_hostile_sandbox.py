"""Whatever becomes of the sandbox's processes, a device has its bin, or none, by the deadline."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from chorister.clock import uptime
from chorister.device.sandbox import Sandbox, processes
from chorister.device.store import Snapshot
from chorister.errors import SandboxFailed
from tests.device.asking import DATA, ENDLESS, TABLES, choose
from tests.device.test_processes import children, confined, gone, running, zygote_of

SPARES = 2
LATE = 20.0  # seconds that a loaded machine may be late; the attacks below would take minutes
LARGE = Snapshot(tables=TABLES, image=bytes(20_000_000))


class HostileSandbox(Sandbox):
    """Its processes do what the query says; see `hostile_boot.py`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        with mock.patch.object(processes, "_BOOT", Path(__file__).with_name("hostile_boot.py")):
            self._zygote = processes.Zygote(uptime() + 60)


@pytest.fixture(scope="module")
def hostile() -> Iterator[HostileSandbox]:
    with HostileSandbox() as sandbox:
        yield sandbox


def fails_by(sandbox: Sandbox, query: str, *, deadline: float, data: Snapshot = DATA) -> None:
    start = uptime()
    with pytest.raises(SandboxFailed) as caught:
        choose(sandbox, query, data, deadline=deadline)
    assert uptime() - start < deadline + LATE
    assert caught.value.__cause__ is caught.value.__context__ is None


def spares_of(zygote: int) -> set[int]:
    """Wait until there are only sandboxes that have no job yet; return them."""
    end = time.monotonic() + 20
    while len(found := children(zygote)) != SPARES:
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    "how",
    ["does not read", "says nothing", "dribbles", "does not close", "ignores the alarm"],
)
def test_a_sandbox_that_was_taken_over_gets_no_more_time(
    how: str, hostile: HostileSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = processes.Zygote.start

    def noted(zygote: processes.Zygote, until: float) -> tuple[int, socket.socket]:
        process, peer = start(zygote, until)
        started.append(process)
        return process, peer

    spares = spares_of(zygote_of(hostile)._process.pid)
    with monkeypatch.context() as patch:
        patch.setattr(processes.Zygote, "start", noted)
        fails_by(hostile, how, deadline=1, data=LARGE if how == "does not read" else DATA)
    (sandbox,) = started
    assert sandbox in spares  # one of them became the sandbox, and is killed
    assert gone(sandbox)
    assert choose(hostile, "is honest") == 1


@pytest.mark.parametrize("how", ["says too much", "says too little", "names no bin", "crashes"])
def test_a_sandbox_that_was_taken_over_says_a_bin_or_nothing(
    how: str, hostile: HostileSandbox
) -> None:
    fails_by(hostile, how, deadline=30)
    assert choose(hostile, "is honest") == 1


# --- the zygote -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [signal.SIGSTOP, signal.SIGKILL])
def test_a_zygote_that_does_not_answer_delays_nobody(by: signal.Signals) -> None:
    with Sandbox() as sandbox:
        first = zygote_of(sandbox)._process.pid
        os.kill(first, by)
        start = uptime()
        with suppress(SandboxFailed):  # unless it was seen to be gone
            choose(sandbox, "SELECT 1 AS x", deadline=1)
        assert uptime() - start < 1 + LATE
        # What was stopped is given up, and the next query has another.
        assert choose(sandbox, "SELECT 1 AS x") == 1
        assert zygote_of(sandbox)._process.pid != first
        assert gone(first)


def test_a_zygote_that_is_stopped_meanwhile_leaves_no_sandbox_running() -> None:
    with Sandbox() as sandbox:
        zygote = zygote_of(sandbox)._process.pid
        others = confined(zygote)  # the trial's, if it is not reaped yet
        failed = threading.Thread(target=fails_by, args=(sandbox, ENDLESS), kwargs={"deadline": 8})
        start = uptime()
        failed.start()
        process = running(zygote, others)
        os.kill(zygote, signal.SIGSTOP)
        failed.join()
        assert uptime() - start < 8 + LATE
        assert gone(process)
        os.kill(zygote, signal.SIGCONT)


def test_a_query_does_not_wait_behind_another_for_longer_than_its_deadline() -> None:
    """The other holds the sandbox's lock, and waits for a zygote that is stopped."""
    with Sandbox() as sandbox:
        os.kill(zygote_of(sandbox)._process.pid, signal.SIGSTOP)
        patient = threading.Thread(
            target=fails_by, args=(sandbox, "SELECT 1 AS x"), kwargs={"deadline": 12}
        )
        patient.start()
        while not sandbox._lock.locked():
            time.sleep(0.01)
        fails_by(sandbox, "SELECT 1 AS x", deadline=0.5)
        assert patient.is_alive()  # it did not wait for the other to end
        patient.join()
        assert choose(sandbox, "SELECT 1 AS x") == 1


def test_a_zygote_that_can_not_be_started_again_fails_by_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(1000)\n")
    with Sandbox() as sandbox:
        sandbox._zygote.close()
        monkeypatch.setattr(processes, "_BOOT", slow)
        fails_by(sandbox, "SELECT 1 AS x", deadline=1)
        monkeypatch.undo()
        assert choose(sandbox, "SELECT 1 AS x") == 1


def test_no_process_is_left_behind_by_queries_that_fail(hostile: HostileSandbox) -> None:
    zygote = zygote_of(hostile)._process.pid
    for _ in range(5):
        fails_by(hostile, "crashes", deadline=30)
    assert choose(hostile, "is honest") == 1
    spares_of(zygote)
    assert not confined(zygote)
