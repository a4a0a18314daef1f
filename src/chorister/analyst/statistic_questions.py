"""Planning `study.mean`, `total`, `rate` and `quantiles`: the histogram that answers each best.

Each function is a method of `Study` and returns a `StatisticQuestion`: `cost()` says before asking
what it spends and how wide its interval will be, `run()` asks. The other options are those of
`study.histogram`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from chorister.analyst.arguments import Real, as_exact, as_list, valid_input
from chorister.analyst.estimate import quantile
from chorister.analyst.question import Question, QuestionCost
from chorister.analyst.request import categories, intervals, reads_of, simple_query
from chorister.analyst.statistics import Statistic, StatisticKind, StatisticRange
from chorister.analyst.tables import paragraphs
from chorister.canonical import decimal_text
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    from chorister.analyst.study import Study

_SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
_GAPS: Final = (4, 3, 5, 2, 1)  # between levels, the best first: with more, noise adds up
_MOST_STEPS: Final = 128  # rows per value
_CELLS: Final = (8, 200)  # of quantiles, the fewest and the most
_LEVEL: Final = "level"
_ANSWER: Final = "answer"


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticQuestion:
    """A statistic that is planned but not asked."""

    kind: StatisticKind
    subject: str
    question: Question
    """The histogram that answers it."""
    scale: StatisticRange | None  # of the values; a rate has none
    several: bool
    shares: tuple[float, ...] = ()

    def cost(self, *, reports: int | None = None) -> StatisticCost:
        """Say what it would spend, and how wide its interval will be."""
        price = self.question.cost(reports=reports)
        return StatisticCost(question=price, half_width=self._half_width(price), asked=self)

    def run(self, target: int | None = None, *, bar: bool | None = None) -> Statistic:
        """Ask and wait, like `question.run`."""
        return Statistic(
            kind=self.kind, subject=self.subject, scale=self.scale, several=self.several,
            shares=self.shares, result=self.question.run(target, bar=bar),
        )  # fmt: skip

    def _half_width(self, price: QuestionCost) -> float:
        """Of a 95% interval, if every device has a value; of one group, if all are equal."""
        asked, z = self.question, quantile(0.955)
        recipe = asked.recipe(number=1, opens=0)
        groups = asked.study.fleet.policy.cells(asked.group_by, len(asked.arms))
        n = max(price.reports // groups, 1)
        base = float(recipe.randomizer.variance(n, 0.0, recipe.privacy.noise_trials))
        held = recipe.randomizer.variance_slope * n
        if self.kind == "quantiles":
            reach = z * math.sqrt((base * price.bins + held) / 4.0) / n
            return (self.scale.width if self.scale else 1.0) * (reach + 1.0 / (price.bins - 3))
        if self.scale is None:
            return z * math.sqrt(base / 2.0 + held / 4.0) / n
        gaps = self.scale.gaps
        levels = np.concatenate([[0.0], np.arange(gaps + 1) / gaps, [1.0]])
        noise = base * float(np.sum((levels - 0.5) ** 2)) + held / 12.0
        drawn = n * (0.25 if self.several else 0.25 / gaps**2)
        half = self.scale.width * z * math.sqrt(noise + drawn) / n + self.scale.slack
        return half * n if self.kind == "total" else half


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticCost:
    """What a statistic would spend and achieve."""

    question: QuestionCost
    half_width: float  # of the 95% interval to expect: in the column's units, or as a share
    asked: StatisticQuestion

    @property
    def allowed(self) -> bool:
        """Whether the policy permits it and there is budget left for it."""
        return self.question.allowed

    @property
    def epsilon(self) -> Decimal:
        """What each device that answers is charged."""
        return self.question.epsilon

    def explain(self) -> str:
        unit = f"{self.half_width:.2%}"
        if self.asked.scale is not None:
            unit = f"{self.half_width:,.4g}"
            if self.asked.kind == "quantiles":
                unit += " if values are spread evenly"
        return (
            f"The {self.asked.kind} of {self.asked.subject} would have an interval (95%) of about "
            f"± {unit} with {self.question.reports:,} reports.\n{self.question.explain()}"
        )

    def _repr_html_(self) -> str:
        return paragraphs(self.explain())


def mean(
    study: Study,
    column: str,
    low: Real,
    high: Real,
    *,
    query: str | None = None,
    **options: Any,  # noqa: ANN401 (whatever `histogram` takes)
) -> StatisticQuestion:
    """Plan the mean of a column's values, each cut to the range from `low` to `high`.

    It is over the devices that have a value; one with several rows counts with their mean. A
    `query` may compute the column, such as `SELECT count(*) AS column FROM stream`. Choose a range
    that holds nearly all values, and not a much wider one: the noise grows with it.
    """
    return _leveled(study, "mean", column, low, high, query, options)


def total(
    study: Study,
    column: str,
    low: Real,
    high: Real,
    *,
    query: str | None = None,
    **options: Any,  # noqa: ANN401 (whatever `histogram` takes)
) -> StatisticQuestion:
    """Plan the sum over all devices that answer of their (mean) values, each cut to the range.

    A device without a value adds 0. For a sum over all rows, let the `query` return one row with
    the device's own sum.
    """
    return _leveled(study, "total", column, low, high, query, options)


def rate(
    study: Study,
    condition: str,
    *,
    among: str | None = None,
    **options: Any,  # noqa: ANN401 (whatever `histogram` takes)
) -> StatisticQuestion:
    """Plan the share of devices that have a row for which an SQL condition holds.

    `condition` names fields, with their stream or profile unless the name is unique:
    `user.age >= 65`. With `among`, only devices are counted that have a row for which this other
    condition holds.
    """
    asked = f'SELECT EXISTS ({_exists(study, condition)}) AS "{_ANSWER}"'
    reads = _fields_read(study, condition)
    if among is not None:
        asked = f"{asked} WHERE EXISTS ({_exists(study, among)})"
        for table, names in _fields_read(study, among).items():
            reads[table] = tuple(dict.fromkeys((*reads.get(table, ()), *names)))
    _free_query(study)
    options = {"reads": reads, **options}
    question = study.histogram(categories(_ANSWER, [0, 1]), query=asked, **options)
    subject = condition if among is None else f"{condition} among {among}"
    return StatisticQuestion(
        kind="rate", subject=subject, question=question, scale=None, several=False
    )


def quantiles(
    study: Study,
    column: str,
    low: Real,
    high: Real,
    shares: Sequence[float] = _SHARES,
    *,
    query: str | None = None,
    **options: Any,  # noqa: ANN401 (whatever `histogram` takes)
) -> StatisticQuestion:
    """Plan quantiles of a column's values, each cut to the range from `low` to `high`.

    One histogram: as many cells as the noise allows, of whole numbers for an integer field. Where a
    device may answer several rounds, `ch.distribution` finds narrower intervals.
    """
    wanted = tuple(float(as_exact(each, "shares")) for each in as_list(shares, "shares", "[0.5]"))
    if not wanted or not all(0.0 < share < 1.0 for share in wanted):
        raise InvalidInput("the shares of quantiles must lie strictly between 0 and 1")
    first, last = _range(low, high)
    source = _source(study, column, query, options)
    options = {**options, "reads": source.reads}
    whole = source.whole and first == first.to_integral_value() and last == last.to_integral_value()
    step = Decimal(1) if whole else (last - first) / 8
    cut = f"WHEN v < {_sql(first)} THEN {_sql(first - step)} WHEN v >= {_sql(last)}"
    asked = f'SELECT CASE {cut} THEN {_sql(last)} ELSE v END AS "{column}" FROM ({source.sql})'  # noqa: S608 (checked by every device)

    def planned(cells: int) -> Question:
        width = (last - first) / cells
        unit = Decimal(1) if whole else Decimal(1).scaleb(width.adjusted() - 2)
        inner = {(first + width * i).quantize(unit) for i in range(1, cells)}
        edges = [first, *sorted(edge for edge in inner if first < edge < last), last]
        feature = intervals(column, [first - step, *edges, last + step])
        return study.histogram(feature, query=asked, **options)

    fewest, most = _CELLS
    price = planned(fewest).cost()
    # Where a cell's share and the noise of what lies below its edge are about the same.
    cells = round((1.0 / (2.0 * price.relative_error)) ** (2.0 / 3.0))
    cells = min(max(cells, fewest), most, study.terms.max_bins - 3)
    if whole:
        cells = min(cells, int(last - first))
    return StatisticQuestion(
        kind="quantiles", subject=column, question=planned(max(cells, 1)),
        several=source.several,
        scale=StatisticRange(low=first, high=last, gaps=1, steps=1, exact=True), shares=wanted,
    )  # fmt: skip


# --- Queries ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Where the values of a column come from."""

    sql: str  # a query that returns them as v
    reads: Mapping[str, Iterable[str]]  # the queries around it read nothing else
    several: bool  # whether a device may have several rows
    whole: bool  # whether they are integers


def _leveled(
    study: Study, kind: StatisticKind, column: str, low: Real, high: Real, query: str | None,
    options: dict[str, Any],
) -> StatisticQuestion:  # fmt: skip
    first, last = _range(low, high)
    source = _source(study, column, query, options)
    scale = _rounding(first, last, whole=source.whole)
    all_steps = scale.gaps * scale.steps
    rows = ", ".join(f"({i})" for i in range(scale.steps))
    level = (
        f"(CAST((v - {_sql(first)}) * {all_steps}.0 / {_sql(last - first)} + 0.5 AS INTEGER)"
        f" + steps.column1) / {scale.steps}"
    )
    cut = f"WHEN v < {_sql(first)} THEN -1 WHEN v > {_sql(last)} THEN {scale.gaps + 1}"
    tables = f"({source.sql}), (VALUES {rows}) AS steps"
    asked = f'SELECT CASE {cut} ELSE {level} END AS "{_LEVEL}" FROM {tables}'  # noqa: S608 (as above)
    feature = categories(_LEVEL, range(-1, scale.gaps + 2))
    question = study.histogram(feature, query=asked, **{**options, "reads": source.reads})
    return StatisticQuestion(
        kind=kind, subject=column, question=question, scale=scale, several=source.several
    )


def _rounding(low: Decimal, high: Decimal, *, whole: bool) -> StatisticRange:
    """How to round: without error where values and range are whole numbers and that is possible."""
    width = high - low
    if whole and low == low.to_integral_value() and width == width.to_integral_value():
        for gaps in _GAPS:
            steps, rest = divmod(int(width), gaps)
            if rest == 0 and 1 <= steps <= _MOST_STEPS:
                return StatisticRange(low=low, high=high, gaps=gaps, steps=steps, exact=True)
    return StatisticRange(low=low, high=high)


def _source(study: Study, column: str, query: str | None, options: dict[str, Any]) -> _Source:
    _free_query(study)
    if options.get("selection", "uniform") != "uniform":
        # The smallest of the rows that round a value at random always rounds it down.
        raise InvalidInput(
            "a mean, a total and quantiles need rows that are drawn at random: leave out "
            "`selection`, and let the `query` choose the rows that count",
            field="selection",
        )
    with valid_input():
        probe = intervals(column, (0, 1))
    if query is not None:
        if not isinstance(query, str):
            raise InvalidInput(f"a query is text, not {query!r}", field="query")
        given = query.strip().rstrip(";")
        return _Source(
            sql=f'SELECT "{column}" AS v FROM ({given})',  # noqa: S608 (as above)
            reads=options.get("reads") or reads_of(given, study.terms), several=True, whole=False,
        )  # fmt: skip
    simple = simple_query(study.fleet.policy, study.terms, (probe,), ())
    refs = [ref for ref in study.terms.fields if ref.partition(".")[2] == column]
    kind = study.fleet.policy.fields[refs[0]].type
    if kind == "text":
        raise InvalidInput(
            f"{refs[0]} is text, not a number: count its values with "
            "`study.histogram(ch.categories(...))`"
        )
    table = refs[0].partition(".")[0]
    return _Source(
        sql=simple.replace(f'AS "{column}"', "AS v"),
        reads=options.get("reads") or {table: (column,)},
        several=table in study.fleet.policy.streams, whole=kind == "integer",
    )  # fmt: skip


def _free_query(study: Study) -> None:
    if study.terms.query_class == "exact":
        raise InvalidInput(
            "this analysis permits only the queries that it lists, and statistics write their own: "
            "ask a histogram of one of those, or `ch.distribution`"
        )


def _exists(study: Study, condition: str) -> str:
    """A query with a row for each row that satisfies a condition."""
    reads = _fields_read(study, condition)
    if ";" in condition or "--" in condition or "/*" in condition:
        raise InvalidInput("a condition is one SQL expression, without ; and comments")
    tables = ", ".join(f'"{table}"' for table in reads)
    return f"SELECT 1 FROM {tables} WHERE ({condition})"  # noqa: S608 (checked by every device)


def _fields_read(study: Study, condition: str) -> dict[str, tuple[str, ...]]:
    """The fields that SQL names; one whose name is unique needs no stream before it."""
    fields = study.terms.fields
    if isinstance(condition, str):
        words = re.findall(r"\w+", re.sub(r"'[^']*'", "''", condition.lower()))
        tables = {ref.partition(".")[0] for ref in fields}
        if not tables & set(words):
            names = [ref.partition(".")[2] for ref in fields]
            found = [ref for ref, name in zip(fields, names, strict=True) if name in words]
            if found and all(names.count(ref.partition(".")[2]) == 1 for ref in found):
                condition = " ".join(found)
    return reads_of(condition, study.terms)


def _range(low: Real, high: Real) -> tuple[Decimal, Decimal]:
    first, last = as_exact(low, "low"), as_exact(high, "high")
    if first >= last:
        raise InvalidInput(f"the range goes from low to high, not from {low} to {high}")
    return first, last


def _sql(value: Decimal) -> str:
    """A number as SQL: integers stay integers, so that comparing them is exact."""
    text = decimal_text(value)
    return f"({text})" if value < 0 else text
