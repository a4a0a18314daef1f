"""The console's form for words that are on no list."""

from __future__ import annotations

import pytest

from chorister.analyst.algorithms.words import Words
from chorister.console.algorithms import ALGORITHMS, plan_run
from chorister.errors import InvalidInput
from tests.analyst.algorithms.test_words import new_study, policy
from tests.keyboard import ANALYSIS

FORM = {"field": "keyboard.ngram", "rounds": "1", "epsilon": "", "cohorts": "", "target": ""}


def found(form: dict[str, str]) -> Words:
    study = new_study(
        {"Guten Morgen": 20_000}, policy(4, **{f"analyses/{ANALYSIS}/max_bins": 2_000})
    )
    result = plan_run(ALGORITHMS["words"], study, {**FORM, **form}).result
    assert isinstance(result, Words)
    return result


def test_words_of_another_language_are_found() -> None:
    assert {"guten", "morgen"} <= set(found({"language": "de", "find": "words"}).found())


def test_known_words_are_skipped_and_values_are_found_whole() -> None:
    (result,) = found({"find": "whole values", "deny": "hello"}).results
    assert "words(" not in result.recipe.query
    assert result.recipe.deny[0].phrases == ("hello",)


@pytest.mark.parametrize(
    ("form", "field"), [({"language": "xx"}, "language"), ({"find": "all"}, "find")]
)
def test_a_mistake_is_at_its_field(form: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        plan_run(ALGORITHMS["words"], new_study(), {**FORM, **form})
    assert refused.value.field == field
