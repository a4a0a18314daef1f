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
from scipy.stats import binom

import chorister as ch
from chorister.analyst.estimate import Part
from chorister.analyst.rehearsal.simulation import draw_sums
from chorister.errors import DecodeError, InvalidInput
from chorister.policy import Crowd
from tests.analyst.fleets import AGES, decades, fleet, generous, honest
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
    for part in ("89,100 devices", "Intervals reflect the noise", "hostile", "epsilon 1"):
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
    rows = max(chart.to_dict()["datasets"].values(), key=len)
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


@pytest.mark.parametrize(
    ("name", "value"), [("group", []), ("group", ["de_DE"] * 2), ("reports", 2**70), ("reports", 0)]
)
def test_loading_a_part_that_no_question_has(table: ch.Result, name: str, value: object) -> None:
    tree = json.loads(table.to_json())
    tree["parts"][0][name] = value
    with pytest.raises(DecodeError, match="a part has 1 groups"):
        ch.Result.from_json(json.dumps(tree))


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
    with pytest.raises(InvalidInput, match="separate cohorts"):
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
    two_rows: Any = np.int64(2)
    assert len(result.top(two_rows)) == 2
    labels: list[Any] = [5, [5], [["OOV"]], None]
    for wrong in labels:
        with pytest.raises(InvalidInput, match="age"):
            result.filter(age=wrong)
    counts: list[Any] = [-1, 1.5, "all", None]
    for wrong in counts:
        with pytest.raises(InvalidInput, match="count"):
            result.top(wrong)
    confidences: list[Any] = ["95%", None, 0, 1]
    for wrong in confidences:
        with pytest.raises(InvalidInput, match="strictly between 0 and 1"):
            result.with_confidence(wrong)


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
    with pytest.raises(InvalidInput, match="another result"):
        result.compare(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="another result"):
        result.consistent(5, [0])  # type: ignore[arg-type]


def test_what_chance_alone_would_do_follows_the_intervals(result: ch.Result) -> None:
    """Two draws from the same devices: the stated number of differences is what noise makes."""
    study = fleet(seed=8).study("other", analysis=ANALYSIS)
    other = study.histogram(decades(), local_epsilon=3, epsilon=1).run()
    each, at_once = result.compare(other), result.simultaneous().compare(other)
    assert each.by_chance == pytest.approx(0.05 * len(result))
    assert at_once.by_chance == pytest.approx(0.05)
    assert "about 0.4 would" in each.explain()
    assert "0.4 would" not in at_once.explain()
    assert "the chance that any would is at most 5%" in at_once.explain()
    # 8 rows x 1,500 pairs. Where nothing differs the number of rows apart is a sum of independent
    # indicators of 5% (or .6%): 6 standard deviations either way have a chance below 1e-6.
    recipe, rng = result.recipe, np.random.default_rng(9)
    counts = np.array([900, 2000, 3000, 100, 4000, 5000, 4000, 1000])
    runs, seen = 1_500, np.zeros(2)
    for _ in range(runs):
        one, two = (
            ch.Result(
                recipe=recipe,
                parts=(
                    Part(group=(), reports=20_000, sums=draw_sums(recipe, counts, 20_000, rng)),
                ),
            )
            for _ in range(2)
        )
        for which, first in enumerate((one, one.simultaneous())):
            found = first.compare(two)
            seen[which] += int(((found.ci_low > 0) | (found.ci_high < 0)).sum())
    expected = np.array([each.by_chance, at_once.by_chance]) * runs
    assert (np.abs(seen - expected) < 6 * np.sqrt(expected)).all()


@pytest.mark.parametrize("crowd", ["noised", "honest"])
@pytest.mark.parametrize("mechanism", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("smaller", [0, 1])
def test_simultaneous_comparisons_hold_for_rare_bits(
    crowd: Crowd, mechanism: str, smaller: int
) -> None:
    """By the exact law, so there is no false alarm: a small cohort beside one without noise.

    Every sum that a bin which nobody holds can have is a row of its own; the chances of those that
    are told apart from 0 add up to what one row of so many may have.
    """
    study = fleet(honest()).study("rare", analysis=ANALYSIS)
    question = study.histogram(
        ch.intervals("age", range(400)),
        local_epsilon=4,
        epsilon=1,
        mechanism=mechanism,
        crowd=crowd,
    )
    recipe = question.recipe(number=1, opens=0)
    law, few, rows = recipe.randomizer, recipe.privacy.min_cohort, recipe.encoding.size
    trials = few - 1 if crowd == "noised" else 0
    sums = np.arange(rows, dtype=np.uint64)
    many = 10**12
    nothing = np.full(rows, round(law.q * (many + 2 * trials)), dtype=np.uint64)
    results = [
        ch.Result(recipe=recipe, parts=(Part(group=(), reports=n, sums=found),), candidates=10_000)
        for n, found in ((few, sums), (many, nothing))
    ]
    found = results[smaller].compare(results[1 - smaller])
    apart = (found.ci_low > 0.0) | (found.ci_high < 0.0)
    assert apart.any()
    chances = binom.pmf(sums.astype(np.int64), few + 2 * trials, law.q)
    assert chances.sum() == pytest.approx(1.0)
    assert float(chances[apart].sum()) * 10_000 <= 0.05


@pytest.mark.parametrize("mechanism", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("local_epsilon", [2, 6, 8])
@pytest.mark.parametrize("held", [(0, 0), (0, 9), (31, 12), (40, 66)])
def test_comparisons_of_small_cohorts_cover_by_the_exact_law(
    mechanism: str, local_epsilon: int, held: tuple[int, int]
) -> None:
    study = fleet(honest()).study("small", analysis=ANALYSIS)
    question = study.histogram(
        ch.intervals("age", range(100)),
        local_epsilon=local_epsilon,
        epsilon=local_epsilon,
        mechanism=mechanism,
        crowd="honest",
    )
    recipe = question.recipe(number=1, opens=0)
    law, reports, rows = recipe.randomizer, (40, 66), recipe.encoding.size
    laws = [
        np.convolve(
            binom.pmf(np.arange(f + 1), f, law.h), binom.pmf(np.arange(n - f + 1), n - f, law.q)
        )
        for n, f in zip(reports, held, strict=True)
    ]
    sums = np.arange(rows, dtype=np.uint64)
    second = ch.Result(recipe=recipe, parts=(Part(group=(), reports=reports[1], sums=sums),))
    true = held[1] / reports[1] - held[0] / reports[0]
    covered = 0.0
    for total, chance in enumerate(laws[0]):
        same = np.full(rows, total, dtype=np.uint64)
        first = ch.Result(recipe=recipe, parts=(Part(group=(), reports=reports[0], sums=same),))
        found = first.compare(second)
        holds = ((found.ci_low <= true) & (true <= found.ci_high))[: len(laws[1])]
        covered += chance * float(laws[1][holds].sum())
    assert covered >= 0.945
