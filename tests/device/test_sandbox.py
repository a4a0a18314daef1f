"""The sandbox: right answers, one kind of failure, and a process that has nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.device.sandbox import Answer, Sandbox, confinement
from chorister.device.sandbox import sandbox as device_side
from chorister.device.sandbox.functions import PURE_FUNCTIONS, TABLE_FUNCTIONS, known_functions
from chorister.device.schema import FieldType
from chorister.device.store import Snapshot
from chorister.encoding.words import split_words
from chorister.errors import InvalidInput, QueryRefused, SandboxFailed, SandboxUnavailable

TABLES: Mapping[str, Mapping[str, FieldType]] = {"t": {"a": "text", "b": "integer"}}
ENDLESS = "SELECT count(*) FROM t AS a, t AS b, t AS c, t AS d, t AS e"


def snapshot(rows: Sequence[tuple[Any, ...]]) -> Snapshot:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (a TEXT, b INTEGER) STRICT")
    connection.executemany("INSERT INTO t VALUES (?, ?)", rows)
    return Snapshot(tables=TABLES, image=connection.serialize("main"))


ROWS = [(f"how are you {i}", i) for i in range(200)]
DATA = snapshot(ROWS)
ALL = known_functions()


def ask(sandbox: Sandbox, query: str, data: Snapshot = DATA, deadline: float = 20) -> Answer:
    return sandbox.run(query, data, functions=ALL, deadline=deadline)


def test_a_query_is_answered(sandbox: Sandbox) -> None:
    answer = ask(sandbox, "SELECT b AS number, a FROM t ORDER BY b LIMIT 2")
    assert answer.names == ("number", "a")
    assert answer.rows == [(0, "how are you 0"), (1, "how are you 1")]
    assert answer.columns == {"number": [0, 1], "a": ["how are you 0", "how are you 1"]}


def test_a_query_without_rows_is_answered(sandbox: Sandbox) -> None:
    answer = ask(sandbox, "SELECT a, b FROM t", snapshot([]))
    assert (answer.names, answer.rows) == (("a", "b"), [])


def test_of_two_columns_with_one_name_the_first_counts(sandbox: Sandbox) -> None:
    assert ask(sandbox, "SELECT 1 AS x, 2 AS x").columns == {"x": [1]}


def test_values_keep_their_types(sandbox: Sandbox) -> None:
    answer = ask(sandbox, "SELECT 1, 1.0, 'a', NULL, x'00', 9e999, -9e999, 1 = 1, 0.1 + 0.2")
    assert answer.rows == [(1, 1.0, "a", None, None, float("inf"), float("-inf"), 1, 0.1 + 0.2)]
    assert [type(value) for value in answer.rows[0][:3]] == [int, float, str]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.none() | st.text(), st.none() | st.integers(-(2**63), 2**63 - 1))))
def test_what_went_in_comes_out(rows: list[tuple[str | None, int | None]]) -> None:
    with _shared() as sandbox:
        assert ask(sandbox, "SELECT a, b FROM t ORDER BY rowid", snapshot(rows)).rows == rows


class _shared:  # noqa: N801
    """One sandbox for hypothesis, which does not take fixtures of a function."""

    sandbox: Sandbox | None = None

    def __enter__(self) -> Sandbox:
        if _shared.sandbox is None:
            _shared.sandbox = Sandbox()
        return _shared.sandbox

    def __exit__(self, *_: object) -> None:
        pass


# --- functions ------------------------------------------------------------------------------------


def test_words_are_those_of_the_encodings(sandbox: Sandbox) -> None:
    text = "Don't STOP — thinking about “tomorrow”, ﬁne?"
    answer = ask(sandbox, "SELECT word, position FROM t, words(t.a)", snapshot([(text, 0)]))
    assert answer.rows == [(word, i) for i, word in enumerate(split_words(text))]


def test_ngrams_slide_over_the_words(sandbox: Sandbox) -> None:
    data = snapshot([("One two, three four", 1), ("five", 2), ("", 3), (None, 4)])
    query = "SELECT b, g.ngram, g.position FROM t, ngrams(t.a, 3) AS g"
    assert ask(sandbox, query, data).rows == [(1, "one two three", 0), (1, "two three four", 1)]
    assert ask(sandbox, "SELECT count(*) FROM t, ngrams(t.a, t.b)", data).rows == [(4,)]


@pytest.mark.parametrize("n", ["0", "17", "-1", "NULL", "'2'", "2.0"])
def test_ngrams_of_no_length_fail(n: str, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed):
        ask(sandbox, "SELECT ngram FROM t, ngrams(t.a, n)".replace("n)", f"{n})"))


@pytest.mark.parametrize("query", ["SELECT * FROM ngrams", "SELECT * FROM ngrams('a b')"])
def test_ngrams_without_arguments_do_not_compile(query: str, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed):
        ask(sandbox, query)


def test_every_pure_function_is_known_to_sqlite() -> None:
    found = apsw.Connection(":memory:").execute("SELECT DISTINCT name FROM pragma_function_list")
    assert {name for (name,) in found} >= PURE_FUNCTIONS


def test_no_function_knows_time_version_or_files() -> None:
    for stem in ("time", "date", "julian", "sqlite", "load", "fts", "token", "file", "match",
                 "rtree", "geopoly", "changes", "rowid", "zeroblob", "carray"):  # fmt: skip
        assert not [name for name in ALL if stem in name], stem


def test_functions_that_are_not_listed_are_refused(sandbox: Sandbox) -> None:
    for function, query in {
        "lower": "SELECT lower(a) FROM t",
        "like": "SELECT a FROM t WHERE a LIKE 'h%'",
        "count": "SELECT count(*) FROM t",
        "ngrams": "SELECT ngram FROM t, ngrams(t.a, 2)",
        "->>": "SELECT '[1]' ->> 0",
    }.items():
        assert sandbox.run(query, DATA, functions=[function], deadline=20).rows is not None
        with pytest.raises(SandboxFailed):
            sandbox.run(query, DATA, functions=ALL - {function}, deadline=20)
        with pytest.raises(QueryRefused, match=r"not authorized|no such table|prohibited"):
            sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL - {function})


def test_a_function_that_the_device_lacks_is_a_callers_mistake(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="no function load_extension"):
        sandbox.run("SELECT 1", DATA, functions=["load_extension"], deadline=1)


@pytest.mark.parametrize("deadline", [0, -1, 3601, float("nan")])
def test_a_deadline_has_bounds(deadline: float, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="deadline"):
        ask(sandbox, "SELECT 1", deadline=deadline)


def test_table_functions_are_documented_where_they_are_listed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "device.md").read_text()
    for name in TABLE_FUNCTIONS:
        assert f"`{name}(" in page


# --- compiling ------------------------------------------------------------------------------------


def test_compiling_names_the_columns(sandbox: Sandbox) -> None:
    query = "SELECT g.ngram, b AS number FROM t, ngrams(a, 2) AS g;  "
    assert sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL) == ("ngram", "number")


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT c FROM t", "no such column: c"),
        ('SELECT "c" FROM t', "no such column"),
        ("SELECT a FROM u", "no such table: u"),
        ("SELEC a", "syntax error"),
        ("SELECT 1; SELECT 2", "more than one statement"),
        ("SELECT 1; -- and", "more than one statement"),
        ("EXPLAIN SELECT 1", "not a SELECT"),
        ("EXPLAIN QUERY PLAN SELECT 1", "not a SELECT"),
        ("-- nothing", "not a SELECT"),
        (";", "not a SELECT"),
        ("SELECT ?", "variable"),
        ("SELECT 1 \0 2", "NUL"),
    ],
)
def test_what_does_not_compile_is_refused_in_words(query: str, why: str, sandbox: Sandbox) -> None:
    with pytest.raises(QueryRefused, match=why) as caught:
        sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL)
    assert (caught.value.check, caught.value.field) == ("query", "query")
    with pytest.raises(SandboxFailed):
        ask(sandbox, query)


@settings(max_examples=25)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_is_a_query_or_refused(query: str) -> None:
    with _shared() as sandbox:
        try:
            names = sandbox.compile(query, Snapshot.empty(TABLES), functions=ALL)
        except QueryRefused:
            return
    assert names


# --- failures -------------------------------------------------------------------------------------


def test_every_failure_looks_the_same(sandbox: Sandbox) -> None:
    failures = []
    for query, deadline in {
        "SELECT c FROM t": 20.0,  # does not compile
        "SELECT abs(-9223372036854775807 - 1)": 20.0,  # fails while it runs
        "SELECT printf('%.*c', 100000000, 'x')": 20.0,  # too large
        ENDLESS: 0.2,  # too slow
    }.items():
        with pytest.raises(SandboxFailed) as caught:
            ask(sandbox, query, deadline=deadline)
        error = caught.value
        failures.append((str(error), error.args, error.__cause__, error.__context__))
    assert len(set(map(str, failures))) == 1
    assert failures[0][2:] == (None, None)


def test_a_query_ends_at_its_deadline(sandbox: Sandbox) -> None:
    start = time.monotonic()
    with pytest.raises(SandboxFailed):
        ask(sandbox, ENDLESS, deadline=0.3)
    assert time.monotonic() - start < 5


def test_a_sandbox_that_hears_nothing_is_killed(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own deadline is put out of action; what is left is the device's."""
    monkeypatch.setattr(device_side, "_INNER_SHARE", 1000.0)
    process = _start(sandbox, ENDLESS, deadline=0.7)
    assert _gone(process)


def _children(process: int) -> set[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return set(map(int, path.read_text().split()))


def _start(sandbox: Sandbox, query: str, *, deadline: float) -> int:
    """Run a query that takes its time, wait for it to be confined, and return its process."""
    failed = []

    def work() -> None:
        try:
            ask(sandbox, query, deadline=deadline)
        except SandboxFailed:
            failed.append(True)

    zygote = sandbox._zygote._process.pid
    others = _confined(zygote)
    thread = threading.Thread(target=work)
    thread.start()
    process = _running(zygote, others)
    _start.threads.append((thread, failed))  # type: ignore[attr-defined]
    return process


_start.threads = []  # type: ignore[attr-defined]


def _confined(zygote: int) -> set[int]:
    """The sandboxes that have a job: a spare has no system call filter yet."""
    found = set()
    for child in _children(zygote):
        with suppress(OSError):
            if "Seccomp:\t2" in Path(f"/proc/{child}/status").read_text():
                found.add(child)
    return found


def _running(zygote: int, others: set[int]) -> int:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for child in _confined(zygote) - others:
            return child
        time.sleep(0.005)
    raise AssertionError("no sandbox is running")


def _gone(process: int) -> bool:
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


@pytest.fixture(autouse=True)
def _joined() -> Any:
    yield
    while _start.threads:  # type: ignore[attr-defined]
        thread, failed = _start.threads.pop()  # type: ignore[attr-defined]
        thread.join()
        assert failed


def test_a_running_sandbox_has_one_descriptor_no_environment_and_no_network(
    sandbox: Sandbox,
) -> None:
    assert sandbox.weaknesses() == ()
    process = _start(sandbox, ENDLESS, deadline=3)
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
    assert int(limits["Max cpu time"][1]) <= 5
    assert int(limits["Max address space"][1]) < 2**30
    if os.geteuid() == 0:  # as another user one may not even look
        descriptors = [str(path.readlink()) for path in (folder / "fd").iterdir()]
        assert len(descriptors) == 1
        assert descriptors[0].startswith("socket:")
        assert (folder / "environ").read_bytes() == b"TZ=UTC0\0"
        assert (folder / "ns" / "net").readlink() != Path("/proc/self/ns/net").readlink()
        assert b"keyboard" not in (folder / "cmdline").read_bytes()


def test_the_zygote_holds_little_and_no_data(sandbox: Sandbox) -> None:
    ask(sandbox, "SELECT a FROM t")
    folder = Path(f"/proc/{sandbox._zygote._process.pid}")
    loaded = (folder / "maps").read_text()
    assert "apsw" in loaded
    for heavy in ("numpy", "scipy", "pydantic", "_native"):
        assert heavy not in loaded
    assert "Threads:\t1" in (folder / "status").read_text()


def test_a_sandbox_that_is_killed_is_a_failure_like_others(sandbox: Sandbox) -> None:
    process = _start(sandbox, ENDLESS, deadline=60)
    os.kill(process, signal.SIGKILL)
    assert _gone(process)
    assert ask(sandbox, "SELECT 1").rows == [(1,)]


def test_a_spare_that_was_killed_is_replaced() -> None:
    with Sandbox() as sandbox:
        ask(sandbox, "SELECT 1")
        time.sleep(0.2)  # until the first one is reaped and the next spare there
        for child in _children(sandbox._zygote._process.pid):
            os.kill(child, signal.SIGKILL)
            assert _gone(child)
        assert ask(sandbox, "SELECT 1").rows == [(1,)]


def test_a_zygote_that_was_killed_is_replaced() -> None:
    with Sandbox() as sandbox:
        first = sandbox._zygote._process.pid
        children = _children(first)
        os.kill(first, signal.SIGKILL)
        sandbox._zygote._process.wait()
        assert all(_gone(child) for child in children)
        assert ask(sandbox, "SELECT 1").rows == [(1,)]
        assert sandbox._zygote._process.pid != first


def test_closing_ends_everything() -> None:
    sandbox = Sandbox()
    zygote = sandbox._zygote._process.pid
    process = _start(sandbox, ENDLESS, deadline=60)
    sandbox.close()
    sandbox.close()
    assert _gone(zygote)
    assert _gone(process)


def test_an_interpreter_that_does_not_start_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for program in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(SandboxUnavailable, match="no sandbox can be started"):
            Sandbox()


def test_threads_share_a_sandbox(sandbox: Sandbox) -> None:
    found: list[object] = []

    def work(number: int) -> None:
        query = "SELECT count(*), number FROM t".replace("number", str(number))
        found.extend(ask(sandbox, query).rows for _ in range(5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, found)) == sorted(str([(200, i)]) for i in range(4) for _ in range(5))


FORKS = """
import os, sys
from chorister.device.sandbox import Sandbox
from chorister.device.store import Snapshot
sandbox, data = Sandbox(), Snapshot.empty({"t": {"a": "text"}})
def ask(): return sandbox.run("SELECT count(*) FROM t", data, functions=["count"], deadline=30).rows
assert ask() == [(0,)]
child = os.fork()
assert ask() == [(0,)]
if child == 0:
    sandbox.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert ask() == [(0,)]
"""


def test_an_app_that_forks_keeps_two_sandboxes_apart() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)


DIES = """
import os, signal, sys, threading, time
from pathlib import Path
from tests.device.test_sandbox import ENDLESS, DATA, ALL, _running
from chorister.device.sandbox import Sandbox
sandbox = Sandbox()
work = lambda: sandbox.run(ENDLESS, DATA, functions=ALL, deadline=600)
threading.Thread(target=work, daemon=True).start()
zygote = sandbox._zygote._process.pid
print(zygote, _running(zygote, set()), flush=True)
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
    assert all(_gone(process) for process in map(int, run.stdout.split()))


# --- confinement, tried out from within -----------------------------------------------------------

TRIES = """
import json, mmap, os, resource, runpy, socket, sys
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
