"""A map that is finer where people are: coarse cells first, then finer ones where it pays."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.algorithms import map_pictures
from chorister.analyst.algorithms.algorithm_run import (
    AlgorithmResult,
    AlgorithmRun,
    Step,
    answered_by,
    devices_of,
    resumable,
    scaled,
)
from chorister.analyst.algorithms.map_rules import (
    DISJOINT_RULES,
    EVERYONE_RULES,
    SMALL_FLEET_RULES,
    MapRules,
    Partition,
    asked_once,
    enough_left,
    rounds_pay,
)
from chorister.analyst.algorithms.pyramid import Measured, Pyramid, fit_map
from chorister.analyst.arguments import Real, as_count, as_reads
from chorister.analyst.cohorts import Cohorts, RoundsPlan
from chorister.analyst.estimate import Estimates
from chorister.analyst.preflight import require_fitting
from chorister.analyst.request import grid, reads_of, simple_query
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.encoding import Grid, Selection
from chorister.errors import CohortTooSmall, InvalidInput
from chorister.policy import Crowd
from chorister.privacy import Mechanism

if TYPE_CHECKING:
    import altair


_MAX_DEPTH: Final = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class HeatMap(AlgorithmResult):
    """A map with cells of different sizes.

    `estimate` is the fitted number of devices in a cell: it combines all rounds, is smoothed where
    noise hides the details, and adds up. `measured`, its standard error and its interval come from
    the last round alone, whose noise did not influence the choice of cells: so the interval covers
    the truth. It is not an interval of the fit, which may lie outside.
    """

    FORMAT: ClassVar[str] = "chorister-heatmap-1"
    NOUN: ClassVar[str] = "a saved map"

    results: tuple[Result, ...]
    cohorts: Cohorts
    depth: int  # the finest level

    def __post_init__(self) -> None:
        if not self.results or not all(_grid_of(result) for result in self.results):
            raise InvalidInput("a map needs at least one round, each about one grid without groups")
        if not 1 <= self.depth <= _MAX_DEPTH:
            raise InvalidInput(f"depth must be a level from 1 to {_MAX_DEPTH}, not {self.depth}")

    @property
    def feature(self) -> Grid:
        """The cells of the last round."""
        return _grid_of(self.results[-1])

    @cached_property
    def devices(self) -> int:
        """All devices that answered, inside the box or not. Estimates add up to them."""
        return devices_of(self.results, self.cohorts)

    @cached_property
    def fit(self) -> Pyramid:
        """The fitted map at every level."""
        measured = Measured()
        for result in self.results:
            _add(measured, result, self.devices)
        return fit_map(measured, max(self.depth, measured.finest))

    def image(self, level: int | None = None) -> NDArray[np.float64]:
        """Devices by cell of a level (default: the finest), rows from low to high y."""
        chosen = as_count(self.depth if level is None else level, "level")
        if chosen is None or not 0 <= chosen <= _MAX_DEPTH:
            raise InvalidInput(f"level must be from 0 to {_MAX_DEPTH}, not {level}", field="level")
        return self.fit.at(chosen)

    @cached_property
    def _last(self) -> tuple[Partition, tuple[str, ...], Estimates]:
        """The cells of the last round in the order of the partition, and what it measured."""
        partition, names, order = _partition_of(self.feature)
        rows = scaled(self.results[-1], self.devices).take(1 + order)
        return partition, tuple(names[i] for i in order), rows

    @cached_property
    def _columns(self) -> dict[str, Any]:
        partition, names, rows = self._last
        last = self.results[-1]
        step = last.recipe.randomizer.step * max(self.devices / last.n_reports, 1.0)
        found = rows.interval(step=step)
        estimate = np.concatenate(
            [self.fit.at(level)[mask] for level, mask in enumerate(partition.masks)]
        )
        left, lower, right, upper = _rectangles(partition, self.feature)
        return {
            "cell": list(names),
            "x0": left,
            "y0": lower,
            "x1": right,
            "y1": upper,
            "estimate": estimate,
            "measured": rows.value,
            "std_error": rows.std_error,
            "ci_low": np.clip(found.low, 0.0, self.devices),
            "ci_high": np.clip(found.high, 0.0, self.devices),
        }

    def columns(self) -> dict[str, Any]:
        """One row per cell: corners, fitted devices, and what the last round measured."""
        return dict(self._columns)

    def plot(
        self,
        *,
        outline: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        width: int = 560,
    ) -> altair.LayerChart:
        """Draw the map; `outline` is land to draw over it, as GeoJSON or a TopoJSON file."""
        return map_pictures.cells(self, outline=outline, width=width)

    def explain(self) -> str:
        sizes = [len(name) for name in self._columns["cell"]]
        inside = float(self.fit.at(0)[0, 0])
        rounds = len(self.results)
        last = f"The last of {rounds} rounds" if rounds > 1 else "The only round"
        return (
            f"{answered_by(self.results, self.cohorts)}; about {inside:,.0f} of them are inside "
            "the box. "
            f"{last} had {len(sizes):,} cells, from level "
            f"{min(sizes)} to {max(sizes)}; an empty one reads 0 ± "
            f"{float(np.sqrt(self._last[2].base[0])):,.1f} devices. Estimates combine all rounds "
            "and are smoothed where noise hides the details. Measured values and their 95% "
            "intervals come from the last round alone; the intervals reflect noise and sampling, "
            "for each cell on its own. A fitted estimate may lie outside."
        )

    def __repr__(self) -> str:
        return f"<HeatMap: {len(self._columns['cell']):,} cells, {self.devices:,} devices>"

    def _settings(self) -> dict[str, Any]:
        return {"depth": self.depth}

    @classmethod
    def _with_settings(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return {"depth": int(tree["depth"])}


def _grid_of(result: Result) -> Grid:
    features = result.features
    if len(features) != 1 or not isinstance(features[0], Grid) or result.recipe.group_by:
        raise InvalidInput("a map needs one grid, without groups")
    return features[0]


def _partition_of(feature: Grid) -> tuple[Partition, tuple[str, ...], NDArray[np.int64]]:
    """Return the cells of a grid as a partition, their names, and their order in it."""
    if feature.cells is not None:
        partition, order = Partition.of_quadkeys(feature.cells)
        return partition, feature.cells, order
    partition = Partition.uniform(feature.level or 0)
    names = tuple(feature.label(index) for index in range(1, feature.size))
    return partition, names, np.array([int(key, 4) for key in partition.quadkeys()])


def _rectangles(partition: Partition, feature: Grid) -> tuple[NDArray[np.float64], ...]:
    x0, y0, x1, y1 = (float(edge) for edge in feature.box)
    corners: list[NDArray[np.float64]] = []
    for level, mask in enumerate(partition.masks):
        rows, columns = np.nonzero(mask)
        wide, high = (x1 - x0) / 2**level, (y1 - y0) / 2**level
        left, lower = x0 + columns * wide, y0 + rows * high
        corners.append(np.stack([left, lower, left + wide, lower + high]))
    return tuple(np.concatenate(corners, axis=1))


def _add(measured: Measured, result: Result, devices: int) -> None:
    """Add the cells of a round, and what it says about the whole box."""
    partition, _, order = _partition_of(_grid_of(result))
    rows = scaled(result, devices)
    cells = rows.take(1 + order)
    start = 0
    for level, mask in enumerate(partition.masks):
        end = start + int(np.count_nonzero(mask))
        measured.add(level, mask, cells.value[start:end], cells.variance[start:end])
        start = end
    # Devices outside the box are in bin 0, and the number of reports is known.
    whole = np.ones((1, 1), dtype=np.bool_)
    measured.add(0, whole, devices - rows.value[:1], rows.variance[:1])


@resumable
def heatmap(
    study: Study,
    columns: Sequence[str],
    box: Sequence[Real],
    *,
    depth: int = 10,
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
    rules: MapRules | None = None,
) -> AlgorithmRun[HeatMap]:
    """Map where devices are, in `columns` (x, y) inside `box`, down to cells of level `depth`.

    Nothing is asked until you iterate over the run or take its `result`; `run.plan` states the cost
    of every round beforehand. If the policy allows enough reports, every device answers every
    round; otherwise the rounds go to disjoint cohorts. Where rounds do not pay, everyone is asked
    once, and the plan says so, unless you choose `cohorts` or `rules`, which decide what is split.
    """
    if not 1 <= (as_count(depth, "depth") or 0) <= _MAX_DEPTH:
        raise InvalidInput(f"depth must be a level from 1 to {_MAX_DEPTH}, not {depth}")
    probe = grid(columns, box, level=1)
    x0, y0, x1, y1 = map(float, probe.box)
    for low, high in ((x0, x1), (y0, y1)):
        if not (np.diff(np.linspace(low, high, 2**depth + 1)) > 0.0).all():
            raise InvalidInput(
                f"the box is too narrow for cells of level {depth}: from {low} to {high} there are "
                "fewer doubles than cells; choose a smaller depth",
                field="depth",
            )
    if query is None:
        query = simple_query(study.fleet.policy, study.terms, (probe,), ())
    fields = reads_of(query, study.terms) if reads is None else as_reads(reads)
    require_fitting(study, (probe,), query, fields)

    most_cells = study.terms.max_bins - 1

    def planned(shares: Sequence[float], who: Cohorts) -> RoundsPlan:
        return study.plan_rounds(
            shares, reads=fields, epsilon=epsilon, delta=delta, mechanism=mechanism, crowd=crowd,
            cohorts=who, devices=devices, target=target,
        )  # fmt: skip

    if rules is not None:
        used = rules
        plan = planned(used.shares, study.cohorts(len(used.shares), reads=fields, wanted=cohorts))
    else:
        who = study.cohorts(len(EVERYONE_RULES.shares), reads=fields, wanted=cohorts)
        used, plan = _best_plan(planned, who, depth, most_cells, in_rounds=cohorts is not None)

    def steps() -> Generator[Step, None, HeatMap]:
        first = min(used.first_level, depth)
        while 4**first > most_cells:
            first -= 1
        partition = Partition.uniform(first)
        results: list[Result] = []
        for number, planned in enumerate(plan.rounds, start=1):
            if results:
                seen = _so_far(results, plan, depth)
                sigma = planned.std_error * _scale(plan, number)
                partition = used.refinements[number - 2].partition(
                    seen.fit, sigma, depth=depth, most_cells=most_cells
                )
            question = study.histogram(
                grid(columns, box, cells=partition.quadkeys()),
                query=query, reads=fields, selection=selection, **planned.settings,
            )  # fmt: skip
            results.append(study.ask(question, target=planned.target))
            known = _so_far(results, plan, depth)
            yield Step(number=number, question=question, result=results[-1], draw=known.plot)
        return _so_far(results, plan, depth)

    return AlgorithmRun(plan, steps)


def _best_plan(
    planned: Callable[[Sequence[float], Cohorts], RoundsPlan],
    who: Cohorts,
    depth: int,
    most_cells: int,
    *,
    in_rounds: bool,
) -> tuple[MapRules, RoundsPlan]:
    """Plan rounds where they pay against one question to everybody, and that question elsewhere.

    With `in_rounds`, plan rounds whether they pay or not.
    """
    once = planned((1.0,), "disjoint")
    (alone,) = once.rounds
    devices, sigma = alone.expected_reports, alone.std_error
    if in_rounds or rounds_pay(devices, sigma, depth=depth, most_cells=most_cells):
        note = "Several rounds pay off: later ones have small cells only where there is something."
        if who == "everyone":
            return EVERYONE_RULES, replace(planned(EVERYONE_RULES.shares, who), note=note)
        for rules in (DISJOINT_RULES, SMALL_FLEET_RULES):
            with suppress(CohortTooSmall):
                plan = planned(rules.shares, who)
                if enough_left(plan.rounds[-1].expected_reports, devices):
                    return rules, replace(plan, note=note)
        if in_rounds:
            return SMALL_FLEET_RULES, planned(SMALL_FLEET_RULES.shares, who)
        why = "cohorts that explore first would leave too few devices for the map itself"
    else:
        why = f"even an average cell of level {depth} stands out from the noise"
    rules = asked_once(devices, sigma, depth=depth, most_cells=most_cells)
    return rules, replace(once, note=f"Everyone is asked once, because {why}.")


def _so_far(results: Sequence[Result], plan: RoundsPlan, depth: int) -> HeatMap:
    return HeatMap(results=tuple(results), cohorts=plan.cohorts, depth=depth)


def _scale(plan: RoundsPlan, number: int) -> float:
    """How many of the devices asked so far one device of this round's cohort represents."""
    if plan.cohorts == "everyone":
        return 1.0
    asked = sum(planned.expected_reports for planned in plan.rounds[: number - 1])
    return asked / plan.rounds[number - 1].expected_reports
