"""A question before it is asked, what it costs, and which epsilon a wanted accuracy needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from chorister.analyst.arguments import as_count, as_positive, valid_input
from chorister.analyst.preflight import preflight
from chorister.analyst.request import refs_of
from chorister.analyst.spending import LedgerModel, expected_ledgers, fresh_share, new_to_study
from chorister.analyst.tables import paragraphs
from chorister.canonical import decimal_text, dumps, sha256
from chorister.encoding import AnyFeature, DenyList, Encoding, Selection
from chorister.errors import BudgetExceeded, ChoristerError, CohortTooSmall, InvalidInput
from chorister.policy.values import number_text
from chorister.privacy import Setting, accuracy_for_cohort, cost_of_accuracy
from chorister.privacy.planning import Cost
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON
from chorister.recipe import (
    Aggregators,
    Arm,
    Check,
    Participation,
    Privacy,
    Recipe,
    Series,
    Window,
)

if TYPE_CHECKING:
    from chorister.analyst.result import Result
    from chorister.analyst.study import Study


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """A histogram over features, groups and arms, planned but not asked."""

    study: Study = field(repr=False)
    features: tuple[AnyFeature, ...]
    query: str
    reads: Mapping[str, tuple[str, ...]]
    group_by: tuple[str, ...]
    arms: tuple[Arm, ...]
    selection: Selection
    deny: tuple[DenyList, ...]
    privacy: Privacy
    participation: Participation
    answer_seconds: int  # how long devices answer
    grace_seconds: int  # how long afterwards the result can be collected
    repeat: int = 0  # distinguishes the same question asked on purpose more than once
    series: Series | None = None  # further windows: see `study.track`
    periods: Mapping[str, int] | None = None  # by stream: for how long its events count

    @cached_property
    def encoding(self) -> Encoding:
        """All features together: how rows become bins."""
        return Encoding(self.features, self.deny)

    @property
    def size(self) -> int:
        """The number of bins."""
        return self.encoding.size

    @cached_property
    def digest(self) -> str:
        """Identifies the question, whenever it is asked."""
        content = {
            "features": [_dump(feature) for feature in self.features],
            "query": self.query,
            "reads": {table: list(names) for table, names in self.reads.items()},
            "group_by": list(self.group_by),
            **({"arms": [_dump(arm) for arm in self.arms]} if self.arms else {}),
            "selection": self.selection,
            "deny": [_dump(deny) for deny in self.deny],
            "privacy": _dump(self.privacy),
            "participation": _dump(self.participation),
            "study": self.study.name,
            "repeat": self.repeat,
            "window": [self.answer_seconds, self.grace_seconds],
            **({"series": _dump(self.series)} if self.series is not None else {}),
            **({"periods": dict(self.periods)} if self.periods else {}),
        }
        return sha256(dumps(content)).hex()

    def recipe(self, *, number: int, opens: int) -> Recipe:
        """Return the recipe that devices get; raise `InvalidInput` if no recipe can ask it."""
        study = self.study
        closes = opens + self.answer_seconds
        pair = next(study.fleet.policy.pairs(study.terms))
        with valid_input():
            return Recipe(
                version=1,
                id=f"{study.name[:80]}.{number}",
                study=study.name,
                analysis=study.analysis,
                collector=study.fleet.collector(study.analysis),
                query=self.query,
                reads=dict(self.reads),
                group_by=self.group_by,
                arms=self.arms,
                features=self.features,
                selection=self.selection,
                deny=self.deny,
                privacy=self.privacy,
                window=Window(opens=opens, closes=closes, ends=closes + self.grace_seconds),
                series=self.series,
                periods=dict(self.periods) if self.periods else None,
                participation=self.participation,
                aggregators=Aggregators(leader=pair.leader.url, helper=pair.helper.url),
            )

    def again(self) -> Question:
        """Return a copy that a study asks again, where it would only return the old result."""
        return replace(self, repeat=self.repeat + 1)

    def cost(self, *, reports: int | None = None, target: int | None = None) -> QuestionCost:
        """Say what it would spend, the cohort it needs, the error to expect, and what is left.

        `reports` is how many to expect, for a fleet of unknown size; `target` is the number of
        reports at which `run` would stop.
        """
        return _price(self, reports, target)

    def run(self, target: int | None = None, *, bar: bool | None = None) -> Result:
        """Ask and wait: until `target` reports, or until the window ends with enough of them."""
        return self.study.ask(self, target=target, bar=bar)

    def _repr_html_(self) -> str:
        try:
            return self.cost()._repr_html_()
        except ChoristerError as error:
            return paragraphs(f"This question can't be asked: {error}.")


def _dump(model: Any) -> Any:  # noqa: ANN401 (a model, and its JSON)
    return model.model_dump(mode="json", exclude_none=True)


def check_target(question: Question, target: int | None) -> None:
    """Refuse a target below the minimum cohort: nothing could be released when it is reached."""
    least, reports = question.privacy.min_cohort, as_count(target, "target")
    if reports is not None and reports < least:
        raise InvalidInput(
            f"the target {reports:,} is below the minimum cohort of {least:,}: raise it, or leave "
            "it out",
            field="target",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionCost:
    """What one question would spend, need and achieve."""

    epsilon: Decimal  # charged to every device that answers
    delta: Decimal
    local_epsilon: Decimal  # of one report, to both aggregators together (replacement value)
    min_cohort: int  # with fewer reports, nothing is released
    expected: int | None  # reports to expect with the budgets as they are
    reports: int  # for which the errors below are stated
    bins: int
    bytes_per_report: int  # approximate size of an upload
    std_error: float  # of a bin that nobody holds, in devices
    relative_error: float  # the same as a share of the reports
    more: int  # such questions left to a device that answered everything so far
    fresh_devices: float  # share of the fleet that has answered nothing in this study yet
    checks: tuple[Check, ...]  # against the policy
    exhausted: BudgetExceeded | None  # why no device would answer
    warnings: tuple[str, ...] = ()  # why it would be a waste although devices would answer
    too_small: CohortTooSmall | None = None  # why nothing could be released: then it is refused
    remarks: tuple[str, ...] = ()  # what to expect, and what can't be known
    asked: int | None = None  # the round that asked it already: asking again costs nothing

    @property
    def allowed(self) -> bool:
        """Whether the policy permits it and there is budget left for it."""
        return self.exhausted is None and all(outcome.passed for outcome in self.checks)

    def explain(self) -> str:
        if self.asked is not None:
            return (
                f"This question was asked already, in round {self.asked}. Asking it returns that "
                "result and costs nothing; `question.again()` asks it again, for "
                f"epsilon {decimal_text(self.epsilon)}."
            )
        lines = [
            f"Refused ({outcome.name}): {outcome.why}."
            for outcome in self.checks
            if not outcome.passed
        ]
        if self.exhausted is not None:
            lines.append(f"No device would answer: {self.exhausted}.")
        lines += [
            f"Each device that answers is charged epsilon {decimal_text(self.epsilon)}, delta "
            f"{number_text(self.delta)}, and one report of {self.bins:,} bins "
            f"(about {self.bytes_per_report:,} bytes). "
            + (self._more_in_words() if self.allowed else "")
            + new_to_study(self.fresh_devices),
            f"It needs {self.min_cohort:,} devices"
            + (f"; about {self.expected:,} are expected." if self.expected is not None else "."),
            f"With {self.reports:,} reports a bin that nobody holds reads 0 ± "
            f"{self.std_error:,.1f} devices ({self.relative_error:.3%} of the reports).",
        ]
        lines.extend((*(f"Don't ask it: {why}" for why in self.warnings), *self.remarks))
        return "\n".join(lines)

    def _more_in_words(self) -> str:
        several = f"{self.more:,} such questions, including this one"
        left = several if self.more > 1 else "this question and no more like it"
        return f"A device that has answered every question so far can answer {left}. "

    def _repr_html_(self) -> str:
        return paragraphs(self.explain())


def _price(question: Question, reports: int | None, target: int | None) -> QuestionCost:
    """Price a question with the budgets as the study's rounds leave them."""
    study, fleet = question.study, question.study.fleet
    target, reports = as_count(target, "target"), as_count(reports, "reports")
    recipe = question.recipe(number=study.next_number, opens=fleet.clock.now())
    found = preflight(fleet, recipe, target=target, reports=reports)
    refused = any(not outcome.passed for outcome in found.checks)
    ledgers = expected_ledgers(fleet)
    at = reports or max(recipe.privacy.min_cohort, round(found.expected or 0))
    error = float(recipe.randomizer.std_error(at, 0.0, recipe.privacy.noise_trials))
    asked = study.asked_before(question)
    return QuestionCost(
        epsilon=recipe.privacy.epsilon,
        delta=recipe.privacy.delta,
        local_epsilon=recipe.randomizer.replacement_epsilon,
        min_cohort=recipe.privacy.min_cohort,
        expected=None if found.expected is None else round(found.expected),
        reports=at,
        bins=recipe.encoding.size,
        bytes_per_report=16 * recipe.encoding.size + 1000,
        std_error=error,
        relative_error=error / at,
        more=0 if refused else _more(ledgers.fullest, question),
        fresh_devices=fresh_share(ledgers, recipe.study),
        checks=found.checks,
        exhausted=found.exhausted,
        warnings=found.warnings,
        too_small=found.too_small,
        remarks=found.remarks,
        asked=None if asked is None else asked.number,
    )


def _more(fullest: LedgerModel, question: Question) -> int:
    """In disjoint cohorts a device answers at most once; otherwise, what its budget allows."""
    recipe = question.recipe(number=1, opens=0)
    if question.participation.once_per_study:
        return min(1, LedgerModel.empty(fullest.policy).more(recipe))
    return fullest.more(recipe)


def for_accuracy(
    study: Study,
    features: AnyFeature | Sequence[AnyFeature],
    *,
    std_error: float | None = None,
    relative_error: float | None = None,
    reports: int | None = None,
    **options: Any,  # noqa: ANN401 (whatever `histogram` takes)
) -> Question:
    """Plan the question with the smallest epsilon that reaches an accuracy.

    Give the standard error of an empty bin either in devices, together with the number of
    reports, or as a share of the reports. The other options are those of `histogram`.
    """
    if (std_error is None) == (relative_error is None):
        raise InvalidInput("give either std_error (in devices, with reports) or relative_error")
    for name in ("epsilon", "local_epsilon", "min_cohort"):
        if name in options and not (name == "local_epsilon" and relative_error is not None):
            raise InvalidInput(f"{name} follows from the accuracy: leave it out")
    if std_error is not None:
        std_error = float(as_positive(std_error, "std_error"))
    if relative_error is not None:
        relative_error = float(as_positive(relative_error, "relative_error"))
    reports = as_count(reports, "reports")
    terms = study.terms
    fixed = {"local_epsilon": "0.1", "min_cohort": terms.cohort.smallest}  # replaced below
    draft = study.histogram(features, **{**options, **fixed})
    refs, delta, mechanism = refs_of(draft.reads), draft.privacy.delta, draft.privacy.mechanism
    crowd, bounded = draft.privacy.crowd, draft.privacy.report == "bounded"
    limit = min(terms.budget.local_epsilon, *(terms.fields[ref].local_epsilon for ref in refs))
    largest = mechanism.largest_local_epsilon(limit)
    setting = Setting(
        local_epsilon=options.get("local_epsilon") or min(largest, MAX_LOCAL_EPSILON),
        mechanism=mechanism,
        crowd=crowd,
        honest_fraction=terms.honest_fraction or 1 if crowd == "honest" else 1,
    )
    if relative_error is not None:
        found: Cost = cost_of_accuracy(
            setting, relative_error=relative_error, delta=delta, length=draft.size, bounded=bounded
        )
    elif reports is None or std_error is None:
        raise InvalidInput("std_error is a number of devices: add the number of reports, reports=")
    else:
        found = accuracy_for_cohort(
            setting, std_error=std_error, reports=reports, delta=delta, length=draft.size,
            bounded=bounded,
        )  # fmt: skip
    exact = {
        "epsilon": found.charge.epsilon,
        "delta": delta,
        "local_epsilon": found.charge.release.setting.local_epsilon,
        "min_cohort": max(found.min_cohort, terms.cohort.smallest),
        "mechanism": mechanism,
        "crowd": crowd,
    }
    return study.histogram(features, **{**options, **exact})
