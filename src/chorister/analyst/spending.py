"""What devices have spent so far, and what they may still answer by their own rules.

Which rounds a device answered decides what else it may answer. Devices that answered the same
rounds have the same ledger and form one *class*. Each class carries a weight: a share of the fleet
when planning, numbers of simulated devices in a rehearsal. Everything is assumed to happen within
one budget period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

import numpy as np

from chorister.analyst.rounds import PlanBasis, Round, RoundState
from chorister.analyst.tables import paragraphs
from chorister.canonical import decimal_text
from chorister.device.ledger.budget import Charge, Limit, Standing
from chorister.device.ledger.counting import Counts, PolicyTerms
from chorister.errors import BudgetExceeded, QueryRefused
from chorister.policy import Policy
from chorister.policy.values import number_text
from chorister.recipe import Recipe
from chorister.transparency.checkpoint import MAX_SKEW

if TYPE_CHECKING:
    from chorister.analyst.fleet import Fleet
    from chorister.analyst.question import Question
    from chorister.analyst.study import Study

_TIME: Final = 0  # one budget period: when a charge is made does not matter
_MAX_COUNTED: Final = 10_000  # questions
_FEW: Final = 0.005  # a share of the fleet that rounds to 0 %
Weight = TypeVar("Weight")
_Key: TypeAlias = tuple[tuple[str, ...], frozenset[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerModel:
    """The ledger of all devices that answered the same rounds."""

    policy: Policy
    counts: Counts
    charges: tuple[Charge, ...] = ()

    @classmethod
    def empty(cls, policy: Policy) -> LedgerModel:
        return cls(policy=policy, counts=Counts(offset=0).with_policy(PolicyTerms.of(policy)))

    @property
    def key(self) -> _Key:
        """Equal for ledgers that allow the same: their charges and the studies they were in."""
        spent = (
            f"{charge.analysis} {charge.fields} {charge.privacy.canonical()!r}"
            for charge in self.charges
        )
        return tuple(sorted(spent)), frozenset(charge.study for charge in self.charges)

    def check(self, charge: Charge) -> None:
        """Raise `BudgetExceeded` if a device with this ledger would refuse the charge."""
        self.counts.check(charge, self.policy, _TIME)

    def is_new_to(self, study: str) -> bool:
        """Whether devices with this ledger have answered nothing in a study yet."""
        return all(charge.study != study for charge in self.charges)

    def is_asked(self, recipe: Recipe) -> bool:
        """Whether the recipe addresses devices with this ledger."""
        return not recipe.participation.once_per_study or self.is_new_to(recipe.study)

    def would_answer(self, recipe: Recipe) -> bool:
        """Whether devices with this ledger would answer, a series at least once."""
        if not self.is_asked(recipe):
            return False
        try:
            return self.payable(recipe)[0] > 0
        except QueryRefused:
            return False

    def payable(self, recipe: Recipe) -> tuple[int, BudgetExceeded | None]:
        """How many answers of a recipe this ledger can pay, and what keeps it from paying all.

        A device that answers several windows of a series may have drawn successive ones: then the
        fewest of its answers fall into the next budget period.
        """
        charge, counts = Charge.of(recipe), self.counts
        every = 0 if recipe.series is None else recipe.series.every
        for number in range(recipe.answers):
            try:
                counts.check(charge, self.policy, _TIME + number * every)
            except BudgetExceeded as error:
                return number, error
            counts = counts.with_charge(charge, _TIME + number * every)
        return recipe.answers, None

    def after(self, charge: Charge) -> LedgerModel:
        """Return the ledger after a charge."""
        counts = self.counts.with_charge(charge, _TIME)
        return replace(self, counts=counts, charges=(*self.charges, charge))

    def after_answers(self, recipe: Recipe, answers: int) -> LedgerModel:
        """Return the ledger after so many answers, as many as can count at the same time."""
        ledger, charge = self, Charge.of(recipe)
        for _ in range(min(answers, _at_once(recipe, self.policy))):
            ledger = ledger.after(charge)
        return ledger

    def more(self, recipe: Recipe) -> int:
        """Count how many recipes of this cost a device with this ledger may still answer."""
        ledger, charge = self, Charge.of(recipe)
        for count in range(_MAX_COUNTED):
            try:
                ledger.check(charge)
            except BudgetExceeded:
                return count
            ledger = ledger.after(charge)
        return _MAX_COUNTED

    def limits(self, analysis: str) -> list[Limit]:
        """List the limits that bind an analysis: the device's, its own, and its fields'."""
        prefix = f"analyses.{analysis}."
        return [
            limit
            for limit in self.counts.limits(self.policy, _TIME)
            if limit.path == "device" or limit.path.startswith(prefix)
        ]


@dataclass(slots=True)
class LedgerClasses(Generic[Weight]):
    """All classes of devices with their weights. Mutable: it changes with every round."""

    policy: Policy
    fresh: Weight  # of the devices that have answered nothing yet
    classes: dict[_Key, tuple[LedgerModel, Weight]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        empty = LedgerModel.empty(self.policy)
        self.classes[empty.key] = (empty, self.fresh)

    def answer(
        self,
        recipe: Recipe,
        take: Callable[[Weight], tuple[Weight, Weight]],
        join: Callable[[Weight, Weight], Weight],
    ) -> list[Weight]:
        """Answer a recipe: `take` splits each class into those that answer and the others.

        Returns the weights that answer, one per class that would. Those that answer a series answer
        it as often as they may.
        """
        answering: list[Weight] = []

        def split(weight: Weight, most: int) -> dict[int, Weight]:
            taken, left = take(weight)
            answering.append(taken)
            return {0: left, most: taken}

        self.settle(recipe, split, join)
        return answering

    def settle(
        self,
        recipe: Recipe,
        split: Callable[[Weight, int], Mapping[int, Weight]],
        join: Callable[[Weight, Weight], Weight],
    ) -> None:
        """Charge a recipe: `split` says how many of a class answer how often, up to a number."""
        after: dict[_Key, tuple[LedgerModel, Weight]] = {}
        for ledger, weight in self.classes.values():
            parts = [(ledger, weight)]
            if ledger.would_answer(recipe):
                found = split(weight, ledger.payable(recipe)[0])
                parts = [(ledger.after_answers(recipe, n), part) for n, part in found.items()]
            for each, amount in parts:
                if not np.any(np.asarray(amount)):
                    continue  # nobody is left in this class
                known = after.get(each.key)
                joined = amount if known is None else join(known[1], amount)
                after[each.key] = (each, joined)
        self.classes = after

    def why_nobody(self, recipe: Recipe) -> BudgetExceeded | None:
        """Return the budget that keeps every class from answering; None if one would answer.

        A series has to be payable as a whole: a device answers as often as the series asks it to.
        """
        found: BudgetExceeded | None = None
        for ledger in self.ledgers:
            if not ledger.is_asked(recipe):
                continue
            error = ledger.payable(recipe)[1]
            if error is None:
                return None
            found = error
        return found

    @property
    def ledgers(self) -> Iterable[LedgerModel]:
        return (ledger for ledger, _ in self.classes.values())

    @property
    def fullest(self) -> LedgerModel:
        """The ledger with the most charges."""
        return max(self.ledgers, key=lambda ledger: len(ledger.charges))


# --- What to expect of a fleet ------------------------------------------------------------------


def expected_ledgers(
    fleet: Fleet, *, withdrawn: bool = False, basis: PlanBasis | None = None
) -> LedgerClasses[float]:
    """Predict the ledgers after all rounds so far, weighted by shares of the fleet.

    How many devices answered a question before it was withdrawn is unknown: assume none, or with
    `withdrawn` all that could. With a `basis`, only what it counts.
    """
    ledgers: LedgerClasses[float] = LedgerClasses(policy=fleet.policy, fresh=1.0)
    now = fleet.clock.now() if basis is None else basis.time
    for round_ in fleet.archive.all_rounds():
        counts = round_.published and (withdrawn or round_.state is not RoundState.WITHDRAWN)
        if basis is not None and round_.sequence > basis.sequence:
            break
        if counts and not _has_renewed(round_.recipe, fleet.policy, now):
            expect_answers(ledgers, round_.recipe, at_most=_largest_share(round_, fleet.devices))
    return ledgers


def with_others(
    ledgers: LedgerClasses[float], recipes: Iterable[Recipe], now: int
) -> LedgerClasses[float]:
    """The ledgers if every device that could answer other analysts' recipes has done so.

    An upper bound: how many devices answered them is known to their authors only.
    """
    bound: LedgerClasses[float] = LedgerClasses(policy=ledgers.policy, fresh=ledgers.fresh)
    bound.classes = dict(ledgers.classes)
    for recipe in recipes:
        if not _has_renewed(recipe, ledgers.policy, now):
            bound.answer(recipe, take=lambda weight: (weight, 0.0), join=lambda a, b: a + b)
    return bound


def _largest_share(round_: Round, devices: int | None) -> float:
    """The largest share of the fleet that can have answered: a target ends a recipe early."""
    if round_.target is None or devices is None:
        return 1.0
    parts = len(round_.result.parts) if round_.result is not None else 1
    reports = round_.result.n_reports if round_.result is not None else round_.target * parts
    return min(1.0, reports / devices)


def expect_answers(ledgers: LedgerClasses[float], recipe: Recipe, *, at_most: float = 1.0) -> float:
    """Charge the expected share of the fleet for a recipe, and return that share."""
    chance = float(recipe.participation.probability)
    willing = sum(
        weight for ledger, weight in ledgers.classes.values() if ledger.would_answer(recipe)
    )
    if chance * willing > at_most:
        chance = at_most / willing
    shares = ledgers.answer(
        recipe,
        take=lambda weight: (weight * chance, weight * (1.0 - chance)),
        join=lambda one, other: one + other,
    )
    return sum(shares)


def without_budget(ledgers: LedgerClasses[float], recipe: Recipe) -> str:
    """Say how many devices that a recipe addresses can't pay for it, and why; "" if all can."""
    share, heaviest, why = 0.0, 0.0, None
    for ledger, weight in ledgers.classes.values():
        if not ledger.is_asked(recipe) or ledger.would_answer(recipe):
            continue
        share += weight
        if weight > heaviest:
            heaviest, why = weight, ledger.payable(recipe)[1]
    if why is None or share < _FEW:
        return ""
    return f"About {share:.0%} of the devices have too little budget left for it: {why}."


def fresh_share(ledgers: LedgerClasses[float], study: str) -> float:
    """The share of the fleet that has answered nothing in a study yet."""
    return sum(weight for ledger, weight in ledgers.classes.values() if ledger.is_new_to(study))


def new_to_study(share: float) -> str:
    """Say which share of the fleet has answered nothing in a study yet."""
    if share <= 0.0:
        return "Every device has answered in this study."
    if share >= 1.0:
        return "No device has answered in this study yet."
    return f"{share:.0%} of the devices have not answered in this study yet."


def _has_renewed(recipe: Recipe, policy: Policy, now: int) -> bool:
    """Whether no device counts the cost of a recipe any more."""
    analysis = policy.analyses.get(recipe.analysis)
    periods = [policy.device.period, analysis.budget.period if analysis is not None else None]
    if any(period is None for period in periods):
        return False
    # Charges are dated ahead, and renew by checkpoints that may be as old as the policy permits.
    late = MAX_SKEW + policy.checkpoint_max_age
    longest = max(period for period in periods if period is not None)
    return now >= recipe.closes + late + longest


def _at_once(recipe: Recipe, policy: Policy) -> int:
    """How many answers of one device can count against a budget at the same time."""
    analysis = policy.analyses.get(recipe.analysis)
    periods = [policy.device.period, analysis.budget.period if analysis is not None else None]
    known = [period for period in periods if period is not None]
    if recipe.series is None or len(known) < len(periods):
        return recipe.answers
    return min(recipe.answers, -(-max(known) // recipe.series.every))


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyBudget:
    """The budgets of a device that answered every round it could."""

    limits: tuple[Standing, ...]  # the device's, the analysis's, its fields'
    fresh_devices: float  # share of the fleet that has answered nothing in this study yet
    ledger: LedgerModel  # the fullest one
    others: int = 0  # questions of other analysts that are counted in it, from the public log
    unknown: str = ""  # why more may be spent than this, if that is so

    def more(self, question: Question) -> int:
        """Count how many questions of this cost such a device could still answer."""
        return question.cost().more

    def explain(self) -> str:
        lines = [
            f"{new_to_study(self.fresh_devices)} A device that answered every question "
            "it could has spent:"
        ]
        lines.extend(
            f"{standing.limit}: epsilon {decimal_text(standing.spent.epsilon)} of "
            f"{decimal_text(standing.allowed.epsilon)}, delta "
            f"{number_text(standing.spent.delta)} of {number_text(standing.allowed.delta)}, "
            f"{standing.reports} of {standing.allowed_reports} reports"
            for standing in self.limits
        )
        if self.others:
            lines.append(
                f"This counts {self.others:,} questions of other analysts from the public log, as "
                "if every device had answered them."
            )
        if self.unknown:
            lines.append(f"What other analysts have asked is unknown: {self.unknown}.")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return paragraphs(self.explain())


def study_budget(study: Study) -> StudyBudget:
    """The most that devices can have spent: our rounds, and others' recipes in the public log."""
    fleet, others = study.fleet, study.fleet.others()
    own = expected_ledgers(fleet, withdrawn=True)
    fullest = with_others(own, others.recipes, fleet.clock.now()).fullest
    return StudyBudget(
        limits=tuple(limit.standing() for limit in fullest.limits(study.analysis)),
        fresh_devices=fresh_share(expected_ledgers(fleet), study.name),
        ledger=fullest,
        others=len(others.recipes),
        unknown=others.problem,
    )
