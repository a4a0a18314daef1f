"""Cross two features: ask about each alone, then about a grid of buckets that fits both."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms import crosstab_pictures
from chorister.analyst.algorithms.algorithm_run import (
    AlgorithmResult,
    AlgorithmRun,
    Step,
    answered_by,
    resumable,
)
from chorister.analyst.algorithms.crosstab_margins import (
    Margin,
    Precision,
    refined_margin,
    smooth,
    spikiness,
)
from chorister.analyst.algorithms.crosstab_rules import (
    bucket_count,
    bucket_starts,
    fit_table,
    full_table_pays,
    round_shares,
    steps_of_both,
)
from chorister.analyst.algorithms.crosstab_slices import (
    Slices,
    fit_slices,
    slice_counts,
    slice_starts,
)
from chorister.analyst.arguments import Real, as_reads
from chorister.analyst.cohorts import Cohorts, RoundsPlan
from chorister.analyst.estimate import column_names
from chorister.analyst.preflight import require_fitting
from chorister.analyst.request import reads_of, simple_query
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.encoding import Categories, Encoding, Intervals, Selection
from chorister.errors import CohortTooSmall, InvalidInput
from chorister.policy import Crowd
from chorister.privacy import Mechanism

if TYPE_CHECKING:
    import altair


Axis: TypeAlias = Intervals | Categories
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Crosstab(AlgorithmResult):
    """A two-way table.

    Its rows are the buckets of the last round, or all cells if everyone was asked once. Their
    estimates and intervals come from that round alone, whose noise did not influence the choice of
    buckets. `shares` is the fitted table at full resolution: it combines all rounds, smoothed where
    noise hides the details.
    """

    FORMAT: ClassVar[str] = "chorister-crosstab-1"
    NOUN: ClassVar[str] = "a saved crosstab"

    # Rows, perhaps in slices of the columns; columns likewise; buckets of both. Or both at once.
    results: tuple[Result, ...]
    cohorts: Cohorts

    def __post_init__(self) -> None:
        sizes = [len(result.features) for result in self.results]
        if sizes not in ([1, 1, 2], [2, 2, 2], [2]) or any(
            result.recipe.group_by for result in self.results
        ):
            raise InvalidInput(
                "a crosstab needs a round about both features, and before it none or one about each"
            )
        for result in self.results:
            if len(result.features) == 2:
                for fine, coarse in zip(self.axes, result.features, strict=True):
                    _starts_in(fine, _axis(coarse))

    @property
    def both(self) -> Result:
        """The round about both features."""
        return self.results[-1]

    @property
    def axes(self) -> tuple[Axis, Axis]:
        if len(self.results) == 1:
            rows, columns = self.both.features
        else:
            rows, columns = self.results[0].features[0], self.results[1].features[-1]
        return _axis(rows), _axis(columns)

    @property
    def devices(self) -> int:
        """All devices that answered any round."""
        reports = [result.n_reports for result in self.results]
        return sum(reports) if self.cohorts == "disjoint" else max(reports)

    @cached_property
    def shares(self) -> Floats:
        """The fitted share of every fine cell, with OOV first on both axes; they add up to 1."""
        both = self.both
        starts = [
            _starts_in(fine, _axis(coarse))
            for fine, coarse in zip(self.axes, both.features, strict=True)
        ]
        table = (both.counts / both.n_reports).reshape([len(each) for each in starts])
        if len(self.results) == 1:
            high, wide = starts
            return fit_table(
                table, _precision(both, self.devices), high, wide, np.ones(len(high)),
                np.ones(len(wide)),
            )  # fmt: skip
        rows, columns, _ = self.results
        precision = _precision(both, self.devices)
        slices = [_slices(each, i, self.devices) for i, each in enumerate((rows, columns))]
        margins = [_margin_fit(each, axis) for each, axis in zip(slices, self.axes, strict=True)]
        row_fit, column_fit = (
            margin.shares
            if isinstance(feature, Categories)
            else refined_margin(
                margin, each.margin, each.margin_precision, table.sum(axis=axis),
                precision.variance(np.add.reduceat(margin.shares, at), table.shape[axis]), at,
                fixed=1,
            )
            for feature, each, margin, axis, at in zip(
                self.axes, slices, margins, (1, 0), starts, strict=True
            )
        )  # fmt: skip
        return fit_table(
            table, precision, starts[0], starts[1], row_fit, column_fit,
            row_precision=slices[0].margin_precision,
            column_precision=slices[1].margin_precision,
            steps=steps_of_both(margins, starts),
        )  # fmt: skip

    @cached_property
    def fitted(self) -> Floats:
        """The fitted shares of the last round's buckets, bin by bin."""
        found = self.shares
        for axis, (fine, coarse) in enumerate(zip(self.axes, self.both.features, strict=True)):
            found = np.add.reduceat(found, _starts_in(fine, _axis(coarse)), axis=axis)
        return found

    @cached_property
    def _columns(self) -> dict[str, Any]:
        both = self.both
        ends = both.intervals()
        return {
            **{name: list(column) for name, column in both.labels.items()},
            "estimate": both.estimate,
            "std_error": both.std_error,
            "ci_low": np.clip(ends.low, 0.0, both.n_reports),
            "ci_high": np.clip(ends.high, 0.0, both.n_reports),
            "fitted_share": self.fitted.ravel(),
        }

    def columns(self) -> dict[str, Any]:
        """One row per bucket: devices in the last round with intervals, and the fitted share."""
        return dict(self._columns)

    def plot(self, *, kind: str = "heat") -> altair.LayerChart | altair.Chart:
        """Draw a `heat` table of the fitted shares, or a `mosaic` whose areas are the shares."""
        return crosstab_pictures.draw(self, kind=kind)

    def explain(self) -> str:
        both = self.both
        high, wide = (_axis(feature).size for feature in both.features)
        names = column_names(both.recipe)
        noise = (
            f"An empty cell reads 0 ± {both.noise_sigma:,.1f} of {both.n_reports:,} devices. "
            f"Estimates and intervals ({both.confidence:.0%}, of the noise, each on its own)"
        )
        title = f"{names[0]} by {names[1]}:"
        if len(self.results) == 1:
            return (
                f"{title} {self.devices:,} devices answered one question about all {high} x {wide} "
                f"cells. {noise} are what it measured; fitted shares are smoothed."
            )
        first = self.results[0].features
        alone = "alone" if len(first) == 1 else "in a few slices of the other"
        return (
            f"{title} {answered_by(self.results, self.cohorts)}. The first two rounds asked about "
            f"each {alone}; the last one crossed {high} buckets with {wide}. {noise} come from the "
            "last round alone; fitted shares combine all rounds and are smoothed."
        )

    def __repr__(self) -> str:
        high, wide = (_axis(feature).size for feature in self.both.features)
        return f"<Crosstab: {high} x {wide} cells, {self.devices:,} devices>"


@resumable
def crosstab(
    study: Study,
    rows: Axis,
    columns: Axis,
    *,
    query: str | None = None,
    reads: Mapping[str, Iterable[str]] | None = None,
    selection: Selection = "uniform",
    epsilon: Real | None = None,
    delta: Real | None = None,
    mechanism: Mechanism | str | None = None,
    crowd: Crowd | None = None,
    cohorts: Cohorts | None = None,
    devices: int | None = None,
    target: Real | None = None,
) -> AlgorithmRun[Crosstab]:
    """Cross two features, given at full resolution: fine intervals, or categories.

    There are three rounds: rows, columns, and a grid whose buckets fit both. If noise allows it,
    the first two ask about a few slices of the other feature too, which shows what lies across the
    table. Neighbouring intervals are merged into buckets, categories never are. Where the policy
    allows a question about all cells and their noise is small, everyone is asked only that, and the
    plan says so, unless you choose `cohorts`. Nothing is asked until you iterate over the run or
    take its `result`; `run.plan` states the cost of every round beforehand.
    """
    axes = (_axis(rows), _axis(columns))
    if axes[0].column == axes[1].column:
        raise InvalidInput("rows and columns must be two different columns")
    if query is None:
        query = simple_query(study.fleet.policy, study.terms, axes, ())
    fields = reads_of(query, study.terms) if reads is None else as_reads(reads)
    require_fitting(study, axes, query, fields)

    most = study.terms.max_bins
    if max(axis.size for axis in axes) > most:
        raise InvalidInput(f"one feature alone has more than {most:,} cells: use larger ones")
    # Before anything is asked: intervals can be merged into one bucket and OOV.
    least = math.prod(axis.size if isinstance(axis, Categories) else 2 for axis in axes)
    if least > most:
        raise InvalidInput(
            f"these categories need {least:,} cells, more than {most:,}: use fewer of them"
        )

    def planned(shares: Sequence[float], who: Cohorts) -> RoundsPlan:
        return study.plan_rounds(
            shares, reads=fields, epsilon=epsilon, delta=delta, mechanism=mechanism, crowd=crowd,
            cohorts=who, devices=devices, target=target,
        )  # fmt: skip

    who = study.cohorts(3, reads=fields, wanted=cohorts)
    plan = _best_plan(planned, who, Encoding(axes).size, most, in_rounds=cohorts is not None)

    def asked(number: int, found: list[Result]) -> tuple[Axis, ...]:
        if len(plan.rounds) == 1:
            return axes
        first, last = plan.rounds[0], plan.rounds[-1]
        if number < 3:
            return _sliced(axes, number, first.std_error / first.expected_reports, most)
        total = sum(result.n_reports for result in found) + last.expected_reports
        known = total if plan.cohorts == "disjoint" else last.expected_reports
        sigma = last.std_error / last.expected_reports
        slices = [_slices(each, i, known) for i, each in enumerate(found)]
        margins = [_margin_fit(each, axis) for each, axis in zip(slices, axes, strict=True)]
        return _crossed(axes, margins, sigma, most)

    def steps() -> Generator[Step, None, Crosstab]:
        found: list[Result] = []
        for number, each in enumerate(plan.rounds, start=1):
            question = study.histogram(
                asked(number, found), query=query, reads=fields, selection=selection,
                **each.settings,
            )  # fmt: skip
            found.append(study.ask(question, target=each.target))
            last = number == len(plan.rounds)
            yield Step(
                number=number, question=question, result=found[-1],
                draw=_table(found, plan).plot if last else found[-1].plot,
            )  # fmt: skip
        return _table(found, plan)

    return AlgorithmRun(plan, steps)


def _table(found: list[Result], plan: RoundsPlan) -> Crosstab:
    return Crosstab(results=tuple(found), cohorts=plan.cohorts)


def _best_plan(
    planned: Callable[[Sequence[float], Cohorts], RoundsPlan],
    who: Cohorts,
    cells: int,
    most: int,
    *,
    in_rounds: bool,
) -> RoundsPlan:
    """Plan three rounds where they pay against one question about all cells, else that question.

    With `in_rounds`, plan rounds whether they pay or not.
    """
    once = planned((1.0,), "disjoint")
    (alone,) = once.rounds
    sigma = alone.std_error / alone.expected_reports
    shares = round_shares(cells, sigma)
    if in_rounds or cells > most:
        return planned(shares, who)
    if full_table_pays(cells, sigma):
        note = (
            f"Everyone is asked once about all {cells:,} cells: their noise is so small that "
            "rounds would gain nothing."
        )
        return replace(once, note=note)
    try:
        plan = planned(shares, who)
    except CohortTooSmall:
        note = f"Everyone is asked once about all {cells:,} cells: there are too few for rounds."
        return replace(once, note=note)
    note = f"Several rounds pay off: asked at once, {cells:,} cells would be lost in noise."
    return replace(plan, note=note)


def _sliced(axes: tuple[Axis, Axis], number: int, sigma: float, most: int) -> tuple[Axis, ...]:
    """One axis at full resolution, crossed with slices of the other where they are worth it."""
    alone = axes[number - 1 : number]
    if any(isinstance(axis, Categories) for axis in axes):
        return alone
    rows, columns = axes
    counts = slice_counts((rows.size - 1, columns.size - 1), sigma)
    if min(counts) == 1:
        return alone
    both = (
        (rows, _merged(columns, slice_starts(columns.size, counts[0], fixed=1))),
        (_merged(rows, slice_starts(rows.size, counts[1], fixed=1)), columns),
    )
    # Both rounds or none.
    return both[number - 1] if max(Encoding(each).size for each in both) <= most else alone


def _crossed(
    axes: tuple[Axis, Axis], margins: list[Margin], sigma: float, most: int
) -> tuple[Axis, ...]:
    """Put both axes into buckets, with at most `most` cells in total."""
    ordered = all(isinstance(axis, Intervals) for axis in axes)
    # Without OOV.
    spikes = min(spikiness(margin.shares[1:]) for margin in margins) if ordered else 0.0
    both_stepped = all(margin.steps is not None for margin in margins)
    measured = [margin.bends for margin in margins if margin.bends is not None]
    bends = sum(measured) if len(measured) == len(margins) else None
    count = bucket_count(sigma, most=most, spikes=spikes, both_stepped=both_stepped, bends=bends)
    for kept in (margins, [Margin(margin.shares) for margin in margins]):  # without steps at last
        for buckets in range(count, 0, -1):
            coarse = tuple(
                _merged(axis, bucket_starts(margin.shares, buckets, fixed=1, steps=margin.steps))
                for axis, margin in zip(axes, kept, strict=True)
            )
            if Encoding(coarse).size <= most:
                return coarse
    raise InvalidInput(f"a table of these features needs more than {most:,} cells")


def _axis(feature: object) -> Axis:
    if not isinstance(feature, Intervals | Categories):
        raise InvalidInput("a crosstab needs intervals or categories")
    return feature


def _merged(axis: Axis, starts: Ints) -> Axis:
    """Merge neighbouring intervals; cell 0, OOV, stays."""
    if isinstance(axis, Categories):
        return axis
    # Fine cell i (from 1) begins at edges[i - 1]; the last edge closes the last bucket.
    edges = tuple(axis.edges[int(start) - 1] for start in starts[1:])
    return Intervals(column=axis.column, edges=(*edges, axis.edges[-1]))


def _starts_in(fine: Axis, coarse: Axis) -> Ints:
    """Which fine cells the coarse ones begin with."""
    if isinstance(fine, Intervals) and isinstance(coarse, Intervals):
        place = {edge: i for i, edge in enumerate(fine.edges)}
        try:
            edges = [place[edge] for edge in coarse.edges]
        except KeyError:
            raise InvalidInput("the buckets of the grid are not made of the fine cells") from None
        if edges[0] == 0 and edges[-1] == len(fine.edges) - 1 and fine.column == coarse.column:
            return np.array([0, *(edge + 1 for edge in edges[:-1])], dtype=np.int64)
    elif fine == coarse:
        return np.arange(fine.size)
    raise InvalidInput("the buckets of the grid are not made of the fine cells")


def _precision(result: Result, devices: int) -> Precision:
    """The precision of a round's shares: noise, and which devices were in the cohort."""
    n = result.n_reports
    rows = result.rows
    chance = max(1.0 / n - 1.0 / devices, 0.0)
    return Precision(float(rows.base[0]) / n**2, float(rows.slope[0]) / n + chance)


def _slices(result: Result, axis: int, devices: int) -> Slices:
    """What a round about one axis measured: a row per fine cell, OOV first."""
    devices = max(devices, result.n_reports)
    seen = (result.counts / result.n_reports).reshape([each.size for each in result.features])
    seen = seen[:, None] if seen.ndim == 1 else seen if axis == 0 else seen.T
    return Slices(seen, _precision(result, devices), devices)


def _margin_fit(slices: Slices, axis: Axis) -> Margin:
    """Fit the fine shares of a round; OOV comes first."""
    outside, precision = float(slices.margin[0]), slices.precision
    if isinstance(axis, Categories):
        return Margin(smooth(slices.margin, precision, ordered=False))
    inside = max(1.0 - outside, 1e-9)  # OOV has no neighbours
    within = Precision(precision.base / inside**2, precision.slope / inside)
    fine = fit_slices(Slices(slices.seen[1:] / inside, within, slices.devices))
    outside = min(max(outside, 0.0), 1.0)
    return Margin(
        np.concatenate([[outside], fine.shares * (1.0 - outside)]),
        None if fine.steps is None else np.concatenate([[0], fine.steps + 1]),
        fine.bends,
    )
