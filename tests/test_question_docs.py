"""The reference names every key of a policy, every field of a recipe, every check and command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from chorister.encoding import Categories, Grid, HashedPrefixTree, Intervals, PrefixTree
from chorister.encoding.tokenizer import split_words
from chorister.policy import model as policy_model
from chorister.recipe import SignedRecipe, check, sign
from chorister.recipe import model as recipe_model
from tests.keyboard import AUTHOR, POLICY, RECIPE

DOCS = Path(__file__).parent.parent / "docs"


def models(module: object) -> list[type[BaseModel]]:
    found = [value for value in vars(module).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, BaseModel) and value.model_fields]


def named(page: str) -> set[str]:
    """Every word inside backquotes."""
    text = (DOCS / "reference" / page).read_text()
    return {
        word for quoted in re.findall(r"`([^`]+)`", text) for word in re.split(r"[^\w-]+", quoted)
    }


@pytest.mark.parametrize("model", models(policy_model), ids=lambda model: model.__name__)
def test_every_key_of_a_policy_is_documented(model: type[BaseModel]) -> None:
    assert set(model.model_fields) <= named("policy.md")


@pytest.mark.parametrize(
    "model",
    [*models(recipe_model), Intervals, Categories, PrefixTree,
     HashedPrefixTree, Grid],
    ids=lambda model: model.__name__,
)  # fmt: skip
def test_every_field_of_a_recipe_is_documented(model: type[BaseModel]) -> None:
    assert set(model.model_fields) <= named("recipe.md")


def test_every_check_is_documented() -> None:
    signed = SignedRecipe.parse(sign(RECIPE, AUTHOR))
    names = {outcome.name for outcome in check(signed, POLICY, now=0)}
    assert names <= named("recipe.md")


def test_the_tokenisation_example() -> None:
    text = (DOCS / "concepts" / "questions.md").read_text()
    example, words = re.search(r"^`(Don.*?)` is (.*)\. Prefixes", text, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert split_words(example) == re.findall("`(.*?)`", words)


def test_the_limit_on_bytes() -> None:
    assert (
        f"{recipe_model.MAX_RECIPE_BYTES:,} bytes" in (DOCS / "reference" / "recipe.md").read_text()
    )
