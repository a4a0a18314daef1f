"""What is left to spend, and to which share of the fleet: what a plan may count on.

A plan counts everything that is known to be spent: our own rounds from the archive, and other
analysts' recipes from the public log, as if every device had answered those. It keeps what it
counted (its *basis*), because a run that resumes has to plan the same again, although its own
rounds are spent by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from chorister.analyst.arguments import Real, as_positive
from chorister.analyst.request import budgets_of, proportional_delta
from chorister.analyst.rounds import PlanBasis
from chorister.analyst.spending import LedgerClasses, LedgerModel, expected_ledgers, with_others
from chorister.canonical import decimal_text
from chorister.device.ledger.budget import Charge, Limit
from chorister.errors import BudgetExceeded, CohortTooSmall
from chorister.policy import Renyi
from chorister.policy.values import number_text

if TYPE_CHECKING:
    from chorister.analyst.cohorts import PlannedRound
    from chorister.analyst.fleet import Fleet, OthersQuestions
    from chorister.analyst.study import Study

_BASIS: Final[ContextVar[PlanBasis | None]] = ContextVar("basis", default=None)


@contextmanager
def planning_by(basis: PlanBasis | None) -> Iterator[None]:
    """Plan by what an earlier plan counted as spent; None: by everything that is spent now."""
    token = _BASIS.set(basis)
    try:
        yield
    finally:
        _BASIS.reset(token)


def basis_now(fleet: Fleet) -> PlanBasis:
    """What a plan that is made now counts as spent."""
    return PlanBasis(
        sequence=len(fleet.archive.all_rounds()),
        time=fleet.clock.now(),
        others=tuple(recipe.digest.hex() for recipe in fleet.others().recipes),
    )


def known_ledgers(fleet: Fleet) -> tuple[LedgerClasses[float], LedgerClasses[float]]:
    """The ledgers after our own rounds, and the same with everything that others have asked."""
    basis = _BASIS.get()
    own = expected_ledgers(fleet, basis=basis)
    recipes = fleet.others().recipes
    if basis is not None:
        counted = set(basis.others)
        recipes = tuple(recipe for recipe in recipes if recipe.digest.hex() in counted)
    time = fleet.clock.now() if basis is None else basis.time
    return own, with_others(own, recipes, time) if recipes else own


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """What devices with one ledger may still spend, and the share of the fleet that may."""

    ledger: LedgerModel
    epsilon: Decimal
    delta: Decimal
    reports: int
    share: float  # of the fleet that has at least as much left


def allowance(
    study: Study, ledgers: LedgerClasses[float], refs: Sequence[str], *, fresh: bool = False
) -> Allowance:
    """What is left where it is worth most: the most epsilon times devices.

    With `fresh`, only devices count that are new to the study. Raises `BudgetExceeded`, naming the
    limit, if nobody has anything left.
    """
    found = [
        (_left(study, ledger, refs), weight)
        for ledger, weight in ledgers.classes.values()
        if not fresh or ledger.is_new_to(study.name)
    ]
    if not found:
        raise _all_answered(study)
    able = [
        (left, weight) for left, weight in found if left.reports and left.delta > 0 < left.epsilon
    ]
    if not able:
        ledger = max(found, key=lambda each: each[1])[0].ledger
        raise exhausted(study, ledger, refs)
    best = [
        replace(
            left,
            share=sum(
                weight
                for other, weight in able
                if other.epsilon >= left.epsilon
                and other.delta >= left.delta
                and other.reports >= left.reports
            ),
        )
        for left, _ in able
    ]
    return max(best, key=lambda left: float(left.epsilon) * left.share)


def _left(study: Study, ledger: LedgerModel, refs: Sequence[str]) -> Allowance:
    limits = _limits(study, ledger, refs)
    return Allowance(
        ledger=ledger,
        epsilon=min(limit.standing().remaining.epsilon for limit in limits),
        delta=min(_delta_left(limit) for limit in limits),
        reports=min(limit.standing().remaining_reports for limit in limits),
        share=0.0,
    )


def _limits(study: Study, ledger: LedgerModel, refs: Sequence[str]) -> list[Limit]:
    """The limits that a question about these fields is charged to."""
    fields = {f"analyses.{study.analysis}.fields.{ref}" for ref in refs}
    return [
        limit
        for limit in ledger.limits(study.analysis)
        if limit.path in fields or ".fields." not in limit.path
    ]


def _delta_left(limit: Limit) -> Decimal:
    """A Renyi filter spends its whole delta with the first charge, and no more after it."""
    standing = limit.standing()
    renyi = all(isinstance(each, Renyi) for each in limit.compositions)
    return standing.allowed.delta if renyi else standing.remaining.delta


def can_pay(
    study: Study, ledger: LedgerModel, refs: Sequence[str], *, epsilon: Decimal, delta: Decimal,
    reports: int,
) -> bool:  # fmt: skip
    """Whether devices with this ledger have as much left."""
    left = _left(study, ledger, refs)
    return left.epsilon >= epsilon and left.delta >= delta and left.reports >= reports


def all_new(study: Study) -> bool:
    """Whether no device has answered anything in this study."""
    return all(ledger.is_new_to(study.name) for ledger in known_ledgers(study.fleet)[0].ledgers)


def exhausted(
    study: Study,
    ledger: LedgerModel,
    refs: Sequence[str],
    *,
    epsilon: Decimal | None = None,
    delta: Decimal | None = None,
    reports: int = 1,
) -> BudgetExceeded:
    """Say which limit has too little left for this: by default, for anything at all."""
    for limit in _limits(study, ledger, refs):
        standing = limit.standing()
        wanted = epsilon if epsilon is not None else standing.allowed.epsilon
        if standing.remaining.epsilon < (wanted if epsilon is not None else Decimal("1e-9")):
            return BudgetExceeded(
                spent=standing.spent.epsilon, asked=wanted, allowed=standing.allowed.epsilon,
                field=f"{limit.path}.epsilon",
            )  # fmt: skip
        wanted = delta if delta is not None else standing.allowed.delta
        left = _delta_left(limit)
        if left < wanted if delta is not None else left <= 0:
            return BudgetExceeded(
                spent=standing.spent.delta, asked=wanted, allowed=standing.allowed.delta,
                field=f"{limit.path}.delta",
            )  # fmt: skip
        if standing.remaining_reports < reports:
            return BudgetExceeded(
                spent=Decimal(standing.reports), asked=Decimal(reports),
                allowed=Decimal(standing.allowed_reports), field=f"{limit.path}.reports",
            )  # fmt: skip
    limit = _limits(study, ledger, refs)[0]
    standing = limit.standing()
    return BudgetExceeded(
        spent=standing.spent.epsilon, asked=epsilon or standing.allowed.epsilon,
        allowed=standing.allowed.epsilon, field=f"{limit.path}.epsilon",
    )  # fmt: skip


def _all_answered(study: Study) -> CohortTooSmall:
    return CohortTooSmall(
        f"every device has answered in the study {study.name!r} already, and these rounds go to "
        "devices that have not: begin a new study, which starts with all devices that have budget "
        "left",
        reports=0,
        needed=study.terms.cohort.smallest,
    )


# --- What a plan may spend ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanBudget:
    """What a plan may spend, and the share of the fleet that can pay for it."""

    epsilon: Decimal
    delta: Decimal
    ledger: LedgerModel
    share: float
    lacking: BudgetExceeded | None  # why most of the others can't pay
    remarks: tuple[str, ...]

    @classmethod
    def of(
        cls,
        study: Study,
        refs: tuple[str, ...],
        cohorts: str,
        rounds: int,
        epsilon: Real | None,
        delta: Real | None,
    ) -> PlanBudget:
        """What is given, or else all that is left; raises `BudgetExceeded` if that is too little.

        What others may have spent is left out of what is offered, but refuses nothing: nobody knows
        which devices answered them.
        """
        own, bound = known_ledgers(study.fleet)
        # One question to everyone does not need devices that are new to the study.
        fresh = cohorts == "disjoint" and rounds > 1
        reports = rounds if cohorts == "everyone" else 1
        offered = allowance(study, bound if epsilon is None else own, refs, fresh=fresh)
        whole = offered.epsilon if epsilon is None else as_positive(epsilon, "epsilon")
        budgets = budgets_of(study.fleet.policy, study.terms, refs)
        if delta is not None:
            part = as_positive(delta, "delta")
        elif epsilon is None:
            part = offered.delta
        else:
            part = min(proportional_delta(budgets, whole), offered.delta)
        paying = [
            (ledger, weight)
            for ledger, weight in own.classes.values()
            if (not fresh or ledger.is_new_to(study.name))
            and can_pay(study, ledger, refs, epsilon=whole, delta=part, reports=reports)
        ]
        if not paying:
            raise exhausted(study, offered.ledger, refs, epsilon=whole, delta=part, reports=reports)
        share = min(1.0, sum(weight for _, weight in paying))
        return cls(
            epsilon=whole,
            delta=part,
            ledger=max(paying, key=lambda each: each[1])[0],
            share=1.0 if share > 1.0 - 1e-9 else share,
            lacking=_lacking(study, own, refs, whole, part, reports),
            remarks=tuple(_remarks(study, refs, own, bound, whole, part, reports, share)),
        )


def _lacking(
    study: Study, own: LedgerClasses[float], refs: tuple[str, ...], epsilon: Decimal,
    delta: Decimal, reports: int,
) -> BudgetExceeded | None:  # fmt: skip
    """Which limit keeps most of the devices that can't pay from paying; None if all can."""
    asked: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "reports": reports}
    poor = [
        (weight, ledger)
        for ledger, weight in own.classes.values()
        if not can_pay(study, ledger, refs, **asked)
    ]
    if not poor:
        return None
    return exhausted(study, max(poor, key=lambda each: each[0])[1], refs, **asked)


def _remarks(
    study: Study,
    refs: tuple[str, ...],
    own: LedgerClasses[float],
    bound: LedgerClasses[float],
    epsilon: Decimal,
    delta: Decimal,
    reports: int,
    share: float,
) -> Iterator[str]:
    if any(ledger.charges for ledger in own.ledgers):
        left = f"{share:.0%} of the devices have that much left after earlier questions."
        yield f"It needs epsilon {decimal_text(epsilon)}, delta {number_text(delta)}: {left}"
    refused = None
    if not any(
        can_pay(study, ledger, refs, epsilon=epsilon, delta=delta, reports=reports)
        for ledger in bound.ledgers
    ):
        refused = exhausted(
            study, bound.fullest, refs, epsilon=epsilon, delta=delta, reports=reports
        )
    yield from others_in_words(study.fleet.others(), refused)


# --- Whether a whole plan fits ------------------------------------------------------------------


def charge_of(study: Study, refs: Sequence[str], planned: PlannedRound, number: int) -> Charge:
    """What a planned round will charge."""
    return Charge(
        recipe=f"{number:064x}",
        study="plan",
        analysis=study.analysis,
        fields=tuple(refs),
        privacy=planned.privacy,
    )


def after_all(
    study: Study, ledger: LedgerModel, refs: Sequence[str], rounds: Sequence[PlannedRound]
) -> LedgerModel:
    """The ledger of a device that answers all rounds; raises `BudgetExceeded` if it can't."""
    for number, planned in enumerate(rounds):
        charge = charge_of(study, refs, planned, number)
        ledger.check(charge)
        ledger = ledger.after(charge)
    return ledger


def require_affordable(
    study: Study, refs: Sequence[str], rounds: Sequence[PlannedRound], devices: int
) -> None:
    """Raise unless all rounds can be answered by enough devices, with the budgets as they are now.

    Called when a run begins: between planning and asking, something else may have been asked.
    """
    disjoint = any(planned.participation.once_per_study for planned in rounds)
    answering, refused = 0.0, None
    fleet = study.fleet
    for ledger, weight in expected_ledgers(fleet).classes.values():
        if disjoint and not ledger.is_new_to(study.name):
            continue
        try:
            if disjoint:
                for planned in rounds:
                    after_all(study, ledger, refs, (planned,))
            else:
                after_all(study, ledger, refs, rounds)
        except BudgetExceeded as error:
            refused = error
        else:
            answering += weight
    least = max(planned.min_cohort for planned in rounds)
    if answering * devices >= least or (answering >= 1.0 - 1e-9):
        return
    if refused is not None:
        raise refused
    raise _all_answered(study)


def others_in_words(others: OthersQuestions, refused: BudgetExceeded | None) -> list[str]:
    """What other analysts may have spent, and what can't be known, in sentences."""
    lines = []
    if others.recipes and refused is not None:
        count = len(others.recipes)
        lines.append(
            f"The public log has {count:,} question{'' if count == 1 else 's'} of other analysts. "
            f"A device that answered all of them would refuse this one ({refused}). How many did "
            "is unknown, so fewer reports may come than expected, or none."
        )
    if others.problem:
        lines.append(f"What other analysts have asked is unknown: {others.problem}.")
    return lines
