"""A recipe against a policy: each rule, broken alone, is the one that says no."""

from __future__ import annotations

from typing import Any

import pytest

from chorister.errors import QueryRefused
from chorister.policy import Policy
from chorister.policy.bounds import Claim
from chorister.recipe import Recipe, SignedRecipe, check, refusal, sign, verify_recipe
from chorister.recipe.in_words import describe
from chorister.recipe.template import template
from tests.conftest import REPOSITORY
from tests.keyboard import (
    ANALYSIS,
    AUTHOR,
    POLICY,
    RECIPE,
    STRANGER,
    analysis_at,
    policy_at,
    policy_tree,
    recipe_at,
)

OPENS = RECIPE.window.opens
OTHER_AUTHOR = "O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik"  # of the all-zero key


def failed(recipe: Recipe | SignedRecipe, policy: Policy = POLICY, **options: Any) -> list[str]:
    return [outcome.name for outcome in check(recipe, policy, **options) if not outcome.passed]


def test_the_example_is_allowed() -> None:
    signed = SignedRecipe.parse(sign(RECIPE, AUTHOR))
    outcomes = check(signed, POLICY, now=OPENS)
    assert [outcome.name for outcome in outcomes] == [
        "analysis", "author", "collector", "aggregators", "query", "fields", "groups", "cells",
        "bins", "prefixes", "window", "open", "cohort", "mechanism", "report", "crowd",
        "local-epsilon", "budget", "field-budgets", "amplification",
    ]  # fmt: skip
    assert all(outcome.passed and outcome.why for outcome in outcomes)
    assert all(outcome.field is None for outcome in outcomes)
    verify_recipe(signed, POLICY, now=OPENS)


HASHED = {
    "kind": "hashed_prefix_tree", "column": "ngram", "tokenisation": 1, "salt": "00" * 16,
    "depths": [1], "prefixes": ["11" * 16], "vocabulary": ["22" * 16],
}  # fmt: skip
ARMS = [{"name": name, "weight": 1} for name in ("a", "b", "c")]
LEADER = "https://leader.example.net/dap/"


@pytest.mark.parametrize(
    ("changes", "name", "field", "words"),
    [
        ({"analysis": "keyboard.other"}, "analysis", "analysis", "no analysis keyboard.other"),
        ({"collector": "ab" * 32}, "collector", "collector", "not among"),
        ({"query": "DELETE FROM keyboard"}, "query", "query", "only SELECT"),
        ({"aggregators/leader": LEADER}, "aggregators", "aggregators", "not a permitted pair"),
        ({"arms": ARMS}, "cells", "group_by", "15 parts"),
        ({"features/1": HASHED}, "prefixes", "features", "hashed"),
        ({"window/closes": OPENS + 60}, "window", "window", "answered for 1 minute"),
        ({"window/ends": OPENS + 40 * 86_400}, "window", "window", "collected for 33 days"),
        ({"privacy/report": "plain"}, "report", "privacy.report", "not permitted"),
        ({"privacy/epsilon": "0.31"}, "field-budgets", "privacy.epsilon", "user.age"),
        ({"privacy/local_epsilon": "2.5", "privacy/epsilon": "0.3"}, "field-budgets",
         "privacy.local_epsilon", "user.age"),
        ({"privacy/mechanism": "symmetric", "privacy/min_cohort": 100_000}, "field-budgets",
         "privacy.local_epsilon", "user.age: local_epsilon 4"),
        ({"privacy/epsilon": "0.15"}, "amplification", "privacy.min_cohort", "more than the 0.15"),
    ],
)  # fmt: skip
def test_one_rule_broken(changes: dict[str, Any], name: str, field: str, words: str) -> None:
    recipe = recipe_at(changes)
    (outcome,) = [c for c in check(recipe, POLICY) if not c.passed]
    assert (outcome.name, outcome.field) == (name, field)
    assert words in outcome.why
    with pytest.raises(QueryRefused) as caught:
        verify_recipe(SignedRecipe.parse(sign(recipe, AUTHOR)), POLICY, now=OPENS)
    assert (caught.value.check, caught.value.field) == (name, field)


@pytest.mark.parametrize(
    "changes",
    [
        {"query": "DELETE FROM keyboard"},
        {"privacy/epsilon": "0.6"},
        {"privacy/local_epsilon": "9"},
        {"group_by": ["user.age"]},
    ],
)
def test_a_recipe_refused_for_a_cheap_reason_costs_no_accounting(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices and aggregators stop at the first refusal; an explanation goes on."""
    asked: list[int] = []

    def certified(self: Claim, min_cohort: int) -> float:
        asked.append(min_cohort)
        return 0.1

    monkeypatch.setattr(Claim, "certified_epsilon", certified)
    signed = SignedRecipe.parse(sign(recipe_at(changes), AUTHOR))
    with pytest.raises(QueryRefused):
        verify_recipe(signed, POLICY, now=OPENS)
    found = refusal(signed, POLICY)
    assert found is not None
    assert not found.passed
    assert asked == []
    assert [each.name for each in check(signed, POLICY)][-1] == "amplification"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"reads": {"user": ["age", "locale"]}}, ["fields", "field-budgets"]),
        ({"reads": {"user": ["shoes"]}}, ["fields", "field-budgets"]),
        ({"group_by": ["user.age"]}, ["groups", "cells"]),
        ({"group_by": ["user.shoes"]}, ["groups", "cells"]),
        ({"privacy/min_cohort": 999}, ["cohort", "amplification"]),
        ({"privacy/min_cohort": 10**9}, ["cohort", "amplification"]),
        ({"privacy/epsilon": "0.6"}, ["budget", "field-budgets"]),
        ({"privacy/delta": "0.00001"}, ["budget", "field-budgets"]),
        ({"privacy/local_epsilon": "9", "privacy/epsilon": "0.3"},
         ["local-epsilon", "field-budgets", "amplification"]),
    ],
)  # fmt: skip
def test_rules_that_break_together(changes: dict[str, Any], names: list[str]) -> None:
    assert failed(recipe_at(changes)) == names


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"query_class": "exact", "functions": [], "queries": ["SELECT 1"]}, "query"),
        ({"max_bins": 271}, "bins"),
        ({"mechanisms": ["symmetric"]}, "mechanism"),
        ({"crowds": ["honest"], "honest_fraction": "9/10"}, "crowd"),
        ({"max_cells": 4}, "cells"),
        ({"budget/epsilon": policy_tree()["device"]["delta"]}, "budget"),
    ],
)
def test_one_limit_moved(changes: dict[str, Any], name: str) -> None:
    assert failed(RECIPE, analysis_at(changes)) == [name]


def test_an_exact_query_is_compared_to_the_letter() -> None:
    exact = analysis_at({"query_class": "exact", "functions": [], "queries": [RECIPE.query]})
    assert failed(RECIPE, exact) == []
    assert failed(recipe_at({"query": RECIPE.query + " "}), exact) == ["query"]


def test_honest_fractions() -> None:
    policy = analysis_at({"crowds": ["noised", "honest"], "honest_fraction": "9/10"})

    def relying_on(fraction: str, cohort: int) -> Recipe:
        return recipe_at({"privacy/crowd": "honest", "privacy/honest_fraction": fraction,
                          "privacy/min_cohort": cohort})  # fmt: skip

    assert failed(relying_on("9/10", 2000), policy) == []
    assert failed(relying_on("1/2", 3000), policy) == []
    assert failed(relying_on("19/20", 2000), policy) == ["crowd"]
    # 1,000 devices of which 900 are honest do not hide as well as 1,000.
    assert failed(relying_on("9/10", 1000), policy) == ["amplification"]


def test_one_operator_is_said() -> None:
    pair = {**policy_tree()["aggregators"][0], "one_operator": True}
    policy = Policy.model_validate({**policy_tree(), "aggregators": [pair]})
    (outcome,) = [c for c in check(RECIPE, policy) if c.name == "aggregators"]
    assert outcome.passed
    assert "one operator: no protection" in outcome.why


def test_another_analysis_author_key() -> None:
    """A key that may ask for one analysis may not ask for another."""
    tree = policy_tree()
    tree["analyses"]["keyboard.second"] = {
        **tree["analyses"][ANALYSIS], "author_keys": [OTHER_AUTHOR]
    }  # fmt: skip
    policy = Policy.model_validate(tree)
    theirs = recipe_at({"analysis": "keyboard.second"})
    assert failed(SignedRecipe.parse(sign(theirs, STRANGER)), policy) == []
    assert failed(SignedRecipe.parse(sign(theirs, AUTHOR)), policy) == ["author"]
    assert failed(SignedRecipe.parse(sign(RECIPE, STRANGER)), policy) == ["author"]


def test_when_it_is_open() -> None:
    window = RECIPE.window
    assert failed(RECIPE, now=window.opens - 1) == ["open"]
    assert failed(RECIPE, now=window.opens) == []
    assert failed(RECIPE, now=window.closes - 1) == []
    assert failed(RECIPE, now=window.closes) == ["open"]


def test_one_feature_is_no_product() -> None:
    features = [RECIPE.model_dump(mode="json", exclude_none=True)["features"][0]]
    outcomes = {
        outcome.name: outcome.why for outcome in check(recipe_at({"features": features}), POLICY)
    }
    assert outcomes["bins"].startswith("8 bins, ")


def test_bounded_reports_use_a_little_delta() -> None:
    """At delta just above 1e-12 the bounded report has almost nothing left; the plain one has."""
    tiny = {"privacy/delta": "0.0000000000011", "privacy/epsilon": "0.3"}
    bounded = recipe_at(tiny).privacy.claim
    plain = recipe_at({**tiny, "privacy/report": "plain"}).privacy.claim
    assert bounded.certified_epsilon(1000) > plain.certified_epsilon(1000)
    assert bounded.least_cohort() > plain.least_cohort()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mechanisms": ["symmetric"]},
        {"crowds": ["honest"], "honest_fraction": "1/2"},
        {"report_kinds": ["plain"]},
        {
            "query_class": "exact",
            "functions": [],
            "queries": ["SELECT ngram AS value FROM keyboard"],
        },
    ],
)
def test_templates_are_allowed(changes: dict[str, Any]) -> None:
    policy = analysis_at(changes)
    recipe = template(policy, None, now=OPENS, columns=lambda *_: ["value"])
    assert failed(recipe, policy, now=OPENS) == []
    assert Recipe.parse(recipe.canonical()) == recipe
    # A first try does not spend what other questions may need.
    terms = policy.analyses[recipe.analysis]
    assert recipe.privacy.epsilon * terms.budget.reports <= terms.budget.epsilon


@pytest.mark.parametrize("name", ["algorithms", "fitness", "keyboard"])
def test_every_example_has_a_template(name: str) -> None:
    """That of the algorithms permits a local epsilon that no cohort hides at its epsilon."""
    policy = Policy.load(REPOSITORY / "examples" / name / "policy.toml")
    terms = next(iter(policy.analyses.values()))
    columns = ["steps"] if name == "fitness" else ["value"]
    recipe = template(policy, None, now=OPENS, columns=lambda *_: columns)
    assert failed(recipe, policy, now=OPENS) == []
    assert recipe.privacy.min_cohort <= terms.cohort.largest


def test_how_often_it_can_be_asked_is_no_less_than_ledgers_permit() -> None:
    """A device's budget that renews more often than the analysis' bounds no period of that."""
    changes = {
        "device/period": "30d",
        "device/reports": 1,
        **{
            f"analyses/{ANALYSIS}/{part}/{name}": value
            for part in ("budget", "fields/user.age", "fields/keyboard.ngram")
            for name, value in (("epsilon", "2"), ("delta", "0.00001"), ("reports", 7))
        },
    }
    words = [line for section in describe(RECIPE, policy_at(changes)) for line in section.lines]
    assert "a device answers at most 7 questions of this cost in each period of 180 days" in words
