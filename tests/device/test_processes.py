"""The sandbox's processes: what they have, which is nothing, and that they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import pytest

from chorister.device.sandbox import Sandbox, confinement, processes
from chorister.device.sandbox import sandbox as device_side
from chorister.device.sandbox.wire import encode_job
from chorister.device.store import Snapshot
from chorister.encoding import Encoding, PrefixTree
from chorister.errors import SandboxFailed, SandboxUnavailable
from tests.device.asking import ENDLESS, choose

Start: TypeAlias = Callable[..., int]
SHORT = 3.0
"""Seconds until a query is ended. Before, it has to be seen at work, perhaps on a busy machine."""


def zygote_of(sandbox: Sandbox) -> processes.Zygote:
    assert isinstance(sandbox._zygote, processes.Zygote)
    return sandbox._zygote


def children(process: int) -> set[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return set(map(int, path.read_text().split()))


def confined(zygote: int) -> set[int]:
    """The sandboxes that have a job: a spare has no system call filter yet."""
    found = set()
    for child in children(zygote):
        with suppress(OSError):
            if "Seccomp:\t2" in Path(f"/proc/{child}/status").read_text():
                found.add(child)
    return found


def running(zygote: int, others: set[int], work: threading.Thread | None = None) -> int:
    """Wait until a sandbox has a job, or until the thread whose job it is has ended."""
    end = time.monotonic() + 20
    while time.monotonic() < end and (work is None or work.is_alive()):
        for child in confined(zygote) - others:
            return child
        time.sleep(0.005)
    raise AssertionError("no sandbox is running")


def gone(process: int) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            return True
        if "State:\tZ" in status:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an endless query, wait until it is confined, return its process; it has to fail."""
    threads, failed = [], []

    def work(sandbox: Sandbox, deadline: float) -> None:
        try:
            choose(sandbox, ENDLESS, deadline=deadline)
        except SandboxFailed:
            failed.append(True)

    def begin(sandbox: Sandbox, *, deadline: float) -> int:
        zygote = zygote_of(sandbox)._process.pid
        others = confined(zygote)
        while True:
            thread = threading.Thread(target=work, args=(sandbox, deadline))
            thread.start()
            threads.append(thread)
            try:
                return running(zygote, others, thread)
            except AssertionError:  # perhaps the machine stood still until the deadline
                if thread.is_alive() or len(threads) == 5:
                    raise

    yield begin
    for thread in threads:
        thread.join()
    assert len(failed) == len(threads)


def test_a_running_sandbox_has_one_descriptor_no_environment_and_no_network(
    sandbox: Sandbox, start: Start
) -> None:
    assert sandbox.weaknesses() == ()
    process = start(sandbox, deadline=60)
    folder = Path(f"/proc/{process}")
    status = (folder / "status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert "Threads:\t1" in status
    limits = {
        line[:26].strip(): line[26:].split()[:2]
        for line in (folder / "limits").read_text().splitlines()[1:]
    }
    for name in ("Max core file size", "Max file size", "Max open files", "Max processes"):
        assert limits[name] == ["0", "0"], name
    assert int(limits["Max cpu time"][1]) <= 62
    assert int(limits["Max address space"][1]) < 2**30
    if os.geteuid() == 0:  # as another user one may not even look
        descriptors = [str(path.readlink()) for path in (folder / "fd").iterdir()]
        assert len(descriptors) == 1
        assert descriptors[0].startswith("socket:")
        assert (folder / "environ").read_bytes() == b"TZ=UTC0\0"
        assert (folder / "ns" / "net").readlink() != Path("/proc/self/ns/net").readlink()
        assert b"keyboard" not in (folder / "cmdline").read_bytes()
    os.kill(process, signal.SIGKILL)


def test_a_sandbox_that_takes_too_long_is_killed(sandbox: Sandbox, start: Start) -> None:
    process = start(sandbox, deadline=SHORT)
    assert gone(process)


def test_an_alarm_ends_a_sandbox_that_nobody_kills(
    sandbox: Sandbox, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's own kill is put out of action; what is left is the kernel's clock."""
    monkeypatch.setattr(processes.Zygote, "end", lambda _zygote, _process: None)
    process = start(sandbox, deadline=SHORT)
    assert gone(process)


def test_a_kill_ends_a_sandbox_without_an_alarm(
    sandbox: Sandbox, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that broke SQLite might ignore the alarm: as if the deadline were an hour away."""
    monkeypatch.setattr(
        device_side, "encode_job", lambda job: encode_job(job._replace(seconds=3000))
    )
    process = start(sandbox, deadline=SHORT)
    assert gone(process)


def test_the_zygote_holds_little_and_no_data(sandbox: Sandbox) -> None:
    choose(sandbox, "SELECT a AS x FROM t")
    folder = Path(f"/proc/{zygote_of(sandbox)._process.pid}")
    loaded = (folder / "maps").read_text()
    assert "apsw" in loaded
    for heavy in ("numpy", "scipy", "pydantic", "_native"):
        assert heavy not in loaded
    assert "Threads:\t1" in (folder / "status").read_text()


NOT_NEEDED = (
    *("numpy", "pydantic", "pydantic_core", "annotated_types", "typing_extensions"),
    *("chorister._native", "chorister.canonical", "chorister.encoding.features"),
    *("subprocess", "asyncio", "secrets", "ssl", "http", "urllib.request", "multiprocessing"),
)


def test_the_sandboxs_modules_need_the_standard_library_and_apsw_only() -> None:
    """In an interpreter of its own, which imports what a zygote does and nothing else."""
    script = (
        "import sys, runpy, importlib\n"
        "boot = runpy.run_path(sys.argv[1])['boot']\n"
        "class Zygote:\n"
        "    main = staticmethod(lambda *_: None)\n"
        "real = importlib.import_module\n"
        "def load(name):\n"
        "    real(name)\n"
        "    return Zygote\n"
        "boot.__globals__['import_module'] = load\n"
        "boot(0, '', sys.argv[2:])\n"
        "print(*sorted(sys.modules))\n"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, processes._BOOT, *sys.path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(run.stdout.split())
    assert {"chorister.encoding.encoder", "chorister.encoding.tokenizer", "apsw"} <= loaded
    assert loaded.isdisjoint(NOT_NEEDED), loaded & set(NOT_NEEDED)
    others = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert others == {"__main__", "apsw", "chorister"}


def test_the_sandbox_is_the_first_to_go_if_memory_runs_out(sandbox: Sandbox, start: Start) -> None:
    zygote = zygote_of(sandbox)._process.pid
    process = start(sandbox, deadline=60)
    for each in (zygote, process):
        assert Path(f"/proc/{each}/oom_score_adj").read_text() == "1000\n"
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000
    os.kill(process, signal.SIGKILL)


SEEDED = """
import sys
from pathlib import Path
from chorister.device.sandbox import Sandbox
assert not sys.flags.hash_randomization
with Sandbox() as sandbox:
    process = Path(f"/proc/{sandbox._zygote._process.pid}")
    print((process / "cmdline").read_bytes().split(b"\\0")[1:3], (process / "environ").read_bytes())
"""


def test_tables_have_a_random_seed_whatever_the_apps(tmp_path: Path) -> None:
    """Or an author could choose texts that collide."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    run = subprocess.run(
        [sys.executable, "-c", SEEDED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.strip() == "[b'-I', b'-S'] b'TZ=UTC0\\x00'"
    hashes = {
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", "import sys; print(hash('a'), sys.flags)"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for _ in range(3)
    }
    assert len(hashes) == 3
    assert all("hash_randomization=1" in found for found in hashes)


def test_a_sandbox_that_is_killed_is_a_failure_like_others(sandbox: Sandbox, start: Start) -> None:
    process = start(sandbox, deadline=60)
    os.kill(process, signal.SIGKILL)
    assert gone(process)
    assert choose(sandbox, "SELECT 1 AS x") == 1


def test_a_spare_that_was_killed_is_replaced() -> None:
    with Sandbox() as sandbox:
        choose(sandbox, "SELECT 1 AS x")
        zygote = zygote_of(sandbox)._process.pid
        end = time.monotonic() + 20
        while confined(zygote) or len(children(zygote)) != 2:
            assert time.monotonic() < end  # until the first one is reaped and the next spare there
            time.sleep(0.01)
        for child in children(zygote):
            os.kill(child, signal.SIGKILL)
            assert gone(child)
        assert choose(sandbox, "SELECT 1 AS x") == 1


def test_a_zygote_that_was_killed_is_replaced() -> None:
    with Sandbox() as sandbox:
        first = zygote_of(sandbox)._process.pid
        forked = children(first)
        os.kill(first, signal.SIGKILL)
        zygote_of(sandbox)._process.wait()
        assert all(gone(child) for child in forked)
        assert choose(sandbox, "SELECT 1 AS x") == 1
        assert zygote_of(sandbox)._process.pid != first


def test_closing_ends_everything(start: Start) -> None:
    sandbox = Sandbox()
    zygote = zygote_of(sandbox)._process.pid
    process = start(sandbox, deadline=60)
    sandbox.close()
    sandbox.close()
    assert gone(zygote)
    assert gone(process)


def test_an_interpreter_that_does_not_start_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for program in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(SandboxUnavailable, match="no sandbox can be started"):
            Sandbox()


def test_a_sandbox_that_answers_nothing_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_side, "_TRIAL", "SELECT what does not compile")
    with pytest.raises(SandboxUnavailable, match="test query"):
        Sandbox()


def test_the_test_query_has_the_encoding_that_it_says() -> None:
    encoding = Encoding((PrefixTree(column="word", prefixes=("",), vocabulary=("works",)),))
    assert encoding.canonical == device_side.TRIAL_ENCODING
    assert (encoding.size, encoding.index(["works"])) == (
        device_side.TRIAL_BINS,
        device_side.TRIAL_BIN,
    )


def test_a_sandbox_that_nobody_waited_for_is_tried_before_its_first_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And tried again by the next one: a device keeps it."""
    empty = Snapshot.empty({"t": {"x": "integer"}})
    with Sandbox(wait=False) as sandbox:
        with monkeypatch.context() as broken:
            broken.setattr(device_side, "_TRIAL", "SELECT what does not compile")
            for _ in range(2):
                with pytest.raises(SandboxUnavailable, match="test query"):
                    sandbox.compile("SELECT x FROM t", empty, functions=())
        assert sandbox.compile("SELECT x FROM t", empty, functions=()) == ("x",)
        with Sandbox() as other:
            assert sandbox.weaknesses() == other.weaknesses()
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        with Sandbox(wait=False) as sandbox, pytest.raises(SandboxUnavailable):
            sandbox.weaknesses()


def test_threads_share_a_sandbox(sandbox: Sandbox) -> None:
    found: list[int] = []

    def work(number: int) -> None:
        query = "SELECT count(*) + number AS x FROM t".replace("number", str(number))
        found.extend(choose(sandbox, query) for _ in range(5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([200 + i for i in range(4)] * 5)


FORKS = """
import os
from tests.device.asking import choose
from chorister.device.sandbox import Sandbox
sandbox = Sandbox()
def ask(): return choose(sandbox, "SELECT count(*) AS x FROM t", deadline=30)
assert ask() == 200
child = os.fork()
assert ask() == 200
if child == 0:
    sandbox.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert ask() == 200
"""


def test_an_app_that_forks_keeps_two_sandboxes_apart() -> None:
    subprocess.run(
        [sys.executable, "-c", FORKS], check=True, timeout=60, cwd=Path(__file__).parents[2]
    )


DIES = """
import os, signal, sys, threading, time
from pathlib import Path
from tests.device.asking import ENDLESS, choose
from tests.device.test_processes import running
from chorister.device.sandbox import Sandbox
sandbox = Sandbox()
work = lambda: choose(sandbox, ENDLESS, deadline=600)
threading.Thread(target=work, daemon=True).start()
zygote = sandbox._zygote._process.pid
print(zygote, running(zygote, set()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_device_that_is_killed_leaves_no_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", DIES],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == -signal.SIGKILL
    assert all(gone(process) for process in map(int, run.stdout.split()))


# --- confinement, tried out from within -----------------------------------------------------------

TRIES = """
import json, mmap, os, resource, runpy, signal, socket, sys
module = runpy.run_path(sys.argv[2])
weaknesses = module["leave_network"]() + module["confine"](seconds=5, memory=256 * 2**20)
outcomes = {}
def attempt(name, call):
    try:
        call()
        outcomes[name] = "possible"
    except BaseException as error:
        outcomes[name] = type(error).__name__
attempt("read a file", lambda: os.open("/etc/hostname", os.O_RDONLY))
attempt("make a file", lambda: os.open("/tmp/left-behind", os.O_CREAT | os.O_WRONLY))
attempt("delete a file", lambda: os.unlink(sys.argv[1]))
attempt("rename a file", lambda: os.rename(sys.argv[1], sys.argv[1] + "x"))
attempt("list a folder", lambda: os.listdir("/"))
attempt("stat", lambda: os.stat("/"))
attempt("internet", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
attempt("unix socket", lambda: socket.socket(socket.AF_UNIX))
attempt("fork", os.fork)
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("signal the parent", lambda: os.kill(os.getppid(), 0))
attempt("lift a limit", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
attempt("pipe", os.pipe)
attempt("put off the alarm", lambda: signal.setitimer(signal.ITIMER_REAL, 0))
attempt("much memory", lambda: bytearray(2**30))
attempt("executable memory", lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC))
attempt("some memory", lambda: bytearray(2**24))
attempt("randomness", lambda: os.urandom(8))
os.write(1, json.dumps({"weaknesses": weaknesses, "outcomes": outcomes}).encode())
os._exit(0)
"""


def test_a_confined_process_can_compute_and_nothing_else(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    run = subprocess.run(
        [sys.executable, "-c", TRIES, victim, confinement.__file__],
        capture_output=True,
        check=True,
        timeout=60,
    )
    found = json.loads(run.stdout)
    assert found["weaknesses"] == []
    allowed = {name for name, outcome in found["outcomes"].items() if outcome == "possible"}
    assert allowed == {"some memory", "randomness"}
    assert victim.exists()
    assert not Path("/tmp/left-behind").exists()  # noqa: S108


REFUSED = """
import ctypes, json, os, runpy, sys, types
module = runpy.run_path(sys.argv[1])
def refuse(*arguments):
    ctypes.set_errno(1)
    return -1
module["confine"].__globals__["_libc"] = lambda: types.SimpleNamespace(unshare=refuse, prctl=refuse)
found = module["leave_network"]() + module["confine"](seconds=5, memory=256 * 2**20)
try:
    os.open("/etc/hostname", os.O_RDONLY)
    found.append("can open a file")
except OSError:
    pass
print(json.dumps(found))
"""


def test_what_the_system_refuses_is_said_in_words_and_rlimits_remain() -> None:
    run = subprocess.run(
        [sys.executable, "-c", REFUSED, confinement.__file__],
        capture_output=True,
        check=True,
        timeout=60,
    )
    found = json.loads(run.stdout)
    assert [words[:22] for words in found[:2]] == [
        "no network namespace (",
        "no system call filter ",
    ]
    assert "Operation not permitted" in found[0]
    assert "can open a file" not in found


TIMED_BY_A_THREAD = """
import os, runpy, sys, threading
module = runpy.run_path(sys.argv[1])
if os.geteuid() == 0:
    os.setuid(65534)  # a limit on processes does not apply to root
module["restrict"](frozenset({"limits"}))
found = module["confine"](seconds=60, memory=256 * 2**20)
assert threading.active_count() == 2
try:
    threading.Thread(target=print).start()
    found.append("can start a thread")
except RuntimeError:
    pass
os.write(1, "|".join(found).encode())
os._exit(0)
"""


def test_the_thread_that_stands_in_for_an_alarm_is_the_last_one() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TIMED_BY_A_THREAD, confinement.__file__],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "a thread of the sandbox" in run.stdout
    assert "can start a thread" not in run.stdout
