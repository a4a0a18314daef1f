"""Cross two features: ask about each alone, then about a grid of buckets that fits both."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms import crosstab_pictures
from chorister.analyst.algorithms.crosstab_rules import (
    Precision,
    bucket_count,
    bucket_starts,
    fit_table,
    smooth,
)
from chorister.analyst.algorithms.run import AlgorithmResult, AlgorithmRun, Step
from chorister.analyst.cohorts import Cohorts, RoundsPlan
from chorister.analyst.estimate import column_names
from chorister.analyst.request import Real, reads_of, simple_query
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.analyst.tables import html_table, paragraphs
from chorister.encoding import Categories, Encoding, Intervals, Selection
from chorister.errors import InvalidInput
from chorister.policy import Crowd
from chorister.privacy import Mechanism

if TYPE_CHECKING:
    import altair


Axis: TypeAlias = Intervals | Categories
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def round_shares(cohorts: Cohorts) -> tuple[float, float, float]:
    """Shares of rows, columns and grid: of the devices, or of 1/sigma^2 if everyone answers."""
    return (0.25, 0.25, 0.5) if cohorts == "disjoint" else (0.2, 0.2, 0.6)


@dataclass(frozen=True, kw_only=True, eq=False)
class Crosstab(AlgorithmResult):
    """A two-way table.

    Its rows are the buckets of the last round. Their estimates and intervals come from that round
    alone, whose noise did not influence the choice of buckets. `shares` is the fitted table at full
    resolution: it combines all rounds, smoothed where noise hides the details.
    """

    FORMAT: ClassVar[str] = "chorister-crosstab-1"
    NOUN: ClassVar[str] = "a saved crosstab"

    results: tuple[Result, Result, Result]
    cohorts: Cohorts

    def __post_init__(self) -> None:
        sizes = [len(result.features) for result in self.results]
        if sizes != [1, 1, 2] or any(result.recipe.group_by for result in self.results):
            raise InvalidInput(
                "a crosstab needs two rounds about one feature each, and one about both"
            )
        for fine, coarse in zip(self.axes, self.results[2].features, strict=True):
            _starts_in(fine, _axis(coarse))

    @property
    def axes(self) -> tuple[Axis, Axis]:
        return _axis(self.results[0].features[0]), _axis(self.results[1].features[0])

    @property
    def devices(self) -> int:
        """All devices that answered any round."""
        reports = [result.n_reports for result in self.results]
        return sum(reports) if self.cohorts == "disjoint" else max(reports)

    @cached_property
    def shares(self) -> Floats:
        """The fitted share of every fine cell, with OOV first on both axes; they add up to 1."""
        rows, columns, both = self.results
        row_fit, column_fit = (_margin_fit(each, self.devices) for each in (rows, columns))
        starts = [
            _starts_in(fine, _axis(coarse))
            for fine, coarse in zip(self.axes, both.features, strict=True)
        ]
        table = (both.counts / both.n_reports).reshape([len(each) for each in starts])
        return fit_table(
            table, _precision(both, self.devices), starts[0], starts[1], row_fit, column_fit,
            row_precision=_precision(rows, self.devices),
            column_precision=_precision(columns, self.devices),
        )  # fmt: skip

    @cached_property
    def fitted(self) -> Floats:
        """The fitted shares of the last round's buckets, bin by bin."""
        found = self.shares
        for axis, (fine, coarse) in enumerate(
            zip(self.axes, self.results[2].features, strict=True)
        ):
            found = np.add.reduceat(found, _starts_in(fine, _axis(coarse)), axis=axis)
        return found

    @cached_property
    def _columns(self) -> dict[str, Any]:
        both = self.results[2]
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
        both = self.results[2]
        high, wide = (_axis(feature).size for feature in both.features)
        names = column_names(both.recipe)
        asked = (
            "each answered every round" if self.cohorts == "everyone" else "answered one round each"
        )
        return (
            f"{names[0]} by {names[1]}: {self.devices:,} devices {asked}. The first two rounds "
            f"asked about each alone; the last one crossed {high} buckets with {wide}. An empty "
            f"cell reads 0 ± {both.noise_sigma:,.1f} of {both.n_reports:,} devices. Estimates and "
            f"intervals ({both.confidence:.0%}, of the noise, each by itself) come from the last "
            "round alone; fitted shares combine all rounds and are smoothed."
        )

    def __repr__(self) -> str:
        high, wide = (_axis(feature).size for feature in self.results[2].features)
        return f"<Crosstab: {high} x {wide} cells, {self.devices:,} devices>"

    def _repr_html_(self) -> str:
        return paragraphs(self.explain()) + html_table(self.columns())


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
) -> AlgorithmRun[Crosstab]:
    """Cross two features, given at full resolution: fine intervals, or categories.

    There are three rounds: rows, columns, and a grid whose buckets fit both. Neighbouring intervals
    are merged into buckets, categories never are. Nothing is asked until you iterate over the run
    or take its `result`; `run.plan` states the cost of every round beforehand.
    """
    axes = (_axis(rows), _axis(columns))
    if axes[0].column == axes[1].column:
        raise InvalidInput("rows and columns must be two different columns")
    if query is None:
        query = simple_query(study.fleet.policy, study.terms, axes, ())
    fields = reads_of(query, study.terms) if reads is None else {k: tuple(reads[k]) for k in reads}

    chosen = study.cohorts(3, reads=fields, wanted=cohorts)
    plan = study.plan_rounds(
        round_shares(chosen), reads=fields, epsilon=epsilon, delta=delta, mechanism=mechanism,
        crowd=crowd, cohorts=chosen, devices=devices,
    )  # fmt: skip
    most = study.terms.max_bins
    if max(axis.size for axis in axes) > most:
        raise InvalidInput(f"one feature alone has more than {most:,} cells: use wider ones")

    def steps() -> Generator[Step, None, Crosstab]:
        found: list[Result] = []
        for number, planned in enumerate(plan.rounds, start=1):
            asked: tuple[Axis, ...] = axes[number - 1 : number]
            if number == 3:
                total = sum(result.n_reports for result in found) + planned.expected_reports
                known = total if plan.cohorts == "disjoint" else planned.expected_reports
                sigma = planned.std_error / planned.expected_reports
                asked = _crossed(axes, [_margin_fit(each, known) for each in found], sigma, most)
            question = study.histogram(
                asked, query=query, reads=fields, selection=selection, **planned.settings
            )
            found.append(study.ask(question))
            yield Step(
                number=number, question=question, result=found[-1],
                draw=found[-1].plot if number < 3 else _table(found, plan).plot,
            )  # fmt: skip
        return _table(found, plan)

    return AlgorithmRun(plan, steps)


def _table(found: list[Result], plan: RoundsPlan) -> Crosstab:
    rows, columns, both = found
    return Crosstab(results=(rows, columns, both), cohorts=plan.cohorts)


def _crossed(
    axes: tuple[Axis, Axis], margins: list[Floats], sigma: float, most: int
) -> tuple[Axis, ...]:
    """Put both axes into buckets, with at most `most` cells in total."""
    count = bucket_count(sigma, most=math.isqrt(most))
    while True:
        coarse = tuple(
            _merged(axis, bucket_starts(shares, count, fixed=1))
            for axis, shares in zip(axes, margins, strict=True)
        )
        if Encoding(coarse).size <= most:
            return coarse
        if count <= 2:
            raise InvalidInput(
                f"these categories need {Encoding(coarse).size:,} cells, more than {most:,}"
            )
        count -= 1


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


def _margin_fit(result: Result, devices: int) -> Floats:
    """Smooth the fine shares of a round; OOV comes first."""
    (feature,) = result.features
    shares = result.counts / result.n_reports
    precision = _precision(result, max(devices, result.n_reports))
    if isinstance(feature, Categories):
        return smooth(shares, precision, ordered=False)
    inside = max(1.0 - float(shares[0]), 1e-9)  # OOV has no neighbours
    fine = smooth(shares[1:] / inside, Precision(precision.base / inside**2, precision.slope))
    outside = min(max(float(shares[0]), 0.0), 1.0)
    return np.concatenate([[outside], fine * (1.0 - outside)])
