"""What analysts are told if something fails that is nobody's mistake: a full disk, or a bug."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chorister.console import background
from chorister.console.background import RunRecord
from chorister.console.pages_studies import EventStreams, LiveStudy
from tests.console.test_access import STUDY, Site, begin

FULL = OSError(errno.ENOSPC, "No space left on device")
ERRORS = [(FULL, "No space left on device"), (KeyError("oops"), "bug in Chorister")]


def raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(("error", "words"), ERRORS)
def test_a_page(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    words: str,
) -> None:
    ada = site.signed_in("ada")
    begin(ada)
    monkeypatch.setattr(LiveStudy, "of", raising(error))
    answer = ada.get(STUDY)
    assert answer.status_code == 500
    assert words in answer.text
    assert ("bug" in answer.text) is (error is not FULL)
    assert [(each.levelno, each.exc_info is not None) for each in caplog.records] == [
        (logging.ERROR, True)
    ]


@pytest.mark.parametrize(("error", "words"), ERRORS)
def test_a_stream_says_that_its_page_is_out_of_date(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    ada = site.signed_in("ada")
    begin(ada)
    monkeypatch.setattr(EventStreams, "_look", raising(error))
    answer = ada.get(STUDY + "/events")
    assert "This page is out of date" in answer.text
    assert words in answer.text


class FailingRun:
    """A run whose first step fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[object]:
        raise self.error


@pytest.mark.parametrize(("error", "words"), ERRORS)
def test_a_run_ends_and_says_why_even_if_that_can_not_be_stored(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """Otherwise it would seem to run until the next restart, and no other could be started."""
    runs, study = site.workspace.runs, ("rehearsal", "ada-mine")
    record = RunRecord(number=1, algorithm="ngrams", values={}, by="ada", planned=1)
    runs._keep(study, record)
    monkeypatch.setattr(background, "write_atomically", raising(FULL))
    with pytest.raises(OSError, match="No space left"):
        runs._follow(study, record, FailingRun(error), ())  # type: ignore[arg-type]
    found = runs.get(study, 1)
    assert found is not None
    assert not found.running
    assert words in found.words


def test_a_chart_that_can_not_be_drawn_does_not_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step: Any = SimpleNamespace(picture=SimpleNamespace(to_dict=raising(KeyError("oops"))))
    background.RunStore._draw(tmp_path / "run.picture", step)
    assert not (tmp_path / "run.picture").exists()
    assert "drawing a chart failed because of a bug" in caplog.text
