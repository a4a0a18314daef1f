"""A recipe in words: what is asked, of whom, when, and what it costs a person who answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Final

from chorister.canonical import decimal_text
from chorister.clock import utc_minute
from chorister.encoding import (
    AnyFeature,
    Categories,
    Grid,
    HashedPrefixTree,
    Intervals,
    PrefixTree,
)
from chorister.policy import Analysis, FieldBudget, Policy, Renyi
from chorister.policy.explain import Section
from chorister.policy.model import Budget, empty_filter
from chorister.policy.values import duration_text, number_text
from chorister.recipe.model import Recipe
from chorister.recipe.outlook import noise_of

_LISTED: Final = 20  # values or words, before "and so on"


def describe(recipe: Recipe, policy: Policy) -> list[Section]:
    """Describe the question first, then whom it is put to, then its cost."""
    return [
        Section(title=f"Question {recipe.id}", lines=tuple(_question(recipe, policy))),
        Section(title="Who answers, and when", lines=tuple(_answering(recipe))),
        Section(title="What it costs a person", lines=tuple(_cost(recipe, policy))),
    ]


def _question(recipe: Recipe, policy: Policy) -> Iterator[str]:
    analysis = policy.analyses.get(recipe.analysis)
    if analysis is not None:
        yield f"asked to: {analysis.purpose}"
    columns = " and ".join(column for each in recipe.features for column in each.columns_read)
    size = recipe.encoding.size
    yield f"each device that answers reports, under noise, one of {size:,} bins of {columns}"
    for feature in recipe.features:
        yield _feature(feature)
    yield "everything else counts as OOV (out of vocabulary), which is a bin of each of them"
    if recipe.selection == "uniform":
        yield "a device with several rows reports one of those that fall into a bin, at random"
    else:
        yield "a device with several rows reports the one that falls into the first bin"
    for deny in recipe.deny:
        count, listed = len(deny.phrases), _list(deny.phrases)
        yield f"rows whose {deny.column} contains one of {count:,} phrases are skipped: {listed}"
    yield f"the device runs: {recipe.query}"
    types = (f"{ref} ({_type(policy, ref)})" for ref in recipe.fields_read)
    yield f"which reads: {', '.join(types)}"


def _type(policy: Policy, ref: str) -> str:
    known = policy.fields.get(ref)
    return known.type if known is not None else "unknown to the policy"


def _feature(feature: AnyFeature) -> str:
    if isinstance(feature, Intervals):
        edges = [decimal_text(edge) for edge in feature.edges]
        return f"{feature.column} in {len(edges) - 1:,} intervals, with edges {_list(edges)}"
    if isinstance(feature, Categories):
        values = [str(value) for value in feature.values]
        return f"{feature.column} as one of {len(values):,} listed values: {_list(values)}"
    if isinstance(feature, Grid):
        box = ", ".join(decimal_text(edge) for edge in feature.box)
        where = " and ".join(feature.columns)
        return f"{where} as one of {feature.size - 1:,} cells of a map from {box}"
    if isinstance(feature, PrefixTree):
        words = f"one of {len(feature.vocabulary):,} words: {_list(feature.vocabulary)}"
        if feature.prefixes == ("",):
            return f"the first word of {feature.column}, {words}"
        prefixes = f"one of {len(feature.prefixes):,} beginnings ({_list(feature.prefixes)})"
        return f"the word of {feature.column} after {prefixes}, {words}"
    if isinstance(feature, HashedPrefixTree):
        return f"the word of {feature.column} after hashed beginnings, which nobody can read"
    return str(feature.columns_read)


def _list(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:_LISTED])
    more = len(texts) - _LISTED
    return f"{shown} and {more:,} more" if more > 0 else shown


def _answering(recipe: Recipe) -> Iterator[str]:
    chance = recipe.participation.probability
    who = "every device" if chance == 1 else f"{_percent(chance)} of the devices, drawn at random"
    if recipe.participation.once_per_study:
        who += f", but none that has answered in the study {recipe.study} before"
    if recipe.series is None:
        yield f"{who}; once each"
    else:
        each = "one" if recipe.answers == 1 else f"{recipe.answers:,}"
        windows = f"{recipe.window_count:,} windows"
        yield f"{who}, in {each} of {windows}, which each device draws at random"
    if recipe.group_by:
        yield f"in groups by {', '.join(recipe.group_by)}: which group a device is in is not hidden"
    if recipe.arms:
        arms = ", ".join(f"{arm.name} ({arm.weight})" for arm in recipe.arms)
        yield f"each device draws its arm of an experiment by weight: {arms}"
    window = recipe.window
    yield (
        f"{'' if recipe.series is None else 'the first window is open '}"
        f"from {utc_minute(window.opens)} to {utc_minute(window.closes)}, "
        f"{duration_text(window.answer_seconds)}; the result is collected until "
        f"{utc_minute(window.ends)}"
    )
    if recipe.series is not None:
        last = utc_minute(recipe.window_at(recipe.window_count - 1).opens)
        every = duration_text(recipe.series.every)
        yield f"a window opens every {every}, the last one at {last}"
    for stream, period in (recipe.periods or {}).items():
        span = duration_text(period)
        yield f"only events of {stream} count that were donated in the {span} before a window opens"
    least = recipe.privacy.min_cohort
    each = " in a group" if recipe.group_by or recipe.arms else ""
    yield f"nothing is released unless {least:,} devices or more have answered{each}"
    noise = noise_of(recipe, least)
    yield f"with {least:,} of them, a bin that nobody holds reads 0 ± {noise:,.1f} devices"


def _percent(share: Decimal) -> str:
    return f"{float(share) * 100:.3g}%"


def _cost(recipe: Recipe, policy: Policy) -> Iterator[str]:
    privacy = recipe.privacy
    yield (
        f"epsilon {number_text(privacy.epsilon)}, delta {number_text(privacy.delta)} to anyone who "
        f"does not control both aggregators; {number_text(privacy.replacement_epsilon)} to both "
        "together"
    )
    analysis = policy.analyses.get(recipe.analysis)
    if analysis is None:
        return
    if recipe.series is not None:
        yield f"each of up to {recipe.answers:,} answers is checked and charged when it is given"
    for whose, budget, period in _budgets(recipe, policy, analysis):
        cost, spent, delta = "", privacy.epsilon, privacy.delta
        composition = getattr(budget, "composition", analysis.budget.composition)
        if recipe.series is not None:
            # As the ledger adds up; fewer answers may fall into one period.
            empty = empty_filter(composition, budget.epsilon, budget.delta)
            whole = empty.after([privacy.stated_cost] * recipe.answers).spent
            spent, delta = whole.epsilon, whole.delta
            cost = f"the whole series costs at most epsilon {number_text(spent)}, "
            cost += f"delta {number_text(whole.delta)}: "
        when = f" {_in_each(period)}" if period else ", which never renews"
        parts = (spent / budget.epsilon, delta / budget.delta)
        within = max(parts) <= 1 and recipe.answers <= budget.reports
        tighter = ""
        if parts[1] > parts[0] and not isinstance(composition, Renyi):
            share, limit = _percent(parts[1]), number_text(budget.delta)
            tighter = f", and {share} of its delta {limit}, which runs out first"
        yield (
            f"{cost}{float(parts[0]):.0%} of the epsilon {number_text(budget.epsilon)} that "
            f"{whose} may cost{when}{tighter}{'' if within else '; what exceeds it is refused'}"
        )
    yield _how_often(recipe, policy, analysis)


def _budgets(
    recipe: Recipe, policy: Policy, analysis: Analysis
) -> Iterator[tuple[str, Budget | FieldBudget, int | None]]:
    yield "everything together", policy.device, policy.device.period
    yield "this analysis", analysis.budget, analysis.budget.period
    for ref in recipe.fields_read:
        if ref in analysis.fields:
            yield ref, analysis.fields[ref], analysis.budget.period


def _how_often(recipe: Recipe, policy: Policy, analysis: Analysis) -> str:
    """How many questions of this cost a device answers before a budget is spent."""
    own, times = analysis.budget.period, []
    for _, budget, period in _budgets(recipe, policy, analysis):
        least = budget.reports
        composition = getattr(budget, "composition", analysis.budget.composition)
        if not isinstance(composition, Renyi):
            least = min(least, math.floor(budget.epsilon / recipe.privacy.epsilon))
            least = min(least, math.floor(budget.delta / recipe.privacy.delta))
        if least < 1:
            return "a device can't answer it: it costs more than a whole budget"
        if period == own:  # others may renew meanwhile
            times.append(least)
    most = min(times)
    questions = "one question" if most == 1 else f"{most:,} questions"
    return f"a device answers at most {questions} of this cost {_in_each(own) if own else 'ever'}"


def _in_each(period: int) -> str:
    """Not "in 180 days": that long a time can overlap two periods."""
    return f"in each period of {duration_text(period)}"
