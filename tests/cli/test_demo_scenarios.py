"""The demo's other scenarios, each with as few devices as it allows, compared with the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from tests.cli.test_demo import run_demo

DEVICES = {"heatmap": 1200, "distribution": 500, "words": 500, "trend": 400}


@pytest.fixture(scope="module", params=list(DEVICES))
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp(request.param)
    options = ("--algorithm", request.param, "--devices", str(DEVICES[request.param]))
    text = run_demo(folder, *options, "--seed", "3", "--json", "--report", "report.html")
    return request.param, json.loads(text), Path(folder, "report.html").read_text()


def test_intervals_hold_the_truth_at_the_stated_rate(told: tuple[str, dict[str, Any], str]) -> None:
    """By the binomial law of 95% intervals a false alarm is below 1e-6.

    Those of words are simultaneous, so they miss less often. The two words that most
    people type exceed the threshold by four standard errors.
    """
    algorithm, found, _ = told
    rows = found["estimates"]
    assert len(rows) >= {"heatmap": 100, "distribution": 4, "words": 1, "trend": 4}[algorithm]
    misses = sum(not row["ci_low"] <= row["truth"] <= row["ci_high"] for row in rows)
    assert stats.binom.sf(misses - 1, len(rows), 0.05) > 1e-6


def test_everybody_is_counted_once(told: tuple[str, dict[str, Any], str]) -> None:
    algorithm, found, page = told
    assert found["devices"] == DEVICES[algorithm]
    reports = sum(each["reports"] for each in found["rounds"])
    spent = found["spent"]["devices_by_reports"]
    if algorithm == "trend":
        # A window closes, whoever is late: such a report is charged, but not counted.
        assert DEVICES[algorithm] // 2 < reports <= spent["1"] <= DEVICES[algorithm]
        assert set(spent) <= {"0", "1"}
    else:
        assert reports == DEVICES[algorithm]
        assert spent == {"1": DEVICES[algorithm]}
    assert f"{DEVICES[algorithm]:,} simulated devices" in page
    assert "<svg" in page
