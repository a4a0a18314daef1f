"""Where a policy contradicts itself: budgets that can never be spent, limits that exclude all.

A *contradiction* makes part of a policy meaningless, and `chorister policy check` fails. A *remark*
is about something valid that its author may not expect: in the paper's own Table 1 the n-gram field
may cost 1 in an analysis that may cost 0.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from chorister.canonical import decimal_text
from chorister.errors import InvalidInput
from chorister.policy.bounds import Claim
from chorister.policy.model import Analysis, Budget, FieldBudget, Policy, Renyi
from chorister.policy.values import duration_text, number_text
from chorister.privacy.certified import renyi_to_epsilon
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON, MIN_LOCAL_EPSILON, Mechanism
from chorister.privacy.weights import BOUND_DELTA


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something about a policy that its author should know."""

    kind: Literal["contradiction", "remark"]
    field: str
    why: str
    remedy: str = ""  # what to change; empty where nothing has to be


def _contradiction(field: str, why: str, remedy: str) -> Finding:
    return Finding(kind="contradiction", field=field, why=why, remedy=remedy)


def _remark(field: str, why: str) -> Finding:
    return Finding(kind="remark", field=field, why=why)


def findings(policy: Policy) -> list[Finding]:
    """Return all contradictions, then all remarks."""
    found = list(_device(policy))
    for name, analysis in policy.analyses.items():
        where = f"analyses.{name}"
        found.extend(_against_device(policy, where, analysis))
        found.extend(_limits(policy, where, analysis))
        found.extend(_renyi(f"{where}.budget", analysis.budget))
        for ref, field in analysis.fields.items():
            found.extend(_field(f"{where}.fields.{ref}", analysis, field))
        found.extend(_cohorts(policy, where, analysis))
    return sorted(found, key=lambda finding: finding.kind)


def _device(policy: Policy) -> Iterator[Finding]:
    yield from _renyi("device", policy.device)
    if policy.device.period is not None and policy.device.min_ledger_age > policy.device.period:
        why = "a new device is silent for longer than its budget takes to renew"
        yield _remark("device.min_ledger_age", why)
    longest = max(analysis.longest_open for analysis in policy.analyses.values())
    if policy.device.min_ledger_age < longest + policy.checkpoint_max_age:
        why = "a device whose ledger was deleted may answer an open recipe again; "
        why += f"{duration_text(longest + policy.checkpoint_max_age)} would prevent it"
        yield _remark("device.min_ledger_age", why)
    for pair in policy.aggregators:
        if pair.one_operator:
            why = "one operator runs both aggregators: there is no protection against it"
            yield _remark(f"aggregators.{pair.name}", why)


def _against_device(policy: Policy, where: str, analysis: Analysis) -> Iterator[Finding]:
    own, device = analysis.budget, policy.device
    if device.period is not None and own.period is None:
        return  # the device's budget renews beneath one that never does: any amount can be spent
    renewals = 1
    if device.period is not None and own.period is not None and device.period != own.period:
        # The most periods of the device that can overlap one of the analysis.
        renewals = -(-own.period // device.period) + 1
    for name in ("epsilon", "delta", "reports"):
        allowed, cap = getattr(own, name), getattr(device, name) * renewals
        if allowed > cap:
            why = (
                f"{_text(allowed)} can never be spent: the device allows {_text(cap)} in that time"
            )
            remedy = f"lower it to {_text(cap)}, or raise device.{name}"
            yield _contradiction(f"{where}.budget.{name}", why, remedy)


def _limits(policy: Policy, where: str, analysis: Analysis) -> Iterator[Finding]:
    window, cohort = analysis.window, analysis.cohort
    if window.shortest > window.longest:
        why = "the shortest window is longer than the longest"
        yield _contradiction(f"{where}.window", why, "lower shortest, or raise longest")
    if cohort.smallest > cohort.largest:
        why = "the smallest cohort is larger than the largest"
        yield _contradiction(f"{where}.cohort", why, "lower smallest, or raise largest")
    fraction = analysis.honest_fraction
    if fraction is not None and fraction.numerator * cohort.smallest < fraction.denominator:
        why = f"{fraction} of the smallest cohort is less than one honest device"
        remedy = "raise cohort.smallest, or the fraction"
        yield _contradiction(f"{where}.honest_fraction", why, remedy)
    yield from _series(where, analysis)
    if window.longest < policy.checkpoint_max_age:
        age = duration_text(policy.checkpoint_max_age)
        why = f"a device whose list is {age} old, which is permitted, learns of recipes too late"
        yield _remark(f"{where}.window.longest", why)
    if analysis.budget.period is not None and analysis.budget.period < window.longest:
        why = "the budget can renew while a recipe is still being answered"
        yield _remark(f"{where}.budget.period", why)
    for ref in analysis.group_by:
        parts = len(policy.group_values(ref))
        if parts > analysis.max_cells:
            why = f"{ref} alone makes {parts} parts, but max_cells is {analysis.max_cells}"
            remedy = f"raise max_cells to {parts}, or leave {ref} out"
            yield _contradiction(f"{where}.group_by", why, remedy)


def _series(where: str, analysis: Analysis) -> Iterator[Finding]:
    series, where = analysis.series, f"{where}.series"
    if series is None:
        return
    if series.longest < 2 * analysis.window.shortest:
        least = duration_text(2 * analysis.window.shortest)
        why = f"two of the shortest windows take {least}: no series is as short as this"
        yield _contradiction(f"{where}.longest", why, f"raise it to {least} or more")
    if series.answers > series.windows:
        why = f"a device can't answer in {series.answers:,} of {series.windows:,} windows"
        yield _contradiction(f"{where}.answers", why, f"lower it to {series.windows:,}")
    if series.cells < series.windows:
        why = f"{series.windows:,} windows are at least as many parts: cells must not be below"
        yield _contradiction(f"{where}.cells", why, f"raise it to {series.windows:,} or more")
    reports, period = analysis.budget.reports, analysis.budget.period
    if series.answers > reports and (period is None or period >= series.longest):
        why = f"{series.answers:,}, but the analysis' budget has {reports:,} reports in that time"
        yield _remark(f"{where}.answers", why)


def _field(where: str, analysis: Analysis, field: FieldBudget) -> Iterator[Finding]:
    own = analysis.budget
    least = min(each.replacement_epsilon(MIN_LOCAL_EPSILON) for each in analysis.mechanisms)
    if min(field.local_epsilon, own.local_epsilon) < least:
        why = f"no permitted mechanism goes below {decimal_text(least)}: nothing can be asked"
        remedy = f"raise it, and the analysis' own, to {decimal_text(least)} or more"
        yield _contradiction(f"{where}.local_epsilon", why, remedy)
    if "plain" not in analysis.report_kinds and min(field.delta, own.delta) <= BOUND_DELTA:
        why = f"bounded reports use {BOUND_DELTA} of delta: nothing can be asked"
        yield _contradiction(f"{where}.delta", why, "raise it, for example to 1e-6")
    for name in ("local_epsilon", "epsilon", "delta", "reports"):
        allowed, cap = getattr(field, name), getattr(own, name)
        if allowed > cap:
            why = f"{_text(allowed)}, but only the analysis' {_text(cap)} can be used"
            yield _remark(f"{where}.{name}", why)


def _renyi(where: str, budget: Budget) -> Iterator[Finding]:
    if not isinstance(budget.composition, Renyi):
        return
    orders = budget.composition.renyi
    share = float(budget.delta) / len(orders)
    spare = min(renyi_to_epsilon(0.0, order, share) for order in orders)
    if Decimal(spare) >= budget.epsilon:
        why = (
            f"at this order and delta {_text(budget.delta)}, a divergence of 0 already counts as "
            f"epsilon {spare:.3g}: choose a higher order"
        )
        yield _contradiction(f"{where}.composition", why, "raise the order, or delta")


def _cohorts(policy: Policy, where: str, analysis: Analysis) -> Iterator[Finding]:
    """Check that the largest cohort makes each field's local epsilon affordable."""
    short = []
    for ref, field in analysis.fields.items():
        local = min(field.local_epsilon, analysis.budget.local_epsilon)
        epsilon = min(field.epsilon, analysis.budget.epsilon, policy.device.epsilon)
        delta = min(field.delta, analysis.budget.delta, policy.device.delta)
        if local <= epsilon or analysis.cohort.smallest > analysis.cohort.largest:
            continue
        if not any(_affordable(analysis, m, local, epsilon, delta) for m in analysis.mechanisms):
            short.append((ref, local, epsilon))
    for ref, local, epsilon in short:
        most = f"{analysis.cohort.largest:,} devices, the largest permitted cohort"
        why = (
            f"local epsilon {_text(local)} can never be used in full: with {most}, "
            f"it costs more than epsilon {_text(epsilon)}"
        )
        path = f"{where}.fields.{ref}.local_epsilon"
        if len(short) < len(analysis.fields):
            yield _remark(path, why)
        else:
            remedy = "raise cohort.largest or epsilon, or lower local_epsilon"
            yield _contradiction(path, why, remedy)


def _affordable(
    analysis: Analysis, mechanism: Mechanism, local: Decimal, epsilon: Decimal, delta: Decimal
) -> bool:
    """Return whether the largest cohort, in any permitted way, is enough for this epsilon."""
    parameter = min(mechanism.largest_local_epsilon(local), MAX_LOCAL_EPSILON)
    for crowd in analysis.crowds:
        claim = Claim(
            mechanism=mechanism,
            local_epsilon=parameter,
            epsilon=epsilon,
            delta=delta,
            crowd=crowd,
            honest_fraction=analysis.honest_fraction if crowd == "honest" else None,
            # Plain reports have a little more delta, too little to matter here.
            report=analysis.report_kinds[0],
        )
        try:
            if claim.holds(analysis.cohort.largest):
                return True
        except InvalidInput:
            continue  # not provable this way; maybe another
    return False


def _text(value: Decimal | int) -> str:
    return f"{value:,}" if isinstance(value, int) else number_text(value)
