"""From what an analyst says to what a recipe needs: the query, the fields read, the privacy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import lru_cache
from typing import Final

from pydantic import ValidationError

from chorister.analyst.features import Real, as_exact
from chorister.canonical import culprit
from chorister.encoding import AnyFeature, DenyList, Encoding
from chorister.errors import InvalidInput
from chorister.policy import Analysis, Crowd, FieldBudget, Policy, ReportKind
from chorister.policy.certify import Claim
from chorister.policy.model import Budget
from chorister.privacy import Mechanism, amplification
from chorister.privacy.decimals import DOWN
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON
from chorister.privacy.weights import BOUND_DELTA
from chorister.recipe import Arm, Participation, Privacy

__all__ = [
    "PrivacyRequest",
    "as_arms",
    "as_participation",
    "budgets_of",
    "expected_cohort",
    "reads_of",
    "refs_of",
    "simple_query",
    "smallest_share",
]

_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEP: Final = Decimal("0.0001")
_EVERYONE: Final = Participation(probability=Decimal(1), once_per_study=False)


def simple_query(
    policy: Policy, analysis: Analysis, features: Sequence[AnyFeature], deny: Sequence[DenyList]
) -> str:
    """A query that selects the features' columns, each a field of this analysis."""
    if analysis.query_class == "exact":
        if len(analysis.queries) == 1:
            return analysis.queries[0]
        listed = "; ".join(analysis.queries)
        raise InvalidInput(f"this analysis permits these queries only, give one: {listed}")
    chosen: dict[str, str] = {}
    for column in Encoding(tuple(features), tuple(deny)).columns:
        found = [ref for ref in analysis.fields if ref.partition(".")[2] == column]
        if len(found) != 1:
            known = ", ".join(analysis.fields)
            why = "several fields have" if found else "no field of this analysis has"
            raise InvalidInput(
                f"{why} the name of the column {column!r}: give a query that returns it; there "
                f"are the fields {known}"
            )
        chosen[column] = found[0]
    tables = list(dict.fromkeys(ref.partition(".")[0] for ref in chosen.values()))
    streams = [table for table in tables if table in policy.streams]
    if len(streams) > 1:
        raise InvalidInput(
            f"the columns are of several streams ({', '.join(streams)}): give a query that says "
            "which of their rows belong together"
        )
    items = ", ".join(
        f'"{ref.partition(".")[0]}"."{column}" AS "{column}"' for column, ref in chosen.items()
    )
    sources = ", ".join(f'"{table}"' for table in tables)
    return f"SELECT {items} FROM {sources}"  # noqa: S608 (names are identifiers)


def reads_of(query: str, analysis: Analysis) -> dict[str, tuple[str, ...]]:
    """The analysis' fields whose names, and whose stream's name, occur in the query."""
    names = {word.lower() for word in _WORD.findall(query)}
    reads: dict[str, list[str]] = {}
    for ref in analysis.fields:
        table, _, field = ref.partition(".")
        if {table, field} <= names:
            reads.setdefault(table, []).append(field)
    if not reads:
        raise InvalidInput(
            f"the query names no field of this analysis ({', '.join(analysis.fields)}); say what "
            "it reads: reads={stream: [field, ...]}"
        )
    return {table: tuple(names) for table, names in reads.items()}


def refs_of(reads: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """The fields as "stream.field"."""
    return tuple(f"{table}.{field}" for table, names in reads.items() for field in names)


def as_participation(value: Participation | Real | str | None) -> Participation:
    """Who answers: "everyone", or a share of those that answered nothing in this study yet."""
    if value is None or value == "everyone":
        return _EVERYONE
    if isinstance(value, Participation):
        return value
    share = as_exact(value)
    if not 0 < share <= 1:
        raise InvalidInput(f'participation is "everyone" or a share in (0, 1], not {value!r}')
    return Participation(
        probability=share.quantize(Decimal("1e-12"), context=DOWN).normalize(DOWN),
        once_per_study=True,
    )


def as_arms(value: Mapping[str, int] | Sequence[str]) -> tuple[Arm, ...]:
    """The arms of an experiment: names with weights, or names of equal weight."""
    weights = value if isinstance(value, Mapping) else dict.fromkeys(value, 1)
    if isinstance(value, str) or len(weights) != len(value) or len(weights) == 1:
        raise InvalidInput("an experiment has two or more arms with different names")
    try:
        return tuple(Arm(name=name, weight=weight) for name, weight in weights.items())
    except ValidationError as error:
        field, why = culprit(error)
        raise InvalidInput(f"arms: {field}: {why}") from None


def smallest_share(arms: Sequence[Arm]) -> float:
    """Of the devices that answer: the share of the arm that fewest of them draw."""
    if not arms:
        return 1.0
    return min(arm.weight for arm in arms) / sum(arm.weight for arm in arms)


def expected_cohort(expected: float, probability: Decimal, margin: float) -> int:
    """A minimum cohort that is reached almost surely when so many devices are expected to answer.

    Six standard deviations of the participation coins, and a margin for what nobody knows.
    """
    p = float(probability)
    spread = math.sqrt(max(expected * (1.0 - p), 0.0))
    return math.floor(margin * expected - 6.0 * spread)


def budgets_of(
    policy: Policy, analysis: Analysis, refs: Iterable[str]
) -> list[Budget | FieldBudget]:
    """All budgets that a question about these fields is charged to."""
    return [policy.device, analysis.budget, *(analysis.fields[ref] for ref in refs)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacyRequest:
    """What an analyst may say about privacy; the rest follows from the policy."""

    local_epsilon: Real | None = None
    epsilon: Real | None = None
    delta: Real | None = None
    min_cohort: int | None = None
    mechanism: Mechanism | str | None = None
    crowd: Crowd | None = None
    report: ReportKind | None = None

    def resolve(
        self, policy: Policy, analysis: Analysis, refs: Sequence[str], *, cohort: int | None
    ) -> Privacy:
        """All of it. `cohort` is a minimum that will surely be reached, if anybody knows one.

        Epsilon and delta default to an equal share of what the budgets allow for as many reports
        as they allow. Given them, the local epsilon is the largest that the policy permits and the
        cohort pays for: at a fixed epsilon that has the least noise.
        """
        unknown = [ref for ref in refs if ref not in analysis.fields]
        if unknown:
            raise InvalidInput(f"{unknown[0]} is not open to this analysis")
        budgets = budgets_of(policy, analysis, refs)
        reports = min(budget.reports for budget in budgets)
        least_epsilon = min(budget.epsilon for budget in budgets)
        least_delta = min(budget.delta for budget in budgets)
        crowd = self.crowd or analysis.crowds[0]
        try:
            mechanism = Mechanism(self.mechanism or analysis.mechanisms[0])
        except ValueError:
            raise InvalidInput(f"mechanism must be one of {', '.join(Mechanism)}") from None
        report = self.report or analysis.report_kinds[0]
        epsilon = _share(least_epsilon, reports) if self.epsilon is None else as_exact(self.epsilon)
        delta = _share(least_delta, reports) if self.delta is None else as_exact(self.delta)
        limit = min(
            analysis.budget.local_epsilon, *(analysis.fields[ref].local_epsilon for ref in refs)
        )
        if mechanism is Mechanism.SYMMETRIC:
            limit = DOWN.divide(limit, Decimal(2))
        limit = min(limit, MAX_LOCAL_EPSILON).quantize(_STEP, context=DOWN)
        fraction = analysis.honest_fraction if crowd == "honest" else None
        if crowd == "honest" and fraction is None:
            raise InvalidInput("this analysis does not permit an honest crowd: leave out crowd")
        if self.local_epsilon is None:
            wanted = self.min_cohort if self.min_cohort is not None else cohort
            if wanted is None:
                local = limit
            else:
                wanted = min(wanted, analysis.cohort.largest)
                local = min(limit, _largest(wanted, epsilon, delta, mechanism, crowd, fraction,
                                            report))  # fmt: skip
        else:
            local = as_exact(self.local_epsilon)
        claim = Claim(
            mechanism=mechanism,
            local_epsilon=local.normalize(DOWN),
            epsilon=epsilon.normalize(DOWN),
            delta=delta.normalize(DOWN),
            crowd=crowd,
            honest_fraction=fraction,
            report=report,
        )
        least = self.min_cohort
        if least is None:
            least = max(_least_cohort(claim), analysis.cohort.smallest)
        return Privacy(
            min_cohort=least, **{field.name: getattr(claim, field.name) for field in fields(claim)}
        )


@lru_cache(maxsize=1024)
def _least_cohort(claim: Claim) -> int:
    return claim.least_cohort()


def _share(whole: Decimal, parts: int) -> Decimal:
    """An equal part, rounded down to six digits."""
    part = DOWN.divide(whole, Decimal(parts))
    return part.quantize(Decimal(1).scaleb(part.adjusted() - 5), context=DOWN)


@lru_cache(maxsize=1024)
def _largest(
    cohort: int,
    epsilon: Decimal,
    delta: Decimal,
    mechanism: Mechanism,
    crowd: Crowd,
    fraction: object,
    report: ReportKind,
) -> Decimal:
    """The largest local epsilon that a cohort pays for."""
    if cohort < 2:
        raise InvalidInput(
            f"at most {max(cohort, 0):,} devices can be expected to answer, which hides nobody: "
            "ask a larger share, or say how many devices there are"
        )
    left = DOWN.subtract(delta, BOUND_DELTA) if report == "bounded" else delta
    if left <= 0:
        raise InvalidInput(f"bounded reports use {BOUND_DELTA} of delta: ask for more than {delta}")
    return amplification.local_epsilon(
        cohort=cohort,
        epsilon=epsilon,
        delta=left,
        mechanism=mechanism,
        crowd=crowd,
        honest_fraction=1 if fraction is None else fraction,  # type: ignore[arg-type]
    )
