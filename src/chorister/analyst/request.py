"""From what an analyst writes to what a recipe needs: features, query, fields read, privacy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import lru_cache
from typing import Final, TypeAlias, get_args

from pydantic import ValidationError

from chorister.canonical import first_error
from chorister.encoding import (
    AnyFeature,
    Categories,
    DenyList,
    Encoding,
    Grid,
    Intervals,
    PrefixTree,
    canonical_texts,
)
from chorister.errors import InvalidInput
from chorister.policy import Analysis, Crowd, FieldBudget, Policy, ReportKind
from chorister.policy.bounds import Claim
from chorister.policy.model import Budget
from chorister.policy.values import parse_duration
from chorister.privacy import Mechanism, amplification
from chorister.privacy.decimals import DOWN, as_decimal
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON
from chorister.privacy.weights import BOUND_DELTA
from chorister.recipe import Arm, Participation, Privacy

Real: TypeAlias = int | float | str | Decimal
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEP: Final = Decimal("0.0001")
_LEAST_DELTA: Final = 10 * BOUND_DELTA  # with less, bounded reports would take most of it
_EVERYONE: Final = Participation(probability=Decimal(1), once_per_study=False)


def as_exact(value: Real) -> Decimal:
    """Convert a number to the decimal that it prints as."""
    if isinstance(value, bool):
        raise InvalidInput("expected a number, not a boolean")
    try:
        return as_decimal(value)
    except (ArithmeticError, TypeError, ValueError):
        raise InvalidInput(f"{value!r} is not a number") from None


@contextmanager
def valid_input(prefix: str = "") -> Iterator[None]:
    """Raise `InvalidInput` where pydantic finds that something given is invalid."""
    try:
        yield
    except ValidationError as error:
        field, message = first_error(error)
        text = f"{prefix}{field}: {message}" if field else message
        raise InvalidInput(text, field=field) from None


def as_seconds(value: int | str, name: str) -> int:
    """Read a duration: seconds, or text such as "12h"."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise InvalidInput(f"{name}: {error}, or a number of seconds", field=name) from None


def as_count(value: int | None, name: str) -> int | None:
    """Read a whole number of devices, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidInput(f"{name} is a whole number, not {value!r}", field=name)
    return value


def as_names(value: Sequence[str] | str) -> tuple[str, ...]:
    """Read names: one, or several."""
    return (value,) if isinstance(value, str) else tuple(value)


def as_deny_lists(value: DenyList | Sequence[DenyList]) -> tuple[DenyList, ...]:
    """Read deny lists: one, or several."""
    lists = (value,) if isinstance(value, DenyList) else tuple(value)
    if any(not isinstance(each, DenyList) for each in lists):
        raise InvalidInput(
            "deny takes deny lists: ch.DenyList(column=..., phrases=...)", field="deny"
        )
    return lists


def intervals(column: str, edges: Iterable[Real]) -> Intervals:
    """Count in cells [a, b) between neighbouring edges; everything else is OOV."""
    with valid_input():
        return Intervals(column=column, edges=tuple(as_exact(edge) for edge in edges))


def categories(column: str, values: Iterable[str | int]) -> Categories:
    """Count each value exactly as given; everything else is OOV."""
    with valid_input():
        return Categories(column=column, values=tuple(values))


def prefix_tree(
    column: str, vocabulary: Iterable[str], prefixes: Iterable[str] = ("",)
) -> PrefixTree:
    """Count which word follows known prefixes. Texts are put into canonical form."""
    with valid_input():
        return PrefixTree(
            column=column,
            prefixes=tuple(canonical_texts(list(prefixes))),
            vocabulary=tuple(canonical_texts(list(vocabulary))),
        )


def grid(
    columns: Sequence[str],
    box: Sequence[Real],
    *,
    level: int | None = None,
    cells: Iterable[str] | None = None,
) -> Grid:
    """Count in quadtree cells over a box (x0, y0, x1, y1): all of a level, or listed quadkeys."""
    if len(columns) != 2 or len(box) != 4:
        raise InvalidInput("a grid has two columns and a box (x0, y0, x1, y1)")
    x0, y0, x1, y1 = (as_exact(edge) for edge in box)
    with valid_input():
        return Grid(
            columns=(columns[0], columns[1]),
            box=(x0, y0, x1, y1),
            level=level,
            cells=None if cells is None else tuple(cells),
        )


# --- The query and the fields it reads ----------------------------------------------------------


def simple_query(
    policy: Policy, analysis: Analysis, features: Sequence[AnyFeature], deny: Sequence[DenyList]
) -> str:
    """Write the query that selects the features' columns, each a field of this analysis."""
    if analysis.query_class == "exact":
        if len(analysis.queries) == 1:
            return analysis.queries[0]
        listed = "; ".join(analysis.queries)
        raise InvalidInput(f"this analysis permits only these queries, give one of them: {listed}")
    chosen: dict[str, str] = {}
    for column in Encoding(tuple(features), tuple(deny)).columns:
        found = [ref for ref in analysis.fields if ref.partition(".")[2] == column]
        if len(found) != 1:
            known = ", ".join(analysis.fields)
            why = "several fields have" if found else "no field of this analysis has"
            raise InvalidInput(
                f"{why} the name of the column {column!r}: give a query that returns it; the "
                f"fields are {known}"
            )
        chosen[column] = found[0]
    tables = list(dict.fromkeys(ref.partition(".")[0] for ref in chosen.values()))
    streams = [table for table in tables if table in policy.streams]
    if len(streams) > 1:
        raise InvalidInput(
            f"the columns belong to several streams ({', '.join(streams)}): give a query that says "
            "which of their rows belong together"
        )
    items = ", ".join(
        f'"{ref.partition(".")[0]}"."{column}" AS "{column}"' for column, ref in chosen.items()
    )
    sources = ", ".join(f'"{table}"' for table in tables)
    return f"SELECT {items} FROM {sources}"  # noqa: S608 (names are identifiers)


def reads_of(query: str, analysis: Analysis) -> dict[str, tuple[str, ...]]:
    """Return the fields of the analysis that the query names together with their stream."""
    if not isinstance(query, str):
        raise InvalidInput(f"a query is text, not {query!r}", field="query")
    names = {word.lower() for word in _WORD.findall(query)}
    reads: dict[str, list[str]] = {}
    for ref in analysis.fields:
        table, _, field = ref.partition(".")
        if {table, field} <= names:
            reads.setdefault(table, []).append(field)
    if not reads:
        raise InvalidInput(
            f"the query names no field of this analysis ({', '.join(analysis.fields)}): say which "
            "fields it reads, reads={stream: [field, ...]}"
        )
    return {table: tuple(names) for table, names in reads.items()}


def refs_of(reads: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Write fields as "stream.field"."""
    return tuple(f"{table}.{field}" for table, names in reads.items() for field in names)


def as_participation(value: Participation | Real | str | None) -> Participation:
    """Read who answers: "everyone", or a share of those new to the study."""
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
    """Read the arms of an experiment: names with weights, or names of equal weight."""
    weights = value if isinstance(value, Mapping) else dict.fromkeys(value, 1)
    if isinstance(value, str) or len(weights) != len(value) or len(weights) == 1:
        raise InvalidInput("an experiment needs two or more arms with different names")
    with valid_input("arms: "):
        return tuple(Arm(name=name, weight=weight) for name, weight in weights.items())


def expected_cohort(expected: float, probability: Decimal, margin: float) -> int:
    """A minimum cohort that is reached almost surely when `expected` devices should answer.

    It allows for six standard deviations of the participation coins, and for a margin.
    """
    p = float(probability)
    spread = math.sqrt(max(expected * (1.0 - p), 0.0))
    return math.floor(margin * expected - 6.0 * spread)


def budgets_of(
    policy: Policy, analysis: Analysis, refs: Iterable[str]
) -> list[Budget | FieldBudget]:
    """List all budgets that a question about these fields is charged to."""
    return [policy.device, analysis.budget, *(analysis.fields[ref] for ref in refs)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacyRequest:
    """What an analyst may choose about privacy; the rest follows from the policy."""

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
        """Fill in the rest. `cohort` is a minimum that is safely reached, if one is known.

        Epsilon defaults to the budgets divided by the number of reports that they allow, and delta
        to the same part of its budget as epsilon. The local epsilon is then the largest one that
        the policy permits and the cohort supports,
        because at a fixed epsilon that has the least noise.
        """
        unknown = [ref for ref in refs if ref not in analysis.fields]
        if unknown:
            raise InvalidInput(f"this analysis may not read {unknown[0]}")
        budgets = budgets_of(policy, analysis, refs)
        reports = Decimal(min(budget.reports for budget in budgets))
        equal_epsilon = DOWN.divide(min(budget.epsilon for budget in budgets), reports)
        crowd = self.crowd or analysis.crowds[0]
        if crowd not in get_args(Crowd):
            raise InvalidInput(f"crowd must be one of {', '.join(get_args(Crowd))}", field="crowd")
        try:
            mechanism = Mechanism(self.mechanism or analysis.mechanisms[0])
        except ValueError:
            raise InvalidInput(f"mechanism must be one of {', '.join(Mechanism)}") from None
        report = self.report or analysis.report_kinds[0]
        epsilon = six_digits(equal_epsilon) if self.epsilon is None else as_exact(self.epsilon)
        delta = proportional_delta(budgets, epsilon) if self.delta is None else as_exact(self.delta)
        limit = min(
            analysis.budget.local_epsilon, *(analysis.fields[ref].local_epsilon for ref in refs)
        )
        largest = min(mechanism.largest_local_epsilon(limit), MAX_LOCAL_EPSILON)
        limit = largest.quantize(_STEP, context=DOWN)
        fraction = analysis.honest_fraction if crowd == "honest" else None
        if crowd == "honest" and fraction is None:
            raise InvalidInput("this analysis does not permit an honest crowd: leave out `crowd`")
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
        with valid_input():
            return Privacy(
                min_cohort=least,
                **{field.name: getattr(claim, field.name) for field in fields(claim)},
            )


@lru_cache(maxsize=1024)
def _least_cohort(claim: Claim) -> int:
    return claim.least_cohort()


def proportional_delta(budgets: Sequence[Budget | FieldBudget], epsilon: Decimal) -> Decimal:
    """The part of delta that an epsilon is of its own budget: half for half, never more than all.

    A smaller part would leave delta unused when epsilon is spent, and a larger one the reverse.
    """
    whole = min(budget.delta for budget in budgets)
    part = DOWN.divide(epsilon, min(budget.epsilon for budget in budgets))
    least = min(whole, _LEAST_DELTA)
    return six_digits(max(least, DOWN.multiply(whole, min(part, Decimal(1)))))


def six_digits(value: Decimal) -> Decimal:
    """Round down to six significant digits."""
    return value.quantize(Decimal(1).scaleb(value.adjusted() - 5), context=DOWN)


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
    """The largest local epsilon that a cohort supports."""
    if cohort < 2:
        raise InvalidInput(
            f"only {max(cohort, 0):,} devices are expected to answer, which hides nobody: ask a "
            "larger share, or say how many devices there are"
        )
    left = DOWN.subtract(delta, BOUND_DELTA) if report == "bounded" else delta
    if left <= 0:
        raise InvalidInput(
            f"bounded reports use {BOUND_DELTA} of delta: it must be larger than {delta}"
        )
    return amplification.local_epsilon(
        cohort=cohort,
        epsilon=epsilon,
        delta=left,
        mechanism=mechanism,
        crowd=crowd,
        honest_fraction=1 if fraction is None else fraction,  # type: ignore[arg-type]
    )
