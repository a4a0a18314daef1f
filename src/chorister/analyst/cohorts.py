"""Which devices answer which round, and what each round may cost.

- If the policy lets a device answer every round, everyone is asked each time. The budget is split
  so that each round gets its share of 1/sigma^2.
- If not, the rounds go to disjoint cohorts: a device answers at most one of them, with the whole
  budget. Shares are of all devices; a recipe carries the probability given that a device has not
  answered before. A round that would stay below the policy's smallest cohort gets as many devices
  as it needs from the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from chorister.analyst.allowance import (
    PlanBudget,
    after_all,
    all_new,
    allowance,
    known_ledgers,
)
from chorister.analyst.arguments import (
    Real,
    as_count,
    as_exact,
    as_list,
    as_participation,
    as_positive,
    as_reads,
)
from chorister.analyst.request import (
    PrivacyRequest,
    budgets_of,
    expected_cohort,
    refs_of,
    six_digits,
)
from chorister.analyst.spending import LedgerModel
from chorister.analyst.tables import paragraphs
from chorister.canonical import decimal_text
from chorister.errors import BudgetExceeded, CohortTooSmall, InvalidInput
from chorister.policy import Crowd
from chorister.policy.values import number_text
from chorister.privacy import Mechanism, OneHotRandomizer
from chorister.privacy.decimals import DOWN
from chorister.recipe import Participation, Privacy
from chorister.recipe.outlook import hides_everything

if TYPE_CHECKING:
    from chorister.analyst.study import Study

Cohorts: TypeAlias = Literal["everyone", "disjoint"]
_BISECTIONS: Final = 14  # when searching for the scale of epsilons
_HALVINGS: Final = 10  # when searching for rounds that fit into what is left
_BINS: Final = 1000  # of a planned round; the noise in one bin hardly depends on it


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRound:
    """The cost and the expected accuracy of one round."""

    privacy: Privacy
    participation: Participation
    expected_reports: int
    std_error: float  # of a bin that nobody holds, in devices
    target: int | None = None  # reports at which the round ends; None: at the end of its window

    @property
    def epsilon(self) -> Decimal:
        return self.privacy.epsilon

    @property
    def local_epsilon(self) -> Decimal:
        return self.privacy.local_epsilon

    @property
    def min_cohort(self) -> int:
        return self.privacy.min_cohort

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments for `study.histogram(features, **planned.settings)`."""
        privacy = self.privacy
        return {
            "local_epsilon": privacy.local_epsilon,
            "epsilon": privacy.epsilon,
            "delta": privacy.delta,
            "min_cohort": privacy.min_cohort,
            "mechanism": privacy.mechanism,
            "crowd": privacy.crowd,
            "report": privacy.report,
            "participation": self.participation,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundsPlan:
    """All rounds of an algorithm, priced before the first is asked."""

    cohorts: Cohorts
    rounds: tuple[PlannedRound, ...]
    epsilon: Decimal  # the most that one device is charged, by the policy's composition
    delta: Decimal
    fields: tuple[str, ...] = ()  # what all rounds read
    devices: int = 0  # that the plan counts on
    note: str = ""  # whether rounds pay here, as the algorithm that planned them says
    warnings: tuple[str, ...] = ()  # why it would be a waste to run it
    remarks: tuple[str, ...] = ()  # what is left after earlier questions, and what is unknown

    def explain(self) -> str:
        who = (
            "every device answers every round"
            if self.cohorts == "everyone"
            else "every device answers at most one round"
        )
        count = "1 round" if len(self.rounds) == 1 else f"{len(self.rounds)} rounds"
        lines = [
            f"{count}; {who}. No device spends more than epsilon {decimal_text(self.epsilon)}, "
            f"delta {number_text(self.delta)}."
        ]
        lines.extend(
            f"Round {number}: epsilon {decimal_text(planned.epsilon)}, local epsilon "
            f"{decimal_text(planned.local_epsilon)}, at least {planned.min_cohort:,} devices of "
            f"{planned.expected_reports:,} expected; an empty bin reads 0 ± "
            f"{planned.std_error:,.1f} devices."
            + (f" It ends at {planned.target:,} reports." if planned.target is not None else "")
            for number, planned in enumerate(self.rounds, start=1)
        )
        if self.note:
            lines.append(self.note)
        lines.extend((*self.remarks, *(f"Don't run it: {warning}" for warning in self.warnings)))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return paragraphs(self.explain())


def conditional_shares(shares: Iterable[Real]) -> list[Decimal]:
    """Convert shares of all devices to probabilities given that a device has not answered."""
    left, found = Decimal(1), []
    for share in (as_exact(each, "shares") for each in shares):
        if not 0 < share <= 1 or share > left + Decimal("1e-9"):
            raise InvalidInput("shares must be above 0 and add up to at most 1")
        chance = min(Decimal(1), DOWN.divide(share, left)) if left > 0 else Decimal(1)
        # The last cohort gets what rounding leaves over.
        if Decimal(1) - chance < Decimal("1e-9"):
            chance = Decimal(1)
        found.append(chance.quantize(Decimal("1e-12"), context=DOWN).normalize(DOWN))
        left = max(Decimal(0), left - share)
    if not found:
        raise InvalidInput("a plan needs at least one round")
    return found


def reports_allowed(study: Study, reads: Mapping[str, Iterable[str]]) -> int:
    """Return how many more reports about these fields a device may send in this period.

    That is what the policy allows, less what was sent: by the share of the fleet that can pay most.
    """
    refs = refs_of(as_reads(reads))
    own, bound = known_ledgers(study.fleet)
    for ledgers in (bound, own):
        with suppress(BudgetExceeded):
            return allowance(study, ledgers, refs).reports
    budgets = budgets_of(study.fleet.policy, study.terms, refs)
    return min(budget.reports for budget in budgets)  # nothing is left: the plan will say what


def choose_cohorts(
    study: Study, rounds: int, *, reads: Mapping[str, Iterable[str]], wanted: Cohorts | None = None
) -> Cohorts:
    """Choose everyone if the policy lets a device answer every round, else disjoint cohorts."""
    if wanted not in (None, *get_args(Cohorts)):
        raise InvalidInput(f"cohorts is everyone or disjoint, not {wanted!r}", field="cohorts")
    allowed = reports_allowed(study, reads)
    if wanted == "everyone" and allowed < rounds:
        raise InvalidInput(
            f"a device may send {allowed} more reports, fewer than {rounds} rounds: use disjoint "
            "cohorts"
        )
    return wanted or ("everyone" if allowed >= rounds > 1 else "disjoint")


def enough_for_each(
    shares: Sequence[Real], devices: int, smallest: int, margin: float = 1.0
) -> list[Decimal]:
    """Adjust shares of the devices so that none is too small for the smallest cohort.

    What small rounds need is taken from the others in proportion. Raises `CohortTooSmall` if there
    are not enough devices for all.
    """
    given = [as_positive(share, "shares") for share in shares]
    total = sum(given, Decimal(0))
    least = _least_share(devices, smallest, margin)
    if least is None or least * len(given) > total:
        raise CohortTooSmall(
            f"{len(given)} rounds for different devices need more than {devices:,} devices, as "
            f"nothing is released below {smallest:,}: plan fewer rounds, ask one question with "
            "`study.histogram`, or let the policy allow one report per round, so that everyone can "
            "answer all of them"
            if len(given) > 1
            else f"{devices:,} devices may not reach the {smallest:,} below which nothing is "
            "released: wait until there are more, or let the policy allow smaller cohorts",
            reports=round(devices * float(total) / max(len(given), 1)),
            needed=smallest,
        )
    raised: set[int] = set()
    while True:
        free = sum((share for i, share in enumerate(given) if i not in raised), Decimal(0))
        scale = DOWN.divide(total - least * len(raised), free) if free else Decimal(0)
        found = [least if i in raised else share * scale for i, share in enumerate(given)]
        small = {i for i, share in enumerate(found) if share < least and i not in raised}
        if not small:
            return found if raised else given
        raised |= small


def _least_share(devices: int, smallest: int, margin: float) -> Decimal | None:
    """The smallest share of the devices that safely reaches the smallest cohort, in thousandths."""
    for thousandth in range(1, 1001):
        share = Decimal(thousandth) / 1000
        if expected_cohort(devices * float(share), share, margin) >= max(smallest, 2):
            return share
    return None


def plan_rounds(
    study: Study,
    shares: Sequence[Real],
    *,
    reads: Mapping[str, Iterable[str]],
    epsilon: Real | None = None,
    delta: Real | None = None,
    mechanism: Mechanism | str | None = None,
    crowd: Crowd | None = None,
    cohorts: Cohorts | None = None,
    devices: int | None = None,
    target: Real | None = None,
) -> RoundsPlan:
    """Plan rounds over these fields, and state all costs before the first is asked.

    `shares` are of the devices if the cohorts are disjoint, and of 1/sigma^2 if everyone answers
    every round; `cohorts` chooses between the two (default: by the number of reports that a device
    has left). `epsilon` and `delta` are totals for one device (default: what earlier questions have
    left of its budgets; a delta in proportion to epsilon). Raises `BudgetExceeded` if less is left.

    Rounds end at their `target` instead of at the end of their windows: a number of reports for
    each, or a share from 0 to 1 of those that each expects. The minimum cohort follows from it.
    """
    reads = as_reads(reads)
    shares = as_list(shares, "shares", "[0.3, 0.7]")
    if unknown := [ref for ref in refs_of(reads) if ref not in study.terms.fields]:
        raise InvalidInput(f"this analysis may not read {unknown[0]}", field="reads")
    given = as_count(devices, "devices")
    known = given if given is not None else study.fleet.devices
    if known is None:
        raise InvalidInput("pass the approximate number of devices: devices=...")
    chosen = choose_cohorts(study, len(shares), reads=reads, wanted=cohorts)
    refs, smallest, margin = refs_of(reads), study.terms.cohort.smallest, study.fleet.margin
    if chosen == "disjoint":
        conditional_shares(enough_for_each(shares, known, smallest, margin))  # raises if they can't
    else:
        enough_for_each((1,), known, smallest, margin)
    budget = PlanBudget.of(study, refs, chosen, len(shares), epsilon, delta)
    devices_left = math.floor(known * budget.share)
    try:
        enough_for_each(shares if chosen == "disjoint" else (1,), devices_left, smallest, margin)
    except CohortTooSmall:
        if budget.lacking is None:
            raise
        raise CohortTooSmall(
            f"only {devices_left:,} of {known:,} devices have enough budget left, too few for "
            f"these rounds: {budget.lacking}",
            reports=devices_left,
            needed=smallest,
        ) from None
    wanted = None if target is None else as_exact(target, "target")
    planner = _Planner(study, refs, mechanism, crowd, budget.ledger, wanted)
    if chosen == "everyone":
        each = [float(as_exact(share, "shares")) for share in shares]
        plan = planner.everyone(each, devices_left, budget.epsilon, budget.delta)
    else:
        rounds, left = [], 1.0
        again = len(shares) == 1 and not all_new(study)
        for chance in conditional_shares(enough_for_each(shares, devices_left, smallest, margin)):
            # Being in this cohort depends on the coins of the earlier rounds as well.
            share = left * float(chance)
            who = as_participation(None if again else chance)
            rounds.append(
                planner.round(budget.epsilon, budget.delta, who, devices_left * share, share)
            )
            left *= 1.0 - float(chance)
        plan = RoundsPlan(
            cohorts=chosen, rounds=tuple(rounds), epsilon=budget.epsilon, delta=budget.delta
        )
    return replace(
        plan,
        fields=refs,
        devices=known,
        remarks=budget.remarks,
        warnings=tuple(drowned(plan.rounds)),
    )


def drowned(rounds: Sequence[PlannedRound]) -> Iterator[str]:
    """Say which rounds could show nothing, whatever devices hold."""
    for number, planned in enumerate(rounds, start=1):
        if hides_everything(planned.std_error, planned.expected_reports):
            yield (
                f"in round {number}, even a bin that all {planned.expected_reports:,} devices hold "
                f"would not stand out from the noise of ±{planned.std_error:,.0f} devices. Give "
                "more epsilon, plan fewer rounds, or wait for more devices."
            )


@dataclass(frozen=True)
class _Planner:
    study: Study
    refs: tuple[str, ...]
    mechanism: Mechanism | str | None
    crowd: Crowd | None
    ledger: LedgerModel  # of the devices that the plan is for
    target: Decimal | None

    def round(
        self,
        epsilon: Decimal,
        delta: Decimal,
        who: Participation,
        expected: float,
        share: float,
    ) -> PlannedRound:
        fleet = self.study.fleet
        cohort = expected_cohort(expected, Decimal(share), fleet.margin)
        reports, target = max(round(expected), 1), None
        if self.target is not None:
            target = reports = self._ending(reports)
            cohort = min(cohort, target)
        request = PrivacyRequest(
            epsilon=epsilon, delta=delta, mechanism=self.mechanism, crowd=self.crowd
        )
        privacy = request.resolve(fleet.policy, self.study.terms, self.refs, cohort=cohort)
        randomizer = OneHotRandomizer(
            mechanism=privacy.mechanism, local_epsilon=privacy.local_epsilon, length=_BINS
        )
        if target is not None and target < privacy.min_cohort:
            raise InvalidInput(
                f"a round that ends at {target:,} reports is below its minimum cohort of "
                f"{privacy.min_cohort:,}: raise the target, or leave it out",
                field="target",
            )
        return PlannedRound(
            privacy=privacy,
            participation=who,
            expected_reports=reports,
            std_error=float(randomizer.std_error(reports, 0.0, privacy.noise_trials)),
            target=target,
        )

    def _ending(self, expected: int) -> int:
        """At how many reports a round ends that expects so many."""
        wanted = Decimal(1) if self.target is None else self.target
        if 0 < wanted <= 1:
            return max(math.floor(float(wanted) * expected), 1)
        if wanted != wanted.to_integral_value() or not 1 < wanted <= expected:
            raise InvalidInput(
                "the target of a round is a share from 0 to 1 of the reports that it expects, or "
                f"a whole number of reports: here up to {expected:,}, not {decimal_text(wanted)}",
                field="target",
            )
        return int(wanted)

    def everyone(
        self, shares: list[float], devices: int, epsilon: Decimal, delta: Decimal
    ) -> RoundsPlan:
        """Epsilons proportional to the roots of the shares, as large as the budgets allow."""
        if min(shares) <= 0.0:
            raise InvalidInput("shares must be above 0", field="shares")
        roots = [math.sqrt(share / sum(shares)) for share in shares]
        each_delta = six_digits(DOWN.divide(delta, Decimal(len(shares))))
        basic = float(epsilon) / sum(roots)  # always valid
        low, high = basic, float(epsilon) / max(roots)

        def at(scale: float) -> list[PlannedRound]:
            epsilons = [six_digits(Decimal(scale * root)) for root in roots]
            everyone = as_participation(None)
            return [self.round(each, each_delta, everyone, devices, 1.0) for each in epsilons]

        best = at(low)
        spent = self._spent(best, epsilon, delta)
        for _ in range(_HALVINGS):  # what Renyi divergences have left is not a difference
            if spent is not None:
                break
            low, high = low / 2.0, low
            best = at(low)
            spent = self._spent(best, epsilon, delta)
        if spent is None:
            raise InvalidInput(
                "the policy's budgets do not allow these rounds: plan fewer, or a smaller epsilon"
            )
        compositions = (self.study.terms.budget, self.study.fleet.policy.device)
        if low == basic and any(budget.composition == "basic" for budget in compositions):
            high = low  # epsilons add up, so there is nothing to gain
        for _ in range(_BISECTIONS):
            if high - low <= 1e-4 * high:
                break
            middle = (low + high) / 2.0
            trial = at(middle)
            found = self._spent(trial, epsilon, delta)
            if found is None:
                high = middle
            else:
                low, best, spent = middle, trial, found
        return RoundsPlan(cohorts="everyone", rounds=tuple(best), epsilon=spent[0], delta=spent[1])

    def _spent(
        self, rounds: list[PlannedRound], epsilon: Decimal, delta: Decimal
    ) -> tuple[Decimal, Decimal] | None:
        """What a device that answers all rounds spends; None if a limit does not allow it."""
        try:
            after_all(self.study, self.ledger, self.refs, rounds)
            alone = LedgerModel.empty(self.study.fleet.policy)
            ledger = after_all(self.study, alone, self.refs, rounds)
        except BudgetExceeded:
            return None
        own = f"analyses.{self.study.analysis}.budget"
        limits = ledger.limits(self.study.analysis)
        after = next(limit.standing() for limit in limits if limit.path == own).spent
        if after.epsilon > epsilon or after.delta > delta:
            return None
        return after.epsilon, after.delta
