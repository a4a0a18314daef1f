"""Results: frozen, self-explaining, out in every form, and honest after every step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chorister as ch
from chorister.analyst.rehearsal import draw_sums
from chorister.analyst.view import Part
from chorister.errors import DecodeError, InvalidInput
from tests.analyst.fleets import AGES, decades, fleet, generous
from tests.keyboard import ANALYSIS

EVIL = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def result() -> ch.Result:
    study = fleet().study("results", analysis=ANALYSIS)
    return study.histogram(decades(), local_epsilon=3, epsilon=1).run()


@pytest.fixture(scope="module")
def table() -> ch.Result:
    """Two features, in groups."""
    rows: dict[str, list[Any]] = {"age": [], "ngram": [], "locale": [], "count": []}
    for age in (15, 25, 35):
        for word in ("a", "b"):
            for locale in ("de_DE", "en_US", "xx"):
                rows["age"].append(age)
                rows["ngram"].append(word)
                rows["locale"].append(locale)
                rows["count"].append(40 * age if locale != "xx" else 1)
    study = ch.rehearse(rows, generous(), seed=1).study("table", analysis=ANALYSIS)
    return study.histogram(
        [decades(), ch.categories("ngram", ["a", "b"])],
        group_by=["user.locale"],
        local_epsilon=2,
        epsilon=1,
    ).run()


def test_it_is_frozen(result: ch.Result) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.round = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        result.counts[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        result.parts[0].sums[0] = 1


def test_columns_in_every_form(result: ch.Result, tmp_path: Path) -> None:
    names = ["age", "estimate", "std_error", "ci_low", "ci_high"]
    frame = result.to_polars()
    assert frame.columns == names
    assert frame["age"].to_list()[:2] == ["OOV", "[10, 20)"]
    assert isinstance(result.to_pandas(), pd.DataFrame)
    assert list(result.to_pandas().columns) == names
    assert result.to_arrow().column_names == names
    assert pl.DataFrame(pa.table(result)).equals(frame)  # through the PyCapsule interface
    assert pl.DataFrame(result).equals(frame)
    text = result.to_csv()
    assert text is not None
    result.to_csv(tmp_path / "result.csv")
    assert (tmp_path / "result.csv").read_text() == text
    assert pl.read_csv(tmp_path / "result.csv").columns == names
    assert (frame["ci_low"] < frame["estimate"]).all()
    assert (frame["estimate"] < frame["ci_high"]).all()


def test_what_it_says_of_itself(result: ch.Result) -> None:
    assert result.n_reports == sum(AGES["count"])
    assert str(result.epsilon) == "1"
    assert result.noise_trials == result.min_cohort - 1 == 133
    assert result.noise_sigma == pytest.approx(np.sqrt(result.rows.base[0]))
    assert not result.marked
    words = result.explain()
    for part in ("89,100 devices", "Intervals are of the noise", "hostile", "epsilon 1"):
        assert part in words
    assert "89,100 reports" in repr(result)


def test_a_marked_result_says_so_where_it_is_seen(result: ch.Result) -> None:
    part = result.parts[0]
    tampered = dataclasses.replace(
        result,
        parts=(Part(group=(), reports=part.reports, sums=part.sums + np.uint64(20_000)),),
    )
    assert tampered.marked
    assert "hostile" in tampered.explain()
    assert "hostile" in tampered._repr_html_()


def test_labels_are_escaped() -> None:
    study = ch.rehearse({"ngram": [EVIL], "count": [2000]}, generous(), seed=1).study(
        "evil", analysis=ANALYSIS
    )
    found = study.histogram(ch.categories("ngram", [EVIL]), local_epsilon=2, epsilon=1).run()
    assert EVIL not in found._repr_html_()
    assert "&lt;script&gt;" in found._repr_html_()
    assert EVIL in found.to_polars()["ngram"].to_list()


def test_the_chart(result: ch.Result) -> None:
    chart = result.plot(top=3)
    rows = chart.to_dict()["data"]["values"]
    assert len(rows) == 3
    assert rows[0]["low"] < rows[0]["estimate"] < rows[0]["high"]
    assert "<svg" in svg(chart)


def svg(chart: Any) -> str:
    import vl_convert

    return str(vl_convert.vegalite_to_svg(chart.to_json()))


def test_save_and_load(result: ch.Result, table: ch.Result, tmp_path: Path) -> None:
    steps = [result, table, result.top(3).simultaneous(), result.nonnegative(),
             table.group("de_DE").marginal("ngram").with_confidence(0.9)]  # fmt: skip
    for each in steps:
        each.save(tmp_path / "result.json")
        again = ch.Result.load(tmp_path / "result.json")
        assert again.to_polars().equals(each.to_polars())
        assert (again.steps, again.missing) == (each.steps, each.missing)
        assert again.recipe == each.recipe
    with pytest.raises(InvalidInput, match="can't read"):
        ch.Result.load(tmp_path / "missing.json")


@given(st.binary(max_size=200))
def test_loading_rubbish(data: bytes) -> None:
    with pytest.raises(DecodeError):
        ch.Result.from_json(data)


@given(data=st.data())
def test_loading_something_like_a_result(result: ch.Result, data: st.DataObject) -> None:
    tree = json.loads(result.to_json())
    key = data.draw(st.sampled_from(sorted(tree)))
    tree[key] = data.draw(
        st.none() | st.integers() | st.text(max_size=5) | st.just([]) | st.just([{}])
        | st.floats() | st.just({"a": 1})
    )  # fmt: skip
    try:
        again = ch.Result.from_json(json.dumps(tree))
    except DecodeError:
        return
    assert len(again.to_json()) > 0


def test_marginals_add_up_values_and_variances(table: ch.Result) -> None:
    one = table.group("de_DE")
    ages = one.marginal("age")
    assert list(ages.labels) == ["age"]
    assert len(ages) == 8
    np.testing.assert_allclose(ages.estimate, one.estimate.reshape(8, 3).sum(axis=1))
    np.testing.assert_allclose(ages.rows.base, one.rows.base.reshape(8, 3).sum(axis=1))
    total = one.marginal()
    assert len(total) == 1
    assert total.estimate[0] == pytest.approx(one.estimate.sum())
    kept = table.marginal("locale", "age")
    assert len(kept) == 2 * 8
    with pytest.raises(InvalidInput, match="forms groups"):
        table.marginal("age")
    with pytest.raises(InvalidInput, match="no column 'sex'"):
        table.marginal("sex")


def test_groups_below_the_minimum_are_missing(table: ch.Result) -> None:
    assert [part.group for part in table.parts] == [("de_DE",), ("en_US",)]
    assert ("other",) in table.missing
    assert table.counts.shape == (2, 24)
    assert table.labels["locale"][0] == "de_DE"
    with pytest.raises(InvalidInput, match="fewer than"):
        table.group("other")
    with pytest.raises(InvalidInput, match="no group"):
        table.group("nowhere")
    assert "other" in table.explain()


def test_filter_and_top(result: ch.Result) -> None:
    one = result.filter(age="[10, 20)")
    assert one.to_polars()["age"].to_list() == ["[10, 20)"]
    two = result.filter(age=["[10, 20)", "OOV"])
    assert len(two) == 2
    best = result.top(2)
    assert (np.diff(best.estimate) <= 0).all()
    assert "largest" in best.steps[0]
    with pytest.raises(InvalidInput, match="no label"):
        result.filter(age="[10, 21)")
    with pytest.raises(InvalidInput, match="no column"):
        result.filter(sex="f")


def test_simultaneous_intervals_are_over_all_candidates_even_if_few_are_shown(
    result: ch.Result,
) -> None:
    few = result.top(2).simultaneous()
    assert few.candidates == result.encoding.size
    assert (few.ci_low < result.top(2).ci_low).all()
    assert "candidates" in few.explain()


def test_non_negative_results_keep_covering(result: ch.Result) -> None:
    """Norm-Sub moves estimates; intervals stay the noise's, cut to what is possible."""
    recipe, devices = result.recipe, 2000
    counts = np.zeros(recipe.encoding.size, dtype=np.int64)
    counts[:3] = [3, 7, devices - 10]
    rng = np.random.default_rng(4)
    held = total = 0
    for _ in range(500):
        sums = draw_sums(recipe, counts, devices, rng)
        raw = dataclasses.replace(result, parts=(Part(group=(), reports=devices, sums=sums),))
        found = raw.nonnegative()
        assert (found.estimate >= 0).all()
        assert found.estimate.sum() == pytest.approx(devices)
        ends = found.intervals()
        assert (ends.low <= found.estimate).all()
        assert (found.estimate <= ends.high).all()
        assert (ends.low >= 0).all()
        held += int(((ends.low <= counts) & (counts <= ends.high)).sum())
        total += len(counts)
    assert held / total > 0.94
    with pytest.raises(InvalidInput, match="before filtering"):
        result.top(2).nonnegative()
    with pytest.raises(InvalidInput, match="unbiased"):
        result.nonnegative().marginal("age")


def test_sums_make_estimates_more_precise_and_stay_unbiased(result: ch.Result) -> None:
    fitted = result.summing_to_reports()
    assert fitted.estimate.sum() == pytest.approx(result.n_reports)
    assert (fitted.std_error < result.std_error).all()


def test_a_coarser_result_makes_a_finer_one_more_precise() -> None:
    study = fleet().study("levels", analysis=ANALYSIS)
    fine = study.histogram(decades(), local_epsilon=2, epsilon=0.5).run()
    halves = study.histogram(ch.intervals("age", [10, 40, 80]), local_epsilon=2, epsilon=0.5).run()
    parents = [0, 1, 1, 1, 2, 2, 2, 2]
    fit = fine.consistent(halves, parents)
    assert (fit.std_error < fine.std_error).all()
    assert "coarser" in fit.steps[-1]
    with pytest.raises(InvalidInput, match="parents"):
        fine.consistent(halves, [0, 1])


def test_comparing_two_results(result: ch.Result) -> None:
    study = fleet(seed=8).study("other", analysis=ANALYSIS)
    other = study.histogram(decades(), local_epsilon=3, epsilon=1, participation=".3").run()
    noise = result.compare(other)
    assert (noise.ci_low < 0.01).all()
    assert (noise.ci_high > -0.01).all()
    assert noise.to_polars().columns[:2] == ["age", "first"]
    both = result.compare(other, population=True)
    assert (both.std_error > noise.std_error).all()
    assert "who happened to answer" in both.explain()
    assert "noise alone" in noise.explain()
    with pytest.raises(InvalidInput, match="labels"):
        result.compare(other.top(2))
