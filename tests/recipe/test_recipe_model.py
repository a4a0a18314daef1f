"""Recipes: one canonical form, and every departure from it refused with the field named."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from chorister.canonical import dumps
from chorister.errors import RecipeError
from chorister.recipe import Bucket, Recipe, Window, check
from chorister.recipe.model import json_schema
from tests.keyboard import EXAMPLE, POLICY, RECIPE, REMOVE, changed, recipe_at, recipe_tree

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "reference" / "recipe.schema.json"


def test_round_trip() -> None:
    payload = RECIPE.canonical()
    assert Recipe.parse(payload) == RECIPE
    assert Recipe.parse(payload).digest == RECIPE.digest
    assert RECIPE.encoding.size == 272
    assert RECIPE.fields_read == ("keyboard.ngram", "user.age")


def test_a_draft_may_be_laid_out_for_people() -> None:
    draft = (EXAMPLE / "recipe.json").read_bytes()
    with pytest.raises(RecipeError, match="canonical"):
        Recipe.parse(draft)
    assert Recipe.draft(draft) == RECIPE


TREE = "features/1"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"privacy/surprise": 1}, "privacy.surprise"),
        ({f"{TREE}/surprise": 1}, "features.1.prefix_tree.surprise"),
        ({"version": 2}, "version"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"version": REMOVE}, "version"),
        ({"analysis": REMOVE}, "analysis"),
        ({"id": "no spaces"}, "id"),
        ({"collector": "AB" * 32}, "collector"),
        ({"query": ""}, "query"),
        ({"query": " "}, "query"),
        ({"query": "SELECT 1\0, 2"}, "query"),
        ({f"{TREE}/vocabulary": [f"w{i}" for i in range(50_000)]}, "features"),
        ({"reads": {}}, "reads"),
        ({"reads/keyboard": []}, "reads.keyboard"),
        ({"reads/keyboard": ["ngram", "ngram"]}, "reads.keyboard"),
        ({"group_by": ["user.locale", "user.locale"]}, "group_by"),
        ({"group_by": ["locale"]}, "group_by.0"),
        ({"arms": [{"name": "a", "weight": 1}]}, "arms"),
        ({"arms": [{"name": "a", "weight": 1}, {"name": "a", "weight": 1}]}, "arms"),
        ({"arms": [{"name": "a", "weight": 0}, {"name": "b", "weight": 1}]}, "arms.0.weight"),
        ({"features": []}, "features"),
        ({"features/0/kind": "histogram"}, "features.0"),
        ({"features/0/edges": ["20", "10"]}, "features.0.intervals.edges"),
        ({"features/0/edges": [10, 20]}, "features.0.intervals.edges.0"),
        ({f"{TREE}/tokenisation": 2}, "features.1.prefix_tree.tokenisation"),
        ({"selection": "last"}, "selection"),
        ({"deny": [{"column": "ngram", "phrases": ["Rude"]}]}, "deny.0.phrases"),
        ({"deny": [{"column": "ngram", "phrases": ["a" * 401]}]}, "deny.0.phrases.0"),
        ({"deny": [{"column": "ngram", "phrases": ["a " * 16 + "b"]}]}, "deny.0.phrases"),
        ({"deny": [{"column": "ngram", "phrases": ["a"]}] * 9}, "deny"),
        (
            {
                "deny": [
                    {"column": "ngram", "phrases": [f"{'a ' * 15}{i}" for i in range(6_251)]},
                    {"column": "ngram", "phrases": [f"{'b ' * 15}{i}" for i in range(6_250)]},
                ]
            },
            "deny",
        ),
        ({"privacy/mechanism": "laplace"}, "privacy.mechanism"),
        ({"privacy/local_epsilon": "0"}, "privacy.local_epsilon"),
        ({"privacy/local_epsilon": "21"}, "privacy.local_epsilon"),
        ({"privacy/local_epsilon": "1." + "0" * 29 + "1"}, "privacy.local_epsilon"),
        ({"privacy/local_epsilon": 2}, "privacy.local_epsilon"),
        ({"privacy/epsilon": "0.20"}, "privacy.epsilon"),
        ({"privacy/epsilon": "2e-1"}, "privacy.epsilon"),
        ({"privacy/epsilon": "-1"}, "privacy.epsilon"),
        ({"privacy/delta": "0"}, "privacy.delta"),
        ({"privacy/delta": "0.000000000001"}, "privacy.delta"),
        ({"privacy/min_cohort": 1}, "privacy.min_cohort"),
        ({"privacy/min_cohort": "1000"}, "privacy.min_cohort"),
        ({"privacy/crowd": "trusted"}, "privacy.crowd"),
        ({"privacy/crowd": "honest"}, "privacy.honest_fraction"),
        ({"privacy/honest_fraction": "1/2"}, "privacy.honest_fraction"),
        ({"privacy/report": "raw"}, "privacy.report"),
        ({"window/closes": 0}, "window.closes"),
        ({"window/ends": 1794787201}, "window.ends"),
        ({"window/opens": -1}, "window.opens"),
        ({"window/opens": 0}, "window.ends"),
        ({"participation/probability": "1.5"}, "participation.probability"),
        ({"participation/probability": "0"}, "participation.probability"),
        ({"participation/once_per_study": 1}, "participation.once_per_study"),
        ({"aggregators/leader": "ftp://leader.example.org/"}, "aggregators.leader"),
        ({"aggregators/leader": "https://helper.example.net/dap/"}, "aggregators.helper"),
    ],
)
def test_refused_with_the_field_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(dumps(changed(recipe_tree(), changes)))
    assert caught.value.field == field


def payload_with(old: bytes, new: bytes) -> bytes:
    payload = RECIPE.canonical()
    assert payload.count(old) == 1
    return payload.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (b'"epsilon":"0.2"', b'"epsilon":0.2', "privacy.epsilon"),
        (b'"epsilon":"0.2"', b'"epsilon":"0.2","epsilon":"0.1"', "epsilon"),
        (b'"epsilon":"0.2"', b'"epsilon":null', "privacy.epsilon"),
        (b'"min_cohort":1000', b'"min_cohort":1e3', "privacy.min_cohort"),
        (b'"min_cohort":1000', b'"min_cohort":NaN', "privacy.min_cohort"),
        (b'"min_cohort":1000', b'"min_cohort":1000 ', None),
        (b'"uniform"', b'"\\u0075niform"', None),
    ],
)
def test_json_that_another_reader_might_take(old: bytes, new: bytes, field: str | None) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(payload_with(old, new))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"1", b'"x"', b"{}", b"\xef\xbb\xbf" + RECIPE.canonical(), b" " * 9_000_000],
)
def test_what_is_no_recipe(payload: bytes) -> None:
    for read in (Recipe.parse, Recipe.draft):
        with pytest.raises(RecipeError):
            read(payload)


def test_an_optional_field_is_absent_not_null() -> None:
    assert b"honest_fraction" not in RECIPE.canonical()
    honest = recipe_at({"privacy/crowd": "honest", "privacy/honest_fraction": "9/10"})
    assert b'"honest_fraction":"9/10"' in honest.canonical()
    assert Recipe.parse(honest.canonical()) == honest


def test_the_published_schema_is_up_to_date() -> None:
    published = json.loads(SCHEMA.read_text())
    assert published == json_schema(), (
        "run: chorister recipe schema -o docs/reference/recipe.schema.json"
    )


def test_the_schema_takes_what_the_model_takes() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    grid = {"kind": "grid", "columns": ["x", "y"], "box": ["0", "0", "1", "1"], "level": 2}
    arms = [{"name": "a", "weight": 1}, {"name": "b", "weight": 2}]
    hashed = RECIPE.features[1].hashed(bytes(16))  # type: ignore[union-attr]
    for recipe in (
        RECIPE,
        recipe_at({"privacy/crowd": "honest", "privacy/honest_fraction": "9/10"}),
        recipe_at({"features": [grid], "arms": arms}),
        recipe_at({"features/1": json.loads(hashed.canonical())}),
    ):
        validator.validate(json.loads(recipe.canonical()))
    for broken in (
        {"surprise": 1},
        {"version": 2},
        {"privacy/epsilon": 0.2},
        {"privacy/epsilon": "0.20"},
        {"privacy/honest_fraction": None},
        {"query": REMOVE},
        {f"{TREE}/tokenisation": REMOVE},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(changed(recipe_tree(), broken))


def test_arms_are_drawn_by_weight() -> None:
    recipe = recipe_at({"arms": [{"name": "a", "weight": 1}, {"name": "b", "weight": 3}]})
    tickets = iter(range(4))
    drawn = Counter(recipe.draw_arm(randbelow=lambda _: next(tickets)) for _ in range(4))
    assert drawn == {"a": 1, "b": 3}
    assert recipe.draw_arm() in ("a", "b")
    assert RECIPE.draw_arm() is None


PAYLOAD = RECIPE.canonical()


@settings(max_examples=200)
@given(st.integers(0, len(PAYLOAD) - 1), st.binary(max_size=3))
def test_fuzz(at: int, junk: bytes) -> None:
    payload = PAYLOAD[:at] + junk + PAYLOAD[at + 1 :]
    try:
        recipe = Recipe.parse(payload)
    except RecipeError:
        return
    assert recipe.canonical() == payload


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.text(), max_size=2)
)  # fmt: skip
PATHS = [
    "version", "reads", "features", "features/0", "features/0/edges", "features/1/prefixes", "deny",
    "privacy", "privacy/epsilon", "privacy/min_cohort", "window", "window/opens", "arms",
    "group_by", "aggregators/leader", "collector", "query", "participation",
]  # fmt: skip


@settings(max_examples=200)
@given(st.sampled_from(PATHS), VALUES)
def test_fuzz_values(path: str, value: Any) -> None:
    try:
        recipe = Recipe.draft(json.dumps(changed(recipe_tree(), {path: value})).encode())
    except RecipeError:
        return
    assert Recipe.parse(recipe.canonical()) == recipe


def slow_bucket(window: Window) -> Bucket:
    length = window.ends - window.opens
    while window.opens // length != (window.ends - 1) // length:
        length += 1
    return Bucket(window.opens // length, length)


@settings(max_examples=300)
@given(st.integers(0, 200_000), st.integers(1, 300), st.integers(0, 300))
def test_the_bucket_is_the_shortest_that_holds_the_window(
    opens: int, answer: int, grace: int
) -> None:
    window = Window(opens=opens, closes=opens + answer, ends=opens + answer + grace)
    bucket = window.bucket
    assert bucket == slow_bucket(window)
    assert bucket.start <= window.opens < window.ends <= bucket.end


@given(st.integers(0, 2**40 - 400_000_000), st.integers(1, 10 * 366 * 86_400))
def test_every_window_has_a_bucket_soon(opens: int, length: int) -> None:
    window = Window(opens=opens, closes=opens + length, ends=opens + length)
    bucket = window.bucket
    assert bucket.start <= window.opens < window.ends <= bucket.end


def test_real_windows_have_short_buckets() -> None:
    """A week and three days from 2026 on: the bucket is less than 1% longer than the window."""
    for day in range(2000):
        opens = 1_794_787_200 + day * 86_400
        window = Window(opens=opens, closes=opens + 604_800, ends=opens + 864_000)
        assert window.bucket.length < 864_000 * 1.01


def test_a_copy_is_computed_again() -> None:
    """Also where everything was already computed from the original."""
    recipe = recipe_at({"privacy/local_epsilon": "1", "privacy/epsilon": "0.2"})
    _ = recipe.digest, recipe.encoding, recipe.randomizer
    privacy = recipe.privacy.model_copy(update={"local_epsilon": Decimal(8)})
    other = recipe.model_copy(
        update={"privacy": privacy, "id": "other", "features": recipe.features[:1]}
    )
    fresh = Recipe.parse(other.canonical())
    assert other == fresh
    assert other.digest == fresh.digest != recipe.digest
    assert other.encoding.size == fresh.encoding.size == 8
    assert other.randomizer == fresh.randomizer
    assert other.randomizer.local_epsilon == 8
    assert check(other, POLICY) == check(fresh, POLICY) != check(recipe, POLICY)
    assert recipe.model_copy(deep=True).digest == recipe.digest


def test_a_copy_is_validated() -> None:
    with pytest.raises(ValidationError, match="leader and helper must be different"):
        RECIPE.model_copy(
            update={"aggregators": dict.fromkeys(("leader", "helper"), RECIPE.aggregators.leader)}
        )
    with pytest.raises(ValidationError):
        RECIPE.privacy.model_copy(update={"epsilon": Decimal(-1)})
    with pytest.raises(ValidationError):
        RECIPE.model_copy(update={"surprise": 1})


def test_what_is_read_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="frozen"):
        RECIPE.reads["user"] = ("age", "name")
