"""Words on no list, found over a rehearsed fleet by their beginnings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import chorister as ch
from chorister.analyst.algorithms.character_model import END, CharacterModel
from chorister.analyst.algorithms.run import AlgorithmRun
from chorister.analyst.algorithms.words import Words, candidates_of, discover_words, word_query
from chorister.analyst.study import Study
from chorister.device.sandbox.functions import known_functions
from chorister.errors import BudgetExceeded, CohortTooSmall, DecodeError, InvalidInput
from chorister.policy import Policy
from tests.analyst.fleets import generous
from tests.device.asking import ask, snapshot
from tests.keyboard import ANALYSIS

TYPED = {
    "the zorblat is yeeting": 6_000,
    "hello, Привет и пока": 5_000,
    "e4711 again": 4_000,
    "naïve café": 3_000,
    "안녕 안녕": 2_000,
    "": 2_000,
}
DEVICES = sum(TYPED.values())


def policy(reports: int = 4, **changes: Any) -> Policy:
    functions = {f"analyses/{ANALYSIS}/functions": ["substr", "words"]}
    return generous(reports, **{**functions, **changes})


def new_study(
    typed: dict[str, int] | None = None, rules: Policy | None = None, seed: int = 5
) -> Study:
    held = typed or TYPED
    frame = {"ngram": list(held), "count": list(held.values())}
    fleet: Any = ch.rehearse(frame, rules or policy(), seed=seed)
    found: Study = fleet.study("words", analysis=ANALYSIS)
    return found


def begin(study: Study, **options: Any) -> AlgorithmRun[Words]:
    return discover_words(study, field="keyboard.ngram", **{"most_candidates": 3_000, **options})


@pytest.fixture(scope="module")
def everyone() -> Words:
    return begin(new_study()).result


def test_known_and_unknown_words_are_found(everyone: Words) -> None:
    assert {"the", "is", "hello", "again", "zorblat", "yeeting", "e4711"} <= set(everyone.found())


def test_words_of_other_scripts_are_found(everyone: Words) -> None:
    assert {"привет", "и", "пока", "naïve", "café", "안녕"} <= set(everyone.found())
