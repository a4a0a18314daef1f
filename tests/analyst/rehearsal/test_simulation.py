"""Rehearsals: the exact law, the devices' own rules, and no work in the number of devices."""

from __future__ import annotations

from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, chisquare

import chorister as ch
from chorister.analyst.rehearsal.population import Population, choose
from chorister.analyst.rehearsal.queries import parse_simple
from chorister.analyst.rehearsal.simulation import _stopping_counts, draw_sums
from chorister.encoding import DenyList, Encoding
from chorister.errors import CohortTooSmall, InvalidInput, QueryRefused
from chorister.recipe import Recipe
from tests.analyst.fleets import AGES, DEVICES, decades, fleet, generous
from tests.conftest import REPOSITORY
from tests.keyboard import ANALYSIS

ALARM = 1e-8
TEXTS = ["How are you?", "how are they", "I'm fine, thanks", "", None, "ça va bien", "how ARE you"]


def a_recipe(study: ch.Study, features: Any, query: str | None = None, **options: Any) -> Recipe:
    chosen = {"local_epsilon": 3, "epsilon": 1, **options}
    return study.histogram(features, query=query, **chosen).recipe(number=1, opens=0)


def texts(**columns: Any) -> tuple[Population, ch.Study]:
    policy = generous()
    people = Population(columns, policy)
    return people, ch.rehearse(people, policy, seed=1).study("texts", analysis=ANALYSIS)


def answers(people: Population, recipe: Recipe, seed: int = 0) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = people.answers(
        recipe, people.weights, np.random.default_rng(seed)
    ).counts[0]
    return counts


# --- The law ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["asymmetric", "symmetric"])
def test_sums_have_the_law_of_the_sum_of_reports(mechanism: str) -> None:
    """Against reports drawn one by one with the devices' own randomizer, noise included."""
    study = fleet().study("law", analysis=ANALYSIS)
    recipe = a_recipe(study, ch.intervals("age", range(4)), min_cohort=60, local_epsilon=1,
                      mechanism=mechanism)  # fmt: skip
    counts = np.array([10, 0, 3, 17], dtype=np.int64)
    held = np.repeat(np.arange(4), counts)
    rng = np.random.default_rng(2)
    runs = 4000
    drawn = np.array([draw_sums(recipe, counts, 30, rng) for _ in range(runs)], dtype=np.int64)
    randomizer = recipe.randomizer
    reports = randomizer.randomize_many(np.tile(held, runs)).reshape(runs, 30, 4).sum(axis=1)
    noise = rng.binomial(59, randomizer.q, (2, runs, 4)).sum(axis=0)
    for cell in range(4):
        assert same_law(drawn[:, cell], reports[:, cell] + noise[:, cell])
    weights = drawn.sum(axis=1), (reports + noise).sum(axis=1)
    assert same_law(*weights)


def same_law(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """A two-sample chi-squared test; one of a hundred million is wrong about equal laws."""
    values = np.concatenate((one, other)).astype(np.int64)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, 12)))
    table = np.array([np.histogram(each, [-1, *edges[1:-1], 10**12])[0] for each in (one, other)])
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2:
        return True
    return bool(chi2_contingency(table).pvalue > ALARM)


def test_coins_are_binomial_and_cohorts_disjoint() -> None:
    study = fleet(generous(1)).study("cohorts", analysis=ANALYSIS)
    reports = []
    for number, share in enumerate((".1", ".5", "1")):
        question = study.histogram(
            decades(), local_epsilon=3, epsilon=1, participation=share, repeat=number
        )
        reports.append(question.run().n_reports)
    assert sum(reports) == DEVICES
    for seen, chance, among in ((reports[0], 0.1, DEVICES), (reports[1], 0.5, DEVICES * 0.9)):
        assert abs(seen - chance * among) < 5 * np.sqrt(among * chance * (1 - chance)) + 500
    with pytest.raises(ch.errors.BudgetExceeded):  # nobody is left
        study.histogram(decades(), local_epsilon=3, epsilon=1, repeat=9).run()


def test_a_target_ends_the_round_with_a_random_subset() -> None:
    study = fleet().study("target", analysis=ANALYSIS)
    result = study.histogram(decades(), local_epsilon=6, epsilon=3).run(target=20_000)
    assert result.n_reports == 20_000
    share = np.array(AGES["count"])
    truth = np.array([share[5 + 10 * i : 15 + 10 * i].sum() for i in range(7)]) / DEVICES
    assert np.allclose(result.counts[1:] / 20_000, truth, atol=0.02)
    # Those who were not needed were not charged.
    left = study.histogram(decades(), local_epsilon=6, epsilon=3, repeat=1).run()
    assert left.n_reports == DEVICES - 20_000


def test_the_last_group_to_reach_the_target_ends_the_round() -> None:
    rng = np.random.default_rng(1)
    counts = np.array([_stopping_counts(np.array([1000, 3000]), 500, rng) for _ in range(2000)])
    assert (counts >= 500).all()
    assert (counts.min(axis=1) == 500).all()
    # The small group is last, halfway through: the large one has answered by half then.
    assert abs(counts[:, 1].mean() - 1500) < 5
    assert (_stopping_counts(np.array([100, 3000]), 500, rng) == [100, 3000]).all()


def test_1e8_devices_are_rehearsed_from_counts() -> None:
    many = {"age": AGES["age"], "count": [count * 1123 for count in AGES["count"]]}
    found = ch.rehearse(many, generous(), seed=1)
    assert found.population.size > 10**8
    result = found.study("many", analysis=ANALYSIS).histogram(decades(), epsilon=1).run()
    truth = np.array(AGES["count"])[5:15].sum() * 1123
    assert abs(result.counts[1] - truth) < 6 * result.std_error[1]


def test_devices_without_data_and_offline_devices() -> None:
    found = ch.rehearse({"age": [15], "count": [1000]}, generous(), devices=3000, seed=1)
    study = found.study("empty", analysis=ANALYSIS)
    question = study.histogram(decades(), local_epsilon=3, epsilon=1)
    assert found.truth(question)[:2].tolist() == [2000, 1000]
    half = fleet(reach=0.5).study("half", analysis=ANALYSIS).histogram(decades(), epsilon=1)
    assert abs(half.run().n_reports - DEVICES / 2) < 6 * np.sqrt(DEVICES) / 2
    with pytest.raises(InvalidInput, match="fewer than"):
        ch.rehearse(AGES, generous(), devices=3)
    with pytest.raises(InvalidInput, match="reach"):
        fleet(reach=0.0)


# --- What a device would report -----------------------------------------------------------------


def select_by(encoding: Encoding, own: NDArray[np.int64], ticket: int) -> int:
    return encoding.encoder.select(own.tolist(), "uniform", randbelow=lambda n: ticket % n)


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 11)), max_size=25),
    selection=st.sampled_from(["uniform", "first"]),
)
@settings(max_examples=150)
def test_choosing_is_the_devices_rule(rows: list[tuple[int, int]], selection: Any) -> None:
    # Only an encoding with a deny list has denied rows, which are -1.
    deny = (DenyList(column="b", phrases=("z",)),)
    encoding = Encoding((ch.intervals("a", range(4)), ch.categories("b", ["x", "y"])), deny)
    assert encoding.size == 12
    rows = sorted(rows, key=lambda row: row[0])
    owners = np.array([row[0] for row in rows], dtype=np.int64)
    bins = np.array([row[1] for row in rows], dtype=np.int64)
    answering = np.array([1, 0, 3, 1, 2, 1], dtype=np.int64)
    keep = answering[owners] > 0 if len(owners) else np.zeros(0, dtype=np.bool_)
    classes, held, devices = choose(
        encoding, owners[keep], bins[keep], answering, selection, np.random.default_rng(1)
    )
    reported: Counter[int] = Counter()
    for one, bin_, count in zip(classes, held, devices, strict=True):
        own = bins[owners == one] if len(owners) else bins
        if selection == "first":
            assert bin_ == encoding.encoder.select(own.tolist(), "first")
        else:
            possible = {select_by(encoding, own, i) for i in range(max(len(own), 1))}
            assert bin_ in possible
        reported[int(one)] += int(count)
    assert [reported[i] for i in range(6)] == answering.tolist()


@pytest.mark.parametrize("weight", [1, 6_000])
def test_uniform_choices_are_uniform(weight: int) -> None:
    encoding = Encoding((ch.intervals("a", range(7)),))
    bins = np.array([1, 2, 2, 5, 0], dtype=np.int64)  # OOV is never chosen beside a match
    owners = np.zeros(5, dtype=np.int64)
    counts = np.zeros(7)
    rng = np.random.default_rng(3)
    for _ in range(6_000 // weight):
        _, held, devices = choose(encoding, owners, bins, np.array([weight]), "uniform", rng)
        np.add.at(counts, held, devices)
    assert counts.sum() == 6_000
    assert counts[[0, 3, 4, 6]].sum() == 0
    assert chisquare(counts[[1, 2, 5]], [1_500, 3_000, 1_500]).pvalue > ALARM


QUERIES = [
    "SELECT keyboard.ngram AS t FROM keyboard",
    'SELECT "keyboard"."ngram" AS "t" FROM "keyboard"',
    "select ngram as t from keyboard;",
    "SELECT ngrams.ngram AS t FROM keyboard, ngrams(keyboard.ngram, 2)",
    "SELECT g.ngram AS t FROM keyboard, ngrams(keyboard.ngram, 2) AS g",
    "SELECT ngrams.ngram AS t FROM keyboard, ngrams(keyboard.ngram, 1)",
    "SELECT DISTINCT ngrams.ngram AS t FROM keyboard, ngrams(keyboard.ngram, 2)",
    "SELECT lower(keyboard.ngram) AS t FROM keyboard WHERE length(keyboard.ngram) > 3",
]
FEATURES = [
    ch.categories("t", ["how are", "how", "How are you?", "va bien", "fine thanks"]),
    ch.prefix_tree("t", ["are", "fine", "bien", "you"]),
    ch.prefix_tree("t", ["you", "they", "are"], ["how are", "va", "i'm"]),
]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("feature", FEATURES, ids=["categories", "first", "tree"])
def test_simple_queries_give_what_sqlite_gives(query: str, feature: Any) -> None:
    """`first` has no chance in it: the fast way and SQLite must agree to the device."""
    device = [0, 0, 1, 1, 2, 3, 3]
    people, study = texts(device=device, ngram=TEXTS)
    recipe = a_recipe(study, feature, query, reads={"keyboard": ["ngram"]}, selection="first")
    rows = people._queries._run_sqlite(recipe)
    fast = answers(people, recipe)
    people._queries._results = dict.fromkeys(people._queries._results, rows)
    assert answers(people, recipe).tolist() == fast.tolist()
    assert fast.sum() == 4


@pytest.mark.parametrize(
    "query",
    [
        "SELECT DISTINCT ngrams.ngram AS t FROM keyboard, ngrams(keyboard.ngram, 2)",
        "SELECT DISTINCT keyboard.ngram AS t FROM keyboard",
    ],
)
def test_distinct_rows_weigh_the_same(query: str) -> None:
    people, study = texts(
        device=[0] * 5 + [1] * 3, ngram=["a b"] * 4 + ["c d"] + ["e f", "c d", "c d"]
    )
    recipe = a_recipe(study, ch.categories("t", ["a b"]), query, reads={"keyboard": ["ngram"]})
    fast = people._queries.run(recipe)
    slow = people._queries._run_sqlite(recipe)
    assert fast.owners.tolist() == slow.owners.tolist() == [0, 0, 1, 1]
    for rows in (fast, slow):
        assert sorted(rows.columns["t"].values(None)[:2]) == ["a b", "c d"]


def test_which_queries_are_simple() -> None:
    columns = {"keyboard": ("ngram",), "user": ("age", "locale")}
    simple = parse_simple("SELECT age, ngram AS n FROM keyboard, user", columns)
    assert simple is not None
    assert [item.name for item in simple.items] == ["age", "n"]
    for query in (
        "SELECT age FROM user WHERE age > 3",
        "SELECT max(age) AS age FROM user",
        "SELECT age FROM user -- a comment",
        "SELECT age FROM user, user",
        "SELECT height FROM user",
        "SELECT age, age FROM user",
        "SELECT ngram FROM keyboard, ngrams(keyboard.ngram, 2)",
        "SELECT age FROM user LIMIT 1",
        "SELECT age FROM user ORDER BY age",
        "SELECT age FROM nothing",
    ):
        assert parse_simple(query, columns) is None, query


def test_a_stream_and_a_profile_are_joined_by_device() -> None:
    frames = {
        "keyboard": pl.DataFrame({"device": ["a", "b", "b"], "ngram": ["x", "y", "x"]}),
        "user": pd.DataFrame({"device": ["b", "a", "c"], "age": [15, 25, 35]}),
    }
    policy = generous()
    people = Population(frames, policy)
    assert people.size == 3
    study = ch.rehearse(people, policy).study("join", analysis=ANALYSIS)
    recipe = a_recipe(study, [decades(), ch.categories("ngram", ["x", "y"])], selection="first")
    found = answers(people, recipe).reshape(8, 3)
    assert found[2].tolist() == [0, 1, 0]  # a: 25, x
    assert found[1].tolist() == [0, 1, 0]  # b: 15, x before y
    assert found[0].tolist() == [1, 0, 0]  # c has no events: no row, OOV


def test_deny_lists() -> None:
    people, study = texts(device=[0, 0, 1], ngram=["bad word", "good", "bad"])

    recipe = a_recipe(
        study,
        ch.categories("ngram", ["bad word", "good", "bad"]),
        deny=DenyList(column="ngram", phrases=("bad",)),
    )
    assert answers(people, recipe).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("devices", [150, 400])
def test_a_small_fleet_reaches_the_cohort_that_was_planned(devices: int) -> None:
    """However many come online: 100 fleets, each of which fails with a chance of 1e-9."""
    people = {"age": [15, 25], "count": [devices // 2] * 2}
    for seed in range(50):
        study = ch.rehearse(people, generous(), reach=0.7, seed=seed).study("small")
        asked = study.histogram(decades()).run()
        assert asked.n_reports >= asked.min_cohort > devices / 4


@pytest.mark.parametrize("groups", [[], ["user.locale"]])
def test_more_devices_than_there_are_can_not_answer(groups: list[str]) -> None:
    study = ch.rehearse({"age": [15] * 60}, generous()).study("few")
    question = study.histogram(decades(), min_cohort=100, local_epsilon=1, group_by=groups)
    with pytest.raises(CohortTooSmall, match="At most about 60 of 60 devices"):
        question.run()
    assert not study.rounds


@pytest.mark.parametrize("make", [pl.DataFrame, pd.DataFrame, dict,
                                  lambda c: pl.DataFrame(c).to_arrow(),
                                  lambda c: pl.DataFrame(c).lazy()])  # fmt: skip
def test_populations_of_every_kind(make: Any) -> None:
    people = Population(make({"age": [15, 25, 25], "count": [10, 20, 30]}), generous())
    assert people.size == 60
    events = Population(make({"device": [3, 1, 3], "age": [15, 25, 25]}), generous())
    assert events.size == 2
    rows = Population(make({"age": [15, 25, 25]}), generous())
    assert rows.size == 3


def test_populations_that_make_no_sense() -> None:
    policy = generous()
    wrong: list[tuple[Any, str]] = [
        ({"height": [1]}, "no field has the name 'height'"),
        ({"device": [1]}, "no column is a field"),
        ({"age": [1], "count": [-1]}, "0 or more"),
        ({"age": [1], "count": [1.5]}, "whole numbers"),
        ({"age": [1, 2], "count": [2**62, 2**62]}, "add up to at most"),
        ({"age": []}, "at least one row"),
        ({"user": {"age": [1]}}, "no column 'device'"),
        (7, "polars, pandas or Arrow"),
    ]
    for source, message in wrong:
        with pytest.raises(InvalidInput, match=message):
            Population(source, policy)


def test_a_query_that_does_not_compile_is_refused() -> None:
    study = fleet().study("query", analysis=ANALYSIS)
    for query in ("SELECT nothing AS age FROM user", "SELECT user.age AS other FROM user"):
        question = study.histogram(
            decades(), query=query, reads={"user": ["age"]}, local_epsilon=3, epsilon=1
        )
        with pytest.raises(QueryRefused, match="query"):
            question.run()


def test_a_population_from_a_file(tmp_path: Path) -> None:
    """The table that a policy was made from can be rehearsed as it is."""
    table = pl.DataFrame({"age": [15, 25, 35], "count": [20_000] * 3})
    table.write_csv(tmp_path / "people.csv")
    table.write_parquet(tmp_path / "people.parquet")
    for name in ("people.csv", "people.parquet"):
        assert ch.rehearse(str(tmp_path / name), generous()).devices == 60_000
    for wrong in ("none.csv", "people.xlsx"):
        with pytest.raises(InvalidInput, match=wrong):
            ch.rehearse(tmp_path / wrong, generous())


@pytest.mark.parametrize(
    "values", [["x", "y"], [1.5, 2.0], [[1], [2]]], ids=["text", "fractions", "lists"]
)
def test_values_that_a_device_would_refuse_are_refused(values: list[object]) -> None:
    """Otherwise they would all count as OOV, which looks like a result."""
    with pytest.raises(InvalidInput, match=r"user\.age is a whole number"):
        ch.rehearse({"age": values, "count": [10, 10]}, generous())
    with pytest.raises(InvalidInput, match="is text"):
        ch.rehearse({"ngram": [1, 2]}, generous())
    assert ch.rehearse({"age": [1.0, None], "count": [1, 1]}, generous()).devices == 2


def counted(column: str, values: Any, feature: Any, query: str | None = None) -> list[float]:
    """What the devices of a population with one column hold."""
    people = ch.rehearse(pl.DataFrame({column: values}), generous(), devices=100_000)
    counts = people.truth(people.study("types").histogram(feature, query=query))
    return [float(count) for count in counts[1:]]


@pytest.mark.parametrize("query", [None, "SELECT u.age AS age FROM user AS u"])
@pytest.mark.parametrize(
    "values",
    [
        pl.Series([1.0, None, 2.0, float("nan")]),  # as pandas keeps integers with gaps
        pl.Series([1, None, 2, None], dtype=pl.Decimal(10, 2)),
        pl.Series([1, None, 2, None], dtype=pl.UInt64),
        pl.Series([True, None, 2, None], dtype=pl.Int128, strict=False),
    ],
    ids=["float", "decimal", "unsigned", "wide"],
)
def test_whole_numbers_of_any_type_are_the_integers_that_devices_store(
    values: pl.Series, query: str | None
) -> None:
    assert counted("age", values, ch.categories("age", [1, 2]), query) == [1, 1]


def test_numbers_and_texts_of_any_type_are_what_devices_store() -> None:
    flags = pl.Series([True, False, None])
    assert counted("age", flags, ch.categories("age", [0, 1])) == [1, 1]
    # Of a real field a device stores 1.0, which is never the integer 1.
    assert counted("perplexity", [1, 2], ch.categories("perplexity", [1, 2])) == [0, 0]
    fractions = pl.Series([1.5, 2.5]).cast(pl.Decimal(10, 2))
    assert counted("perplexity", fractions, ch.intervals("perplexity", [0, 2, 3])) == [1, 1]
    for kind in (pl.Categorical, pl.Enum(["a", "b"])):
        texts = pl.Series(["a", "b", None], dtype=kind)
        assert counted("ngram", texts, ch.categories("ngram", ["a", "b"])) == [1, 1]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("ngram", date(2026, 1, 3)), ("ngram", b"text"), ("age", 2**63), ("age", Decimal("1.5")),
        ("age", float("inf")),
    ],
)  # fmt: skip
def test_what_no_device_stores_is_refused(column: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=r"a device would refuse it; convert the column"):
        ch.rehearse(pl.DataFrame({column: [value]}), generous())


def test_a_field_may_have_the_name_of_the_column_of_devices() -> None:
    text = (REPOSITORY / "examples/algorithms/policy.toml").read_text().replace("fare", "device")
    policy = ch.Policy.load(text.encode())
    with pytest.raises(InvalidInput, match="pass device= with another name"):
        ch.rehearse({"Device": [1.0, 2.0]}, policy)
    assert ch.rehearse({"Device": [1.0, 2.0]}, policy, device="id").devices == 2
