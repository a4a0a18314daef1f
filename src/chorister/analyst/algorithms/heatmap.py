"""A map, finer where people are: coarse cells first, then the cells that hold enough."""

from __future__ import annotations

import html as escaping
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from chorister.analyst import tables
from chorister.analyst.algorithms import map_pictures
from chorister.analyst.algorithms.keeping import Kept
from chorister.analyst.algorithms.map_rules import (
    DISJOINT_RULES,
    EVERYONE_RULES,
    MapRules,
    Partition,
)
from chorister.analyst.algorithms.pyramid import Measured, Pyramid, fit_map
from chorister.analyst.algorithms.reading import devices_of, scaled
from chorister.analyst.algorithms.running import Run, Step
from chorister.analyst.asking import reads_of, simple_query
from chorister.analyst.cohorts import Cohorts, RoundsPlan
from chorister.analyst.estimate import Estimates
from chorister.analyst.features import Real, grid
from chorister.analyst.result import Result
from chorister.analyst.study import Study
from chorister.encoding import Grid, Selection
from chorister.errors import InvalidInput
from chorister.policy import Crowd
from chorister.privacy import Mechanism

if TYPE_CHECKING:
    import altair
    import polars

__all__ = ["HeatMap", "heatmap"]

_DEEPEST: Final = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class HeatMap(Kept):
    """A map with cells of different sizes.

    `estimate` is the fitted number of devices in a cell: all rounds together, smoothed where noise
    hides what is there, parts adding up. `measured`, its standard error and the interval around it
    are of the last round alone, whose noise had no say in which cells there are: the interval
    covers the truth, chosen cells included. It is not the fit's, which may lie outside of it.
    """

    FORMAT: ClassVar[str] = "chorister-heatmap-1"
    NOUN: ClassVar[str] = "a saved map"

    results: tuple[Result, ...]
    cohorts: Cohorts
    depth: int  # the finest level

    def __post_init__(self) -> None:
        if not self.results or not all(_grid_of(result) for result in self.results):
            raise InvalidInput("a map needs at least one round, each over one grid without groups")
        if not 1 <= self.depth <= _DEEPEST:
            raise InvalidInput(f"depth is a level from 1 to {_DEEPEST}, not {self.depth}")

    @property
    def feature(self) -> Grid:
        """The cells of the last round."""
        return _grid_of(self.results[-1])

    @cached_property
    def devices(self) -> int:
        """All devices that answered, inside the box or not: what estimates add up to."""
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
        return self.fit.at(self.depth if level is None else level)

    @cached_property
    def _last(self) -> tuple[Partition, tuple[str, ...], Estimates]:
        """Cells of the last round in the partition's order, and what it measured."""
        partition, names, order = _partition_of(self.feature)
        rows = scaled(self.results[-1], self.devices).take(1 + order)
        return partition, tuple(names[i] for i in order), rows

    @cached_property
    def _columns(self) -> dict[str, Any]:
        partition, names, rows = self._last
        found = rows.interval()
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
        """The last round's cells: corners, fitted devices; what it measured, with its interval."""
        return dict(self._columns)

    def to_polars(self) -> polars.DataFrame:
        """As a polars frame, one row a cell."""
        return tables.to_polars(self.columns())

    def plot(
        self,
        *,
        outline: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        width: int = 560,
    ) -> altair.LayerChart:
        """The map; `outline` is land to draw over it: GeoJSON, or a TopoJSON file of countries."""
        return map_pictures.cells(self, outline=outline, width=width)

    def explain(self) -> str:
        """In words."""
        sizes = [len(name) for name in self._columns["cell"]]
        inside = float(self.fit.at(0)[0, 0])
        asked = "answered every round" if self.cohorts == "everyone" else "answered one round each"
        return (
            f"{self.devices:,} devices {asked}; about {inside:,.0f} of them are inside the box. "
            f"The last of {len(self.results)} rounds had {len(sizes):,} cells, from level "
            f"{min(sizes)} to {max(sizes)}; an empty one reads 0 ± "
            f"{float(np.sqrt(self._last[2].base[0])):,.1f} devices. Estimates combine all rounds "
            "and are smoothed where noise hides what is there. What was measured and the interval "
            "around it (95 %) are of the last round alone, noise and sampling, and hold for each "
            "cell by itself; a fitted estimate may lie outside of it."
        )

    def __repr__(self) -> str:
        return f"<HeatMap: {len(self._columns['cell']):,} cells, {self.devices:,} devices>"

    def _repr_html_(self) -> str:
        return f"<p>{escaping.escape(self.explain())}</p>{tables.html_table(self.columns())}"

    def _settings(self) -> dict[str, Any]:
        return {"depth": self.depth}

    @classmethod
    def _with_settings(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return {"depth": int(tree["depth"])}


def _grid_of(result: Result) -> Grid:
    features = result.features
    if len(features) != 1 or not isinstance(features[0], Grid) or result.recipe.group_by:
        raise InvalidInput("a map is of one grid, without groups")
    return features[0]


def _partition_of(feature: Grid) -> tuple[Partition, tuple[str, ...], NDArray[np.int64]]:
    """A grid's cells as a partition, their names, and their order in it."""
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
    """Put one round's cells in, and what it says about the box as a whole."""
    partition, _, order = _partition_of(_grid_of(result))
    rows = scaled(result, devices)
    cells = rows.take(1 + order)
    start = 0
    for level, mask in enumerate(partition.masks):
        end = start + int(np.count_nonzero(mask))
        measured.add(level, mask, cells.value[start:end], cells.variance[start:end])
        start = end
    # Whoever is not in the box is in bin 0, and how many answered is known.
    whole = np.ones((1, 1), dtype=np.bool_)
    measured.add(0, whole, devices - rows.value[:1], rows.variance[:1])


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
    rules: MapRules | None = None,
) -> Run[HeatMap]:
    """Map where devices are, in `columns` (x, y) inside `box`, down to cells of level `depth`.

    Nothing is asked until the run is iterated or its `result` is taken; `run.plan` says before what
    every round costs. Every device answers every round where the policy allows so many reports;
    else the rounds go to disjoint cohorts. `rules` says how cells are split.
    """
    if not 1 <= depth <= _DEEPEST:
        raise InvalidInput(f"depth is a level from 1 to {_DEEPEST}, not {depth}")
    probe = grid(columns, box, level=1)
    if query is None:
        query = simple_query(study.fleet.policy, study.terms, (probe,), ())
    fields = reads_of(query, study.terms) if reads is None else {k: tuple(reads[k]) for k in reads}

    used = rules or EVERYONE_RULES
    who = study.cohorts(len(used.shares), reads=fields, wanted=cohorts)
    if rules is None and who == "disjoint":
        used = DISJOINT_RULES
    plan = study.plan_rounds(
        used.shares, reads=fields, epsilon=epsilon, delta=delta, mechanism=mechanism, crowd=crowd,
        cohorts=who, devices=devices,
    )  # fmt: skip
    most_cells = study.terms.max_bins - 1

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
            results.append(study.ask(question))
            known = _so_far(results, plan, depth)
            yield Step(number=number, question=question, result=results[-1], draw=known.plot)
        return _so_far(results, plan, depth)

    return Run(plan, steps)


def _so_far(results: Sequence[Result], plan: RoundsPlan, depth: int) -> HeatMap:
    return HeatMap(results=tuple(results), cohorts=plan.cohorts, depth=depth)


def _scale(plan: RoundsPlan, number: int) -> float:
    """What a count of this round's cohort stands for among the devices asked until then."""
    if plan.cohorts == "everyone":
        return 1.0
    asked = sum(planned.expected_reports for planned in plan.rounds[: number - 1])
    return asked / plan.rounds[number - 1].expected_reports
