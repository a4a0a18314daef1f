"""How a number is distributed: a density, its quantiles, and how sure both are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chorister.analyst import tables
from chorister.analyst.algorithms import density_pictures
from chorister.analyst.algorithms.algorithm_run import (
    AlgorithmResult,
    AlgorithmRun,
    Step,
    answered_by,
    devices_of,
    resumable,
    scaled,
)
from chorister.analyst.algorithms.density import Cells, DensityFit, Floats, fit_density
from chorister.analyst.algorithms.density_bands import Band, distribution_band
from chorister.analyst.algorithms.density_rules import DensityRules, asked_once, regime
from chorister.analyst.arguments import Real, as_exact, as_list, as_reads
from chorister.analyst.cohorts import Cohorts, RoundsPlan
from chorister.analyst.preflight import require_fitting
from chorister.analyst.request import intervals, reads_of, simple_query
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.encoding import Intervals, Selection
from chorister.errors import CohortTooSmall, InvalidInput
from chorister.policy import Crowd
from chorister.privacy import Mechanism

if TYPE_CHECKING:
    import altair
    import polars


_STEPS: Final = 1024
_LEAST_LEFT: Final = 0.8  # of the last cohort; with less, the first one costs more than it says


@dataclass(frozen=True, kw_only=True, eq=False)
class Distribution(AlgorithmResult):
    """A density over a range, fitted to all rounds; everything outside the range is left out.

    The density and its quantiles are estimates of the fit. Intervals do not come from the fit: they
    are what the counts between the asked edges allow for any distribution, so they begin and end at
    such edges, and are as wide as a cell where a quantile lies inside one. See `density_bands`.
    """

    FORMAT: ClassVar[str] = "chorister-distribution-1"
    NOUN: ClassVar[str] = "a saved distribution"

    results: tuple[Result, ...]
    cohorts: Cohorts
    low: Decimal
    high: Decimal

    def __post_init__(self) -> None:
        if not self.results or not self.low < self.high:
            raise InvalidInput("a distribution needs a range and at least one round")
        for result in self.results:
            features = result.features
            if len(features) != 1 or not isinstance(features[0], Intervals):
                raise InvalidInput("a distribution needs one feature in intervals")
            if result.recipe.group_by or len(result.parts) != 1:
                raise InvalidInput("a distribution needs one cohort, without groups or arms")
            if result.view is not None:
                raise InvalidInput("a distribution needs results as released, not processed")

    @property
    def column(self) -> str:
        """What is distributed."""
        feature = self.results[-1].features[0]
        return feature.columns_read[0]

    @cached_property
    def devices(self) -> int:
        """All devices that answered."""
        return devices_of(self.results, self.cohorts)

    @cached_property
    def _rounds(self) -> tuple[list[Cells], float]:
        """Each round's cells as shares of those inside the range; and what part is inside."""
        rows = [scaled(result, self.devices) for result in self.results]
        weights = np.array([1.0 / each.variance[0] for each in rows])
        outside = float(np.average([each.value[0] for each in rows], weights=weights))
        inside = min(max(self.devices - outside, 1.0), float(self.devices))
        parts = []
        for result, each in zip(self.results, rows, strict=True):
            feature = result.features[0]
            if not isinstance(feature, Intervals):
                raise InvalidInput("a distribution needs one feature in intervals")
            # With one device more: where nobody was drawn, there may be somebody.
            least = each.base + each.slope * self.devices / result.n_reports
            parts.append(
                Cells.between(
                    _on_grid(feature.edges, self.low, self.high),
                    each.value[1:] / inside,
                    least[1:] / inside**2,
                    each.slope[1:] / inside,
                )
            )
        return parts, inside / self.devices

    @cached_property
    def fit(self) -> DensityFit:
        """The fitted density on a grid."""
        return fit_density(self._rounds[0], _STEPS)

    @property
    def inside(self) -> float:
        """The share of devices whose value is inside the range."""
        return self._rounds[1]

    @cached_property
    def places(self) -> Floats:
        """The edges of the grid's steps, in the feature's units."""
        return np.linspace(float(self.low), float(self.high), _STEPS + 1)

    def cdf(self, values: ArrayLike) -> Floats:
        """The share of those inside the range that lies below each value."""
        found: Floats = np.interp(
            np.asarray(values, dtype=np.float64), self.places, self.fit.cumulative
        )
        return found

    def quantiles(
        self, shares: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9), *, confidence: float = 0.95
    ) -> dict[str, NDArray[np.float64]]:
        """Quantiles with intervals: columns `share`, `quantile`, `ci_low`, `ci_high`.

        The quantile is the fit's. Its interval holds the true one with this confidence, each by
        itself, whatever the distribution and by any usual definition of a quantile: among the
        devices inside the range that answered the last round (with disjoint cohorts: any round).
        It is stretched to the fit's quantile where that lies outside. Values outside the range
        are left out, so an interval that reaches an end of the range is bounded by it alone.
        """
        given = as_list(shares, "shares", "[0.5]")
        wanted = np.array([float(as_exact(each, "shares")) for each in given])
        if not np.all((wanted > 0.0) & (wanted < 1.0)):
            raise InvalidInput("the shares of quantiles must lie strictly between 0 and 1")
        centre = _inverted(self.fit.cumulative, wanted, self.places)
        low, high = self.band(confidence).quantiles(wanted)
        return {
            "share": wanted,
            "quantile": centre,
            "ci_low": np.minimum(low, centre),
            "ci_high": np.maximum(high, centre),
        }

    def band(self, confidence: float = 0.95) -> Band:
        """Bounds of the distribution function from the measured edges; no fit enters."""
        return distribution_band(self.results, self.cohorts, confidence)

    def columns(self) -> dict[str, Any]:
        """The grid's steps: density (per unit), distribution function with its interval."""
        lower, upper = self.band().at(self.places)
        centre = self.fit.cumulative
        width = (float(self.high) - float(self.low)) / _STEPS
        return {
            self.column: self.places[1:],
            "density": self.fit.density / width,
            "cdf": centre[1:],
            "ci_low": np.minimum(lower, centre)[1:],
            "ci_high": np.maximum(upper, centre)[1:],
        }

    def to_polars(self) -> polars.DataFrame:
        """As a polars frame, one row a step of the grid."""
        return tables.to_polars(self.columns())

    def plot(
        self, *, shares: Sequence[float] = (0.1, 0.5, 0.9), width: int = 560
    ) -> altair.VConcatChart:
        """The density with some quantiles, and the distribution function with its band."""
        return density_pictures.density(self, shares=shares, width=width)

    def explain(self) -> str:
        """In words."""
        found = self.quantiles()
        named = ", ".join(
            f"{share:.0%} below {self._text(value)} ({self._text(low)} to {self._text(high)})"
            for share, value, low, high in zip(*found.values(), strict=True)
        )
        bounded = ""
        if found["ci_low"][0] == float(self.low) or found["ci_high"][-1] == float(self.high):
            bounded = (
                f" Where one begins at {self.low} or ends at {self.high}, the range bounds it, not "
                "what was measured."
            )
        return (
            f"{answered_by(self.results, self.cohorts)}; {self.inside:.1%} have {self.column} from "
            f"{self.low} to {self.high}. Of those: {named}. Intervals (95%, each on its own) begin "
            "and end at edges that were asked and hold for any distribution; quantiles "
            f"between the edges come from the fit.{bounded}"
        )

    def __repr__(self) -> str:
        found = self.quantiles([0.5])
        middle, low, high = (
            self._text(found[name][0]) for name in ("quantile", "ci_low", "ci_high")
        )
        return (
            f"<Distribution of {self.column}: median {middle} ({low} to {high}), "
            f"{self.devices:,} devices>"
        )

    def _text(self, value: float) -> str:
        """A number of the range, however far that is from 0."""
        return tables.number_text(value, float(self.high) - float(self.low))

    def _notebook_columns(self) -> dict[str, Any]:
        return self.quantiles()

    def _settings(self) -> dict[str, Any]:
        return {"low": str(self.low), "high": str(self.high)}

    @classmethod
    def _with_settings(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return {"low": as_exact(tree["low"]), "high": as_exact(tree["high"])}


def _inverted(curve: Floats, shares: Floats, places: Floats) -> Floats:
    """The first place where a non-decreasing curve reaches each share."""
    after = np.searchsorted(curve, shares, side="left")
    at = np.clip(after, 1, len(curve) - 1)
    rise = curve[at] - curve[at - 1]
    part = np.divide(shares - curve[at - 1], rise, out=np.ones_like(shares), where=rise > 0.0)
    found: Floats = places[at - 1] + np.clip(part, 0.0, 1.0) * (places[at] - places[at - 1])
    return found


@resumable
def distribution(
    study: Study,
    column: str,
    low: Real,
    high: Real,
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
    rules: DensityRules | None = None,
) -> AlgorithmRun[Distribution]:
    """Learn how `column` is distributed between `low` and `high`, and its quantiles.

    Nothing is asked until the run is iterated or its `result` is taken; `run.plan` says before what
    every round costs, and whether rounds pay for this policy and fleet. Where they do not, everyone
    is asked once. How many rounds there are follows from the noise of that plan, and how many cells
    there are and where their edges lie from the rounds before; the edges of a field that the policy
    calls an integer are whole numbers, so that no cell holds more of them than its width says.
    """
    first, last = as_exact(low, "low"), as_exact(high, "high")
    if not first < last:
        raise InvalidInput(f"the range goes from low to high, not from {low} to {high}")
    whole = query is None and _is_integer(study, column)
    probe = intervals(column, (first, last))
    if query is None:
        query = simple_query(study.fleet.policy, study.terms, (probe,), ())
    fields = reads_of(query, study.terms) if reads is None else as_reads(reads)
    require_fitting(study, (probe,), query, fields)

    def plan_for(shares: Sequence[float]) -> RoundsPlan:
        return study.plan_rounds(
            shares, reads=fields, epsilon=epsilon, delta=delta, mechanism=mechanism, crowd=crowd,
            cohorts=cohorts, devices=devices, target=target,
        )  # fmt: skip

    if rules is not None:
        used, plan = rules, plan_for(rules.shares)
    else:
        answers = next(
            (n for n in (3, 2) if study.cohorts(n, reads=fields, wanted=cohorts) == "everyone"), 1
        )
        used, plan = _best_plan(plan_for, answers)
    most_cells = study.terms.max_bins - 1

    def steps() -> Generator[Step, None, Distribution]:
        results: list[Result] = []
        known: Distribution | None = None
        for number, planned in enumerate(plan.rounds, start=1):
            parts = [] if known is None else known._rounds[0]
            noise = planned.std_error / planned.expected_reports
            places = used.edges(number, parts, _STEPS, noise=noise, most=most_cells)
            edges = _edges(first, last, places, whole=whole)
            question = study.histogram(
                intervals(column, edges), query=query, reads=fields, selection=selection,
                **planned.settings,
            )  # fmt: skip
            results.append(study.ask(question, target=planned.target))
            known = Distribution(results=tuple(results), cohorts=plan.cohorts, low=first, high=last)
            yield Step(number=number, question=question, result=results[-1], draw=known.plot)
        if known is None:
            raise InvalidInput("a plan has at least one round")
        return known

    return AlgorithmRun(plan, steps)


def _best_plan(
    plan_for: Callable[[Sequence[float]], RoundsPlan], answers: int
) -> tuple[DensityRules, RoundsPlan]:
    """Plan rounds where they pay against one question to everyone, and that question elsewhere.

    `answers` is how many rounds one device may answer, three at most.
    """
    once = plan_for((1.0,))
    noise, costs = _noise_of(once), False
    alone = asked_once(noise)
    try:
        if answers == 1:  # half the devices: sqrt(2) if the local epsilon binds, or 2
            costs = _noise_of(plan_for((0.5, 0.5))) > 1.7 * noise
        rules = regime(noise, splitting_costs=costs, answers=answers)
        plan = plan_for(rules.shares)
    except CohortTooSmall:
        why = "cohorts would be smaller than the policy allows."
        return alone, replace(once, note=f"{alone.note} {why}")
    if len(rules.shares) == 1:
        why = "a first round would drown in its own noise."
        return rules, replace(plan, note=f"{rules.note} {why}")
    left = plan.rounds[-1].expected_reports / once.rounds[0].expected_reports
    if costs and left < _LEAST_LEFT * rules.shares[-1]:
        why = "the smallest cohort that the policy allows would leave too few devices for the rest."
        return alone, replace(once, note=f"{alone.note} {why}")
    return rules, replace(plan, note=rules.note)


def _noise_of(plan: RoundsPlan) -> float:
    """A light cell's standard error in the first round, as a share of its cohort."""
    return plan.rounds[0].std_error / plan.rounds[0].expected_reports


def _is_integer(study: Study, column: str) -> bool:
    """Whether the one field of the analysis with this name holds whole numbers."""
    types = study.fleet.policy.fields
    found = [ref for ref in study.terms.fields if ref.partition(".")[2] == column]
    return len(found) == 1 and types[found[0]].type == "integer"


def _on_grid(edges: Sequence[Decimal], low: Decimal, high: Decimal) -> NDArray[np.int64]:
    """The nearest step of the grid to each edge."""
    begin, end = float(low), float(high)
    places = (np.array(edges, dtype=np.float64) - begin) / (end - begin) * _STEPS
    return np.round(places).astype(np.int64)


def _edges(low: Decimal, high: Decimal, steps: NDArray[np.int64], *, whole: bool) -> list[Decimal]:
    """The grid's edges, with enough digits to distinguish steps, or in whole numbers.

    Rounding may lead an edge to the same step as another, or as an end: it is left out.
    """
    width = (high - low) / _STEPS
    unit = Decimal(1) if whole else Decimal(1).scaleb(width.adjusted() - 2)
    rounded = {(low + width * int(step)).quantize(unit) for step in steps}
    edges = sorted(edge for edge in rounded if low < edge < high)
    places = _on_grid(edges, low, high)
    apart = np.diff(places, prepend=0) > 0
    return [
        low,
        *(edge for edge, place, new in zip(edges, places, apart, strict=True)
          if new and place < _STEPS),
        high,
    ]  # fmt: skip
