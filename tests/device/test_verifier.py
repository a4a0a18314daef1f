"""Before the charge: what can fail without data fails then."""

from __future__ import annotations

import pytest

from chorister.device import verifier
from chorister.device.verifier import verify_encoding
from chorister.encoding import Categories
from chorister.errors import QueryRefused
from tests.device.world import a_recipe


def test_a_recipe_is_prepared_without_data() -> None:
    recipe = a_recipe("one")
    verify_encoding(recipe)
    assert b'"features"' in recipe.encoding.canonical


def test_an_encoding_that_is_longer_than_a_sandbox_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = a_recipe("one")
    monkeypatch.setattr(verifier, "MAX_ENCODING_BYTES", len(recipe.encoding.canonical) - 1)
    with pytest.raises(QueryRefused, match="bytes of features") as caught:
        verify_encoding(recipe)
    assert caught.value.check == "encoding"


def test_an_encoding_that_has_no_canonical_form_is_refused() -> None:
    strange = (Categories(column="age", values=("\u1c89",)),)
    recipe = a_recipe("one").model_copy(update={"features": strange})
    with pytest.raises(QueryRefused, match="not a character of Unicode"):
        verify_encoding(recipe)


def test_tables_that_can_not_be_built_are_found_before_the_charge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = a_recipe("one")

    def fail(_: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr("chorister.encoding.product.Encoder.parse", fail)
    with pytest.raises(QueryRefused, match="memory"):
        verify_encoding(recipe)
