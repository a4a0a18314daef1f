"""The wheel holds all that the installed package reads: templates, static files, migrations."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "chorister"


def test_nothing_is_missing_from_the_wheel(tmp_path: Path) -> None:
    maturin = Path(sys.executable).parent / "maturin"
    build = subprocess.run(
        [maturin, "build", "--quiet", "--release", "--locked", "--out", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("chorister/")}
        unpacked = tmp_path / "installed"
        archive.extractall(unpacked)
    sources = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        # Whoever imports a module meanwhile writes beside its bytecode, under a name of the moment.
        if path.is_file() and path.suffix != ".so" and path.parent.name != "__pycache__"
    }
    assert {
        "chorister/analyst/algorithms/character_words.txt.gz",
        "chorister/console/templates/base.html",
        "chorister/py.typed",
    } <= sources
    assert sources <= packed
    # It is what runs, not the sources beside it: no path but the wheel's and the dependencies'.
    script = (
        "import sys; sys.path[:] = [p for p in sys.path if not p.endswith('/src')];"
        f"sys.path.insert(0, {str(unpacked)!r});"
        "import chorister;"
        "from chorister.aggregator.storage.database import _revisions;"
        f"assert chorister.__file__.startswith({str(unpacked)!r}), chorister.__file__;"
        "print(len(_revisions()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    revisions = list((PACKAGE / "aggregator" / "storage" / "migrations" / "versions").glob("v*.py"))
    assert revisions
    assert (run.returncode, run.stdout.strip()) == (0, str(len(revisions))), run.stderr
