"""Where output goes: any character set, any width, and a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.keyboard import POLICY_FILE

EPSILON = ("privacy", "epsilon", "--cohort", "1000", "--local-epsilon", "3", "--delta", "1e-6")


def run(
    *arguments: str | Path, to: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chorister.cli", *map(str, arguments)],
        env=os.environ | {"NO_COLOR": "1"} | environment,
        stdout=to,
        stderr=subprocess.PIPE,
        encoding="latin-1",
        check=False,
    )


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
def test_what_a_character_set_lacks_is_spelled_out(charset: str, tmp_path: Path) -> None:
    """As on Windows, where a pipe has a character set of its own."""
    policy = tmp_path / "policy.toml"
    text = POLICY_FILE.read_text().replace('purpose = "', 'purpose = "\N{SNOWMAN} ', 1)
    policy.write_text(text, encoding="utf-8")
    assert "\N{SNOWMAN}" in text
    for arguments in (("--help",), EPSILON, ("policy", "check", policy)):
        done = run(*arguments, PYTHONIOENCODING=charset, COLUMNS="40")
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    assert r"\u2603" in done.stdout
    missing = run("policy", "check", tmp_path / "\N{SNOWMAN}", PYTHONIOENCODING=charset)
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: can't read")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [EPSILON, (*EPSILON, "--json")])
def test_a_full_disk_is_no_bug(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run(*arguments, to=full.fileno())
    assert done.returncode == 2
    assert done.stderr == "error: can't write the output: No space left on device\n"


def test_an_error_is_printed_at_every_width() -> None:
    for columns in ("0", "1", "-1"):
        done = run("policy", "check", "/nowhere", COLUMNS=columns)
        assert done.returncode == 2
        assert done.stderr == "error: can't read /nowhere: No such file or directory\n"
