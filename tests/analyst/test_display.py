"""No noise is shown as signal: simultaneous intervals, shares that add up, groups within groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import chorister as ch
from chorister.analyst.display import bar_chart, row_names
from chorister.analyst.estimate import Part
from chorister.analyst.rehearsal.simulation import draw_sums
from chorister.analyst.tables import html_table
from chorister.encoding import Categories
from tests.keyboard import recipe_with

REPORTS = 20_000


def result_of(
    values: dict[str, int], size: int = 600, groups: tuple[str, ...] = (), seed: int = 1
) -> ch.Result:
    """A result of many words, most of which nobody has."""
    names = [*values, *(f"nobody-{i}" for i in range(size - len(values)))]
    feature = Categories(column="ngram", values=tuple(names)).model_dump(mode="json")
    recipe = recipe_with(features=[feature], group_by=["user.locale"] if groups else [])
    rng = np.random.default_rng(seed)
    counts = np.zeros(size + 1, dtype=np.int64)
    counts[1 : len(values) + 1] = list(values.values())
    parts = []
    for i, group in enumerate(groups or ("",)):
        reports = REPORTS * (1 + 3 * i)
        held = counts * (1 + 3 * i)
        held[0] = reports - held.sum()
        sums = draw_sums(recipe, held, reports, rng)
        parts.append(Part(group=(group,) if groups else (), reports=reports, sums=sums))
    return ch.Result(recipe=recipe, parts=tuple(parts))


def drawn_rows(result: ch.Result, **options: Any) -> list[dict[str, Any]]:
    sets = bar_chart(result, **options).to_dict()["datasets"].values()
    return next(list(rows) for rows in sets if "label" in rows[0])


def title_of(result: ch.Result, **options: Any) -> str:
    spec = bar_chart(result, **options).to_dict()
    title = next(each["title"] for each in (spec, *spec["layer"]) if "title" in each)
    return " ".join([title["text"], *title["subtitle"]])


def test_a_chart_of_many_bins_shows_nothing_that_is_not_there() -> None:
    """Of 600 words 5 exist; today's best 25 would include 20 that do not."""
    words = {f"word-{i}": 1_200 for i in range(5)}
    result = result_of(words)
    shown = drawn_rows(result, top=25)
    assert {row["label"] for row in shown if row["above"]} <= {*words, "OOV"}
    assert len([row for row in shown if row["above"]]) >= 4
    assert all(row["low"] > 0 for row in shown if row["above"])
    assert not [row for row in shown if row["label"].startswith("nobody") and row["above"]]
    assert "601" in title_of(result, top=25)


def test_intervals_of_a_chart_hold_for_all_rows_at_once() -> None:
    result = result_of({"word": 3_000})
    sure = result.simultaneous()
    place = result.labels["ngram"].index("word")
    row = next(row for row in drawn_rows(result) if row["label"] == "word")
    assert row["low"] == pytest.approx(float(sure.ci_low[place]))
    assert row["high"] == pytest.approx(float(sure.ci_high[place]))


def test_tables_beside_a_chart_have_its_intervals() -> None:
    """In a notebook and in a report: a bar that may be 0 does not get an interval above 0."""
    result = result_of({"word": 3_000}, size=12)
    shown = html_table(result.simultaneous().columns())
    assert html_table(result.columns()) != shown
    assert shown in result._repr_html_()
    report = result.to_html()
    assert report is not None
    assert shown in report
    assert "all 13 of them contain the true counts" in report


def test_a_report_of_very_many_bins_begins_with_the_largest() -> None:
    result = result_of({"nobody": 0, "last": 0, "word": 3_000}, size=9_999)
    result = result.filter(ngram=[*(f"nobody-{i}" for i in range(9_000)), "word"])
    report = result.to_html()
    assert report is not None
    rows = report.partition("<tbody>")[2]
    assert rows.startswith("<tr><td>word</td>")
    assert rows.partition("</tbody>")[0].count("<tr>") == 1_000
    assert "the 1,000 largest of 9,001 rows" in report


def test_a_result_of_noise_alone_says_so() -> None:
    result = result_of({}).filter(ngram=[f"nobody-{i}" for i in range(600)])
    assert len(result.above_noise()) == 0
    assert not any(row["above"] for row in drawn_rows(result))
    assert "Nothing is above the noise" in title_of(result)


def test_shares_add_up_within_each_group() -> None:
    result = result_of({"word": 6_000, "other": 4_000}, groups=("de_DE", "en_US"))
    shares = result.shares
    assert (shares >= 0.0).all()
    size = result.encoding.size
    assert shares[:size].sum() == pytest.approx(1.0)
    assert shares[size:].sum() == pytest.approx(1.0)


def test_groups_are_drawn_within_the_group() -> None:
    """A group four times as large does not look four times as frequent."""
    result = result_of({"word": 6_000}, groups=("de_DE", "en_US"))
    rows = {row["label"]: row for row in drawn_rows(result)}
    assert rows["de_DE · word"]["estimate"] == pytest.approx(30.0, abs=4.0)
    assert rows["en_US · word"]["estimate"] == pytest.approx(30.0, abs=4.0)
    assert "%" in str(bar_chart(result).to_dict())


def test_the_axis_shows_zero() -> None:
    spec = bar_chart(result_of({"word": 6_000})).to_dict()
    scales = [layer["encoding"]["x"].get("scale", {}) for layer in spec["layer"]]
    assert {"zero": True} in scales


def test_cells_of_a_map_are_named_by_their_coordinates() -> None:
    grid = ch.grid(("x", "y"), (0, 40, 20, 60), level=1).model_dump(mode="json")
    query = "SELECT age AS x, age AS y FROM user"
    recipe = recipe_with(features=[grid], group_by=[], query=query)
    sums = np.full(recipe.encoding.size, 700, dtype=np.uint64)
    result = ch.Result(recipe=recipe, parts=(Part(group=(), reports=1_000, sums=sums),))
    names = row_names(result)
    assert names[0] == "OOV"
    assert names[1] == "x 0 to 10, y 40 to 50"
    assert names[4] == "x 10 to 20, y 50 to 60"
