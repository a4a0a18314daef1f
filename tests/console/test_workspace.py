"""A workspace: what of a study's folder the pages see."""

from __future__ import annotations

from pathlib import Path

import chorister as ch
from tests.console.world import open_workspace
from tests.keyboard import ANALYSIS


def test_what_a_notebook_asked_is_seen_at_once(tmp_path: Path) -> None:
    workspace, _ = open_workspace(tmp_path)
    _, notebook = open_workspace(tmp_path)
    workspace.create("ada", "rehearsal", "ages", ANALYSIS)
    study = notebook.study("ada.ages", analysis=ANALYSIS)
    asked = study.histogram(ch.intervals("age", range(10, 90, 10)), epsilon=1).run()
    (round_,) = workspace.find("ada", "rehearsal", "ada", "ages").study.rounds
    assert round_.result is not None
    assert round_.result.n_reports == asked.n_reports
