"""A result: estimates with intervals that can explain themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chorister.analyst import display, files, postprocessing
from chorister.analyst.estimate import (
    Estimates,
    Floats,
    IntervalMethod,
    Labels,
    Part,
    ResultView,
    WeightCheck,
    check_weight,
    column_names,
    estimate,
    part_columns,
    quantile,
)
from chorister.analyst.postprocessing import Comparison, compare
from chorister.analyst.tables import Tabular
from chorister.encoding import AnyFeature, Encoding
from chorister.errors import DecodeError, InvalidInput
from chorister.privacy import HostileInfluence, Interval, Mechanism
from chorister.recipe import Recipe

if TYPE_CHECKING:
    import altair


@dataclass(frozen=True, kw_only=True, eq=False)
class Result(Tabular):
    """Estimated numbers of devices, row by row, with intervals of the noise.

    Everything is computed from what the aggregators released. A result never changes: `marginal`,
    `filter`, `nonnegative` and the like return a new one, and are listed in its `steps`.
    """

    recipe: Recipe
    """The question exactly as it was asked."""
    parts: tuple[Part, ...]
    """What was released, by group and arm."""
    missing: tuple[tuple[str, ...], ...] = ()
    """Groups with fewer reports than the minimum cohort: nothing was released about them."""
    round: int | None = None
    """The number of its round in the study."""
    confidence: float = 0.95
    candidates: int = 1
    """For how many rows the intervals hold at once."""
    steps: tuple[str, ...] = ()
    """What was done beyond subtracting the mean of the noise."""
    view: ResultView | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidInput("a result needs at least one released part")
        size = self.recipe.encoding.size
        for part in self.parts:
            if part.sums.shape != (size,) or part.sums.dtype != np.uint64:
                raise InvalidInput(f"a part needs {size:,} sums, one per bin, as unsigned integers")
            part.sums.flags.writeable = False
        quantile(self.confidence, self.candidates)  # raises if they are invalid

    # --- The question and its cost --------------------------------------------------------------

    @property
    def features(self) -> tuple[AnyFeature, ...]:
        """What was counted."""
        return self.recipe.features

    @property
    def encoding(self) -> Encoding:
        """All features together: bins and their labels."""
        return self.recipe.encoding

    @property
    def n_reports(self) -> int:
        """Verified reports of all groups."""
        return sum(part.reports for part in self.parts)

    @property
    def epsilon(self) -> Decimal:
        """What each device that answered was charged."""
        return self.recipe.privacy.epsilon

    @property
    def delta(self) -> Decimal:
        """What each device that answered was charged."""
        return self.recipe.privacy.delta

    @property
    def min_cohort(self) -> int:
        """With fewer reports, nothing would have been released."""
        return self.recipe.privacy.min_cohort

    @property
    def mechanism(self) -> Mechanism:
        """How devices randomized their reports."""
        return self.recipe.privacy.mechanism

    @property
    def noise_trials(self) -> int:
        """M, if each aggregator added Bin(M, q) to every bin; 0 if none did."""
        return self.recipe.privacy.noise_trials

    @property
    def bounded(self) -> bool:
        """Whether the aggregators verified that no report sets more bits than it may."""
        return self.recipe.privacy.report == "bounded"

    @property
    def hostile_influence(self) -> HostileInfluence:
        """How far one hostile report can move the estimates."""
        return self.recipe.randomizer.hostile_influence(bounded=self.bounded)

    @cached_property
    def weight(self) -> tuple[WeightCheck, ...]:
        """Whether the total weight of each part fits honest reports."""
        return tuple(
            check_weight(
                self.recipe.randomizer,
                part.sums,
                part.reports,
                self.noise_trials,
                bounded=self.bounded,
            )
            for part in self.parts
        )

    @property
    def marked(self) -> bool:
        """Whether a total weight is too unlikely for honest reports: see `weight`."""
        return any(check.marked for check in self.weight)

    # --- Arrays ---------------------------------------------------------------------------------

    @cached_property
    def _by_part(self) -> tuple[Estimates, ...]:
        randomizer = self.recipe.randomizer
        return tuple(
            estimate(randomizer, part.sums, part.reports, self.noise_trials) for part in self.parts
        )

    @cached_property
    def counts(self) -> Floats:
        """Estimates as released, one per bin; with groups or arms, one row per part."""
        return self._shaped([part.value for part in self._by_part])

    @cached_property
    def variance(self) -> Floats:
        """Variances of `counts`."""
        return self._shaped([part.variance for part in self._by_part])

    @property
    def noise_sigma(self) -> float:
        """The standard error of a bin that nobody holds (in the first group)."""
        return float(np.sqrt(self._by_part[0].base[0]))

    def _shaped(self, arrays: list[Floats]) -> Floats:
        found = np.stack(arrays) if part_columns(self.recipe) else arrays[0]
        found.flags.writeable = False
        return found

    @cached_property
    def table(self) -> ResultView:
        """Labels and rows after all steps."""
        if self.view is not None:
            return self.view
        return ResultView(labels=self._all_labels(), rows=self.rows)

    @cached_property
    def rows(self) -> Estimates:
        """The estimate and the distribution of its noise for every row."""
        return self.view.rows if self.view is not None else Estimates.stacked(list(self._by_part))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Labels:
        """The label columns: groups first, then one column per feature."""
        return self.table.labels

    @property
    def estimate(self) -> Floats:
        """Estimated numbers of devices, row by row."""
        if self.view is not None and self.view.shown is not None:
            return self.view.shown
        return self.rows.value

    @property
    def std_error(self) -> Floats:
        """The standard error of the noise, row by row."""
        return self.rows.std_error

    def intervals(self, *, method: IntervalMethod = "score") -> Interval:
        """Intervals of the noise at this result's confidence, for all its candidates."""
        found = self.rows.interval(
            self.confidence,
            candidates=self.candidates,
            step=self.recipe.randomizer.step,
            method=method,
        )
        bounds = self.view.bounds if self.view is not None else None
        if bounds is None:
            return found
        low, high = np.clip(found.low, *bounds), np.clip(found.high, *bounds)
        return Interval(low=np.minimum(low, self.estimate), high=np.maximum(high, self.estimate))

    @property
    def ci_low(self) -> Floats:
        """Lower ends of the intervals."""
        return self.intervals().low

    @property
    def ci_high(self) -> Floats:
        """Upper ends of the intervals."""
        return self.intervals().high

    def _all_labels(self) -> Labels:
        features = [
            [feature.label(cell) for cell in range(feature.size)] for feature in self.features
        ]
        names = column_names(self.recipe)
        combined = list(zip(*product(*features), strict=True))
        count = len(self.parts)
        groups = {
            name: [part.group[i] for part in self.parts for _ in range(self.encoding.size)]
            for i, name in enumerate(names[: part_columns(self.recipe)])
        }
        cells = {
            name: list(column) * count
            for name, column in zip(names[len(groups) :], combined, strict=True)
        }
        return groups | cells

    # --- Steps, each returning a new result -----------------------------------------------------

    def with_confidence(self, confidence: float) -> Result:
        """Return the same estimates with other intervals."""
        return replace(self, confidence=confidence)

    def simultaneous(self) -> Result:
        """Return intervals that hold for all rows of the question at once.

        This is Bonferroni over all candidates of the round, not only those shown: which rows are
        largest depends on the noise.
        """
        every = self.encoding.size * len(self.parts)
        return replace(
            self,
            candidates=every,
            steps=(*self.steps, f"intervals hold for all {every:,} candidates at once"),
        )

    def group(self, *values: str) -> Result:
        """Return the result of one group, or of one arm of an experiment (its name comes last)."""
        return postprocessing.group(self, values)

    def marginal(self, *columns: str) -> Result:
        """Sum over all other label columns."""
        return postprocessing.marginal(self, columns)

    def filter(self, **wanted: str | Sequence[str]) -> Result:
        """Keep the rows with these labels: `result.filter(age=["[10, 20)"])`."""
        return postprocessing.filtered(self, wanted)

    def top(self, count: int = 10) -> Result:
        """Keep the rows with the largest estimates, largest first.

        On average their estimates are too high, because their noise helped to select them. Use
        `simultaneous()` intervals, or ask a fresh cohort about them.
        """
        order = np.argsort(-self.estimate, kind="stable")[:count]
        return postprocessing.rows(self, order, f"the {len(order):,} largest of {len(self):,} rows")

    def nonnegative(self) -> Result:
        """Find the nearest non-negative counts that add up to the reports (Norm-Sub).

        Estimates are then biased near 0; the intervals still cover the noise, clipped to what is
        possible.
        """
        return postprocessing.nonnegative(self)

    def summing_to_reports(self) -> Result:
        """Use that every device is in exactly one bin: unbiased and slightly more precise."""
        return postprocessing.summing_to_reports(self)

    def consistent(
        self, coarser: Result, parents: Sequence[int], *, same_devices: bool = False
    ) -> Result:
        """Combine with a coarser result; `parents[i]` is its row that contains row i, or -1.

        This is precision-weighted least squares on shares of the reports: unbiased if both are. The
        intervals still concern the devices that answered *this* question. The coarser result counts
        as another sample of the fleet, with its sampling variance, unless you know that the same
        devices answered both and pass `same_devices=True`.
        """
        return postprocessing.consistent(self, coarser, parents, same_devices=same_devices)

    def compare(self, other: Result, *, population: bool = False) -> Comparison:
        """Compare the shares of reports, row by row, with intervals of the difference.

        The intervals cover the noise alone. With `population=True` they also cover the chance that
        other devices had answered, which matters if the two results come from different cohorts.
        """
        postprocessing.unprocessed(self, "compare")
        postprocessing.unprocessed(other, "compare")
        return compare(self, other, population=population)

    # --- Output ---------------------------------------------------------------------------------

    def columns(self) -> dict[str, Any]:
        """All columns: labels, estimate, std_error, ci_low, ci_high."""
        interval = self.intervals()
        return {
            **{name: list(column) for name, column in self.labels.items()},
            "estimate": self.estimate,
            "std_error": self.std_error,
            "ci_low": interval.low,
            "ci_high": interval.high,
        }

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def plot(self, *, top: int = 30) -> altair.LayerChart:
        """Chart the estimates with their intervals."""
        return display.bar_chart(self, top=top)

    def explain(self) -> str:
        """Say what was asked, of whom, what it cost, and what the numbers mean."""
        return display.explain(self)

    def _repr_html_(self) -> str:
        return display.notebook_html(self)

    def __repr__(self) -> str:
        return (
            f"<Result: {len(self):,} rows, {self.n_reports:,} reports, epsilon {self.epsilon}, "
            f"noise ±{self.noise_sigma:,.1f} devices>"
        )

    # --- Files ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Write everything as JSON."""
        return json.dumps(files.result_to_tree(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Result:
        """Read what `to_json` wrote; raise `DecodeError` for anything else."""
        if len(text) > files.MAX_BYTES:
            raise DecodeError(f"a result has at most {files.MAX_BYTES:,} bytes")
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"not JSON: {error}") from None
        return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: Any) -> Result:  # noqa: ANN401 (any JSON)
        try:
            return cls(**files.fields_from_tree(tree))
        except InvalidInput as error:
            raise DecodeError(f"not a saved result: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, whole or not at all."""
        files.write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Read what `save` wrote."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
