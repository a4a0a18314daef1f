"""The example app, run as its reader would: as a process, against a log on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.cli.toml import dumps
from tests.conftest import REPOSITORY
from tests.device.loopback import Reply, Seen, serve
from tests.device.world import DAY, ForgedLog, a_policy, a_recipe

APP = REPOSITORY / "examples" / "keyboard" / "app.py"


def typed(folder: Path, registry: str, text: str, *more: str) -> str:
    run = subprocess.run(
        [sys.executable, APP, "--folder", folder, "--registry", registry, *more],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # a run alone takes 38 seconds, whatever it finds
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_app_answers_a_recipe(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(dumps(a_policy().model_dump(exclude_none=True)))
    log, now = ForgedLog(), int(time.time())

    def answer(request: Seen) -> Reply:
        data = log.files.get(request.path.removeprefix("/"))
        return Reply(status=404) if data is None else Reply(body=data)

    with serve(answer) as server:
        log.publish([], time=now - 60)
        assert "kept 6 n-grams" in typed(
            tmp_path, server.url, "hello world you\n", "--policy", str(policy)
        )
        window = {"opens": now - DAY, "closes": now + 6 * DAY, "ends": now + 7 * DAY}
        # The ledger was created by the app's clock, and is silent for a second.
        log.publish([a_recipe("trigrams", {"window": window})], time=int(time.time()) + 2)
        said = typed(tmp_path, server.url, "", "--policy", str(policy), "--age", "33")
    assert "answered: trigrams" in said
    assert "A report was made, with noise, and sealed" in said


def test_the_app_says_why_it_is_silent(tmp_path: Path) -> None:
    with serve(lambda _: Reply(status=503)) as server:
        said = typed(tmp_path, server.url, "hello\n")
    assert "answered: nothing" in said
    assert "503" in said
