"""Words on no list, found over a rehearsed fleet by their beginnings."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chorister as ch
from chorister.analyst.algorithms.algorithm_run import AlgorithmRun
from chorister.analyst.algorithms.character_model import END, CharacterModel
from chorister.analyst.algorithms.words import (
    Words,
    candidates_of,
    discover_words,
    found_in,
    word_query,
)
from chorister.analyst.study import Study
from chorister.encoding import split_words
from chorister.errors import BudgetExceeded, CohortTooSmall, DecodeError, InvalidInput
from chorister.policy import Policy
from tests.analyst.fleets import generous
from tests.device.asking import ask, snapshot
from tests.keyboard import ANALYSIS

TYPED = {
    "the zorba is yeeting": 6_000,
    "hello, Привет и пока": 5_000,
    "e471 again": 4_000,
    "naïve café": 3_000,
    "안녕 안녕": 2_000,
    "": 2_000,
}
DEVICES = sum(TYPED.values())
PUBLIC = CharacterModel.train(
    split_words(
        "the then that is in it hello help again against yes yet see seeing meeting getting zone "
        "orbit bath over cafe nativ naïf café привычка ответ и по пора каша 안녕하세요 안다 세계"
    )
)


def policy(reports: int = 4, **changes: Any) -> Policy:
    functions = {f"analyses/{ANALYSIS}/functions": ["substr", "words"]}
    return generous(reports, **{**functions, **changes})


def new_study(
    typed: dict[str, int] | None = None, rules: Policy | None = None, **options: Any
) -> Study:
    held = TYPED if typed is None else typed
    frame = {"ngram": list(held), "count": list(held.values())}
    fleet: Any = ch.rehearse(frame, rules or policy(), **{"seed": 5, **options})
    found: Study = fleet.study("words", analysis=ANALYSIS)
    return found


def begin(study: Study, **options: Any) -> AlgorithmRun[Words]:
    chosen: dict[str, Any] = {"model": PUBLIC, "most_candidates": 2_000, **options}
    return discover_words(study, field="keyboard.ngram", **chosen)


@pytest.fixture(scope="module")
def everyone() -> Words:
    return begin(new_study(rules=policy(6)), rounds=6).result


def test_known_and_unknown_words_are_found(everyone: Words) -> None:
    assert {"the", "is", "hello", "again", "zorba", "yeeting", "e471"} <= set(everyone.found())


def test_words_of_other_scripts_are_found(everyone: Words) -> None:
    assert {"привет", "и", "пока", "naïve", "café", "안녕"} <= set(everyone.found())


def test_hardly_anything_false_is_found(everyone: Words) -> None:
    held = {word for text in TYPED for word in text.lower().replace(",", "").split()}
    assert len(set(everyone.found()) - held) <= 2


def test_nothing_is_found_twice_or_asked_again_once_found(everyone: Words) -> None:
    assert len(set(everyone.found())) == len(everyone.found())
    gone: set[str] = set()
    for result in everyone.results:
        names = candidates_of(result)
        assert not gone & set(names)
        gone |= {names[i] for i in np.flatnonzero(found_in(result, everyone.rounds))}


def test_estimates_are_those_of_their_round(everyone: Words) -> None:
    frame = everyone.to_polars()
    for word, number, estimate in frame.select("word", "round", "estimate").rows():
        result = everyone.results[number - 1]
        assert estimate == result.counts[1 + candidates_of(result).index(word + END)]
    assert (frame["ci_low"] <= frame["estimate"]).all()
    assert (frame["estimate"] <= frame["ci_high"]).all()


def test_it_says_what_it_cannot_find(everyone: Words) -> None:
    text = everyone.explain()
    assert "Not found: words" in text
    assert "held no candidate" in text
    assert "characters that it does not know" in text
    assert "at most one false one is expected" in text


def test_denied_words_are_never_asked_about_or_reported() -> None:
    run = begin(new_study(), deny=["The", "hello", "Привет"])
    found = run.result
    assert not {"the", "hello", "привет"} & set(found.found())
    assert {"again", "и"} <= set(found.found())
    for result in found.results:
        assert not {"the" + END, "hello" + END} & set(candidates_of(result))
        assert result.recipe.deny[0].phrases == ("the", "hello", "привет")


def test_disjoint_cohorts_find_words_too() -> None:
    run = begin(new_study(rules=policy(1)), rounds=3)
    assert run.plan.cohorts == "disjoint"
    assert {"the", "hello", "again"} <= set(run.result.found())
    assert sum(result.n_reports for result in run.result.results) == DEVICES


def test_three_reports_mean_three_rounds() -> None:
    run = begin(new_study(rules=policy(3)))
    assert run.plan.cohorts == "everyone"
    assert len(run.plan.rounds) == 3


@pytest.mark.parametrize("typed", [{"": 5_000}, {"a": 5_000}, {"!?": 5_000}])
def test_empty_and_short_text(typed: dict[str, int]) -> None:
    found = begin(new_study(typed), rounds=2).result
    assert {"a"} & set(typed) <= set(found.found())
    assert len(found.found()) <= 2
    assert found.plot().to_dict()


def test_few_devices_are_told_to_plan_fewer_rounds() -> None:
    study = new_study({"hello": 100}, policy(1))
    with pytest.raises(CohortTooSmall, match="fewer rounds"):
        begin(study, rounds=5)


@pytest.mark.parametrize(
    ("devices", "epsilon", "why"),
    [(100, None, "cohorts would be smaller"), (1_000, "0.01", "noise of a first round")],
)
def test_everyone_is_asked_once_where_rounds_do_not_pay(
    devices: int, epsilon: str | None, why: str
) -> None:
    run = begin(new_study({"hello": devices}, policy(1)), epsilon=epsilon)
    assert len(run.plan.rounds) == 1
    assert "Everyone is asked once" in run.plan.note
    assert why in run.plan.explain()
    assert len(run.result.results) == 1


def test_the_plan_says_that_rounds_pay() -> None:
    assert "Several rounds pay off" in begin(new_study()).plan.explain()


def test_an_exhausted_budget_is_named() -> None:
    study = new_study(rules=policy(1))
    assert begin(study, rounds=1).result.found()
    other = study.fleet.study("more", analysis=ANALYSIS)
    with pytest.raises(BudgetExceeded):
        _ = begin(other, rounds=1).result


def test_whole_values_are_found_as_written() -> None:
    codes = CharacterModel.train([f"E-{i} {letter}" for i in range(10, 60) for letter in "abc"])
    found = begin(new_study({"E-17 b": 5_000, "b": 5_000}), values=True, model=codes).result
    assert "E-17 b" in found.found()
    (result, *_) = found.results
    assert "words(" not in result.recipe.query


def test_denied_values_are_compared_as_written() -> None:
    codes = CharacterModel.train({"E-17 b": 9.0, "E-18 c": 1.0})
    study = new_study({"E-17 b": 5_000, "E-18 c": 5_000})
    found = begin(study, values=True, model=codes, deny=["E-17 b", "!"], rounds=1).result
    assert "E-17 b" + END not in candidates_of(found.results[0])
    assert "E-18 c" in found.found()


def test_shipped_models_of_other_languages_can_be_asked_with() -> None:
    """Some of their characters combine, and the list must still be one that a recipe can hold."""
    study = new_study({"مرحبا": 2_000}, policy(6))
    run = begin(study, model=CharacterModel.shipped("ar"), rounds=6, most_candidates=9_999)
    first = next(iter(run))
    assert any(unicodedata.combining(text[0]) for text in candidates_of(first.result))


def test_models_are_spelled_as_devices_spell_words() -> None:
    """Capitals, phrases and decomposed characters: devices fold and split all of them."""
    model = CharacterModel.train(["HELLO", "New World", "cafe\u0301", "x\u0301y"])
    study = new_study({"hello world, Cafe\u0301 x\u0301y": 5_000})
    found = begin(study, model=model).result.found()
    assert {"hello", "world", "café", "x\u0301y"} <= set(found)


def test_values_with_emoji_are_found_as_written() -> None:
    held = {"👍🏽": 5_000, "👨\u200d👩\u200d👧": 4_000, "Ok 👍": 3_000}
    model = CharacterModel.train([*held, "👩", "no 👍"])
    found = begin(new_study(held), values=True, model=model).result
    assert set(held) <= set(found.found())


def test_a_list_too_short_for_any_word_is_refused_before_anything_is_asked() -> None:
    study = new_study()
    flat = CharacterModel.train([f"w{number:03}" for number in range(300)])
    run = begin(study, model=flat, rounds=1, most_candidates=2)
    with pytest.raises(InvalidInput, match="no word likely enough"):
        _ = run.result
    assert not study.rounds


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    study = new_study(folder=tmp_path)
    steps = iter(begin(study, rounds=2))
    next(steps)
    again = new_study(folder=tmp_path)
    found = begin(again, rounds=2).result
    assert len(again.rounds) == 2
    assert again.rounds[0].digest == study.rounds[0].digest
    assert found.results[0].to_json() == study.result(1).to_json()


def test_saved_and_loaded(everyone: Words, tmp_path: Path) -> None:
    everyone.save(tmp_path / "found.json")
    loaded = Words.load(tmp_path / "found.json")
    assert loaded.to_json() == everyone.to_json()
    assert loaded.to_polars().equals(everyone.to_polars())
    with pytest.raises(DecodeError):
        Words.from_json("{}")
    with pytest.raises(InvalidInput):
        Words(results=(), cohorts="everyone", rounds=1)


def test_functions_that_the_policy_does_not_permit() -> None:
    for functions, missing in ((["words"], "substr"), (["substr"], "ngrams")):
        rules = policy(4, **{f"analyses/{ANALYSIS}/functions": functions})
        with pytest.raises(InvalidInput, match=missing):
            begin(new_study(rules=rules))
    rules = policy(4, **{f"analyses/{ANALYSIS}/functions": ["ngrams", "substr"]})
    assert "the" in begin(new_study(rules=rules), rounds=1).result.found()


@pytest.mark.parametrize(
    "options", [{"rounds": 0}, {"rounds": 9}, {"most_candidates": 1}, {"deny": "hello"}]
)
def test_bad_wishes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        begin(new_study(), **options)


@pytest.mark.parametrize("function", ["words", "ngrams"])
def test_real_devices_answer_the_query(function: str) -> None:
    """The sandbox of a device runs it: distinct words, cut by characters and not by bytes."""
    query = word_query("t", "a", values=False, functions=["substr", function])
    answer = ask(query.format(length=4), snapshot([("To be, or not TO Привет", 1)]))
    assert answer.names == ("word", "beginning")
    cut = {"to" + END, "be" + END, "or" + END, "not" + END, "прив"}
    assert sorted(str(row[1]) for row in answer.rows) == sorted(cut)


def test_real_devices_cut_values() -> None:
    query = word_query("t", "a", values=True, functions=["substr"]).format(length=3)
    answer = ask(query, snapshot([("E-17", 1), ("é", 2), ("é", 3)]))
    assert sorted(map(tuple, answer.rows)) == [("E-17", "E-1"), ("é", "é" + END)]
