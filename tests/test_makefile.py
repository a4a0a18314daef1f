"""`make test` keeps the packages of different Python versions apart."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def planned(folder: Path, *arguments: str) -> str:
    """What `make test` would run in a fresh clone."""
    shutil.copy(REPOSITORY / "Makefile", folder)
    shutil.copy(REPOSITORY / "requirements.lock", folder)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    shutil.copytree(REPOSITORY / "src" / "rust" / "src", folder / "src" / "rust" / "src")
    for name in ("Cargo.toml", "Cargo.lock"):
        shutil.copy(REPOSITORY / "src" / "rust" / name, folder / "src" / "rust")
    # A make that runs these tests passes its own arguments on.
    passed_on = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "VENV")
    environment = {name: value for name, value in os.environ.items() if name not in passed_on}
    return subprocess.run(
        ["make", "--dry-run", "test", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], ".venv"),
        (
            [f"PYTHON={sys.executable}"],
            f".venv-{sys.version_info.major}.{sys.version_info.minor}",
        ),
    ],
    ids=["default", "named"],
)
def test_a_named_python_has_its_own_environment(
    arguments: list[str], folder: str, tmp_path: Path
) -> None:
    used = re.findall(r"(?<!\S)(\.venv\S*)/bin/(\w+)", planned(tmp_path, *arguments))
    assert {"python", "pytest"} <= {program for _, program in used}
    assert {environment for environment, _ in used} == {folder}
