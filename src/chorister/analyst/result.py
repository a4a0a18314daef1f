"""What came back: frozen estimates that explain themselves."""

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

from chorister.analyst import pictures, saving, steps, tables, words
from chorister.analyst.comparison import Comparison, compare
from chorister.analyst.estimate import (
    Estimates,
    Floats,
    Method,
    WeightCheck,
    check_weight,
    estimate,
    quantile,
)
from chorister.analyst.files import write_atomically
from chorister.analyst.view import Labels, Part, View, column_names, part_columns
from chorister.encoding import AnyFeature, Encoding
from chorister.errors import DecodeError, InvalidInput
from chorister.privacy import Interval, Mechanism
from chorister.recipe import Recipe

if TYPE_CHECKING:
    import altair
    import pandas
    import polars
    import pyarrow  # type: ignore[import-untyped]

__all__ = ["Part", "Result", "column_names"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Estimated numbers of devices, row by row, with intervals of the noise.

    Everything is computed from what the aggregators released; nothing can be changed. Steps such
    as `marginal`, `filter` or `nonnegative` give another result and are listed in `steps`.
    """

    recipe: Recipe
    """The question, to the letter."""
    parts: tuple[Part, ...]
    """What was released, group by group and arm by arm."""
    missing: tuple[tuple[str, ...], ...] = ()
    """Groups with fewer reports than the minimum cohort: nothing of them was released."""
    round: int | None = None
    """Its number in its study."""
    confidence: float = 0.95
    candidates: int = 1
    """Over how many rows the intervals hold at once."""
    steps: tuple[str, ...] = ()
    """What was done to the released sums beyond removing the noise's mean."""
    view: View | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidInput("a result has at least one released part")
        size = self.recipe.encoding.size
        for part in self.parts:
            if part.sums.shape != (size,) or part.sums.dtype != np.uint64:
                raise InvalidInput(f"a part has {size:,} sums, one a bin, as unsigned integers")
            part.sums.flags.writeable = False
        quantile(self.confidence, self.candidates)  # raises unless they make sense

    # --- What was asked, and what it cost -------------------------------------------------------

    @property
    def features(self) -> tuple[AnyFeature, ...]:
        """The bucketing rules."""
        return self.recipe.features

    @property
    def encoding(self) -> Encoding:
        """The features as one encoding: bins and labels."""
        return self.recipe.encoding

    @property
    def n_reports(self) -> int:
        """Verified reports, of all groups."""
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
        """Below so many reports nothing would have been released."""
        return self.recipe.privacy.min_cohort

    @property
    def mechanism(self) -> Mechanism:
        """Which private one-hot encoding."""
        return self.recipe.privacy.mechanism

    @property
    def noise_trials(self) -> int:
        """M: each aggregator added Bin(M, q) to every bin; 0 where none did."""
        return self.min_cohort - 1 if self.recipe.privacy.crowd == "noised" else 0

    @property
    def bounded(self) -> bool:
        """Whether the aggregators verified that no report sets more than its share of bits."""
        return self.recipe.privacy.report == "bounded"

    @property
    def hostile_influence(self) -> tuple[int, float]:
        """What one hostile report can do at most: how many bins, and by how much each."""
        return self.recipe.randomizer.hostile_influence(bounded=self.bounded)

    @cached_property
    def weight(self) -> tuple[WeightCheck, ...]:
        """The check of the total weight, part by part."""
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
        """Whether a total weight is too unlikely to be honest chance: look at `weight`."""
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
        """Estimates as released, one a bin; with groups or arms, one row a part."""
        return self._shaped([part.value for part in self._by_part])

    @cached_property
    def variance(self) -> Floats:
        """Variances of `counts`, at the estimate."""
        return self._shaped([part.variance for part in self._by_part])

    @property
    def noise_sigma(self) -> float:
        """The standard error of a bin that nobody holds (of the first group)."""
        return float(np.sqrt(self._by_part[0].base[0]))

    def _shaped(self, arrays: list[Floats]) -> Floats:
        found = np.stack(arrays) if part_columns(self.recipe) else arrays[0]
        found.flags.writeable = False
        return found

    @cached_property
    def table(self) -> View:
        """Labels and rows, whatever was done to them."""
        if self.view is not None:
            return self.view
        return View(labels=self._all_labels(), rows=self.rows)

    @cached_property
    def rows(self) -> Estimates:
        """The law of every row's noise."""
        return self.view.rows if self.view is not None else Estimates.stacked(list(self._by_part))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Labels:
        """The label columns: groups first, then one column a feature."""
        return self.table.labels

    @property
    def estimate(self) -> Floats:
        """Estimated numbers of devices, row by row."""
        if self.view is not None and self.view.shown is not None:
            return self.view.shown
        return self.rows.value

    @property
    def std_error(self) -> Floats:
        """Of the noise, row by row."""
        return self.rows.std_error

    def intervals(self, *, method: Method = "score") -> Interval:
        """Intervals of the noise at this result's confidence, over its candidates."""
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

    # --- Steps: each gives another result -------------------------------------------------------

    def with_confidence(self, confidence: float) -> Result:
        """The same with other intervals."""
        return replace(self, confidence=confidence)

    def simultaneous(self) -> Result:
        """With intervals that hold for all rows that were asked about at once.

        Bonferroni over all candidates of the round, not only over those that are shown: to show the
        largest ones is a choice that depends on the noise.
        """
        every = self.encoding.size * len(self.parts)
        return replace(
            self,
            candidates=every,
            steps=(*self.steps, f"intervals hold for all {every:,} candidates at once"),
        )

    def group(self, *values: str) -> Result:
        """The result of one group, or of one arm of an experiment (its name comes last)."""
        return steps.group(self, values)

    def marginal(self, *columns: str) -> Result:
        """Sums over all other label columns. Bins' noises are independent, so variances add up."""
        return steps.marginal(self, columns)

    def filter(self, **wanted: str | Sequence[str]) -> Result:
        """The rows whose labels are among those given: `result.filter(age=["[10, 20)"])`."""
        return steps.filtered(self, wanted)

    def top(self, count: int = 10) -> Result:
        """The rows with the largest estimates, largest first.

        Their estimates are too high on average: they were chosen by their noise as well. Use
        `simultaneous()` intervals, or ask a fresh cohort about them.
        """
        order = np.argsort(-self.estimate, kind="stable")[:count]
        return steps.rows(self, order, f"the {len(order):,} largest of {len(self):,} rows")

    def nonnegative(self) -> Result:
        """The nearest counts that are not negative and add up to the reports (Norm-Sub).

        Estimates are then biased near 0; intervals stay the noise's, cut to what is possible.
        """
        return steps.nonnegative(self)

    def summing_to_reports(self) -> Result:
        """Use that every device is in exactly one bin: unbiased, and a little more precise."""
        return steps.summing_to_reports(self)

    def consistent(self, coarser: Result, parents: Sequence[int]) -> Result:
        """Combine with a coarser result: `parents[i]` is the row of it in which row i lies, or -1.

        Precision-weighted least squares on shares of the reports: unbiased if both are.
        """
        return steps.consistent(self, coarser, parents)

    def compare(self, other: Result, *, population: bool = False) -> Comparison:
        """How the shares of reports differ, row by row, with intervals of the difference.

        Of the noise alone, unless `population`: then also of the chance that other devices had
        answered, which is what matters if the two results are about two cohorts.
        """
        steps.unprocessed(self, "compare")
        steps.unprocessed(other, "compare")
        return compare(self, other, population=population)

    # --- Out ------------------------------------------------------------------------------------

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

    def to_polars(self) -> polars.DataFrame:
        """As a polars frame."""
        return tables.to_polars(self.columns())

    def to_arrow(self) -> pyarrow.Table:
        """As an Arrow table."""
        return tables.to_arrow(self.columns())

    def to_pandas(self) -> pandas.DataFrame:
        """As a pandas frame."""
        return tables.to_pandas(self.columns())

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return tables.arrow_stream(self.columns(), requested_schema)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """As CSV: into a file, or as text."""
        return tables.to_csv(self.columns(), path)

    def plot(self, *, top: int = 30) -> altair.LayerChart:
        """Estimates with their intervals, as a chart."""
        return pictures.bars(self, top=top)

    def explain(self) -> str:
        """In words: what was asked, of whom, what it cost, what the numbers mean."""
        return words.explain(self)

    def _repr_html_(self) -> str:
        return tables.html(self)

    def __repr__(self) -> str:
        return (
            f"<Result: {len(self):,} rows, {self.n_reports:,} reports, epsilon {self.epsilon}, "
            f"noise ±{self.noise_sigma:,.1f} devices>"
        )

    # --- Files ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Everything, as JSON."""
        return json.dumps(saving.result_to_tree(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Result:
        """What `to_json` wrote; anything else raises `DecodeError`."""
        if len(text) > saving.MAX_BYTES:
            raise DecodeError(f"a result has at most {saving.MAX_BYTES:,} bytes")
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"not JSON: {error}") from None
        return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: Any) -> Result:  # noqa: ANN401 (any JSON)
        """The same from JSON values."""
        try:
            return cls(**saving.fields_from_tree(tree))
        except InvalidInput as error:
            raise DecodeError(f"not a saved result: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, whole or not at all."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Read what `save` wrote."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
