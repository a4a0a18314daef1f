"""A policy in words: what may be asked, what it can cost, and whom you have to trust."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chorister.policy.bounds import CostBound, analysis_cost, device_cost, field_cost, series_cost
from chorister.policy.model import Analysis, Composition, Policy, Renyi
from chorister.policy.values import duration_text, legible, number_text, visible
from chorister.policy.witnesses import NO_QUORUM


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and the lines below it."""

    title: str
    lines: tuple[str, ...]


def explain(policy: Policy) -> list[Section]:
    """Explain the whole policy, from the parties to each field."""
    return [
        Section(title=f"Policy {policy.name}", lines=tuple(_parties(policy))),
        Section(title="Data on the device", lines=tuple(_data(policy))),
        Section(title="All analyses together", lines=tuple(_device(policy))),
        *(
            Section(title=f"Analysis {name}", lines=tuple(_analysis(policy, analysis)))
            for name, analysis in policy.analyses.items()
        ),
        Section(title="What is assumed, and about whom", lines=tuple(_assumptions(policy))),
    ]


def cost_text(cost: CostBound) -> str:
    """Put the paper's bounds into one sentence."""
    count = _counted(cost.reports, "report")
    span = f"in each period of {duration_text(cost.period)}" if cost.period else "ever"
    return (
        f"at most {count} {span}: epsilon {number_text(cost.epsilon)}, delta "
        f"{number_text(cost.delta)} to anyone who does not control both aggregators; to both "
        f"together epsilon {number_text(cost.local_total)}, from {count} of local epsilon "
        f"{number_text(cost.local_epsilon)}"
    )


def series_cost_text(cost: CostBound) -> str:
    """Say what a whole series can cost a device."""
    return (
        f"at most {_counted(cost.reports, 'report')}: epsilon {number_text(cost.epsilon)}, delta "
        f"{number_text(cost.delta)}; to both aggregators together epsilon "
        f"{number_text(cost.local_total)}"
    )


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def composition_text(composition: Composition) -> str:
    """Describe how charges add up."""
    if isinstance(composition, Renyi):
        orders = ", ".join(str(order) for order in composition.renyi)
        return f"charges add up as Renyi divergences of order {orders}"
    return "charges add up by basic composition (sums of epsilon and of delta)"


def _parties(policy: Policy) -> Iterator[str]:
    for pair in policy.aggregators:
        yield f"aggregators {pair.name}: {pair.leader.url} and {pair.helper.url}"
    age = duration_text(policy.checkpoint_max_age)
    log = policy.log.origin
    yield f"a device is silent if its copy of the public log {log} is older than {age}"
    witnesses = policy.log.witness_policy
    if witnesses is not None and witnesses.quorum != NO_QUORUM:
        yield f"further witnesses have to cosign the log: {legible(str(witnesses))}"
    yield f"digest {policy.digest.hex()}"


def _data(policy: Policy) -> Iterator[str]:
    for kind, tables in (("stream", policy.streams), ("profile", policy.profiles)):
        for name, table in tables.items():
            fields = ", ".join(f"{field} ({model.type})" for field, model in table.fields.items())
            yield f"{kind} {name}, kept {duration_text(table.retention)}: {fields}"
            for field, model in table.fields.items():
                if model.group_values is not None:
                    values = ", ".join(model.group_values)
                    yield f"{name}.{field} is not sensitive: {values}; anything else is other"


def _device(policy: Policy) -> Iterator[str]:
    yield cost_text(device_cost(policy))
    yield composition_text(policy.device.composition)
    if policy.device.period is not None:
        age = duration_text(policy.checkpoint_max_age)
        yield (
            "the guarantee is per period; over n periods a device can lose n times as much. In any "
            "time as long as a period at most two budgets are charged, one before and one after "
            f"the renewal; three, if the device's clock is slow by up to {age}, or both "
            "aggregators lie about the time. "
            "Each device starts its period at its own random time"
        )
    age = duration_text(policy.device.min_ledger_age)
    yield f"a new ledger is silent for {age}"


def _analysis(policy: Policy, analysis: Analysis) -> Iterator[str]:
    yield legible(analysis.purpose)
    yield cost_text(analysis_cost(policy, analysis))
    yield composition_text(analysis.budget.composition)
    fields: dict[str, list[str]] = {}
    for ref, field in analysis.fields.items():
        fields.setdefault(cost_text(field_cost(policy, analysis, field)), []).append(ref)
    for cost, refs in fields.items():
        yield f"{'each of ' if len(refs) > 1 else ''}{', '.join(refs)}: {cost}"
    yield from _questions(analysis)
    yield from _shape(analysis)
    if (whole := series_cost(policy, analysis)) is not None:
        yield f"a whole series costs a device {series_cost_text(whole)}"


def _questions(analysis: Analysis) -> Iterator[str]:
    if analysis.query_class == "exact":
        yield f"asks one of {len(analysis.queries)} queries, listed verbatim"
        yield from (f"query: {visible(query)}" for query in analysis.queries)
    else:
        functions = ", ".join(analysis.functions) or "no functions"
        yield f"asks any SELECT over these fields, with {functions}"
    if analysis.group_by:
        fields = ", ".join(analysis.group_by)
        yield f"may split the fleet by {fields}, into at most {analysis.max_cells:,} parts"
    elif analysis.max_cells > 1:
        yield f"may split the fleet into at most {analysis.max_cells:,} arms of an experiment"
    if analysis.hashed_prefixes:
        yield "prefix lists may be hashed: then nobody can read what exactly is asked"


def _shape(analysis: Analysis) -> Iterator[str]:
    window, cohort = analysis.window, analysis.cohort
    yield (
        f"a histogram has at most {analysis.max_bins:,} bins, over at least {cohort.smallest:,} "
        f"devices (a recipe may demand up to {cohort.largest:,})"
    )
    yield (
        f"answered for {duration_text(window.shortest)} to {duration_text(window.longest)}, "
        f"collected for up to {duration_text(window.longest_grace)} more"
    )
    if (series := analysis.series) is not None:
        times = "window" if series.answers == 1 else "windows"
        yield (
            f"may be asked repeatedly, in up to {series.windows:,} windows within "
            f"{duration_text(series.longest)}; a device answers in at most {series.answers:,} "
            f"{times} of such a series, drawn at random, and each answer is charged"
        )
    yield (
        f"noise on the device: {' or '.join(analysis.mechanisms)} one-hot encoding, "
        f"{' or '.join(analysis.report_kinds)} reports"
    )
    keys = _counted(len(analysis.author_keys), "author key")
    yield f"{keys} may ask, {_counted(len(analysis.collectors), 'collector')} may see results"


def _assumptions(policy: Policy) -> Iterator[str]:
    yield "the device's own software and its store are trusted"
    for pair in policy.aggregators:
        if pair.one_operator:
            yield f"pair {pair.name}: ONE OPERATOR runs both; there is no protection against it"
        else:
            yield f"pair {pair.name}: at least one of the two aggregators is honest"
    for name, analysis in policy.analyses.items():
        if "noised" in analysis.crowds:
            yield f"{name}, with noise: nothing about the other devices; all may be hostile"
        if "honest" in analysis.crowds:
            yield (
                f"{name}, without noise: {analysis.honest_fraction} of every released batch are "
                "honest devices; if fewer are, epsilon is larger than stated"
            )
    yield (
        "not hidden: the fact that a device took part, when and from where, its group and its "
        "arm. Each store has its own budget: several apps that embed a device do not share one"
    )
