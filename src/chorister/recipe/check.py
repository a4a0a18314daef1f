"""Whether a policy allows a recipe: every rule with its outcome in words.

These are the checks that need no ledger: a device makes them before it looks at its budget, an
analyst before publishing, an aggregator before serving. The paper's checks 1 and 2 appear as
far as they do not depend on what was spent (a question that exceeds a whole budget can never be
answered); check 3, the certified epsilon of the aggregate, is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, TypeAlias

from chorister.canonical import decimal_text
from chorister.encoding import HashedPrefixTree
from chorister.errors import ChoristerError, InvalidInput, QueryRefused, SignatureInvalid
from chorister.policy import Analysis, Policy
from chorister.policy.values import duration_text, number_text
from chorister.recipe.model import Recipe
from chorister.recipe.signature import SignedRecipe, verify

_Verdict: TypeAlias = tuple[bool, str, str]
"""Whether a rule holds, why, and the recipe's field to change if it does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One rule and its outcome."""

    name: str
    passed: bool
    why: str
    field: str | None = None  # the recipe's field to change, where a check failed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    recipe: Recipe
    analysis: Analysis
    policy: Policy
    detailed: bool  # whether an explanation may cost time that the outcome does not need


def check(recipe: Recipe | SignedRecipe, policy: Policy, *, now: int | None = None) -> list[Check]:
    """Make all checks: `author` only if the recipe is signed, `open` only if `now` is given."""
    return list(_checks(recipe, policy, now, detailed=True))


def refusal(
    recipe: Recipe | SignedRecipe, policy: Policy, *, now: int | None = None
) -> Check | None:
    """Return the first check that fails, or None. No rule is evaluated after it.

    Refusing a recipe for a cheap reason takes no time: the certified epsilon, which can take about
    a second for absurd cohorts, comes last.
    """
    outcomes = _checks(recipe, policy, now, detailed=False)
    return next((outcome for outcome in outcomes if not outcome.passed), None)


def verify_recipe(signed: SignedRecipe, policy: Policy, *, now: int) -> None:
    """Raise `QueryRefused` with the first check that fails."""
    _require(refusal(signed, policy, now=now))


def verify_size(recipe: Recipe, policy: Policy) -> None:
    """Raise `QueryRefused` if a recipe has more groups, windows or bins than its analysis permits.

    For callers whose work grows with them, whether or not a device would answer.
    """
    _require(_analysis(recipe, policy))
    case = _case(recipe, policy, detailed=False)
    for name in ("groups", "cells", "series", "bins"):
        _require(_evaluate(name, _RULES[name], case))


def _require(outcome: Check | None) -> None:
    if outcome is not None and not outcome.passed:
        raise QueryRefused(check=outcome.name, why=outcome.why, field=outcome.field)


def _checks(
    recipe: Recipe | SignedRecipe, policy: Policy, now: int | None, *, detailed: bool
) -> Iterator[Check]:
    body = recipe.recipe if isinstance(recipe, SignedRecipe) else recipe
    known = _analysis(body, policy)
    yield known
    if not known.passed:
        return
    case = _case(body, policy, detailed=detailed)
    if isinstance(recipe, SignedRecipe):
        yield _evaluate("author", lambda case: _author(recipe, case.analysis), case)
    for name, rule in _RULES.items():
        if name in _OPTIONAL and getattr(body, name) is None:
            continue
        yield _evaluate(name, rule, case)
        if name == "window" and now is not None:
            yield _evaluate("open", lambda case: _open(case, now), case)


def _case(recipe: Recipe, policy: Policy, *, detailed: bool) -> _Case:
    analysis = policy.analyses[recipe.analysis]
    return _Case(recipe=recipe, analysis=analysis, policy=policy, detailed=detailed)


def _evaluate(name: str, rule: Callable[[_Case], _Verdict], case: _Case) -> Check:
    passed, why, field = rule(case)
    return Check(name=name, passed=passed, why=why, field=None if passed else field)


def _analysis(recipe: Recipe, policy: Policy) -> Check:
    analysis = policy.analyses.get(recipe.analysis)
    if analysis is None:
        why = f"policy {policy.name} has no analysis {recipe.analysis}; nothing else can be checked"
        return Check(name="analysis", passed=False, why=why, field="analysis")
    return Check(name="analysis", passed=True, why=f"{recipe.analysis}: {analysis.purpose}")


def _author(signed: SignedRecipe, analysis: Analysis) -> _Verdict:
    try:
        verify(signed, analysis.author_keys)
    except SignatureInvalid as error:
        return False, str(error), "signature"
    return True, f"signed by this analysis' key {signed.key_id}", "signature"


def _collector(case: _Case) -> _Verdict:
    passed = case.recipe.collector in case.analysis.collectors
    who = f"collector {case.recipe.collector[:16]}…"
    why = f"{who} is listed" if passed else f"{who} is not among this analysis' collectors"
    return passed, why, "collector"


def _aggregators(case: _Case) -> _Verdict:
    wanted = case.recipe.aggregators
    for pair in case.policy.pairs(case.analysis):
        if (pair.leader.url, pair.helper.url) == (wanted.leader, wanted.helper):
            why = f"the pair {pair.name}: privacy holds if one of the two is honest"
            if pair.one_operator:
                why = f"the pair {pair.name} has one operator: no protection against it"
            return True, why, "aggregators"
    return False, f"{wanted.leader} with {wanted.helper} is not a permitted pair", "aggregators"


def _query(case: _Case) -> _Verdict:
    if case.analysis.query_class == "fields":
        if case.recipe.query.split(maxsplit=1)[0].upper() not in ("SELECT", "WITH"):
            return False, "only SELECT (or WITH ... SELECT) is answered", "query"
        functions = ", ".join(case.analysis.functions) or "none"
        why = (
            "a SELECT; when it runs, the device's sandbox holds nothing but the fields below "
            f"and permits these functions: {functions}"
        )
        return True, why, "query"
    passed = case.recipe.query in case.analysis.queries
    why = "listed, word for word" if passed else "not one of the queries that are listed"
    return passed, why, "query"


def _fields(case: _Case) -> _Verdict:
    for ref in case.recipe.fields_read:
        if ref not in case.analysis.fields:
            what = "is not open to this analysis" if ref in case.policy.fields else "does not exist"
            return False, f"{ref} {what}", "reads"
    return True, f"reads {', '.join(case.recipe.fields_read)}: open to this analysis", "reads"


def _groups(case: _Case) -> _Verdict:
    for ref in case.recipe.group_by:
        if ref not in case.analysis.group_by:
            return False, f"{ref} is not a field that this analysis may form groups by", "group_by"
    if not case.recipe.group_by:
        return True, "the fleet is not split into groups", "group_by"
    why = f"by {', '.join(case.recipe.group_by)}, not sensitive; a device's group is not hidden"
    return True, why, "group_by"


def _cells(case: _Case) -> _Verdict:
    limit = case.analysis.max_cells
    try:
        count = case.policy.cells(case.recipe.group_by, len(case.recipe.arms))
    except InvalidInput as error:
        return False, str(error), "group_by"
    parts = f"{count:,} part{'' if count == 1 else 's'} (groups times arms)"
    why = f"{parts}, at most {limit:,}" if count <= limit else f"{parts}, but at most {limit:,}"
    field = "group_by" if case.recipe.group_by else "arms"
    return count <= limit, why, field


def _series(case: _Case) -> _Verdict:
    series, limits = case.recipe.series, case.analysis.series
    if series is None or limits is None:
        why = "asked in many windows, which this analysis does not permit"
        return series is None, why, "series"
    try:
        parts = case.policy.cells(case.recipe.group_by, len(case.recipe.arms))
    except InvalidInput as error:
        return False, str(error), "group_by"
    span = case.recipe.closes - case.recipe.window.opens
    tasks = series.windows * parts
    passed = (
        series.windows <= limits.windows
        and span <= limits.longest
        and series.answers <= limits.answers
        and tasks <= limits.cells
    )
    why = (
        f"{series.windows:,} windows (limit: {limits.windows:,}) in {duration_text(span)} (limit: "
        f"{duration_text(limits.longest)}), of which a device answers {series.answers:,} (limit: "
        f"{limits.answers:,}); windows times parts are {tasks:,} (limit: {limits.cells:,})"
    )
    return passed, why, "series"


def _periods(case: _Case) -> _Verdict:
    lines = []
    for name, period in (case.recipe.periods or {}).items():
        table = case.policy.streams.get(name)
        if table is None:
            why = f"{name} is not a stream: only its events can be limited to a period"
            return False, why, f"periods.{name}"
        words = f"events of {name} count for {duration_text(period)} before the window opens"
        if period > table.retention:
            words += f", of which devices keep {duration_text(table.retention)}"
        lines.append(words)
    return True, "; ".join(lines), "periods"


def _bins(case: _Case) -> _Verdict:
    count, limit = case.recipe.encoding.size, case.analysis.max_bins
    sizes = " x ".join(str(feature.size) for feature in case.recipe.features)
    product = f"{sizes} = {count:,}" if len(case.recipe.features) > 1 else f"{count:,}"
    why = f"{product} bins, an OOV in every feature; the limit is {limit:,}"
    return count <= limit, why, "features"


def _prefixes(case: _Case) -> _Verdict:
    if not any(isinstance(feature, HashedPrefixTree) for feature in case.recipe.features):
        return True, "everything that is asked can be read", "features"
    if case.analysis.hashed_prefixes:
        return True, "prefixes are hashed, which this analysis permits", "features"
    return False, "prefixes are hashed, but this analysis requires readable ones", "features"


def _window(case: _Case) -> _Verdict:
    window, limits = case.recipe.window, case.analysis.window
    answer, grace = window.answer_seconds, window.grace_seconds
    passed = limits.shortest <= answer <= limits.longest and grace <= limits.longest_grace
    why = (
        f"answered for {duration_text(answer)} (limits: {duration_text(limits.shortest)} to "
        f"{duration_text(limits.longest)}), then collected for {duration_text(grace)} "
        f"(limit: {duration_text(limits.longest_grace)})"
    )
    return passed, why, "window"


def _open(case: _Case, now: int) -> _Verdict:
    recipe = case.recipe
    number, opens = recipe.window_open(now), recipe.next_opening(now)
    if number is not None:
        why = f"open for another {duration_text(recipe.window_at(number).closes - now)}"
    elif opens is not None:
        why = f"opens in {duration_text(opens - now)}"
    else:
        why = "its answer period is over"
    if number is not None and recipe.series is not None:
        why = f"window {number + 1} of {recipe.window_count} is {why}"
    return number is not None, why, "window"


def _cohort(case: _Case) -> _Verdict:
    asked, limits = case.recipe.privacy.min_cohort, case.analysis.cohort
    passed = limits.smallest <= asked <= limits.largest
    why = f"at least {asked:,} devices (limits: {limits.smallest:,} to {limits.largest:,})"
    return passed, why, "privacy.min_cohort"


def _mechanism(case: _Case) -> _Verdict:
    asked = case.recipe.privacy.mechanism
    passed = asked in case.analysis.mechanisms
    why = f"{asked} one-hot encoding is {'permitted' if passed else 'not permitted'}"
    return passed, why, "privacy.mechanism"


def _report(case: _Case) -> _Verdict:
    asked = case.recipe.privacy.report
    passed = asked in case.analysis.report_kinds
    why = f"{asked} reports are {'permitted' if passed else 'not permitted'}"
    # A sum over the bins, so not for more bins than are permitted.
    if case.detailed and passed and asked == "bounded" and _bins(case)[0]:
        why += f": a hostile client sets at most {case.recipe.randomizer.max_weight:,} bits"
    return passed, why, "privacy.report"


def _crowd(case: _Case) -> _Verdict:
    privacy, analysis = case.recipe.privacy, case.analysis
    if privacy.crowd not in analysis.crowds:
        return False, f"a crowd that is {privacy.crowd} is not permitted", "privacy.crowd"
    if privacy.crowd == "noised":
        why = "both aggregators add noise; epsilon holds if one of them is honest, whoever answers"
        return True, why, "privacy.crowd"
    asked, allowed = privacy.honest_fraction, analysis.honest_fraction
    if asked is None or allowed is None or asked > allowed:
        why = f"relies on {asked} of the devices being honest; the policy assumes only {allowed}"
        return False, why, "privacy.honest_fraction"
    return True, f"assumes that {asked} of every released batch are honest devices", "privacy.crowd"


def _local_epsilon(case: _Case) -> _Verdict:
    asked = case.recipe.randomizer.replacement_epsilon
    limit = case.analysis.budget.local_epsilon
    why = f"{decimal_text(asked)} for replacing a value (limit: {decimal_text(limit)})"
    return asked <= limit, why, "privacy.local_epsilon"


def _budget(case: _Case) -> _Verdict:
    for owner, budget in (("device", case.policy.device), ("analysis", case.analysis.budget)):
        for name in ("epsilon", "delta"):
            asked: Decimal = getattr(case.recipe.privacy, name)
            allowed: Decimal = getattr(budget, name)
            if asked > allowed:
                why = f"exceeds the {owner}'s whole {number_text(allowed)}"
                return False, f"{name} {decimal_text(asked)} {why}", f"privacy.{name}"
    privacy, budget = case.recipe.privacy, case.analysis.budget
    why = (
        f"epsilon {number_text(privacy.epsilon)} of {number_text(budget.epsilon)}, delta "
        f"{number_text(privacy.delta)} of {number_text(budget.delta)}, one report of "
        f"{budget.reports}"
    )
    return True, why, "privacy.epsilon"


def _field_budgets(case: _Case) -> _Verdict:
    lines = []
    for ref in case.recipe.fields_read:
        budget = case.analysis.fields.get(ref)
        if budget is None:
            return False, f"{ref} has no budget in this analysis", "reads"
        asked = (
            ("local_epsilon", case.recipe.randomizer.replacement_epsilon, budget.local_epsilon),
            ("epsilon", case.recipe.privacy.epsilon, budget.epsilon),
            ("delta", case.recipe.privacy.delta, budget.delta),
        )
        for name, value, limit in asked:
            if value > limit:
                why = f"{ref}: {name} {number_text(value)} exceeds its whole {number_text(limit)}"
                return False, why, f"privacy.{name}"
        lines.append(f"{ref} epsilon {number_text(asked[1][1])} of {number_text(budget.epsilon)}")
    return True, "; ".join(lines), "reads"


def _amplification(case: _Case) -> _Verdict:
    """Check 3 of the paper's section 4.3."""
    privacy = case.recipe.privacy
    if not _cohort(case)[0]:
        # The work grows with the cohort: do none for one that is not permitted.
        return False, "not computed: min_cohort is outside its limits", "privacy.min_cohort"
    try:
        certified = privacy.claim.certified_epsilon(privacy.min_cohort)
    except ChoristerError as error:
        return False, str(error), "privacy"
    passed = Decimal(certified) <= privacy.epsilon
    why = (
        f"{privacy.min_cohort:,} reports at local epsilon {number_text(privacy.local_epsilon)} are "
        f"certified at epsilon {certified:.4g}, delta {number_text(privacy.delta)}; "
        f"{'at most' if passed else 'more than'} the {number_text(privacy.epsilon)} that is stated"
    )
    return passed, why, "privacy.min_cohort"


# Rules for parts that a recipe may lack.
_OPTIONAL: Final = frozenset({"series", "periods"})
# In the order of their display; `author` comes first, and `open` after `window`.
_RULES: Final[Mapping[str, Callable[[_Case], _Verdict]]] = {
    "collector": _collector,
    "aggregators": _aggregators,
    "query": _query,
    "fields": _fields,
    "groups": _groups,
    "cells": _cells,
    "series": _series,
    "periods": _periods,
    "bins": _bins,
    "prefixes": _prefixes,
    "window": _window,
    "cohort": _cohort,
    "mechanism": _mechanism,
    "report": _report,
    "crowd": _crowd,
    "local-epsilon": _local_epsilon,
    "budget": _budget,
    "field-budgets": _field_budgets,
    "amplification": _amplification,  # the most expensive one
}
