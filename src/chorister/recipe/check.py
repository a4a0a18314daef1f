"""Whether a policy allows a recipe: every rule with its outcome in words.

These are the checks that need no ledger: a device makes them before it looks at its budget, an
analyst before publishing, an aggregator before serving. The paper's checks 1 and 2 appear as
far as they do not depend on what was spent (a question that exceeds a whole budget can never be
answered); check 3, the certified epsilon of the aggregate, is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal

from chorister.canonical import decimal_text
from chorister.encoding import HashedPrefixTree
from chorister.errors import ChoristerError, InvalidInput, QueryRefused, SignatureInvalid
from chorister.policy import Analysis, Policy
from chorister.policy.values import duration_text
from chorister.privacy.decimals import UP
from chorister.recipe.model import Recipe
from chorister.recipe.signature import SignedRecipe, verify

__all__ = ["Check", "check", "refusal", "verify_recipe", "verify_size"]


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
    """All checks. An unsigned recipe has no `author` check, and without `now` none is `open`."""
    body = recipe.recipe if isinstance(recipe, SignedRecipe) else recipe
    found = [_analysis(body, policy)]
    if found[0].passed:
        case = _case(body, policy, detailed=True)
        found.extend(rule(case) for rule in _rules(recipe, now))
    return found


def refusal(
    recipe: Recipe | SignedRecipe, policy: Policy, *, now: int | None = None
) -> Check | None:
    """The first check that fails, or None. No rule is evaluated after it.

    A recipe that is refused for a cheap reason costs nothing else: the certified epsilon, the one
    rule that takes milliseconds, is the last.
    """
    body = recipe.recipe if isinstance(recipe, SignedRecipe) else recipe
    known = _analysis(body, policy)
    if not known.passed:
        return known
    case = _case(body, policy, detailed=False)
    outcomes = (rule(case) for rule in _rules(recipe, now))
    return next((outcome for outcome in outcomes if not outcome.passed), None)


def verify_recipe(signed: SignedRecipe, policy: Policy, *, now: int) -> None:
    """Raise `QueryRefused` with the first check that fails."""
    _insist(refusal(signed, policy, now=now))


def _case(recipe: Recipe, policy: Policy, *, detailed: bool) -> _Case:
    analysis = policy.analyses[recipe.analysis]
    return _Case(recipe=recipe, analysis=analysis, policy=policy, detailed=detailed)


def _rules(recipe: Recipe | SignedRecipe, now: int | None) -> Iterator[Callable[[_Case], Check]]:
    """The rules that apply, in the order of their display; amplification, the dearest, last."""
    if isinstance(recipe, SignedRecipe):
        yield lambda case: _author(recipe, case.analysis)
    yield from (_collector, _aggregators, _query, _fields, _groups, _cells, _bins, _prefixes)
    yield _window
    if now is not None:
        yield lambda case: _open(case, now)
    yield from (_cohort, _mechanism, _report, _crowd, _local_epsilon, _budget, _field_budgets)
    yield _amplification


def verify_size(recipe: Recipe, policy: Policy) -> None:
    """Raise `QueryRefused` where a recipe has more groups or bins than its analysis permits.

    For whoever is about to do work that grows with them, whether or not a device would answer.
    """
    _insist(_analysis(recipe, policy))
    case = _case(recipe, policy, detailed=False)
    for rule in (_groups, _cells, _bins):
        _insist(rule(case))


def _insist(outcome: Check | None) -> None:
    if outcome is not None and not outcome.passed:
        raise QueryRefused(check=outcome.name, why=outcome.why, field=outcome.field)


def _outcome(*, name: str, passed: bool, why: str, field: str | None = None) -> Check:
    return Check(name=name, passed=passed, why=why, field=None if passed else field)


def _analysis(recipe: Recipe, policy: Policy) -> Check:
    analysis = policy.analyses.get(recipe.analysis)
    if analysis is None:
        why = f"policy {policy.name} has no analysis {recipe.analysis}; nothing else can be judged"
        return _outcome(name="analysis", passed=False, why=why, field="analysis")
    return _outcome(name="analysis", passed=True, why=f"{recipe.analysis}: {analysis.purpose}")


def _author(signed: SignedRecipe, analysis: Analysis) -> Check:
    try:
        verify(signed, analysis.author_keys)
    except SignatureInvalid as error:
        return _outcome(name="author", passed=False, why=str(error), field="signature")
    return _outcome(name="author", passed=True, why=f"signed by this analysis' key {signed.key_id}")


def _collector(case: _Case) -> Check:
    passed = case.recipe.collector in case.analysis.collectors
    who = f"collector {case.recipe.collector[:16]}…"
    why = f"{who} is listed" if passed else f"{who} is not among this analysis' collectors"
    return _outcome(name="collector", passed=passed, why=why, field="collector")


def _aggregators(case: _Case) -> Check:
    wanted = case.recipe.aggregators
    for pair in case.policy.pairs(case.analysis):
        if (pair.leader.url, pair.helper.url) == (wanted.leader, wanted.helper):
            why = f"the pair {pair.name}: privacy holds if one of the two is honest"
            if pair.one_operator:
                why = f"the pair {pair.name} has one operator: no protection against it"
            return _outcome(name="aggregators", passed=True, why=why)
    why = f"{wanted.leader} with {wanted.helper} is not a permitted pair"
    return _outcome(name="aggregators", passed=False, why=why, field="aggregators")


def _query(case: _Case) -> Check:
    if case.analysis.query_class == "fields":
        if case.recipe.query.split(maxsplit=1)[0].upper() not in ("SELECT", "WITH"):
            why = "only SELECT (or WITH ... SELECT) is answered"
            return _outcome(name="query", passed=False, why=why, field="query")
        functions = ", ".join(case.analysis.functions) or "none"
        why = (
            "a SELECT; when it runs, the device's sandbox holds nothing but the fields below "
            f"and permits these functions: {functions}"
        )
        return _outcome(name="query", passed=True, why=why)
    passed = case.recipe.query in case.analysis.queries
    why = "listed, to the letter" if passed else "not one of the queries that are listed"
    return _outcome(name="query", passed=passed, why=why, field="query")


def _fields(case: _Case) -> Check:
    for ref in case.recipe.fields_read:
        if ref not in case.analysis.fields:
            what = "is not open to this analysis" if ref in case.policy.fields else "does not exist"
            return _outcome(name="fields", passed=False, why=f"{ref} {what}", field="reads")
    why = f"reads {', '.join(case.recipe.fields_read)}: open to this analysis"
    return _outcome(name="fields", passed=True, why=why)


def _groups(case: _Case) -> Check:
    for ref in case.recipe.group_by:
        if ref not in case.analysis.group_by:
            why = f"{ref} is not a field that this analysis may form groups by"
            return _outcome(name="groups", passed=False, why=why, field="group_by")
    if not case.recipe.group_by:
        return _outcome(name="groups", passed=True, why="the fleet is not split into groups")
    why = f"by {', '.join(case.recipe.group_by)}, not sensitive; a device's group is not hidden"
    return _outcome(name="groups", passed=True, why=why)


def _cells(case: _Case) -> Check:
    limit = case.analysis.max_cells
    try:
        count = case.policy.cells(case.recipe.group_by, len(case.recipe.arms))
    except InvalidInput as error:
        return _outcome(name="cells", passed=False, why=str(error), field="group_by")
    parts = f"{count:,} parts (groups times arms)"
    why = f"{parts}, at most {limit:,}" if count <= limit else f"{parts}, but at most {limit:,}"
    field = "group_by" if case.recipe.group_by else "arms"
    return _outcome(name="cells", passed=count <= limit, why=why, field=field)


def _bins(case: _Case) -> Check:
    count, limit = case.recipe.encoding.size, case.analysis.max_bins
    sizes = " x ".join(str(feature.size) for feature in case.recipe.features)
    product = f"{sizes} = {count:,}" if len(case.recipe.features) > 1 else f"{count:,}"
    why = f"{product} bins, an OOV in every feature; the limit is {limit:,}"
    return _outcome(name="bins", passed=count <= limit, why=why, field="features")


def _prefixes(case: _Case) -> Check:
    hashed = any(isinstance(feature, HashedPrefixTree) for feature in case.recipe.features)
    if not hashed:
        return _outcome(name="prefixes", passed=True, why="everything that is asked can be read")
    if case.analysis.hashed_prefixes:
        why = "prefixes are hashed, which this analysis permits"
        return _outcome(name="prefixes", passed=True, why=why)
    why = "prefixes are hashed: this analysis demands that they can be read"
    return _outcome(name="prefixes", passed=False, why=why, field="features")


def _window(case: _Case) -> Check:
    window, limits = case.recipe.window, case.analysis.window
    answer, grace = window.answer_seconds, window.grace_seconds
    passed = limits.shortest <= answer <= limits.longest and grace <= limits.longest_grace
    why = (
        f"answered for {duration_text(answer)} (limits: {duration_text(limits.shortest)} to "
        f"{duration_text(limits.longest)}), then collected for {duration_text(grace)} "
        f"(limit: {duration_text(limits.longest_grace)})"
    )
    return _outcome(name="window", passed=passed, why=why, field="window")


def _open(case: _Case, now: int) -> Check:
    window = case.recipe.window
    passed = window.opens <= now < window.closes
    if passed:
        why = f"open for another {duration_text(window.closes - now)}"
    elif now < window.opens:
        why = f"opens in {duration_text(window.opens - now)}"
    else:
        why = "its answer period is over"
    return _outcome(name="open", passed=passed, why=why, field="window")


def _cohort(case: _Case) -> Check:
    asked, limits = case.recipe.privacy.min_cohort, case.analysis.cohort
    passed = limits.smallest <= asked <= limits.largest
    why = f"at least {asked:,} devices (limits: {limits.smallest:,} to {limits.largest:,})"
    return _outcome(name="cohort", passed=passed, why=why, field="privacy.min_cohort")


def _mechanism(case: _Case) -> Check:
    asked = case.recipe.privacy.mechanism
    passed = asked in case.analysis.mechanisms
    why = f"{asked} one-hot encoding is {'permitted' if passed else 'not permitted'}"
    return _outcome(name="mechanism", passed=passed, why=why, field="privacy.mechanism")


def _report(case: _Case) -> Check:
    asked = case.recipe.privacy.report
    passed = asked in case.analysis.report_kinds
    why = f"{asked} reports are {'permitted' if passed else 'not permitted'}"
    # A sum over the bins, so not for more bins than are permitted.
    if case.detailed and passed and asked == "bounded" and _bins(case).passed:
        why += f": a hostile client sets at most {case.recipe.randomizer.max_weight:,} bits"
    return _outcome(name="report", passed=passed, why=why, field="privacy.report")


def _crowd(case: _Case) -> Check:
    privacy, analysis = case.recipe.privacy, case.analysis
    if privacy.crowd not in analysis.crowds:
        why = f"a crowd that is {privacy.crowd} is not permitted"
        return _outcome(name="crowd", passed=False, why=why, field="privacy.crowd")
    if privacy.crowd == "noised":
        why = "both aggregators add noise; epsilon holds if one of them is honest, whoever answers"
        return _outcome(name="crowd", passed=True, why=why)
    asked, allowed = privacy.honest_fraction, analysis.honest_fraction
    if asked is None or allowed is None or asked > allowed:
        why = f"relies on {asked} of the devices being honest; the policy assumes only {allowed}"
        return _outcome(name="crowd", passed=False, why=why, field="privacy.honest_fraction")
    why = f"assumes that {asked} of every released batch are honest devices"
    return _outcome(name="crowd", passed=True, why=why)


def _local_epsilon(case: _Case) -> Check:
    asked = case.recipe.randomizer.replacement_epsilon
    limit = case.analysis.budget.local_epsilon
    why = f"{decimal_text(asked)} for replacing a value (limit: {decimal_text(limit)})"
    return _outcome(
        name="local-epsilon", passed=asked <= limit, why=why, field="privacy.local_epsilon"
    )


def _budget(case: _Case) -> Check:
    for owner, budget in (("device", case.policy.device), ("analysis", case.analysis.budget)):
        for name in ("epsilon", "delta"):
            asked: Decimal = getattr(case.recipe.privacy, name)
            allowed: Decimal = getattr(budget, name)
            if asked > allowed:
                why = f"{name} {decimal_text(asked)} exceeds the {owner}'s whole {_text(allowed)}"
                return _outcome(name="budget", passed=False, why=why, field=f"privacy.{name}")
    privacy, budget = case.recipe.privacy, case.analysis.budget
    why = (
        f"epsilon {_text(privacy.epsilon)} of {_text(budget.epsilon)}, delta "
        f"{_text(privacy.delta)} of {_text(budget.delta)}, one report of {budget.reports}"
    )
    return _outcome(name="budget", passed=True, why=why)


def _field_budgets(case: _Case) -> Check:
    said = []
    for ref in case.recipe.fields_read:
        budget = case.analysis.fields.get(ref)
        if budget is None:
            why = f"{ref} has no budget in this analysis"
            return _outcome(name="field-budgets", passed=False, why=why, field="reads")
        asked = (
            ("local_epsilon", case.recipe.randomizer.replacement_epsilon, budget.local_epsilon),
            ("epsilon", case.recipe.privacy.epsilon, budget.epsilon),
            ("delta", case.recipe.privacy.delta, budget.delta),
        )
        for name, value, limit in asked:
            if value > limit:
                why = f"{ref}: {name} {_text(value)} exceeds its whole {_text(limit)}"
                return _outcome(
                    name="field-budgets", passed=False, why=why, field=f"privacy.{name}"
                )
        said.append(f"{ref} epsilon {_text(asked[1][1])} of {_text(budget.epsilon)}")
    return _outcome(name="field-budgets", passed=True, why="; ".join(said))


def _amplification(case: _Case) -> Check:
    """Check 3 of the paper's section 4.3."""
    privacy = case.recipe.privacy
    if not _cohort(case).passed:
        # The work grows with the cohort: do none for one that is not permitted.
        why = "not computed: min_cohort is outside its limits"
        return _outcome(name="amplification", passed=False, why=why, field="privacy.min_cohort")
    try:
        certified = privacy.claim.certified_epsilon(privacy.min_cohort)
    except ChoristerError as error:
        return _outcome(name="amplification", passed=False, why=str(error), field="privacy")
    passed = Decimal(certified) <= privacy.epsilon
    why = (
        f"{privacy.min_cohort:,} reports at local epsilon {_text(privacy.local_epsilon)} are "
        f"certified at epsilon {certified:.4g}, delta {_text(privacy.delta)}; "
        f"{'at most' if passed else 'more than'} the {_text(privacy.epsilon)} that is stated"
    )
    return _outcome(name="amplification", passed=passed, why=why, field="privacy.min_cohort")


def _text(value: Decimal) -> str:
    """Tiny numbers as powers of ten, for people."""
    return decimal_text(value) if value >= Decimal("0.0001") else f"{value.normalize(UP):e}"
