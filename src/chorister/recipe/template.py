"""A first recipe for a policy: small, allowed, and meant to be edited."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from typing import Final, TypeAlias

from chorister.encoding import AnyFeature, Categories, Intervals, PrefixTree
from chorister.errors import InvalidInput
from chorister.policy import Analysis, Policy
from chorister.policy.bounds import Claim
from chorister.privacy.decimals import DOWN
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON
from chorister.recipe.model import Aggregators, Participation, Privacy, Recipe, Window

Reads: TypeAlias = Mapping[str, tuple[str, ...]]
Columns: TypeAlias = Callable[[Analysis, str, Reads], Sequence[str]]
"""Returns the columns of a query's result; only callers with SQLite can find out."""
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def template(policy: Policy, analysis: str | None, *, now: int, columns: Columns) -> Recipe:
    """Return a recipe for the analysis' first field or query, at its limits, open from `now`."""
    name = next(iter(policy.analyses)) if analysis is None else analysis
    allowed = policy.analyses.get(name)
    if allowed is None:
        known = ", ".join(policy.analyses)
        raise InvalidInput(f"policy {policy.name} has no analysis {name}: choose one of {known}")
    query, reads, feature = _question(policy, allowed, columns)
    refs = [f"{table}.{field}" for table, names in reads.items() for field in names]
    pair = next(policy.pairs(allowed))
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
        window=_window(allowed, now),
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
    claim = Claim(
        mechanism=mechanism,
        local_epsilon=local,
        epsilon=min(own.epsilon, device.epsilon, *(field.epsilon for field in read)),
        delta=min(own.delta, device.delta, *(field.delta for field in read)),
        crowd=crowd,
        honest_fraction=analysis.honest_fraction if crowd == "honest" else None,
        report=analysis.report_kinds[0],
    )
    cohort = max(claim.least_cohort(), analysis.cohort.smallest)
    return Privacy(min_cohort=cohort, **{f.name: getattr(claim, f.name) for f in fields(claim)})


def _window(analysis: Analysis, now: int) -> Window:
    closes = now + analysis.window.longest
    return Window(opens=now, closes=closes, ends=closes + analysis.window.longest_grace)
