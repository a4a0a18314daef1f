"""The demo's numbers against the truth that only a simulation knows."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from typer.testing import CliRunner

from chorister.cli import app
from chorister.fleet.deployment import COMMAND

RUNNER = CliRunner()


def run_demo(folder: Path, *options: str) -> str:
    run = subprocess.run(
        [*COMMAND, "demo", *options], cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("crosstab")
    text = run_demo(folder, "--algorithm", "crosstab", "--devices", "400", "--seed", "5", "--json")
    assert not list(folder.iterdir())  # with --json there is a report only if one is asked for
    answer: dict[str, Any] = json.loads(text)
    return answer


def test_intervals_hold_the_truth_at_the_stated_rate(crossed: dict[str, Any]) -> None:
    """Misses of 24 cells have the binomial law of 95% intervals: a false alarm is below 1e-6."""
    rows = crossed["estimates"]
    assert len(rows) == 24
    misses = sum(not row["ci_low"] <= row["truth"] <= row["ci_high"] for row in rows)
    assert stats.binom.sf(misses - 1, len(rows), 0.05) > 1e-6
    # Each row's error by itself, in its own standard errors: Bonferroni over all rows.
    worst = max(abs(row["estimate"] - row["truth"]) / row["std_error"] for row in rows)
    assert worst < stats.norm.isf(1e-7 / len(rows)) + 1


def test_everybody_is_counted_once(crossed: dict[str, Any]) -> None:
    assert crossed["devices"] == 400
    assert sum(each["reports"] for each in crossed["rounds"]) == 400
    last = crossed["rounds"][-1]
    assert sum(row["truth"] for row in crossed["estimates"]) == pytest.approx(last["reports"])
    assert all(each["reports"] >= each["min_cohort"] for each in crossed["rounds"])


def test_devices_spend_what_the_policy_allows_and_no_more(crossed: dict[str, Any]) -> None:
    spent = crossed["spent"]
    assert spent["devices_by_reports"] == {"1": 400}
    assert spent["epsilon"] == spent["allowed_epsilon"] == 2
    assert {each["epsilon"] for each in crossed["rounds"]} == {2}


def test_one_question_is_refused(crossed: dict[str, Any]) -> None:
    (refused,) = crossed["refused"]
    assert refused["check"] == "fields"
    assert "keyboard.recipient is not open" in refused["why"]
    assert re.fullmatch(r"[0-9a-f]{64}", refused["audit"])


def test_the_story_of_phrases(tmp_path: Path) -> None:
    text = run_demo(tmp_path, "--devices", "500", "--report", "phrases.html", "--picture", "p.svg")
    assert "Which phrases do many people type?" in text
    assert "intervals contain the truth" in text
    assert "500 devices sent 1 report: epsilon 2 of 2" in text
    assert "Leader: 500 sealed reports for 2 tasks, 0 rejected" in " ".join(text.split())
    assert "A question was refused" in text
    assert str(tmp_path / "phrases.html") in text
    page = (tmp_path / "phrases.html").read_text()
    assert "<svg" in page
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert "keyboard.recipient is not open to this analysis" in page
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']?(\S+?)["'\s>]|@import|url\(([^)]+)\)""", page)
    assert [each for each in loaded if not "".join(each).startswith(("#", "data:"))] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--devices", "499"], "--devices must be at least 500"),
        (["--algorithm", "heatmap", "--devices", "1000"], "at least 1,200"),
        (["--report", "/no/such/folder/x.html"], "does not exist"),
    ],
)
def test_what_can_not_be_shown_is_refused_in_one_line(options: list[str], words: str) -> None:
    run = RUNNER.invoke(app, ["demo", *options])
    assert run.exit_code == 2
    assert words in " ".join(run.stderr.split())


def test_a_bug_ends_with_three_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **more: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("chorister.cli.demo_run.run_demo", broken)
    run = RUNNER.invoke(app, ["demo", "--json"])
    assert run.exit_code == 3
    assert "Traceback" in run.stderr
    assert "a bug in Chorister, please report it: KeyError('oops')" in run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("demo --devices many", "'--devices'"),
        ("demo --no-such", "No such option: --no-such; see `chorister demo --help`"),
        ("no-such", "No such command 'no-such'; see `chorister --help`"),
        ("--no-such", "No such option: --no-such; see `chorister --help`"),
        ("recipe explain", "Missing argument 'RECIPE'; see `chorister recipe explain --help`"),
    ],
)
def test_wrong_options_end_with_two_and_one_line(words: str, message: str) -> None:
    run = RUNNER.invoke(app, words.split(), prog_name="chorister")
    assert run.exit_code == 2
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("error: ")
    assert message in run.stderr


def test_a_group_alone_shows_its_help() -> None:
    for words in ([], ["recipe"]):
        run = RUNNER.invoke(app, words)
        assert run.exit_code == 2
        assert "Usage:" in run.output


def test_help_lists_every_command() -> None:
    run = RUNNER.invoke(app, ["--help"])
    assert run.exit_code == 0
    for name in ("demo", "up", "down", "doctor"):
        assert name in run.output
