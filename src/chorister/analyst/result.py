"""A result: estimates with intervals that can explain themselves."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from chorister.analyst import display, json_files, postprocessing
from chorister.analyst.arguments import MAX_COUNT
from chorister.analyst.estimate import (
    ConfidenceInterval,
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
from chorister.analyst.tables import Tabular
from chorister.encoding import AnyFeature, Encoding
from chorister.errors import DecodeError, InvalidInput
from chorister.privacy import HostileInfluence, Mechanism
from chorister.recipe import Recipe


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
        groups = part_columns(self.recipe)
        for part in self.parts:
            if len(part.group) != groups or not 0 < part.reports <= MAX_COUNT:
                raise InvalidInput(
                    f"a part has {groups} groups, and reports of at least one device"
                )
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

    def intervals(self, *, method: IntervalMethod = "score") -> ConfidenceInterval:
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
        return ConfidenceInterval(
            low=np.minimum(low, self.estimate), high=np.maximum(high, self.estimate)
        )

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

    with_confidence = postprocessing.with_confidence
    simultaneous = postprocessing.simultaneous
    group = postprocessing.group
    marginal = postprocessing.marginal
    filter = postprocessing.filtered
    top = postprocessing.top
    above_noise = postprocessing.above_noise
    nonnegative = postprocessing.nonnegative
    summing_to_reports = postprocessing.summing_to_reports
    consistent = postprocessing.consistent
    compare = postprocessing.compare
    shares = property(postprocessing.shares)

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

    plot = display.bar_chart
    explain = display.explain
    to_html = display.html_file
    _repr_html_ = display.notebook_html

    def __repr__(self) -> str:
        return (
            f"<Result: {len(self):,} rows, {self.n_reports:,} reports, epsilon {self.epsilon}, "
            f"noise ±{self.noise_sigma:,.1f} devices>"
        )

    # --- Files ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Write everything as JSON."""
        return json.dumps(json_files.result_to_tree(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Result:
        """Read what `to_json` wrote; raise `DecodeError` for anything else."""
        if len(text) > json_files.MAX_BYTES:
            raise DecodeError(f"a result has at most {json_files.MAX_BYTES:,} bytes")
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"not JSON: {error}") from None
        return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: Any) -> Result:  # noqa: ANN401 (any JSON)
        try:
            return cls(**json_files.fields_from_tree(tree))
        except InvalidInput as error:
            raise DecodeError(f"not a saved result: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, whole or not at all."""
        json_files.write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Read what `save` wrote."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except OSError as error:
            raise InvalidInput(f"can't read {path}: {error.strerror}") from None
