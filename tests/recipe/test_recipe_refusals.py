"""What must never get through, each with the field that is to blame."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chorister.canonical import b64url_decode, b64url_encode, dumps
from chorister.dap.task import task_configuration
from chorister.errors import (
    ChoristerError,
    InvalidInput,
    QueryRefused,
    RecipeError,
    SignatureInvalid,
)
from chorister.policy import Policy
from chorister.recipe import Recipe, SignedRecipe, sign, verify_recipe
from tests.keyboard import (
    ANALYSIS,
    AUTHOR,
    POLICY,
    RECIPE,
    STRANGER,
    changed,
    policy_tree,
    recipe_at,
    recipe_tree,
)

NOW = RECIPE.window.opens


def answer(recipe: Recipe, policy: Policy = POLICY) -> None:
    """What a device does with a recipe before it looks at its budget."""
    signed = SignedRecipe.open(sign(recipe, AUTHOR), policy.analyses[ANALYSIS].author_keys)
    verify_recipe(signed, policy, now=NOW)


def replaced(old: bytes, new: bytes) -> bytes:
    payload = RECIPE.canonical()
    assert payload.count(old) == 1
    return payload.replace(old, new)


def one_changed_byte() -> None:
    header, payload, signature = sign(RECIPE, AUTHOR).decode().split(".")
    body = bytearray(b64url_decode(payload))
    body[body.index(b"1000")] = ord("2")
    jws = f"{header}.{b64url_encode(bytes(body))}.{signature}".encode()
    SignedRecipe.open(jws, POLICY.analyses[ANALYSIS].author_keys)


def an_unknown_field() -> None:
    Recipe.parse(dumps(changed(recipe_tree(), {"privacy/priority": 1})))


def an_unknown_version() -> None:
    Recipe.parse(dumps(changed(recipe_tree(), {"version": 2})))


def a_duplicate_key() -> None:
    Recipe.parse(replaced(b'"min_cohort":1000', b'"min_cohort":1000,"min_cohort":10'))


def a_float_where_a_decimal_must_be() -> None:
    Recipe.parse(replaced(b'"epsilon":"0.2"', b'"epsilon":0.2'))


def another_analysis_author_key() -> None:
    tree = policy_tree()
    strangers = b64url_encode(STRANGER.public_key().public_bytes_raw())
    second = {**tree["analyses"][ANALYSIS], "author_keys": [strangers]}
    policy = Policy.model_validate({**tree, "analyses": {**tree["analyses"], "second": second}})
    verify_recipe(SignedRecipe.parse(sign(RECIPE, STRANGER)), policy, now=NOW)


def another_collector() -> None:
    answer(recipe_at({"collector": "ab" * 32}))


def too_many_group_cells() -> None:
    answer(recipe_at({"arms": [{"name": f"arm{i}", "weight": 1} for i in range(3)]}))


@pytest.mark.parametrize(
    ("attempt", "error", "field"),
    [
        (one_changed_byte, SignatureInvalid, "signature"),
        (an_unknown_field, RecipeError, "privacy.priority"),
        (an_unknown_version, RecipeError, "version"),
        (a_duplicate_key, RecipeError, "min_cohort"),
        (a_float_where_a_decimal_must_be, RecipeError, "privacy.epsilon"),
        (another_analysis_author_key, QueryRefused, "signature"),
        (another_collector, QueryRefused, "collector"),
        (too_many_group_cells, QueryRefused, "group_by"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused(attempt: Callable[[], None], error: type[ChoristerError], field: str) -> None:
    with pytest.raises(error) as caught:
        attempt()
    assert getattr(caught.value, "field", None) == field


def test_a_value_outside_a_closed_list() -> None:
    with pytest.raises(InvalidInput, match=r"^user\.locale: 'xx_XX'"):
        task_configuration(POLICY, RECIPE, {"user.locale": "xx_XX"})


def test_the_recipe_itself_gets_through() -> None:
    answer(RECIPE)
