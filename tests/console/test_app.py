"""`chorister serve console` as a process: a rehearsal from files, and what a restart keeps."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from chorister.console.config import ConsoleConfig
from chorister.console.workspace import Workspace
from chorister.errors import ServiceError
from tests.console.world import TOKENS, people
from tests.keyboard import ANALYSIS, POLICY_FILE


def settings(folder: Path) -> Path:
    shutil.copy(POLICY_FILE, folder / "policy.toml")
    rows = people()
    lines = ["age,count"]
    lines += [f"{age},{count}" for age, count in zip(rows["age"], rows["count"], strict=True)]
    (folder / "people.csv").write_text("\n".join(lines))
    digest = hashlib.sha256(TOKENS["ada"].encode()).hexdigest()
    path = folder / "console.toml"
    path.write_text(
        'port = 0\nfolder = "console"\n\n'
        f'[[analysts]]\nname = "ada"\ntoken_digest = "{digest}"\n\n'
        '[[connections]]\nname = "rehearsal"\npolicy = "policy.toml"\n'
        'population = "people.csv"\nfolder = "studies"\nfill_seconds = 0\n'
    )
    return path


def start(config: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [Path(sys.executable).parent / "chorister", "serve", "console", "--config", config],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("console listening on http://127.0.0.1:"), line
    return process, line.split()[-1]


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM)
    assert process.stdout is not None
    process.stdout.close()


def sign_in(url: str) -> tuple[httpx2.Client, str]:
    client = httpx2.Client(base_url=url, headers={"origin": url}, timeout=60)
    answer = client.post("/sign-in", data={"token": TOKENS["ada"]})
    assert answer.status_code == 303
    return client, client.get("/").text.split('name="csrf" value="')[1].split('"')[0]


def test_a_study_outlives_the_process(tmp_path: Path) -> None:
    config = settings(tmp_path)
    process, url = start(config)
    try:
        # Two consoles on one folder would not know of each other.
        with (
            pytest.raises(ServiceError, match="another console is using"),
            Workspace.open(ConsoleConfig.load(config)),
        ):
            pass
        client, csrf = sign_in(url)
        with contextlib.closing(client):
            form = {"csrf": csrf, "name": "kept", "about": f"rehearsal/{ANALYSIS}"}
            assert client.post("/studies", data=form).status_code == 303
            path = "/studies/rehearsal/ada/kept"
            asked = {"csrf": csrf, "use:user.age": "on", "edges:user.age": "10 to 80 by 10"}
            cost = client.post(path + "/ask/cost", data=asked, headers={"hx-request": "true"})
            assert "Ask this question" in cost.text, cost.text
            assert client.post(path + "/ask", data=asked).status_code == 303
    finally:
        stop(process)
    process, url = start(config)
    try:
        client, csrf = sign_in(url)
        with contextlib.closing(client):
            deadline = time.monotonic() + 60
            while (answer := client.get(path + "/rounds/1/result.csv")).status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert answer.text.startswith("age,estimate,std_error,ci_low,ci_high")
            svg = client.get(path + "/rounds/1/chart.svg")
            assert svg.headers["content-type"].startswith("image/svg+xml")
            assert svg.text.startswith("<svg")
            again = client.post(path + "/ask", data={**asked, "csrf": csrf, "again": "on"})
            assert again.status_code == 422  # the policy allows one report
            assert "the budget allows" in again.text
            assert "350ms, load" not in again.text  # a price would take the error's place
    finally:
        stop(process)
