"""n-grams over a rehearsed fleet: known phrases are found, honestly and once."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.analyst.algorithms.algorithm_run import AlgorithmRun
from chorister.analyst.algorithms.ngram_rules import (
    above_noise,
    dealt_shares,
    lists_by_length,
    number_of_lists,
)
from chorister.analyst.algorithms.ngrams import (
    Ngrams,
    candidates_of,
    discover_ngrams,
    found_in,
    ngram_query,
    round_shares,
)
from chorister.analyst.estimate import estimate
from chorister.analyst.rehearsal import rehearse
from chorister.analyst.study import Study
from chorister.device.sandbox.functions import known_functions
from chorister.encoding import PrefixTree
from chorister.errors import CohortTooSmall, DecodeError, InvalidInput
from chorister.privacy import OneHotRandomizer
from tests.analyst.algorithms.phrases import DEVICES, VOCABULARY, policy, typing_fleet
from tests.device.asking import ask, snapshot
from tests.keyboard import ANALYSIS


def begin(study: Study, **options: Any) -> AlgorithmRun[Ngrams]:
    return discover_ngrams(study, VOCABULARY, field="keyboard.ngram", **options)


def new_study(name: str = "phrases", **options: Any) -> Study:
    return typing_fleet(**options).study(name, analysis=ANALYSIS)


@pytest.fixture(scope="module")
def everyone() -> Ngrams:
    return begin(new_study()).result


def test_the_known_tree_is_found(everyone: Ngrams) -> None:
    assert everyone.found(4)[:3] == [
        "good morning to all",
        "see you soon again",
        "good morning to you",
    ]
    assert {"how are you", "how are things", "see you soon"} <= set(everyone.found(3))
    assert {"good morning", "how are"} <= set(everyone.found(2))
    assert "red" in everyone.found(1)


def test_estimates_are_near_the_truth(everyone: Ngrams) -> None:
    """Phrases of four words are held by one class each: nothing is left to chance but noise."""
    frame = everyone.to_polars()
    for phrase, truth in (("good morning to all", 6_000), ("see you soon again", 5_000)):
        row = frame.filter(frame["ngram"] == phrase).row(0, named=True)
        assert row["ci_low"] <= truth <= row["ci_high"]
        assert abs(row["estimate"] - truth) < 6.0 * row["std_error"]
        assert row["share"] == pytest.approx(row["estimate"] / DEVICES)


def test_disjoint_cohorts_find_it_too() -> None:
    run = begin(new_study(rules=policy(1)))
    assert run.plan.cohorts == "disjoint"
    found = run.result
    assert set(found.found(4)) >= {"good morning to all", "see you soon again"}
    assert sum(result.n_reports for result in found.results) == DEVICES
    assert "at most one of the rounds" in found.explain()


def test_the_plan_is_stated_before_the_first_question() -> None:
    study = new_study()
    run = begin(study)
    assert len(run.plan.rounds) == 4
    assert "Round 4: epsilon" in run.plan.explain()
    assert study.rounds == []
    steps = iter(run)
    first = next(steps)
    assert first.number == 1
    assert len(study.rounds) == 1


def test_what_is_spent_is_what_was_planned() -> None:
    study = new_study()
    run = begin(study)
    found = run.result
    for planned, result in zip(run.plan.rounds, found.results, strict=True):
        assert result.epsilon == planned.epsilon
        assert result.min_cohort == planned.min_cohort
    spent = study.budget.limits
    whole = max(limit.spent.epsilon for limit in spent)
    assert whole <= run.plan.epsilon


def test_static_and_interactive_spend_the_same() -> None:
    """One question at the whole epsilon, or four: no device is charged more than epsilon."""
    whole = Decimal(1)
    static = new_study("static")
    question = static.histogram(
        PrefixTree(column="ngram", prefixes=("",), vocabulary=VOCABULARY),
        query=ngram_query("keyboard", "ngram", 1), epsilon=whole, delta="1e-6",
    )  # fmt: skip
    static.ask(question)
    disjoint = new_study("disjoint", rules=policy(1))
    assert begin(disjoint, epsilon=whole, delta="1e-6").result.depth == 4
    everyone = new_study("everyone")
    assert begin(everyone, epsilon=whole, delta="1e-6").result.depth == 4
    spent = [
        max(limit.spent.epsilon for limit in study.budget.limits)
        for study in (static, disjoint, everyone)
    ]
    assert spent[0] == spent[1] == whole
    assert Decimal("0.999") < spent[2] <= whole


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whole = begin(new_study(folder=tmp_path / "whole")).result
    study = new_study(folder=tmp_path / "halves")
    steps = iter(begin(study))
    next(steps)
    next(steps)
    assert len(study.rounds) == 2
    again = typing_fleet(folder=tmp_path / "halves").study("phrases", analysis=ANALYSIS)
    resumed = begin(again).result
    assert len(again.rounds) == 4
    assert resumed.to_polars().equals(whole.to_polars())
    assert [round_.digest for round_ in again.rounds[:2]] == [r.digest for r in study.rounds[:2]]


def test_nothing_is_pooled(everyone: Ngrams) -> None:
    """Every estimate is that of its own round, to the bit."""
    frame = everyone.to_polars()
    for n, result in enumerate(everyone.results, start=1):
        names, first = candidates_of(result)
        for name, value in frame.filter(frame["n"] == n).select("ngram", "estimate").rows():
            assert value == result.counts[first + names.index(name)]


def test_intervals_of_reported_ngrams_cover_at_once() -> None:
    """2,000 simulated last rounds: all reported cells are covered at once in 95% of them.

    Cells are reported because they were found in this very round; Bonferroni is over all
    candidates. The number of failures is at most Bin(2000, .05): above 160 with a chance < 1e-6.
    """
    rng = np.random.default_rng(8)
    law = OneHotRandomizer(mechanism="asymmetric", local_epsilon=5, length=300)
    reports, cells = 20_000, 300
    truth = np.where(np.arange(cells) < 60, rng.integers(40, 900, cells), 0)
    sums = rng.binomial(reports - truth, law.q, (2_000, cells))
    sums += rng.binomial(truth, law.h, (2_000, cells))
    found = estimate(law, sums.ravel(), reports)
    shown = above_noise(sums, trials=reports, q=law.q, candidates=cells)

    def missed(candidates: int) -> int:
        """In how many runs a reported cell lies outside its interval."""
        ends = found.interval(1.0 - 0.05 / candidates, step=law.step)
        low, high = ends.low.reshape(sums.shape), ends.high.reshape(sums.shape)
        return int(np.any(shown & ((truth < low) | (truth > high)), axis=1).sum())

    assert shown.sum(axis=1).min() > 20
    assert missed(cells) <= 160
    # Over the reported ones alone it would fail: the weakest were reported thanks to their noise.
    assert missed(40) > 160


def test_a_domain_limit_is_kept() -> None:
    rules = policy(4, **{f"analyses/{ANALYSIS}/max_bins": 20})
    found = begin(new_study(rules=rules)).result
    assert max(result.encoding.size for result in found.results) <= 20
    with pytest.raises(InvalidInput, match="smaller vocabulary"):
        begin(new_study(rules=policy(4, **{f"analyses/{ANALYSIS}/max_bins": 10})))


def test_candidates_are_dealt_as_several_lists_to_different_devices() -> None:
    rules = policy(1, **{f"analyses/{ANALYSIS}/max_bins": 20})
    run = begin(new_study(rules=rules), max_n=3, lists=2)
    assert len(run.plan.rounds) == 4
    assert "at most one round" in run.plan.explain()
    found = run.result
    assert found.lists == (1, 2, 1)
    assert found.depth == 3
    assert sum(result.n_reports for result in found.results) == DEVICES
    first, second = (set(candidates_of(each)[0]) for each in found.of_length(2))
    assert not first & second
    assert max(result.encoding.size for result in found.results) <= 20
    assert len(first | second) > 20
    assert "good morning to" in found.found(3)
    assert "2 lists for different devices" in found.explain()
    loaded = Ngrams.from_json(found.to_json())
    assert loaded.to_polars().equals(found.to_polars())
    assert loaded.lists == (1, 2, 1)


def test_false_discoveries_count_over_all_lists() -> None:
    """Each list reports against the number of candidates in all of them."""
    found = begin(new_study(rules=policy(1)), max_n=3, lists=2).result
    result = found.of_length(2)[0]
    size = len(candidates_of(result)[0])
    assert found_in(result, 1_000_000).sum() <= found_in(result, 2 * size).sum()


def test_few_devices_are_asked_once_about_all_pairs() -> None:
    few = {"ngram": ["good morning"], "count": [100]}
    fleet = rehearse(few, policy(1), seed=3)
    study = fleet.study("few", analysis=ANALYSIS)
    run = begin(study, max_n=2)
    assert "asked once about all" in run.plan.explain()
    found = run.result
    assert len(found.results) == 1
    assert found.found(1) == []
    names, _ = candidates_of(found.results[0])
    assert len(names) == len(VOCABULARY) ** 2
    assert found.found(2)[0] == "good morning"
    assert len(found.found(2)) <= 2  # one false one is expected
    assert "2-grams: found" in found.explain()
    assert Ngrams.from_json(found.to_json()).to_json() == found.to_json()
    assert found.plot().to_dict()
    with pytest.raises(CohortTooSmall):
        begin(study, max_n=2, cohorts="disjoint")


def test_the_plan_says_whether_rounds_pay() -> None:
    assert "asked once, about single words" in begin(new_study(), max_n=1).plan.explain()
    assert "Several rounds pay off for shorter" in begin(new_study(), max_n=2).plan.explain()
    plan = begin(new_study(), max_n=2, most_candidates=len(VOCABULARY) + 2).plan
    assert "Several rounds pay off: one question" in plan.explain()


@pytest.mark.parametrize("lists", [0, 17])
def test_lists_need_different_devices(lists: int) -> None:
    with pytest.raises(InvalidInput, match="lists"):
        begin(new_study(rules=policy(1)), lists=lists)
    with pytest.raises(InvalidInput, match="different devices"):
        begin(new_study(), lists=2)


def test_many_devices_get_several_lists() -> None:
    assert number_of_lists(1_000, 9_999, "disjoint", 1_000_000) == 4
    assert number_of_lists(1_000, 9_999, "everyone", 1_000_000) == 1
    assert number_of_lists(1_000, 9_999, "disjoint", 10_000) == 1
    assert number_of_lists(100, 9_999, "disjoint", 1_000_000) == 1
    assert lists_by_length(4, 3) == (1, 3, 3, 1)
    assert dealt_shares((0.2, 0.4, 0.4), (1, 2, 1)) == (0.2, 0.2, 0.2, 0.4)


def test_denied_phrases_are_not_collected() -> None:
    found = begin(new_study(), max_n=2, deny=["Good Morning"]).result
    assert "good morning" not in found.found(2)
    assert "how are" in found.found(2)
    assert found.results[0].recipe.deny[0].phrases == ("good morning",)


def test_drawing_reports_the_least_expected() -> None:
    found = begin(new_study(), max_n=2, drawn=1).result
    last = found.results[-1].recipe
    assert last.selection == "first"
    assert last.query.endswith("ORDER BY random() LIMIT 1")
    assert found.results[0].recipe.selection == "uniform"
    assert "least expected" in found.explain()
    names, _ = candidates_of(found.results[-1])
    words = found.to_polars()
    share = dict(words.filter(words["n"] == 1).select("ngram", "share").rows())
    expected = [share.get(a, 0.0) * share.get(b, 0.0) for a, b in map(str.split, names)]
    assert expected[0] < np.median(expected) < expected[-1]
    assert names.index("good morning") > len(names) // 2


def test_drawing_needs_chance_on_the_device() -> None:
    rules = policy(4, **{f"analyses/{ANALYSIS}/functions": ["ngrams"]})
    with pytest.raises(InvalidInput, match="random"):
        begin(new_study(rules=rules), drawn=3)
    assert {"ngrams", "random"} <= known_functions()


def test_distinct_ngrams_weigh_the_same() -> None:
    assert ngram_query("a", "b", 2, distinct=True).startswith("SELECT DISTINCT ")
    found = begin(new_study(), max_n=2, distinct=True).result
    assert "good morning" in found.found(2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_n": 0}, "max_n"),
        ({"max_n": 9}, "max_n"),
        ({"drawn": 0}, "drawn"),
        ({"vocabulary": ["two words", "b"]}, "not a single word"),
        ({"vocabulary": ["alone"]}, "two words"),
        ({"vocabulary": "good morning"}, "is a list such as"),
        ({"deny": "good morning"}, "is a list such as"),
    ],
)
def test_bad_wishes_are_refused(options: dict[str, Any], why: str) -> None:
    arguments = {"vocabulary": VOCABULARY, **options}
    with pytest.raises(InvalidInput, match=why):
        discover_ngrams(new_study(), field="keyboard.ngram", **arguments)


def test_the_only_text_field_is_found() -> None:
    run = discover_ngrams(new_study(), VOCABULARY, max_n=1)
    assert run.result.results[0].recipe.reads == {"keyboard": ("ngram",)}


def test_shares_grow_and_add_up() -> None:
    for cohorts in ("disjoint", "everyone"):
        for rounds in range(1, 9):
            shares = round_shares(rounds, cohorts)
            assert sum(shares) == pytest.approx(1.0)
            assert list(shares) == sorted(shares)


def test_saved_and_loaded(everyone: Ngrams, tmp_path: Path) -> None:
    everyone.save(tmp_path / "found.json")
    loaded = Ngrams.load(tmp_path / "found.json")
    assert loaded.to_json() == everyone.to_json()
    assert loaded.to_polars().equals(everyone.to_polars())
    with pytest.raises(InvalidInput, match="can't read"):
        Ngrams.load(tmp_path / "absent.json")


@given(st.binary(max_size=200) | st.just(b'{"format": "chorister-ngrams-1", "cohorts": "x"}'))
@settings(max_examples=50)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        Ngrams.from_json(data)


def test_words_and_pictures(everyone: Ngrams) -> None:
    assert f"4-grams: found {len(everyone.found(4))} of" in everyone.explain()
    assert repr(everyone).startswith("<Ngrams: ")
    assert "good morning" in everyone._repr_html_()
    picture = everyone.plot(top=5).to_dict()
    assert f"of {len(everyone.found(4))} 4-grams" in picture["title"]["text"]
    drawn = str(picture)
    for word in ("good", "morning", "all", "again"):
        assert f"'word': '{word}'" in drawn


def test_rounds_show_themselves_as_they_come() -> None:
    numbers = []
    for step in begin(new_study(), max_n=2):
        numbers.append(step.number)
        assert step.picture.to_dict()["layer"]
        assert len(step.result) == step.question.size
    assert numbers == [1, 2]


@pytest.mark.parametrize("options", [{}, {"distinct": True}, {"drawn": 2}])
def test_real_devices_answer_the_query(options: dict[str, Any]) -> None:
    """The sandbox of a device runs it, and its rows are n-grams in canonical form."""
    query = ngram_query("t", "a", 2, **options)
    answer = ask(query, snapshot([("To be, or not TO BE", 1)]))
    every = ["to be", "be or", "or not", "not to", "to be"]
    assert answer.names == ("ngram",)
    found = [str(row[0]) for row in answer.rows]
    if "drawn" in options:
        assert len(set(found)) == len(found) == 2
        assert set(found) <= set(every)
    else:
        assert sorted(found) == sorted(set(every) if options else every)
