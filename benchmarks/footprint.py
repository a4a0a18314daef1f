"""What a device costs the app that embeds it: memory, and the time from import to the first poll.

A fresh process, in an environment with what `pip install chorister` brings, opens a device, polls a
log over HTTP, and answers one question of 1,000 bins. What it is compared with imports the
libraries that a device was first built on (it does without joserfc now, and httpcore2 alone is what
it uses of httpx2), and nothing else. Memory is the largest of all turns, times are
the best ones.

- `device_rss_megabytes`: the most that the app's process had in memory at once;
- `device_pss_megabytes`: the same of all its processes, the sandboxes' included, where pages that
  processes share count once;
- `start_over_bare`: from the first import to the first request, over importing the libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from _base_install import base_environment
from _question import DAY, NOW, QuestionLog
from chorister.clock import SettableClock
from chorister.device import Device, HeadFile, KeyFile, Timing

WANTED = {"device_rss_megabytes": 60, "device_pss_megabytes": 75, "start_over_bare": 2.5}

BARE = """
import time
start = time.perf_counter()
import apsw, httpx2, joserfc.jws, pydantic
import chorister._native
print(time.perf_counter() - start)
"""
APP = """
import sys, time
start = time.perf_counter()
from pathlib import Path
from chorister.clock import SettableClock
from chorister.device import Device, HeadFile, KeyFile, Timing
from chorister.policy import Policy
home, registry, now = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
device = Device(
    home / "device",
    Policy.model_validate_json((home / "policy.json").read_bytes()),
    KeyFile(home / "key", store=home / "device"),
    registry=registry,
    head=HeadFile(home / "head"),
    clock=SettableClock(now),
    timing=Timing(settle=0),
)
run = device.run_once()
assert run.answered == ("footprint",), run
print(start, flush=True)
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(peak.split()[1], flush=True)
sys.stdin.read()  # the parent is measuring
"""


@contextlib.contextmanager
def served(question: QuestionLog, requests: list[float]) -> Iterator[str]:
    """The question's log on this machine, which notes the time of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(time.perf_counter())
            body = question.files[self.path.removeprefix("/log/")]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/log/"
        finally:
            server.shutdown()


def prepare(home: Path, question: QuestionLog, registry: str) -> None:
    """A device that a person has used for a day."""
    home.mkdir()
    (home / "policy.json").write_text(question.policy.model_dump_json(exclude_none=True))
    question.ask(time=NOW - DAY)
    with Device(
        home / "device",
        question.policy,
        KeyFile(home / "key", store=home / "device"),
        registry=registry,
        head=HeadFile(home / "head"),
        create=True,
        clock=SettableClock(NOW - DAY),
        timing=Timing(settle=0),
    ) as device:
        device.opt_in()
        device.set_profile("user", {"age": 33, "locale": "en_GB"})
        device.donate_many("keyboard", [{"ngram": "see you soon", "perplexity": 1.0}] * 100)
        device.run_once()
    question.ask(question.recipe("footprint"))


def shared_memory(process: int) -> int:
    """Kilobytes of a process and all its descendants; pages count once, however many share them."""
    total = 0
    # A sandbox may end at any moment. Only root may look into one, so for others this fails.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += sum(map(shared_memory, map(int, children.read_text().split())))
    return total


def run_app(python: Path, home: Path, registry: str, requests: list[float]) -> dict[str, float]:
    """The clock counts from the machine's start, for every process."""
    peak = 0
    requests.clear()
    with subprocess.Popen(
        [python, "-I", "-c", APP, str(home), registry, str(NOW)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as app:
        assert app.stdout is not None
        lines: list[str] = []
        output = app.stdout
        reader = threading.Thread(target=lambda: lines.extend(output.readline() for _ in range(2)))
        reader.start()
        while reader.is_alive():
            peak = max(peak, shared_memory(app.pid))
            time.sleep(0.01)
        peak = max(peak, shared_memory(app.pid))
        app.communicate("")
    start, resident = map(float, lines)
    return {"start": requests[0] - start, "rss": resident / 1e3, "pss": peak / 1e3}


def run_bare(python: Path) -> float:
    run = subprocess.run([python, "-I", "-c", BARE], capture_output=True, check=True, text=True)
    return float(run.stdout)


def measure(turns: int) -> dict[str, float]:
    question = QuestionLog()
    bare, apps, requests = [], [], list[float]()
    with tempfile.TemporaryDirectory() as place, served(question, requests) as registry:
        python = base_environment(Path(place) / "environment", also=["joserfc"])
        for turn in range(turns):
            home = Path(place) / str(turn)
            prepare(home, question, registry)
            bare.append(run_bare(python))
            apps.append(run_app(python, home, registry, requests))
    start = min(app["start"] for app in apps)
    return {
        "device_rss_megabytes": max(app["rss"] for app in apps),
        "device_pss_megabytes": max(app["pss"] for app in apps),
        "start_seconds": start,
        "bare_import_seconds": min(bare),
        "start_over_bare": start / min(bare),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one flat object as the last line")
    parser.add_argument("--turns", type=int, default=9, help="fresh processes a side")
    options = parser.parse_args()
    results = measure(options.turns)
    for name, value in results.items():
        wanted = f" (at most {WANTED[name]} wanted)" if name in WANTED else ""
        print(f"{name} {value:.3f}{wanted}")
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == "__main__":
    main()
