"""Lower packages never import higher ones, and enforcement no cache; both are in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(Path(sys.executable).parent / "lint-imports", "--no-cache"),
            *("--config", REPOSITORY / "pyproject.toml"),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_layers_hold() -> None:
    run = lint(REPOSITORY / "src")
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("lower", "upper"), [("errors", "cli"), ("errors", "privacy"), ("privacy/weights", "cli")]
)
def test_an_import_upwards_is_noticed(lower: str, upper: str, tmp_path: Path) -> None:
    package = tmp_path / "chorister"
    shutil.copytree(REPOSITORY / "src" / "chorister", package)
    with (package / f"{lower}.py").open("a") as module:
        module.write(f"\nimport chorister.{upper}\n")
    run = lint(tmp_path)
    assert run.returncode == 1
    assert "BROKEN" in run.stdout


@pytest.mark.parametrize(
    "module", ["device/outbox", "policy/bounds", "recipe/check", "privacy/filters"]
)
def test_enforcement_that_reads_the_cache_is_noticed(module: str, tmp_path: Path) -> None:
    """Whoever can write to a cache folder must not be able to raise what a device believes."""
    package = tmp_path / "chorister"
    shutil.copytree(REPOSITORY / "src" / "chorister", package)
    with (package / f"{module}.py").open("a") as file:
        file.write("\nfrom chorister.privacy.cache import remember\n")
    run = lint(tmp_path)
    assert run.returncode == 1
    assert "What enforces never reads the cache" in run.stdout.split("Broken contracts")[1]


def test_a_package_without_a_place_in_the_order_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "src" / "chorister", tmp_path / "chorister")
    (tmp_path / "chorister" / "attic.py").touch()
    assert lint(tmp_path).returncode == 1
