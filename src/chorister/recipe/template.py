"""A first recipe for a policy: small, allowed, and meant to be changed."""

from __future__ import annotations

from dataclasses import fields
from decimal import Decimal

from chorister.encoding import AnyFeature, Categories, Intervals, PrefixTree
from chorister.errors import InvalidInput
from chorister.policy import Analysis, Policy
from chorister.policy.certify import Claim
from chorister.privacy.decimals import DOWN
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON, Mechanism
from chorister.recipe.model import Aggregators, Participation, Privacy, Recipe
from chorister.recipe.window import Window

__all__ = ["template"]


def template(policy: Policy, analysis: str | None, *, now: int) -> Recipe:
    """A recipe over the analysis' first field, as strict as its limits, opening at `now`."""
    name = next(iter(policy.analyses)) if analysis is None else analysis
    allowed = policy.analyses.get(name)
    if allowed is None:
        raise InvalidInput(f"policy {policy.name} has no analysis {name}")
    ref = next(iter(allowed.fields))
    table, field = ref.split(".")
    pair = next(policy.pairs(allowed))
    return Recipe(
        version=1,
        id=f"{name}.1",
        study=name,
        analysis=name,
        collector=allowed.collectors[0],
        query=allowed.queries[0] if allowed.queries else _query(table, field),
        reads={table: (field,)},
        group_by=(),
        arms=(),
        features=(_feature(policy.fields[ref].type),),
        selection="uniform",
        deny=(),
        privacy=_privacy(policy, allowed, ref),
        window=_window(allowed, now),
        participation=Participation(probability=Decimal(1), once_per_study=False),
        aggregators=Aggregators(leader=pair.leader.url, helper=pair.helper.url),
    )


def _query(table: str, field: str) -> str:
    return f'SELECT "{field}" AS value FROM "{table}"'  # noqa: S608 (names are identifiers)


def _feature(kind: str) -> AnyFeature:
    if kind == "text":
        return PrefixTree(column="value", prefixes=("",), vocabulary=("hello", "thanks", "you"))
    if kind == "integer":
        return Categories(column="value", values=(0, 1, 2))
    return Intervals(column="value", edges=(Decimal(0), Decimal(1), Decimal(2)))


def _privacy(policy: Policy, analysis: Analysis, ref: str) -> Privacy:
    field, own, device = analysis.fields[ref], analysis.budget, policy.device
    mechanism = analysis.mechanisms[0]
    local = min(field.local_epsilon, own.local_epsilon)
    if mechanism is Mechanism.SYMMETRIC:
        local = DOWN.divide(local, Decimal(2))
    # A parameter that people can read: three places, never rounded up.
    local = min(local, MAX_LOCAL_EPSILON).quantize(Decimal("0.001"), context=DOWN)
    crowd = analysis.crowds[0]
    claim = Claim(
        mechanism=mechanism,
        local_epsilon=local,
        epsilon=min(field.epsilon, own.epsilon, device.epsilon),
        delta=min(field.delta, own.delta, device.delta),
        crowd=crowd,
        honest_fraction=analysis.honest_fraction if crowd == "honest" else None,
        report=analysis.report_kinds[0],
    )
    cohort = max(claim.least_cohort(), analysis.cohort.smallest)
    return Privacy(min_cohort=cohort, **{f.name: getattr(claim, f.name) for f in fields(claim)})


def _window(analysis: Analysis, now: int) -> Window:
    closes = now + analysis.window.longest
    return Window(opens=now, closes=closes, ends=closes + analysis.window.longest_grace)
