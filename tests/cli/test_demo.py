"""The demo's numbers against the truth that only a simulation knows."""

from __future__ import annotations

import json

import pytest
from scipy import stats
from typer.testing import CliRunner

from chorister.cli import app

RUNNER = CliRunner()


def test_intervals_cover_the_truth_at_the_stated_rate() -> None:
    """Five fleets: the number of misses has the binomial law of 95 % intervals (rate 1e-6)."""
    misses = bins = 0
    for seed in range(5):
        run = RUNNER.invoke(app, ["demo", "--devices", "1500", "--seed", str(seed), "--json"])
        assert run.exit_code == 0, run.output
        answer = json.loads(run.stdout)
        assert answer["devices"] == 1500
        assert sum(row["truth"] for row in answer["estimates"]) == 1500
        bins += len(answer["estimates"])
        misses += sum(
            not row["ci_low"] <= row["truth"] <= row["ci_high"] for row in answer["estimates"]
        )
    assert stats.binom.sf(misses - 1, bins, 0.05) > 1e-6


def test_the_table_is_readable() -> None:
    run = RUNNER.invoke(app, ["demo", "--devices", "600"], env={"COLUMNS": "80"})
    assert run.exit_code == 0
    assert "estimate" in run.output
    assert "cover the truth" in run.output
    assert "…" not in run.output


def test_a_fleet_below_the_minimum_cohort_is_refused_in_one_line() -> None:
    run = RUNNER.invoke(app, ["demo", "--devices", "499"])
    assert run.exit_code == 2
    assert "--devices must be at least the minimum cohort" in " ".join(run.stderr.split())


def test_a_bug_ends_with_three_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("chorister.cli.demo.simulate_truth", broken)
    run = RUNNER.invoke(app, ["demo"])
    assert run.exit_code == 3
    assert "Traceback" in run.stderr
    assert "a bug in Chorister, please report it: KeyError('oops')" in run.stderr


def test_wrong_options_end_with_two() -> None:
    assert RUNNER.invoke(app, ["demo", "--no-such-option"]).exit_code == 2
    assert RUNNER.invoke(app, ["no-such-command"]).exit_code == 2


def test_help_lists_every_command() -> None:
    run = RUNNER.invoke(app, ["--help"])
    assert run.exit_code == 0
    assert "demo" in run.output
