"""`chorister collect` and `publish-results`: what they print, write, and exit with."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import chorister as ch
from chorister.analyst import live_fleet
from chorister.analyst.rehearsal import Rehearsal
from chorister.analyst.unattended import pause
from chorister.cli import app
from chorister.clock import SettableClock, utc_minute
from chorister.errors import ServiceError
from tests.aggregator.operators import Operators
from tests.aggregator.server_processes import COMMAND, environment
from tests.analyst.fleets import decades, series_fleet
from tests.analyst.test_live_fleet import write_profile
from tests.keyboard import ANALYSIS

WEEK = 7 * 86_400


class ResultsWorld:
    """A rehearsal in place of the fleet that a profile connects to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = SettableClock(1_800_000_000)
        self.study = self.fleet().study("ada.weekly", analysis=ANALYSIS)
        self.track = self.study.track(decades(), every="1w", windows=3).ask()

    def fleet(self) -> Rehearsal:
        return series_fleet(folder=self.folder / "studies", clock=self.clock)

    def run(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        return done.output


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResultsWorld:
    found = ResultsWorld(tmp_path)
    monkeypatch.setattr(live_fleet, "connect", lambda _: found.fleet())
    return found


def test_collect_says_what_it_collected(world: ResultsWorld) -> None:
    assert world.run("collect") == "nothing to collect\n"
    world.clock.advance(WEEK)
    (line,) = world.run("collect").splitlines()
    assert line.startswith("ada.weekly, series 1, window 0: ")
    assert world.run("collect") == "nothing to collect\n"
    world.clock.advance(WEEK)
    found = json.loads(world.run("collect", "--json"))
    assert len(found["collected"]) == 1
    assert found["left"] == []


def test_collect_exits_with_1_if_something_is_left(
    world: ResultsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise ServiceError("the leader is away")

    world.clock.advance(WEEK)
    with monkeypatch.context() as patch:
        patch.setattr(Rehearsal, "collect", away)
        assert "not yet: ada.weekly, series 1: the leader is away" in world.run("collect", code=1)
        left = json.loads(world.run("collect", "--json", code=1))["left"]
        assert left == ["ada.weekly, series 1: the leader is away"]
    pause(world.track, by="ada")
    assert world.run("collect") == "nothing to collect\n"


def test_collect_raises_alerts(world: ResultsWorld) -> None:
    alerts = world.folder / "alerts.toml"
    alerts.write_text(
        "[destinations.book]\nfile='book.jsonl'\n"
        "[[rules]]\nname='any'\nstudy='ada.weekly'\nabove=0\nto=['book', 'log']\n"
    )
    world.clock.advance(WEEK)
    world.run("collect", "--alerts", str(alerts))
    (line,) = (world.folder / "book.jsonl").read_text().splitlines()
    assert json.loads(line)["rule"] == "any"
    alerts.write_text("[[rules]]\nname='any'\nstudy='ada.weekly'\n")
    assert "limits" in world.run("collect", "--alerts", str(alerts), code=2)
    assert "can't read" in world.run("collect", "--alerts", "missing.toml", code=2)


def test_publish_results(world: ResultsWorld) -> None:
    output = world.folder / "public"
    words = ("publish-results", "ada.weekly", "--output", str(output))
    assert "no result yet" in world.run(*words, code=1)
    assert not output.exists()
    world.clock.advance(2 * WEEK)
    world.run("collect")
    world.run(*words, "--title", "Ages <b>by week</b>", "--note", "Every Monday")
    page = (output / "index.html").read_text()
    assert "<h1>Ages &lt;b&gt;by week&lt;/b&gt;</h1>" in page
    assert "Every Monday" in page
    assert "<script" not in page
    world.clock.advance(WEEK)
    world.run("collect")
    printed = json.loads(world.run(*words, "--series", "1", "--json"))
    trend = world.fleet().study("ada.weekly", analysis=ANALYSIS).tracks()[0].trend
    for text, k in (((output / "index.html").read_text(), 2), (str(trend.to_html()), 0)):
        asked = utc_minute(trend.recipe.window_at(k).opens)
        (summary,) = re.findall("<summary>(.*?)</summary>", text)
        assert summary.startswith(f"Round 1, window {k}: {trend.results[k].n_reports:,} reports")
        assert f"asked {asked}," in summary
    assert len(printed["files"]) == 4
    assert json.loads((output / "results.json").read_text())["windows"] == 3
    assert (output / "results.csv").read_text().count("\n") == 1 + len(world.fleet().study(
        "ada.weekly", analysis=ANALYSIS).tracks()[0].trend)  # fmt: skip


def test_publish_a_round(world: ResultsWorld) -> None:
    study = world.fleet().study("ada.once", analysis=ANALYSIS)
    output = str(world.folder / "public")
    assert "no such round" in world.run("publish-results", "ada.once", "-o", output, code=2)
    study.ask(study.histogram(decades(), epsilon="0.5"))
    world.run("publish-results", "ada.once", "-o", output)
    world.run("publish-results", "ada.once", "-o", output, "--round", "1")
    saved = ch.Result.load(world.folder / "public" / "results.json")
    assert saved.n_reports == study.result().n_reports


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nobody"], "no study 'nobody' in"),
        (["ada.weekly", "--series", "7"], "no series 7; the study has: 1"),
        (["ada.weekly", "--series", "1", "--round", "1"], "either --series or --round"),
        (["ada.weekly", "--round", "9"], "no such round"),
        (["ada.weekly", "--round", "1"], "round 1 is a series: use --series"),
    ],
)
def test_publishing_what_is_not_there(world: ResultsWorld, words: list[str], why: str) -> None:
    output = str(world.folder / "public")
    assert why in world.run("publish-results", *words, "--output", output, code=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_watching_ends_with_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    operators = Operators(tmp_path)
    command = [*COMMAND, "collect", "--watch", "--profile", str(write_profile(operators))]
    watching = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    assert "until stopped" in watching.stdout.readline()
    watching.send_signal(number)
    _, errors = watching.communicate(timeout=120)
    assert (watching.returncode, errors) == (0, "")
