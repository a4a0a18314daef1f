"""No result is lost: runs stay in view whatever fails later, everything can be taken away, and
studies can be named, described, found and archived."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx2
import polars as pl
import pytest

import chorister as ch
from chorister.analyst.algorithms.algorithm_run import AlgorithmRun, Step
from chorister.console.background import RunRecord, RunStore
from chorister.console.workspace import StudyView, Workspace
from chorister.errors import StudyError
from tests.console.test_pages_results import signed_in, text_of
from tests.console.world import NASTY, ConsoleWorld, running, settings
from tests.keyboard import ANALYSIS


def finished(
    world: ConsoleWorld, view: StudyView, number: int, *, seconds: float = 120.0
) -> RunRecord:
    """Wait until a run has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        record = world.workspace.runs.get(view.key, number)
        if record is not None and not record.running:
            return record
        time.sleep(0.05)
    raise AssertionError("the run did not end")


def start(
    world: ConsoleWorld, view: StudyView, run: AlgorithmRun[Any], number: int | None = None
) -> int:
    record = world.workspace.runs.start(
        view.key, algorithm="distribution", values={}, by="ada", run=run, number=number
    )
    return finished(world, view, record.number).number


def failing(run: AlgorithmRun[Any], *, after: int) -> AlgorithmRun[Any]:
    """The same run, whose budget ends after some rounds."""

    def steps() -> Any:
        for number, step in enumerate(run):
            if number == after:
                raise StudyError("no budget is left")
            yield step
        return run.result

    return AlgorithmRun(run.plan, steps)


def csrf_of(client: httpx2.Client) -> str:
    return client.get("/").text.split('name="csrf" value="')[1].split('"')[0]


def test_a_finished_run_stays_in_view_whatever_fails_later(tmp_path: Path) -> None:
    with running(tmp_path, reports=8) as world:
        view = world.workspace.create("ada", "rehearsal", "kept", ANALYSIS)
        good = ch.distribution(view.study, "age", 0, 100, epsilon=1, delta="2e-6")
        assert start(world, view, good) == 1
        bad = ch.distribution(view.study, "age", 0, 90, epsilon=1, delta="2e-6")
        assert start(world, view, failing(bad, after=1)) == 2
        with signed_in(world) as client:
            page = client.get(view.path).text
            assert 'id="run-1"' in page  # with its chart, not only a link
            assert 'id="run-2"' in page
            assert f"{view.path}/runs/1/picture.svg" in page
            assert "no budget is left" in page
            assert "What was found, and downloads" in page
            for number in (1, 2):
                assert client.get(f"{view.path}/runs/{number}").status_code == 200
        # Resuming what fails at once does not hide the round that it had.
        again = ch.distribution(view.study, "age", 0, 90, epsilon=1, delta="2e-6")
        assert start(world, view, failing(again, after=0), number=2) == 2
        record = world.workspace.runs.get(view.key, 2)
        assert record is not None
        assert record.rounds
        # After a restart, everything is still there.
        store = RunStore(tmp_path / "console" / "runs")
        assert [each.state for each in store.of(view.key)] == ["failed", "finished"]
        assert store.result(view.key, 1) is not None


def test_a_chart_that_can_not_be_drawn_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Step) -> None:
        raise ValueError("no such chart")

    monkeypatch.setattr(Step, "picture", property(broken))
    with running(tmp_path) as world:
        view = world.workspace.create("ada", "rehearsal", "kept", ANALYSIS)
        start(world, view, ch.distribution(view.study, "age", 0, 100, epsilon=1, delta="2e-6"))
        record = world.workspace.runs.get(view.key, 1)
        assert record is not None
        assert record.state == "finished"
        with signed_in(world) as client:
            assert client.get(f"{view.path}/runs/1/result.csv").status_code == 200


def test_results_and_runs_are_exported_in_every_format(tmp_path: Path) -> None:
    with running(tmp_path, reports=8) as world:
        view = world.workspace.create("ada", "rehearsal", "export", ANALYSIS)
        start(world, view, ch.distribution(view.study, "age", 0, 100, epsilon=1, delta="2e-6"))
        unfinished = ch.distribution(view.study, "age", 0, 90, epsilon=1, delta="2e-6")
        start(world, view, failing(unfinished, after=1))
        with signed_in(world) as client:
            page = client.get(f"{view.path}/rounds/1").text
            for place in ("/rounds/1", "/runs/1", "/runs/2"):
                files = {
                    kind: client.get(f"{view.path}{place}/result.{kind}")
                    for kind in ("csv", "parquet", "json", "html")
                }
                for kind, answer in files.items():
                    assert answer.status_code == 200, (place, kind)
                    assert f'.{kind}"' in answer.headers["content-disposition"]
                    assert "attachment" in answer.headers["content-disposition"]
                lines = files["csv"].text.splitlines()
                frame = pl.read_parquet(io.BytesIO(files["parquet"].content))
                assert frame.height == len(lines) - 1
                assert json.loads(files["json"].text)["format"].startswith("chorister-")
                assert "<svg" in files["html"].text
                assert "<script" not in files["html"].text
            saved = view.study.result(1)
            exported = ch.Result.from_json(client.get(f"{view.path}/rounds/1/result.json").content)
            assert exported.candidates == len(saved) > 1  # as the page shows
            assert exported.ci_low.tolist() == saved.simultaneous().ci_low.tolist()
            for wrong in ("/rounds/1/result.exe", "/runs/9/result.csv", "/rounds/9/result.csv"):
                assert client.get(view.path + wrong).status_code == 404
        for kind in ("csv", "parquet", "json", "html"):
            assert f"/rounds/1/result.{kind}" in page
        with signed_in(world, "ben") as stranger:
            for place in ("/rounds/1", "/runs/1"):
                assert stranger.get(f"{view.path}{place}/result.csv").status_code == 404


def test_studies_are_renamed_noted_searched_and_archived(tmp_path: Path) -> None:
    with running(tmp_path) as world, signed_in(world) as client:
        first = world.workspace.create("ada", "rehearsal", "first", ANALYSIS)
        world.workspace.create("ada", "rehearsal", "second", ANALYSIS)
        form = {"csrf": csrf_of(client), "title": f"Ages {NASTY}", "note": "Autumn\nsurvey"}
        assert client.post(f"{first.path}/about", data=form).status_code == 303
        page = client.get(first.path).text
        assert NASTY not in page
        assert "Ages &lt;img" in page
        assert "survey" in page
        names = re.compile(r"<strong>([^<]*)</strong>")
        assert len(names.findall(client.get("/").text)) == 2
        for words, count in (("autumn", 1), ("SURVEY ages", 1), ("second", 1), ("nothing", 0)):
            found = client.get("/", params={"q": words}).text
            assert len(names.findall(found)) == count, words
        assert "No study matches" in text_of(client.get("/", params={"q": "nothing"}).text)

        form["archived"] = "yes"
        assert client.post(f"{first.path}/about", data=form).status_code == 303
        assert names.findall(client.get("/").text) == ["second"]
        assert "1 archived" in text_of(client.get("/").text)
        assert len(names.findall(client.get("/", params={"archived": "yes"}).text)) == 1
        assert client.get(first.path).status_code == 200  # it still works

        # All of it outlives the process, and the recipes keep the study's own name.
        again = Workspace(settings(tmp_path), list(world.workspace.connections.values()))
        view = again.find("ada", "rehearsal", "ada", "first")
        assert (view.about.title, view.about.archived) == (f"Ages {NASTY}", True)
        assert view.study.name == "ada.first"

        too_long = {**form, "title": "x" * 81}
        assert client.post(f"{first.path}/about", data=too_long).status_code in (400, 422)
        assert again.find("ada", "rehearsal", "ada", "first").about.title == f"Ages {NASTY}"


def test_only_the_owner_describes_a_study(tmp_path: Path) -> None:
    with running(tmp_path) as world, signed_in(world, "ben") as client:
        view = world.workspace.create("ada", "rehearsal", "hers", ANALYSIS)
        world.workspace.share(view, "ben", "ask")
        form = {"csrf": csrf_of(client), "title": "mine", "note": ""}
        assert client.post(f"{view.path}/about", data=form).status_code in (400, 403, 422)
        assert world.workspace.notes.of("rehearsal", "ada.hers").title == ""
        assert 'id="about"' not in client.get(view.path).text
