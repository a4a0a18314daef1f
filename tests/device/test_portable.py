"""A device on a system without fork, resource limits, alarms or Linux: the same answers, in words.

The switch is `confinement.FACILITIES`. The last tests take the modules themselves away.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chorister.device.sandbox import Sandbox, confinement, processes
from chorister.device.sandbox import sandbox as device_side
from chorister.device.sandbox.confinement import ALARM, FORK, KERNEL, LIMITS
from chorister.device.sandbox.wire import encode_job
from chorister.device.store import Snapshot
from chorister.errors import QueryRefused, SandboxFailed, SandboxUnavailable
from tests.device.asking import ENDLESS, TABLES, choose
from tests.device.home import Home
from tests.device.test_processes import gone
from tests.device.world import a_recipe

SYSTEMS = {
    "like Windows": frozenset[str](),
    "like macOS, without fork": frozenset({LIMITS, ALARM}),
    "Linux without fork": frozenset({LIMITS, ALARM, KERNEL}),
}
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(confinement, "FACILITIES", SYSTEMS[request.param])
    return str(request.param)


@pytest.fixture
def portable(system: str) -> Iterator[Sandbox]:
    del system
    with Sandbox() as sandbox:
        assert isinstance(sandbox._zygote, processes.Interpreters)
        yield sandbox


def running(sandbox: Sandbox) -> set[int]:
    assert isinstance(sandbox._zygote, processes.Interpreters)
    return set(sandbox._zygote._running)


def spare(sandbox: Sandbox) -> int:
    assert isinstance(sandbox._zygote, processes.Interpreters)
    with sandbox._zygote._lock:
        return sandbox._zygote._spare[0][0].pid


class Failing(threading.Thread):
    """A query without end, which has to fail."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self._sandbox = sandbox
        self.failed = False
        self.start()

    def run(self) -> None:
        try:
            choose(self._sandbox, ENDLESS, deadline=60)
        except SandboxFailed:
            self.failed = True


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_answers_are_the_same(portable: Sandbox) -> None:
    assert choose(portable, "SELECT b AS x FROM t WHERE b BETWEEN 7 AND 9") == 7
    empty = Snapshot.empty(TABLES)
    assert portable.compile("SELECT a FROM t", empty, functions=()) == ("a",)
    with pytest.raises(QueryRefused, match="no such column"):
        portable.compile("SELECT c FROM t", empty, functions=())
    with pytest.raises(SandboxFailed):
        choose(portable, "SELECT c AS x FROM t")


def test_each_query_has_its_own_process(portable: Sandbox) -> None:
    first = spare(portable)
    choose(portable, "SELECT 1 AS x")
    second = spare(portable)
    choose(portable, "SELECT 1 AS x")
    assert len({first, second, spare(portable)}) == 3
    assert gone(first)
    assert gone(second)


def test_what_a_sandbox_may_use_is_settled_at_its_start(
    portable: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "FACILITIES", frozenset({FORK, LIMITS, ALARM, KERNEL}))
    for _ in range(3):  # the spare of before, and two that start now
        assert choose(portable, "SELECT 1 AS x") == choose(portable, "SELECT 1 AS x")


def test_a_query_is_killed_at_its_deadline(portable: Sandbox) -> None:
    process, start = spare(portable), time.monotonic()
    with pytest.raises(SandboxFailed):
        choose(portable, ENDLESS, deadline=1.0)
    assert time.monotonic() - start < 30  # on a busy machine; to its end it would take hours
    assert gone(process)


def test_a_query_that_nobody_kills_ends_by_itself(
    portable: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = spare(portable)
    with monkeypatch.context() as nobody:
        nobody.setattr(processes.Interpreters, "end", lambda _self, _process: None)
        with pytest.raises(SandboxFailed):
            choose(portable, ENDLESS, deadline=1.0)
        assert gone(process)


def test_a_process_that_ignores_its_deadline_is_killed(
    portable: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the deadline that it was told were an hour away."""
    monkeypatch.setattr(
        device_side, "encode_job", lambda job: encode_job(job._replace(seconds=3000))
    )
    process = spare(portable)
    with pytest.raises(SandboxFailed):
        choose(portable, ENDLESS, deadline=1.0)
    assert gone(process)


def test_what_is_killed_is_replaced(portable: Sandbox) -> None:
    os.kill(spare(portable), signal.SIGKILL)
    assert gone(spare(portable))
    assert choose(portable, "SELECT 1 AS x") == 1
    process = spare(portable)
    thread = Failing(portable)
    until(lambda: process in running(portable))
    os.kill(process, signal.SIGKILL)
    thread.join()
    assert thread.failed
    assert choose(portable, "SELECT 1 AS x") == 1


def test_closing_ends_everything(portable: Sandbox) -> None:
    process = spare(portable)
    thread = Failing(portable)
    until(lambda: process in running(portable))
    waiting = spare(portable)
    portable.close()
    thread.join()
    assert thread.failed
    assert gone(process)
    assert gone(waiting)
    assert choose(portable, "SELECT 1 AS x") == 1  # like any other, it starts again


def test_what_is_missing_is_said(system: str, portable: Sandbox) -> None:
    words = " / ".join(portable.weaknesses())
    assert "no zygote (fork is missing)" in words
    assert ("no limits" in words) == (LIMITS not in SYSTEMS[system])
    assert ("no kernel alarm" in words) == (ALARM not in SYSTEMS[system])
    assert ("no system call filter" in words) == (KERNEL not in SYSTEMS[system])
    assert ("no network namespace" in words) == (KERNEL not in SYSTEMS[system])
    # Nothing is promised that a missing limit would have to keep.
    assert ("can't open" in words) == ("like macOS" in system)


def test_linux_stays_the_strictest() -> None:
    assert {FORK, LIMITS, ALARM, KERNEL} == confinement.FACILITIES
    with Sandbox() as sandbox:
        assert sandbox.weaknesses() == ()


def test_a_device_cannot_switch_on_what_its_sandboxes_lack() -> None:
    script = (
        "from chorister.device.sandbox import confinement as c\n"
        "c.FACILITIES = frozenset({'alarm'})\n"
        "c.restrict(frozenset({'fork', 'limits', 'alarm', 'kernel'}))\n"
        "assert c.FACILITIES == {'alarm'}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_an_interpreter_that_does_not_start_is_noticed(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del system
    for program in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(SandboxUnavailable, match="no sandbox can be started"):
            Sandbox()


def test_a_device_answers_and_says_what_its_system_lacks(portable: Sandbox, tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.donate()
    home.restart(sandbox=portable)
    assert home.ask(a_recipe("portable")).answered
    home.deliver()
    assert home.network.reports
    assert any("fork is missing" in words for words in home.device.status().weaknesses)
    home.device.close()


ELSEWHERE = """
import os, signal, socket, sys, time
for module in ("fcntl", "resource", "_posixshmem"):
    sys.modules[module] = None
for owner, names in {
    os: "fork forkpty register_at_fork geteuid O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_CLOEXEC",
    signal: "setitimer alarm",
    socket: "send_fds recv_fds",
    time: "CLOCK_BOOTTIME",
}.items():
    for name in names.split():
        delattr(owner, name)
from pathlib import Path
import chorister.device.device, chorister.device.loop, chorister.policy
assert "chorister.device.agent" in sys.modules
del sys.modules["fcntl"]  # the servers of this test may have it
from tests.device.home import Home
from tests.device.world import a_recipe
from chorister.device import KeyFile
from chorister.errors import DeviceBusy
home = Home(Path(sys.argv[1]))
key = KeyFile(home.folder / "elsewhere" / "key", store=home.folder / "device")
assert key.obtain(create=True) == key.obtain(create=False)
home.donate()
assert home.ask(a_recipe("portable")).answered
home.deliver()
assert home.network.reports
from chorister.device.files import run_lock
with run_lock(home.folder):
    try:
        with run_lock(home.folder):
            raise SystemExit("two processes could run one device")
    except DeviceBusy:
        pass
with run_lock(home.folder):
    pass
for words in home.device.status().weaknesses:
    print(words)
home.device.close()
"""


def test_a_python_that_lacks_all_of_it_runs_a_device(tmp_path: Path) -> None:
    """The modules and functions are gone before anything of Chorister is imported."""
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "no zygote (fork is missing)" in run.stdout
    assert "no limits" in run.stdout
    assert "no kernel alarm" in run.stdout


DIES = """
import contextlib, os, signal, threading
from chorister.errors import SandboxFailed
from tests.device.asking import ENDLESS, choose
from tests.device.test_portable import running, spare, until
from chorister.device.sandbox import Sandbox, confinement
confinement.FACILITIES = frozenset()
sandbox = Sandbox()
def ask():
    while True:  # again, if the machine stood still until the deadline
        with contextlib.suppress(SandboxFailed):
            choose(sandbox, ENDLESS, deadline=2)
threading.Thread(target=ask, daemon=True).start()
until(lambda: running(sandbox))
print(spare(sandbox), *running(sandbox), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_device_that_is_killed_leaves_a_process_until_its_deadline_at_most() -> None:
    run = subprocess.run(
        [sys.executable, "-c", DIES],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
        cwd=REPOSITORY,
    )
    assert run.returncode == -signal.SIGKILL
    found = list(map(int, run.stdout.split()))
    assert len(found) >= 2  # a trial may run beside the query
    assert all(gone(process) for process in found)
