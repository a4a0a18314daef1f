"""`pip install chorister` alone: a device runs, and everything else says what to install."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import chorister
from tests.conftest import REPOSITORY
from tests.scripts import loaded

base_install: Any = loaded(REPOSITORY / "benchmarks" / "_base_install.py")
NOT_THERE = ("numpy", "scipy", "typer", "rich", "polars", "starlette", "sqlalchemy")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "environment"
    found: Path = base_install.base_environment(folder, Path(chorister.__file__).parent)
    return found


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-I", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def test_a_device_is_embedded_as_the_howto_says(python: Path) -> None:
    page = (REPOSITORY / "docs" / "howto" / "embed-a-device.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) > 4
    check = f"import sys\nassert not {{*{NOT_THERE!r}}} & {{*sys.modules}}\nprint('done')\n"
    done = run(python, "-c", "\n".join([*blocks, check]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def test_importing_a_device_leaves_http_for_the_time_in_which_its_sandbox_starts(
    python: Path,
) -> None:
    done = run(python, "-c", "from chorister.device import Device; import sys; print(*sys.modules)")
    found = set(done.stdout.split())
    assert "chorister.http_client" in found
    assert found.isdisjoint({"httpcore2", "httpx2", "anyio", "asyncio", "keyring"})


@pytest.mark.parametrize("name", NOT_THERE)
def test_the_environment_has_nothing_else(python: Path, name: str) -> None:
    done = run(python, "-c", f"import {name}")
    assert f"No module named '{name}'" in done.stderr


def test_the_command_says_in_one_line_what_to_install(python: Path) -> None:
    done = run(python, "-m", "chorister.cli", "device", "--help")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*\(numpy\): pip install 'chorister\[cli\]'\n", done.stderr)


def test_the_interface_of_analysts_says_what_to_install(python: Path) -> None:
    done = run(python, "-c", "import chorister as ch; ch.Policy; ch.rehearse")
    last = done.stderr.splitlines()[-1]
    assert last == (
        "ImportError: chorister.rehearse needs more packages (numpy): "
        "pip install 'chorister[analyst]'"
    )
