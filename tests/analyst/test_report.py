"""Every result can be taken away: CSV, Parquet, JSON, and one HTML file that needs nothing else."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import chorister as ch
from chorister.analyst.publishing import publish
from chorister.errors import InvalidInput
from tests.analyst.fleets import fleet, generous
from tests.keyboard import ANALYSIS

EVIL = "</style><script>alert(1)</script><img src=http://x.example/y onerror=alert(2)>"


def _result() -> ch.Result:
    people = {"ngram": [EVIL, "how are you"], "count": [4_000, 6_000]}
    study = ch.rehearse(people, generous(), seed=1).study("export", analysis=ANALYSIS)
    return study.histogram(ch.categories("ngram", [EVIL, "how are you"])).run()


@pytest.fixture(scope="module")
def items() -> dict[str, Any]:
    study = fleet().study("export", analysis=ANALYSIS)
    other = fleet().study("other", analysis=ANALYSIS)
    return {
        "result": _result(),
        "distribution": ch.distribution(study, "age", 0, 100).result,
        "statistic": other.mean("age", 0, 100).run(),
    }


class Loads(HTMLParser):
    """What a page would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            loads = name in ("src", "href", "xlink:href", "srcset", "data", "action")
            if (loads and not str(value).startswith("#")) or name.startswith("on"):
                self.found.append(f"{tag} {name}={value}")


@pytest.mark.parametrize("name", ["result", "distribution", "statistic"])
def test_every_format(items: dict[str, Any], name: str, tmp_path: Path) -> None:
    item = items[name]
    rows = len(next(iter(item.columns().values())))
    assert len(item.to_csv().splitlines()) == rows + 1
    frame = pl.read_parquet(io.BytesIO(item.to_parquet()))
    assert frame.columns == list(item.columns())
    assert frame.height == rows
    item.to_parquet(tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").read_bytes() == item.to_parquet()
    assert json.loads(item.to_json())
    item.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == item.to_html()


@pytest.mark.parametrize("name", ["result", "distribution", "statistic"])
def test_a_report_needs_nothing_else_and_runs_nothing(items: dict[str, Any], name: str) -> None:
    text = items[name].to_html(title=EVIL)
    page = Loads()
    page.feed(text)
    assert page.found == []
    assert not {"script", "link", "iframe", "img", "object"}.intersection(page.tags)
    assert "alert(1)</script>" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "<table>" in text
    assert "epsilon" in text
    assert ("<svg" in text) == (name != "statistic")


def test_a_result_comes_back_from_its_json() -> None:
    result = _result()
    again = ch.Result.from_json(result.to_json())
    assert (again.estimate == result.estimate).all()


# --- Notebooks ----------------------------------------------------------------------------------


def test_everything_that_a_cell_may_end_with_has_rich_html(items: dict[str, Any]) -> None:
    """A chart, words and a table, which run nothing and load nothing."""
    study = fleet().study("notebook", analysis=ANALYSIS)
    question = study.histogram(ch.intervals("age", [0, 30, 60, 90]))
    result = question.run()
    run = ch.distribution(study, "age", 0, 50)
    shown = {
        "study": study, "question": question, "cost": question.cost(), "result": result,
        "run": run, "plan": run.plan, "history": study.history(), "status": study.status(),
        "comparison": result.compare(question.again().run()), "planned mean":
        study.mean("age", 0, 100).cost(), **items,
    }  # fmt: skip
    for name, item in shown.items():
        text = item._repr_html_()
        page = Loads()
        page.feed(text)
        assert page.found == [], name
        assert "script" not in page.tags, name
        assert "<p>" in text or "<table>" in text, name
    for name in ("result", "distribution"):
        assert "<svg" in shown[name]._repr_html_()
        assert "<table>" in shown[name]._repr_html_()
    for name in ("statistic", "comparison"):
        assert "<table>" in shown[name]._repr_html_()


def test_without_the_packages_that_draw_there_is_still_a_table(
    items: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise InvalidInput(f"this needs {name}")

    monkeypatch.setattr("chorister.analyst.report.needed", absent)
    text = items["result"]._repr_html_()
    assert "<svg" not in text
    assert "<table>" in text


def test_a_published_folder_runs_nothing_and_holds_everything(tmp_path: Path) -> None:
    result = _result()
    for _ in range(2):  # the second time over the first
        publish(result, [result], tmp_path / "public", title=EVIL, note=EVIL)
    folder = tmp_path / "public"
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.html", "results.csv", "results.json", "results.parquet",
    ]  # fmt: skip
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
    page = Loads()
    page.feed(text := (folder / "index.html").read_text())
    assert [each for each in page.found if not each.startswith("a href=results.")] == []
    assert not {"script", "img", "iframe", "object", "link"} & set(page.tags)
    assert "default-src 'none'" in text
    assert "http://x.example/y onerror" not in re.sub(r"&lt;.*?&gt;", "", text)
    assert pl.read_parquet(folder / "results.parquet").height == len(result)
    assert pl.read_csv(folder / "results.csv").height == len(result)
    assert ch.Result.load(folder / "results.json").n_reports == result.n_reports


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "public").write_text("a file")
    result = _result()
    with pytest.raises(InvalidInput, match="can't write"):
        publish(result, [result], tmp_path / "public", title="t")
