"""Explanations, contradictions and differences of policies."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import pytest

from chorister.policy.bounds import analysis_cost, device_cost, field_cost, series_cost
from chorister.policy.contradictions import findings
from chorister.policy.diff import diff
from chorister.policy.explain import explain
from tests.keyboard import ANALYSIS, POLICY, REMOVE, analysis_at, policy_at, policy_tree


def said(policy: Any = POLICY) -> str:
    return "\n".join(
        line for section in explain(policy) for line in (section.title, *section.lines)
    )


def test_the_papers_local_bound() -> None:
    """Section 4.3: eps_local x k, for the analysis and, stronger, for each field."""
    analysis = POLICY.analyses[ANALYSIS]
    assert analysis_cost(POLICY, analysis).local_total == 8
    totals = {
        ref: field_cost(POLICY, analysis, field).local_total
        for ref, field in analysis.fields.items()
    }
    assert totals == {"keyboard.ngram": 5, "keyboard.perplexity": 8, "user.age": 2}
    assert device_cost(POLICY).local_total == 32


def test_the_explanation_says_what_it_must() -> None:
    text = said()
    for words in (
        "at most 1 report in each period of 180 days: epsilon 0.5, delta 1e-6",
        "user.age: at most 1 report in each period of 180 days: epsilon 0.3",
        "to both together epsilon 2, from 1 report of local epsilon 2",
        "to both together epsilon 32, from 4 reports of local epsilon 8",
        "the guarantee is per period",
        "In any time as long as a period at most two budgets are charged",
        "three, if the device's clock is slow by up to 2 days, or both aggregators lie",
        "at least one of the two aggregators is honest",
        "nothing about the other devices; all may be hostile",
        "not hidden: the fact that a device took part, when and from where",
        "user.locale is not sensitive: de_DE, en_GB, en_US, fr_FR; anything else is other",
    ):
        assert words in text


def test_assumptions_follow_the_policy() -> None:
    text = said(analysis_at({"crowds": ["honest"], "honest_fraction": "9/10"}))
    assert "9/10 of every released batch are honest devices" in text
    assert "all may be hostile" not in text
    assert "ONE OPERATOR" in said(policy_at({"aggregators/0/one_operator": True}))
    assert "Renyi divergences of order 32" in said(policy_at({"device/composition": {"renyi": 32}}))
    forever = said(policy_at({"device/period": REMOVE}))
    assert "at most 4 reports ever" in forever


def test_the_example_has_remarks_but_no_contradiction() -> None:
    found = findings(POLICY)
    assert {finding.kind for finding in found} == {"remark"}
    assert {finding.field.rpartition(".fields.")[2] for finding in found} == {
        "device.min_ledger_age",
        "keyboard.ngram.epsilon",
        "keyboard.perplexity.epsilon",
    }


FIELD = "fields/keyboard.ngram"
SERIES = {"windows": 26, "longest": "180d", "answers": 1, "cells": 130}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"budget/epsilon": 2}, "budget.epsilon", "can never be spent: the device allows 1"),
        ({"budget/delta": Decimal("1e-4")}, "budget.delta", "can never be spent"),
        ({"budget/reports": 5}, "budget.reports", "can never be spent"),
        ({"window/shortest": "15d"}, "window", "longer than the longest"),
        ({"cohort/largest": 999}, "cohort", "larger than the largest"),
        ({"max_cells": 4}, "group_by", "alone makes 5 parts"),
        ({"budget/composition": {"renyi": 4}}, "budget.composition", "higher order"),
        ({f"{FIELD}/local_epsilon": Decimal("0.0005")}, "fields.keyboard.ngram.local_epsilon",
         "nothing can be asked"),
        ({f"{FIELD}/delta": Decimal("1e-12")}, "fields.keyboard.ngram.delta", "bounded reports"),
        ({"crowds": ["honest"], "honest_fraction": "1/2000"}, "honest_fraction",
         "less than one honest device"),
        ({"cohort/smallest": 2, "cohort/largest": 20}, "fields.user.age.local_epsilon",
         "can never be used in full: with 20 devices"),
        ({"series": SERIES | {"longest": "3h"}}, "series.longest", "no series is as short"),
        ({"series": SERIES | {"answers": 27}}, "series.answers", "27 of 26 windows"),
        ({"series": SERIES | {"cells": 25}}, "series.cells", "26 windows"),
    ],
)  # fmt: skip
def test_contradictions(changes: dict[str, Any], field: str, words: str) -> None:
    found = [f for f in findings(analysis_at(changes)) if f.kind == "contradiction"]
    assert (f"analyses.{ANALYSIS}.{field}", True) in [(f.field, words in f.why) for f in found]


def test_budgets_of_different_periods() -> None:
    """Twice the device's half-year is all that a year's analysis could ever spend, and a bit."""
    yearly = {"budget/period": "360d", "budget/epsilon": Decimal("2.5")}
    assert not [f for f in findings(analysis_at(yearly)) if f.kind == "contradiction"]
    never = {"budget/period": REMOVE, "budget/epsilon": 50}
    assert not [f for f in findings(analysis_at(never)) if f.field.endswith("budget.epsilon")]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"log/checkpoint_max_age": "30d"}, f"analyses.{ANALYSIS}.window.longest"),
        ({f"analyses/{ANALYSIS}/budget/period": "2d"}, f"analyses.{ANALYSIS}.budget.period"),
        ({"device/min_ledger_age": "200d"}, "device.min_ledger_age"),
        ({"aggregators/0/one_operator": True}, "aggregators.main"),
        (
            {f"analyses/{ANALYSIS}/series": SERIES | {"answers": 2}},
            f"analyses.{ANALYSIS}.series.answers",  # the budget has one report in that time
        ),
    ],
)
def test_remarks(changes: dict[str, Any], field: str) -> None:
    assert field in [f.field for f in findings(policy_at(changes)) if f.kind == "remark"]


def test_equal_policies_do_not_differ() -> None:
    assert diff(POLICY, policy_at({})) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"budget/epsilon": Decimal("0.6")}, "budget.epsilon"),
        ({"budget/delta": Decimal("2e-6")}, "budget.delta"),
        ({"budget/reports": 2}, "budget.reports"),
        ({"budget/period": "90d"}, "budget.period"),
        ({"max_bins": 20_000}, "max_bins"),
        ({"cohort/smallest": 500}, "cohort.smallest"),
        ({"window/longest": "20d"}, "window.longest"),
        ({"hashed_prefixes": True}, "hashed_prefixes"),
        ({"functions": ["length", "lower", "ngrams", "substr"]}, "functions"),
        ({"report_kinds": ["bounded", "plain"]}, "report_kinds"),
        ({"crowds": ["noised", "honest"], "honest_fraction": "1/2"}, "honest_fraction"),
        ({f"{FIELD}/local_epsilon": 6}, "fields.keyboard.ngram.local_epsilon"),
        ({"series": SERIES}, "series"),
    ],
)  # fmt: skip
def test_differences_have_a_direction(changes: dict[str, Any], field: str) -> None:
    other = analysis_at(changes)
    forth = {(c.kind, c.field) for c in diff(POLICY, other)}
    back = {(c.kind, c.field) for c in diff(other, POLICY)}
    path = f"analyses.{ANALYSIS}.{field}"
    assert ("more", path) in forth
    assert not [change for change in forth if change[0] == "less"]
    assert ("less", path) in back or ("other", path) in back
    assert not [change for change in back if change[0] == "more"]


@pytest.mark.parametrize("name", list(SERIES))
def test_every_limit_of_a_series_has_a_direction(name: str) -> None:
    before = analysis_at({"series": SERIES})
    after = analysis_at({"series": SERIES | {name: "181d" if name == "longest" else 200}})
    series = f"analyses.{ANALYSIS}.series"
    paths = [*([series] if name == "answers" else []), f"{series}.{name}"]
    assert [(c.kind, c.field) for c in diff(before, after)] == [("more", path) for path in paths]
    assert [(c.kind, c.field) for c in diff(after, before)] == [("less", path) for path in paths]


def test_a_series_is_explained() -> None:
    policy = analysis_at({"series": SERIES})
    assert "may be asked repeatedly" not in said()
    assert "in up to 26 windows within 180 days; a device answers in at most 1 window" in said(
        policy
    )
    # A deleted ledger could answer again until the last window has closed.
    (remark,) = (f for f in findings(policy) if f.field == "device.min_ledger_age")
    assert "182 days would prevent it" in remark.why
    cost, change = diff(POLICY, policy)
    assert change.what == "not given -> windows 26, longest 180 days, answers 1, cells 130"
    whole = "at most 1 report: epsilon 0.5, delta 1e-6; to both aggregators together epsilon 8"
    assert cost.what == f"a whole series can now cost a device {whole}"
    assert f"a whole series costs a device {whole}" in said(policy)


def test_a_series_may_cost_the_budgets_of_several_periods() -> None:
    def cost(changes: dict[str, Any]) -> tuple[int, Decimal]:
        policy = policy_at(changes)
        found = series_cost(policy, policy.analyses[ANALYSIS])
        assert found is not None
        return found.reports, found.epsilon

    series = {f"analyses/{ANALYSIS}/series": SERIES | {"answers": 26}}
    # 182 days with the oldest checkpoint: three periods of 180 days, or 5 of 50.
    assert cost(series) == (3, Decimal("1.5"))
    shorter = series | {f"analyses/{ANALYSIS}/budget/period": "50d"}
    assert cost(shorter) == (5, Decimal("2.5"))
    assert cost(shorter | {"device/period": REMOVE, "device/epsilon": 1}) == (4, Decimal(1))
    never = {"device/period": REMOVE, f"analyses/{ANALYSIS}/budget/period": REMOVE}
    assert cost(series | never) == (1, Decimal("0.5"))


def test_a_new_analysis_is_told_with_its_cost() -> None:
    tree = policy_tree()["analyses"][ANALYSIS]
    wider = policy_at({"analyses/keyboard.second": tree})
    (change,) = diff(POLICY, wider)
    assert (change.kind, change.field) == ("more", "analyses.keyboard.second")
    assert "epsilon 0.5" in change.what
    (back,) = diff(wider, POLICY)
    assert (back.kind, back.what) == ("less", "no longer answered at all")


def test_new_fields_keys_and_pairs_are_told() -> None:
    field = {"local_epsilon": 1, "epsilon": 1, "delta": Decimal("1e-6"), "reports": 1}
    other = analysis_at({"fields/user.locale": field, "collectors": ["ab" * 32]})
    changes = {(c.kind, c.field): c.what for c in diff(POLICY, other)}
    assert "local_epsilon 1" in changes["more", f"analyses.{ANALYSIS}.fields.user.locale"]
    assert changes["more", f"analyses.{ANALYSIS}.collectors"] == f"added {'ab' * 32}"
    assert ("less", f"analyses.{ANALYSIS}.collectors") in changes
    pair = {**policy_tree()["aggregators"][0], "name": "spare"}
    wider = policy_at({"aggregators": [policy_tree()["aggregators"][0], pair]})
    assert ("more", "aggregators.spare") in {(c.kind, c.field) for c in diff(POLICY, wider)}
    narrower = analysis_at({"aggregators": ["main"]})
    assert ("less", f"analyses.{ANALYSIS}.aggregators") in {
        (c.kind, c.field) for c in diff(POLICY, narrower)
    }


def test_what_it_can_cost_is_told_in_words() -> None:
    changes = diff(POLICY, analysis_at({"budget/reports": 3}))
    (cost,) = [c for c in changes if c.field == f"analyses.{ANALYSIS}"]
    assert "epsilon 24, from 3 reports of local epsilon 8; before, at most 1 report" in cost.what


@pytest.mark.parametrize(
    "name", ["period", "epsilon", "keys", "queries", "smallest", "one_operator", "query_class"]
)
def test_a_data_field_may_have_any_name(name: str) -> None:
    for tables, table in (("streams", "keyboard"), ("profiles", "user")):
        other = policy_at({f"{tables}/{table}/fields/{name}": {"type": "real"}})
        path = f"{tables}.{table}.fields.{name}"
        assert [(c.kind, c.field) for c in diff(POLICY, other)] == [("more", path)]
        assert [(c.kind, c.field) for c in diff(other, POLICY)] == [("less", path)]
        retyped = policy_at({f"{tables}/{table}/fields/{name}": {"type": "integer"}})
        assert [(c.kind, c.field) for c in diff(other, retyped)] == [("other", f"{path}.type")]
    budget = policy_tree()["analyses"][ANALYSIS]["fields"]["keyboard.ngram"]
    wider = policy_at(
        {
            f"streams/keyboard/fields/{name}": {"type": "real"},
            f"analyses/{ANALYSIS}/fields/keyboard.{name}": budget,
        }
    )
    path = f"analyses.{ANALYSIS}.fields.keyboard.{name}"
    assert ("more", path) in [(c.kind, c.field) for c in diff(POLICY, wider)]


def test_a_table_may_have_any_name() -> None:
    table = {"retention": "1d", "fields": {"x": {"type": "real"}}}
    for name in ("fields", "period", "retention"):
        other = policy_at({f"streams/{name}": table})
        assert [(c.kind, c.field) for c in diff(POLICY, other)] == [("more", f"streams.{name}")]
        longer = policy_at({f"streams/{name}": {**table, "retention": "2d"}})
        (change,) = diff(other, longer)
        assert (change.kind, change.field) == ("more", f"streams.{name}.retention")


def test_another_composition_may_let_more_be_asked() -> None:
    """The bound stays, but each takes some charges that the other refuses."""
    others = [{"renyi": 32}, {"renyi": 64}, {"renyi": [32, 64]}, "basic"]
    for path in ("device", f"analyses/{ANALYSIS}/budget"):
        policies = [policy_at({f"{path}/composition": other}) for other in others]
        for old, new in itertools.permutations(policies, 2):
            (change,) = diff(old, new)
            assert (change.kind, change.field) == ("more", f"{path.replace('/', '.')}.composition")
            assert "a charge that was refused may now fit" in change.what


def test_pairs_that_are_left_out_are_all() -> None:
    main = policy_tree()["aggregators"][0]
    both = {"aggregators": [main, {**main, "name": "spare"}]}
    path = f"analyses/{ANALYSIS}/aggregators"
    everything, one = policy_at(both), policy_at({**both, path: ["main"]})
    two, other = (policy_at({**both, path: names}) for names in (["main", "spare"], ["spare"]))
    assert [c.kind for c in diff(everything, one)] == ["less"]
    assert [c.kind for c in diff(one, everything)] == ["more"]
    assert [c.kind for c in diff(one, two)] == ["more"]
    assert [(c.kind, c.what) for c in diff(one, other)] == [
        ("more", "added spare"),
        ("less", "removed main"),
    ]
