"""From what an analyst writes to what a recipe needs: features, query, fields read, privacy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import lru_cache
from numbers import Integral
from typing import Final, get_args

from chorister.analyst.arguments import (
    Real,
    as_column,
    as_exact,
    as_list,
    as_positive,
    as_texts,
    valid_input,
)
from chorister.canonical import decimal_text
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
from chorister.privacy import Mechanism, amplification
from chorister.privacy.decimals import DOWN
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON, MIN_LOCAL_EPSILON
from chorister.privacy.weights import BOUND_DELTA
from chorister.recipe import Privacy

_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEP: Final = Decimal("0.0001")
_LEAST_DELTA: Final = 10 * BOUND_DELTA  # with less, bounded reports would take most of it
_MAX_DELTA: Final = Decimal("0.1")


def intervals(column: str, edges: Iterable[Real]) -> Intervals:
    """Count in cells [a, b) between neighbouring edges; everything else is OOV."""
    with valid_input():
        given = as_list(edges, "edges", "[10, 20, 40]")
        return Intervals(
            column=as_column(column), edges=tuple(as_exact(edge, "edges") for edge in given)
        )


def categories(column: str, values: Iterable[str | int]) -> Categories:
    """Count each value exactly as given; everything else is OOV."""
    given = tuple(map(_as_category, as_list(values, "values", '["red", "green"]')))
    with valid_input():
        return Categories(column=as_column(column), values=given)


def _as_category(value: object) -> str | int:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidInput(
            f"values are texts or whole numbers, not {value!r}: count other numbers with "
            "ch.intervals",
            field="values",
        )
    return int(value)


def prefix_tree(
    column: str, vocabulary: Iterable[str], prefixes: Iterable[str] = ("",)
) -> PrefixTree:
    """Count which word follows known prefixes. Texts are put into canonical form."""
    words = as_texts(vocabulary, "vocabulary")
    with valid_input():
        return PrefixTree(
            column=as_column(column),
            prefixes=tuple(canonical_texts(as_texts(prefixes, "prefixes"))),
            vocabulary=tuple(canonical_texts(words)),
        )


def grid(
    columns: Sequence[str],
    box: Sequence[Real],
    *,
    level: int | None = None,
    cells: Iterable[str] | None = None,
) -> Grid:
    """Count in quadtree cells over a box (x0, y0, x1, y1): all of a level, or listed quadkeys."""
    names = as_list(columns, "columns", '["x", "y"]')
    edges = as_list(box, "box", "[x0, y0, x1, y1]")
    if len(names) != 2 or len(edges) != 4:
        raise InvalidInput("a grid has two columns and a box (x0, y0, x1, y1)")
    x0, y0, x1, y1 = (as_exact(edge, "box") for edge in edges)
    with valid_input():
        return Grid(
            columns=(as_column(names[0]), as_column(names[1])),
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
        raise InvalidInput(f"this analysis permits only these queries: pass one of them: {listed}")
    chosen: dict[str, str] = {}
    for column in Encoding(tuple(features), tuple(deny)).columns:
        found = [ref for ref in analysis.fields if ref.partition(".")[2] == column]
        if len(found) != 1:
            known = ", ".join(analysis.fields)
            why = "several fields have" if found else "no field of this analysis has"
            raise InvalidInput(
                f"{why} the name of the column {column!r}: give a query that returns it; the "
                f"fields are {known}",
                field="query",
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
            f"nothing here names a field of this analysis ({', '.join(analysis.fields)}) together "
            "with its stream or profile: name both (in Python, `reads` can list them instead)",
            field="query",
        )
    return {table: tuple(names) for table, names in reads.items()}


def refs_of(reads: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Write fields as "stream.field"."""
    return tuple(f"{table}.{field}" for table, names in reads.items() for field in names)


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
        if not refs:
            raise InvalidInput("a question reads at least one field", field="reads")
        budgets = budgets_of(policy, analysis, refs)
        reports = Decimal(min(budget.reports for budget in budgets))
        equal_epsilon = DOWN.divide(min(budget.epsilon for budget in budgets), reports)
        crowd = self.crowd or analysis.crowds[0]
        if crowd not in get_args(Crowd):
            raise InvalidInput(f"crowd must be one of {', '.join(get_args(Crowd))}", field="crowd")
        try:
            mechanism = Mechanism(self.mechanism or analysis.mechanisms[0])
        except ValueError:
            raise InvalidInput(
                f"mechanism must be one of {', '.join(Mechanism)}", field="mechanism"
            ) from None
        report = self.report or analysis.report_kinds[0]
        if report not in get_args(ReportKind):
            raise InvalidInput(
                f"report must be one of {', '.join(get_args(ReportKind))}", field="report"
            )
        epsilon = (
            six_digits(equal_epsilon)
            if self.epsilon is None
            else as_positive(self.epsilon, "epsilon")
        )
        delta = (
            proportional_delta(budgets, epsilon)
            if self.delta is None
            else as_positive(self.delta, "delta")
        )
        if delta > _MAX_DELTA:
            why = f"delta must be above 0 and at most {_MAX_DELTA}, not {delta}"
            raise InvalidInput(why, field="delta")
        if self.min_cohort is not None and self.min_cohort < 1:
            raise InvalidInput("min_cohort must be at least 1", field="min_cohort")
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
                with _about_epsilon(epsilon, min(budget.epsilon for budget in budgets)):
                    local = min(limit, _largest(wanted, epsilon, delta, mechanism, crowd, fraction,
                                                report))  # fmt: skip
        else:
            local = as_positive(self.local_epsilon, "local_epsilon")
            if not MIN_LOCAL_EPSILON <= local <= MAX_LOCAL_EPSILON:
                raise InvalidInput(
                    f"local_epsilon must lie between {MIN_LOCAL_EPSILON} and {MAX_LOCAL_EPSILON}, "
                    f"not {local}",
                    field="local_epsilon",
                )
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
            with _about_epsilon(epsilon, min(budget.epsilon for budget in budgets)):
                least = max(_least_cohort(claim), analysis.cohort.smallest)
        with valid_input():
            return Privacy(
                min_cohort=least,
                **{field.name: getattr(claim, field.name) for field in fields(claim)},
            )


@contextmanager
def _about_epsilon(epsilon: Decimal, whole: Decimal) -> Iterator[None]:
    """Say that an epsilon is the reason where the accountant can't compute anything with it."""
    try:
        yield
    except InvalidInput as error:
        if error.field is None and epsilon > whole:
            why = f"epsilon {decimal_text(epsilon)} exceeds the {decimal_text(whole)} of the policy"
            raise InvalidInput(why, field="epsilon") from None
        error.field = error.field or "epsilon"
        raise


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
            f"only {max(cohort, 0):,} devices are sure to answer in each group or window, which "
            "hides nobody: ask a larger share or in fewer groups, or pass the number of devices",
            field="participation",
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
