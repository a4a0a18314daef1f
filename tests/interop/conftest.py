"""Programs of others, built if Go is installed and its modules can be had; CI has both."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def interop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory, "interop", ".", FOLDER)


@pytest.fixture(scope="session")
def litewitness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("ssh-agent", "ssh-add", "ssh-keygen"):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    package = "filippo.io/torchwood/cmd/litewitness"
    return _build(tmp_path_factory, "litewitness", package, FOLDER / "witness")


@pytest.fixture(scope="session")
def omniwitness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = "github.com/transparency-dev/witness/cmd/omniwitness"
    return _build(tmp_path_factory, "omniwitness", package, FOLDER / "witness")


def _build(factory: pytest.TempPathFactory, name: str, package: str, module: Path) -> Path:
    """Build a package with the versions that a module pins; Go caches what does not change."""
    if shutil.which("go") is None:
        pytest.skip("Go is not installed")
    program = factory.mktemp(name) / name
    built = subprocess.run(
        # Without symbols, which take longer to link than the rest takes to check.
        ["go", "build", "-ldflags=-s -w", "-o", str(program), package],
        cwd=module,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    if built.returncode and ("dial tcp" in built.stderr or "Forbidden" in built.stderr):
        pytest.skip("the Go modules can't be downloaded")
    assert built.returncode == 0, built.stderr
    return program
