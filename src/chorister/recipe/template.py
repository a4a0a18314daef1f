"""A first recipe for a policy: small, allowed, and meant to be edited."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from decimal import Decimal
from typing import Final, TypeAlias

from chorister.encoding import AnyFeature, Categories, Intervals, PrefixTree
from chorister.errors import InvalidInput
from chorister.policy import Analysis, FieldBudget, Policy
from chorister.policy.bounds import Claim
from chorister.policy.model import Budget, CohortLimits
from chorister.policy.values import duration_text
from chorister.privacy import amplification
from chorister.privacy.decimals import DOWN
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON
from chorister.privacy.weights import BOUND_DELTA
from chorister.recipe.model import (
    MAX_WINDOWS,
    Aggregators,
    Participation,
    Privacy,
    Recipe,
    Series,
    Window,
)

Reads: TypeAlias = Mapping[str, tuple[str, ...]]
Columns: TypeAlias = Callable[[Analysis, str, Reads], Sequence[str]]
"""Returns the columns of a query's result; only callers with SQLite can find out."""
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def template(
    policy: Policy, analysis: str | None, *, now: int, columns: Columns, every: int | None = None
) -> Recipe:
    """Return a recipe for the analysis' first field or query, at its limits, open from `now`.

    With `every`, in seconds, it is a series about the events since the previous window.
    """
    name = next(iter(policy.analyses)) if analysis is None else analysis
    allowed = policy.analyses.get(name)
    if allowed is None:
        known = ", ".join(policy.analyses)
        raise InvalidInput(f"policy {policy.name} has no analysis {name}: choose one of {known}")
    query, reads, feature = _question(policy, allowed, columns)
    refs = [f"{table}.{field}" for table, names in reads.items() for field in names]
    pair = next(policy.pairs(allowed))
    window = _window(allowed, now, every)
    streams = [name for name in reads if name in policy.streams]
    return Recipe(
        version=1,
        id=f"{name}.1",
        study=name,
        analysis=name,
        collector=allowed.collectors[0],
        query=query,
        reads=dict(reads),
        group_by=(),
        arms=(),
        features=(feature,),
        selection="uniform",
        deny=(),
        privacy=_privacy(policy, allowed, refs),
        window=window,
        series=None if every is None else _series(allowed, window, every),
        periods=dict.fromkeys(streams, every) if every is not None and streams else None,
        participation=Participation(probability=Decimal(1), once_per_study=False),
        aggregators=Aggregators(leader=pair.leader.url, helper=pair.helper.url),
    )


def _question(
    policy: Policy, analysis: Analysis, columns: Columns
) -> tuple[str, Reads, AnyFeature]:
    """Return a query, what it reads, and one feature of its result."""
    if analysis.queries:
        query = analysis.queries[0]
        named = {word.lower() for word in _WORD.findall(query)}
        refs = [ref for ref in analysis.fields if set(ref.split(".")) <= named]
        reads: dict[str, tuple[str, ...]] = {}
        for table, field in (ref.split(".") for ref in refs):
            reads[table] = (*reads.get(table, ()), field)
        column = columns(analysis, query, reads)[0]
        known = {ref.split(".")[1]: policy.fields[ref].type for ref in refs}
        # Computed columns may be anything; table-valued functions return text.
        return query, reads, _feature(column, known.get(column, "text"))
    ref = next(iter(analysis.fields))
    table, field = ref.split(".")
    query = f'SELECT "{field}" AS value FROM "{table}"'  # noqa: S608 (names are identifiers)
    return query, {table: (field,)}, _feature("value", policy.fields[ref].type)


def _feature(column: str, kind: str) -> AnyFeature:
    if kind == "text":
        return PrefixTree(column=column, prefixes=("",), vocabulary=("hello", "thanks", "you"))
    if kind == "integer":
        return Categories(column=column, values=(0, 1, 2))
    return Intervals(column=column, edges=(Decimal(0), Decimal(1), Decimal(2)))


def _privacy(policy: Policy, analysis: Analysis, refs: Sequence[str]) -> Privacy:
    read, own, device = [analysis.fields[ref] for ref in refs], analysis.budget, policy.device
    mechanism = analysis.mechanisms[0]
    local = min(own.local_epsilon, *(field.local_epsilon for field in read))
    # A readable parameter: three decimal places, never rounded up.
    largest = min(mechanism.largest_local_epsilon(local), MAX_LOCAL_EPSILON)
    local = largest.quantize(Decimal("0.001"), context=DOWN)
    crowd = analysis.crowds[0]
    budgets: list[Budget | FieldBudget] = [own, device, *read]
    whole = Claim(
        mechanism=mechanism,
        local_epsilon=local,
        epsilon=min(budget.epsilon for budget in budgets),
        delta=min(budget.delta for budget in budgets),
        crowd=crowd,
        honest_fraction=analysis.honest_fraction if crowd == "honest" else None,
        report=analysis.report_kinds[0],
    )
    # An equal share, so that a first try leaves room for the other questions.
    reports = min(budget.reports for budget in budgets)
    share = replace(whole, epsilon=_part(whole.epsilon, reports), delta=_part(whole.delta, reports))
    claim = whole
    with suppress(InvalidInput):  # no cohort is large enough for so little
        claim = share if share.least_cohort() <= analysis.cohort.largest else whole
    if not _supported(claim, analysis.cohort.largest):
        claim = _in_cohorts(share, analysis.cohort)
    cohort = max(claim.least_cohort(), analysis.cohort.smallest)
    return Privacy(min_cohort=cohort, **{f.name: getattr(claim, f.name) for f in fields(claim)})


def _supported(claim: Claim, largest: int) -> bool:
    """Whether a cohort of at most this size certifies a claim."""
    try:
        return claim.least_cohort() <= largest
    except InvalidInput:
        return False


def _in_cohorts(claim: Claim, sizes: CohortLimits) -> Claim:
    """The claim with the largest local epsilon that a small cohort supports, or else a larger one.

    A policy may permit a local epsilon that no cohort hides at this epsilon.
    """
    middle = math.isqrt(sizes.smallest * sizes.largest)
    delta = DOWN.subtract(claim.delta, BOUND_DELTA) if claim.report == "bounded" else claim.delta
    for cohort in (sizes.smallest, middle, sizes.largest):
        with suppress(InvalidInput):
            local = amplification.local_epsilon(
                cohort=cohort, epsilon=claim.epsilon, delta=delta, mechanism=claim.mechanism,
                crowd=claim.crowd, honest_fraction=claim.honest_fraction or 1,
            )  # fmt: skip
            local = min(local, claim.local_epsilon).quantize(Decimal("0.001"), context=DOWN)
            found = replace(claim, local_epsilon=local)
            if _supported(found, sizes.largest):
                return found
    return claim


def _part(value: Decimal, reports: int) -> Decimal:
    """An equal part, rounded down to three digits."""
    part = DOWN.divide(value, reports)
    return part.quantize(Decimal(1).scaleb(part.adjusted() - 2), context=DOWN).normalize(DOWN)


def _series(analysis: Analysis, window: Window, every: int) -> Series:
    limits = analysis.series
    if limits is None:
        raise InvalidInput("this analysis permits no series: add [analyses.NAME.series] to it")
    fitting = (limits.longest - window.answer_seconds) // every + 1
    windows = min(limits.windows, limits.cells, fitting, MAX_WINDOWS)
    if windows < 2 or every < analysis.window.shortest:
        least, most = duration_text(analysis.window.shortest), duration_text(limits.longest)
        raise InvalidInput(f"choose windows at least every {least}, and two of them within {most}")
    return Series(windows=windows, every=every, answers=1)


def _window(analysis: Analysis, now: int, every: int | None) -> Window:
    longest = analysis.window.longest
    closes = now + (longest if every is None else min(longest, every))
    return Window(opens=now, closes=closes, ends=closes + analysis.window.longest_grace)
