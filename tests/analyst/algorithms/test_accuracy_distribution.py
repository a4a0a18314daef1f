"""The benchmark of distributions: its quick mode on a file of its kind, and its comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "accuracy_distribution.py"


def test_any_file_of_numbers_is_accepted(tmp_path: Path) -> None:
    values = np.random.default_rng(1).gamma(2.0, 5.0, 20_000)
    file = tmp_path / "waits.csv"
    file.write_text("\n".join(["who,waited", *(f"x,{value:.3f}" for value in values)]))
    command = [sys.executable, str(SCRIPT), "--data", str(file), "--quick", "--json"]
    command += ["--settings", "honest"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("k3", "k1"):
        key = f"worst_ratio_to_static_fit_{name}"
        assert 0.0 < found[key] < 10.0
        assert found[f"{key}_se"] > 0.0
    assert found["interactive_adult_0.05"] > 0.0
    assert found["worst_ratio_of_static_rule"] > 0.5
    assert "held out" in done.stdout
