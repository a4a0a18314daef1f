"""A series over real servers and devices, with kills of leader, helper and collector in between.

Nobody touches anything but what is killed. Afterwards every window's sum is exactly what the
devices' own audit logs say that they sent, collected once, and no alert was lost.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import chorister as ch
from chorister.analyst.alert_record import AlertRecord
from chorister.analyst.alerts import AlertSettings, judge_trend
from chorister.analyst.series import Track
from chorister.analyst.unattended import alert_record
from chorister.device import Device, Sandbox
from chorister.device.audit import Event
from chorister.device.loop import keep_running
from chorister.recipe import Window
from tests.aggregator.inprocess_pair import wait_until
from tests.aggregator.operators import OperatorAddresses, Operators
from tests.aggregator.server_processes import (
    COMMAND,
    ServerProcesses,
    environment,
    server_processes,
)
from tests.aggregator.test_end_to_end import a_device, polled
from tests.analyst.test_live_fleet import write_profile
from tests.logworld import ANALYSIS

DEVICES = 4
WINDOWS = 3
EVERY = 30
LONG = 300.0  # seconds: the machine may be busy
RULES = {
    "window": {"shortest": "10s", "longest": "1d", "longest_grace": "1d"},
    "series": {"windows": 10, "longest": "1d", "answers": 10, "cells": 20},
    "crowds": ["noised", "honest"],
    "honest_fraction": "1/1",  # then aggregators add nothing, and sums can be compared exactly
}
ALERTS = """
[destinations.book]
file = "book.jsonl"

[[rules]]
name = "any"
study = "kills"
above = 0
false_alarms = 0.5
to = ["book"]
"""


class Collecting:
    """`chorister collect --watch`, which may be killed at any time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "collector.log"
        self.process: subprocess.Popen[str] | None = None

    def command(self, *options: str) -> list[str]:
        profile, alerts = self.folder / "profile.toml", self.folder / "alerts.toml"
        return [*COMMAND, "collect", "--profile", str(profile), "--alerts", str(alerts), *options]

    def start(self) -> None:
        with self.output.open("a") as log:
            self.process = subprocess.Popen(
                self.command("--watch"), env=environment(), stdout=log, stderr=log, text=True
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def once(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command("--timeout", "60"), env=environment(), capture_output=True, text=True,
            check=False,
        )  # fmt: skip


def killed(servers: ServerProcesses, *roles: str) -> None:
    for role in roles:
        servers.running[role].kill()
        servers.running[role].wait(30)


def started(servers: ServerProcesses, *roles: str) -> None:
    for role in roles:
        servers.begin(role)


@contextlib.contextmanager
def living(devices: list[Device]) -> Iterator[None]:
    """Let devices poll, answer and upload as they do in an app."""
    stop = threading.Event()

    def live(device: Device) -> None:
        for _ in keep_running(device):
            if stop.is_set():
                return

    threads = [threading.Thread(target=live, args=(each,), daemon=True) for each in devices]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(LONG)


def sent(devices: list[Device], window: int) -> list[tuple[int, ...]]:
    """The bits of every report that the leader has acknowledged."""
    found = []
    for device in devices:
        entries = [record.entry for record in device.audit.records()]
        of_window = [
            entry for entry in entries
            if entry.question is not None and entry.question.window == window
        ]  # fmt: skip
        made = [entry.sent for entry in of_window if entry.event is Event.REPORTED]
        done = [entry for entry in of_window if entry.event is Event.UPLOADED]
        assert len(made) <= 1
        assert len(done) <= len(made)
        if done and made[0] is not None:
            found.append(made[0].ones)
    return found


def until(moment: float) -> None:
    while time.time() < moment:
        time.sleep(0.05)


def test_every_window_is_collected_once_whoever_is_killed(tmp_path: Path) -> None:
    operators = Operators(tmp_path, OperatorAddresses.local(), policy=RULES)
    profile = write_profile(operators)
    (tmp_path / "alerts.toml").write_text(ALERTS)
    collecting = Collecting(tmp_path)
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(server_processes(operators))
        stack.callback(collecting.kill)
        devices = [
            stack.enter_context(a_device(operators, number, stack.enter_context(Sandbox())))
            for number in range(DEVICES)
        ]
        wait_until(lambda: polled(devices[0]), "a published checkpoint", LONG)
        for device in devices[1:]:
            device.run_once()
        study = ch.connect(profile).study("kills", analysis=ANALYSIS)
        track = study.track(
            ch.intervals("age", [10, 20, 30, 40]), reads={"user": ["age"]}, every=EVERY,
            windows=WINDOWS, answers_per_device=WINDOWS, period=None, grace=1200,
            local_epsilon=8, epsilon=8, delta="1e-6", min_cohort=2, crowd="honest",
        ).ask()  # fmt: skip
        periods = [each.window for each in track.windows]
        collecting.start()
        with living(devices):
            attack(servers, collecting, devices, periods, tmp_path)
            found = wait_until(lambda: outcome(profile, track.number), "all windows", LONG)
        check(found, devices)
        check_alerts(found, tmp_path)
        # Nothing is left, and nothing is collected again.
        before = windows_on_disk(tmp_path)
        collecting.kill()
        again = collecting.once()
        assert (again.returncode, again.stdout) == (0, "nothing to collect\n"), again.stderr
        assert windows_on_disk(tmp_path) == before
        publish(profile, tmp_path)
        killed(servers, "leader", "helper", "registry")  # a published page needs none of them


def attack(
    servers: ServerProcesses,
    collecting: Collecting,
    devices: list[Device],
    periods: list[Window],
    folder: Path,
) -> None:
    """Kill in every window, while devices have nothing to say, and as windows close."""

    def all_sent(number: int) -> None:
        while time.time() < periods[number].closes - 2 and len(sent(devices, number)) < DEVICES:
            time.sleep(0.2)

    # The leader dies with reports that are not aggregated, the helper as the window closes.
    all_sent(0)
    killed(servers, "leader")
    started(servers, "leader")
    until(periods[0].closes)
    killed(servers, "helper")
    # The collector dies after it asked for the batch, before there is a result.
    first = folder / "studies" / "kills" / "window-0001-0000.json"
    wait_until(first.exists, "the collector to ask", LONG)
    collecting.kill()
    assert json.loads(first.read_text())["result"] is None
    started(servers, "helper")
    collecting.start()
    # The collector is away while a window closes.
    all_sent(1)
    collecting.kill()
    until(periods[1].closes + 1)
    killed(servers, "leader", "helper")
    collecting.start()
    time.sleep(2)
    started(servers, "helper", "leader")
    # All three at once, as the last window closes.
    all_sent(2)
    until(periods[2].closes)
    killed(servers, "leader", "helper")
    collecting.kill()
    started(servers, "leader", "helper")
    collecting.start()


def outcome(profile: Path, number: int) -> Track | None:
    study = ch.connect(profile).study("kills", analysis=ANALYSIS)
    track = Track(study, number)
    return track if track.finished else None


def check(track: Track, devices: list[Device]) -> None:
    assert [str(each.state) for each in track.windows] == ["collected"] * WINDOWS
    for number, result in track.trend.results.items():
        reports = sent(devices, number)
        truth = np.zeros(result.encoding.size, dtype=np.uint64)
        for ones in reports:
            truth[list(ones)] += 1
        assert len(reports) >= 2, f"window {number}"
        assert result.n_reports == len(reports)
        assert result.parts[0].sums.tolist() == truth.tolist()


def check_alerts(track: Track, folder: Path) -> None:
    """All that the rule finds in the results was told, perhaps repeated with the same id."""
    (rule,) = AlertSettings.load(folder / "alerts.toml").rules

    def settled() -> bool:
        record = alert_record(track.study)
        judged = not record.to_judge(rule, track.number, range(WINDOWS))
        return judged and not record.pending

    wait_until(settled, "all windows to be judged", LONG)
    expected = AlertRecord(folder / "expected.json")
    judge_trend(expected, rule, track.number, track.trend)
    book = folder / "book.jsonl"
    told = [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []
    assert {alert["id"] for alert in told} == {alert.id for alert in expected.alerts}
    assert all("reports" not in alert for alert in told)


def windows_on_disk(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in (folder / "studies" / "kills").glob("window-*")
    }


def publish(profile: Path, folder: Path) -> None:
    output = folder / "public"
    run = subprocess.run(
        [*COMMAND, "publish-results", "kills", "--profile", str(profile), "-o", str(output)],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    page = (output / "index.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    names = ["index.html", "results.csv", "results.json", "results.parquet"]
    assert sorted(path.name for path in output.iterdir()) == names
