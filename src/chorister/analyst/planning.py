"""Planning both ways: what is left of the budgets, and which epsilon gives an accuracy."""

from __future__ import annotations

import html as escaping
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chorister.analyst.asking import reads_of, refs_of, simple_query
from chorister.analyst.fleet import foreseen
from chorister.analyst.ledgers import Ledger
from chorister.canonical import decimal_text
from chorister.device.budget import Standing
from chorister.encoding import AnyFeature, DenyList, Encoding
from chorister.errors import InvalidInput
from chorister.privacy import Mechanism, Setting, accuracy_for_cohort, cost_of_accuracy
from chorister.privacy.planning import Cost
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON

if TYPE_CHECKING:
    from chorister.analyst.question import Question
    from chorister.analyst.study import Study

__all__ = ["StudyBudget", "for_accuracy", "study_budget"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyBudget:
    """The budgets of a device that answered every round that it could."""

    limits: tuple[Standing, ...]  # the device's, the analysis', its fields'
    fresh_devices: float  # share of the fleet that answered nothing in this study yet
    ledger: Ledger  # what the fullest ledger looks like

    def more(self, question: Question) -> int:
        """How many more questions that cost as much such a device could answer."""
        return question.cost().more

    def explain(self) -> str:
        """In words."""
        lines = [
            f"{self.fresh_devices:.0%} of the devices answered nothing in this study yet. A device "
            "that answered all it could has spent:"
        ]
        lines.extend(
            f"{standing.limit}: epsilon {decimal_text(standing.spent.epsilon)} of "
            f"{decimal_text(standing.allowed.epsilon)}, delta "
            f"{decimal_text(standing.spent.delta)} of {decimal_text(standing.allowed.delta)}, "
            f"{standing.reports} of {standing.allowed_reports} reports"
            for standing in self.limits
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escaping.escape(line)}</p>" for line in self.explain().split("\n"))


def study_budget(study: Study) -> StudyBudget:
    """What devices have spent at most, as far as the rounds of this fleet tell."""
    most = foreseen(study.fleet, withdrawn=True)
    fullest = max(most.ledgers, key=lambda ledger: len(ledger.charges))
    ledgers = foreseen(study.fleet)
    fresh = sum(
        weight
        for ledger, weight in ledgers.classes.values()
        if all(charge.study != study.name for charge in ledger.charges)
    )
    return StudyBudget(
        limits=tuple(limit.standing() for limit in fullest.limits(study.analysis)),
        fresh_devices=fresh,
        ledger=fullest,
    )


def for_accuracy(
    study: Study,
    features: AnyFeature | Sequence[AnyFeature],
    *,
    std_error: float | None,
    relative_error: float | None,
    reports: int | None,
    options: Mapping[str, Any],
) -> Question:
    """The question with the least epsilon that gives an accuracy."""
    if (std_error is None) == (relative_error is None):
        raise InvalidInput("give std_error (devices, with reports) or relative_error, one of them")
    for name in ("epsilon", "local_epsilon", "min_cohort"):
        if name in options and not (name == "local_epsilon" and relative_error is not None):
            raise InvalidInput(f"{name} follows from the accuracy: leave it out")
    chosen = tuple(features) if isinstance(features, Sequence) else (features,)
    deny = options.get("deny", ())
    denied = (deny,) if isinstance(deny, DenyList) else tuple(deny)
    query = options.get("query") or simple_query(study.fleet.policy, study.terms, chosen, denied)
    refs = refs_of(options.get("reads") or reads_of(query, study.terms))
    length = Encoding(chosen, denied).size
    terms = study.terms
    crowd = options.get("crowd") or terms.crowds[0]
    mechanism = Mechanism(options.get("mechanism") or terms.mechanisms[0])
    bounded = (options.get("report") or terms.report_kinds[0]) == "bounded"
    delta = options.get("delta")
    if delta is None:
        delta = study.histogram(chosen, **{**options, "local_epsilon": "0.1"}).privacy.delta
    limit = min(terms.budget.local_epsilon, *(terms.fields[ref].local_epsilon for ref in refs))
    largest = limit / 2 if mechanism is Mechanism.SYMMETRIC else limit
    setting = Setting(
        local_epsilon=options.get("local_epsilon") or min(largest, MAX_LOCAL_EPSILON),
        mechanism=mechanism,
        crowd=crowd,
        honest_fraction=terms.honest_fraction or 1 if crowd == "honest" else 1,
    )
    if relative_error is not None:
        found: Cost = cost_of_accuracy(
            setting, relative_error=relative_error, delta=delta, length=length, bounded=bounded
        )
    elif reports is None or std_error is None:
        raise InvalidInput("std_error is a number of devices: say of how many reports, reports=...")
    else:
        found = accuracy_for_cohort(
            setting, std_error=std_error, reports=reports, delta=delta, length=length,
            bounded=bounded,
        )  # fmt: skip
    return study.histogram(
        chosen,
        **{
            **options,
            "epsilon": found.charge.epsilon,
            "delta": delta,
            "local_epsilon": found.charge.release.setting.local_epsilon,
            "min_cohort": max(found.min_cohort, terms.cohort.smallest),
            "mechanism": mechanism,
            "crowd": crowd,
        },
    )
