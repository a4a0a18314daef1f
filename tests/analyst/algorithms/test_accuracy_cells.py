"""The benchmarks of maps and two-way tables on a file of their kind: ratios, and intervals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.mark.parametrize("name", ["marginals", "heatmap"])
def test_intervals_of_cells_cover_and_are_as_wide_as_the_errors(name: str, tmp_path: Path) -> None:
    """The least coverage of two settings is below .95 by six standard errors once in 1e8 runs."""
    rng = np.random.default_rng(2)
    x = rng.gamma(2.0, 5.0, 20_000)
    file = tmp_path / "pairs.csv"
    rows = zip(x, x / 2.0 + rng.gamma(3.0, 2.0, 20_000), strict=True)
    file.write_text("\n".join(["waited,paid", *(f"{a:.3f},{b:.3f}" for a, b in rows)]))
    script = BENCHMARKS / f"accuracy_{name}.py"
    options = ["--data", str(file), "--quick", "--families-only", "--seeds", "2", "--json"]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for k in ("k3", "k1"):
        assert 0.0 < found[f"worst_ratio_to_static_fit_{k}"] < 10.0
        assert found[f"coverage_{k}"] > 0.95 - 6.0 * max(found[f"coverage_{k}_se"], 1e-3)
        assert found[f"coverage_{k}_se"] < 0.02
        assert 0.5 < found[f"interval_width_{k}"] < 2.0
