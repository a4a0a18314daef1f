"""The table of docs/scale.md is what the script computes from the figures beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import loaded

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "scale.json"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return loaded(ROOT / "benchmarks" / "scale.py")


@pytest.mark.parametrize(("options", "lines"), [([], 11), (["--parts"], 9), (["--growth"], 6)])
def test_the_page_shows_what_the_script_computes(options: list[str], lines: int) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), str(FIGURES), *options]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert len(printed.splitlines()) == lines
    assert printed in (ROOT / "docs" / "scale.md").read_text()


def test_needs_grow_with_reports_and_bins(scale: ModuleType) -> None:
    figures = json.loads(FIGURES.read_text())
    small, large = (scale.need(figures, number, 1_000) for number in (10**6, 10**9))
    assert large.leader_cores == pytest.approx(1000 * small.leader_cores)
    assert large.uploaded == pytest.approx(1000 * small.uploaded)
    sizes = [scale.need(figures, 10**8, bins) for bins in scale.SIZES]
    for name in ("leader_cores", "helper_cores", "uploaded", "waiting"):
        values = [getattr(each, name) for each in sizes]
        assert values == sorted(values)
        assert values[0] < values[-1]
    # At the size that was measured: nothing is extrapolated but the rate.
    measured = scale.need(figures, scale.DAY, 1_000)
    assert measured.leader_cores == pytest.approx(figures["workers_2_worker_cpu"])
    assert measured.helper_cores == pytest.approx(figures["workers_2_helper_cpu"])
    assert measured.database_cores == pytest.approx(figures["workers_2_database_cpu"])


@pytest.mark.parametrize(
    ("value", "shown"), [(0.123, "0.12"), (1.26, "1.3"), (12.6, "13"), (1260, "1,300")]
)
def test_figures_have_two_digits(scale: ModuleType, value: float, shown: str) -> None:
    assert scale.number(value) == shown
