"""What came back: frozen estimates that explain themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst import pictures, tables, words
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
from chorister.analyst.files import pack, require_format, unpack, write_atomically
from chorister.canonical import WIRE
from chorister.encoding import AnyFeature, Encoding
from chorister.errors import DecodeError, InvalidInput
from chorister.privacy import Interval, Mechanism
from chorister.recipe import Recipe

if TYPE_CHECKING:
    import altair
    import pandas
    import polars
    import pyarrow  # type: ignore[import-untyped]

__all__ = ["Part", "Result"]

_FORMAT: Final = "chorister-result-1"
_MAX_BYTES: Final = 1_000_000_000
Labels: TypeAlias = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Part:
    """The released sums of one group, or of the whole cohort where there are no groups."""

    group: tuple[str, ...]  # its values, in the order of the recipe's group_by
    reports: int  # verified
    sums: NDArray[np.uint64]  # one a bin, noise included


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _View:
    """Rows that are not, or no longer, the bins as they came."""

    labels: Labels
    rows: Estimates
    bounds: tuple[Floats, Floats] | None = None  # (least, most) possible, if a step knows them
    shown: Floats | None = None  # estimates after post-processing; intervals stay the noise's


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Estimated numbers of devices, row by row, with intervals of the noise.

    Everything is computed from what the aggregators released; nothing can be changed. Steps such
    as `marginal`, `filter` or `nonnegative` give another result and are listed in `steps`.
    """

    recipe: Recipe
    """The question, to the letter."""
    parts: tuple[Part, ...]
    """What was released, group by group."""
    missing: tuple[tuple[str, ...], ...] = ()
    """Groups with fewer reports than the minimum cohort: nothing of them was released."""
    round: int | None = None
    """Its number in its study."""
    confidence: float = 0.95
    candidates: int = 1
    """Over how many rows the intervals hold at once."""
    steps: tuple[str, ...] = ()
    """What was done to the released sums beyond removing the noise's mean."""
    view: _View | None = None

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
        """Estimates as released, one a bin; with groups, one row a group."""
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
        found = np.stack(arrays) if self.recipe.group_by else arrays[0]
        found.flags.writeable = False
        return found

    @cached_property
    def _view(self) -> _View:
        if self.view is not None:
            return self.view
        return _View(labels=self._all_labels(), rows=self.rows)

    @cached_property
    def rows(self) -> Estimates:
        """The law of every row's noise."""
        return self.view.rows if self.view is not None else Estimates.stacked(list(self._by_part))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Labels:
        """The label columns: groups first, then one column a feature."""
        return self._view.labels

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
        found = self.rows.interval(self.confidence, candidates=self.candidates, method=method)
        bounds = self.view.bounds if self.view is not None else None
        if bounds is None:
            return found
        return Interval(low=np.clip(found.low, *bounds), high=np.clip(found.high, *bounds))

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
            for i, name in enumerate(names[: len(self.recipe.group_by)])
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
        """The result of one group."""
        for part in self.parts:
            if part.group == values:
                found = replace(self, parts=(part,), missing=(), view=None)
                chosen = np.flatnonzero(np.ones(self.encoding.size))
                kept = {
                    name: column
                    for name, column in found.labels.items()
                    if name not in column_names(self.recipe)[: len(values)]
                }
                step = f"group {', '.join(values)}"
                view = _View(labels=kept, rows=found.rows.take(chosen))
                return replace(found, view=view, steps=(*self.steps, step))
        if values in self.missing:
            raise InvalidInput(
                f"group {', '.join(values)} had fewer than {self.min_cohort:,} reports: nothing of "
                "it was released"
            )
        known = "; ".join(", ".join(part.group) for part in self.parts)
        raise InvalidInput(f"there is no group {', '.join(values)!r}; there are: {known}")

    def marginal(self, *columns: str) -> Result:
        """Sums over all other label columns. Bins' noises are independent, so variances add up."""
        labels = self.labels
        for column in columns:
            if column not in labels:
                raise InvalidInput(f"there is no column {column!r}, but {', '.join(labels)}")
        groups = column_names(self.recipe)[: len(self.recipe.group_by)]
        lost = [name for name in groups if name in labels and name not in columns]
        if lost and len(self.parts) > 1:
            raise InvalidInput(
                f"{', '.join(lost)} forms groups, each a cohort of its own: keep it as a column, "
                "or take one with `result.group(...)`"
            )
        self._unprocessed("marginal")
        keys = list(zip(*(labels[column] for column in columns), strict=True))
        keys = keys or [()] * len(self)
        index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        into = np.array([index[key] for key in keys], dtype=np.int64)
        kept = {column: [key[i] for key in index] for i, column in enumerate(columns)}
        view = _View(labels=kept, rows=self.rows.summed(into, len(index)))
        step = f"summed to {', '.join(columns) or 'one total'}"
        return replace(self, view=view, steps=(*self.steps, step))

    def filter(self, **wanted: str | Sequence[str]) -> Result:
        """The rows whose labels are among those given: `result.filter(age=["[10, 20)"])`."""
        keep = np.ones(len(self), dtype=np.bool_)
        for column, value in wanted.items():
            if column not in self.labels:
                raise InvalidInput(f"there is no column {column!r}, but {', '.join(self.labels)}")
            values = {value} if isinstance(value, str) else set(value)
            unknown = values.difference(self.labels[column])
            if unknown:
                raise InvalidInput(f"{column} has no label {min(unknown)!r}")
            keep &= np.fromiter((label in values for label in self.labels[column]), np.bool_)
        return self._rows(np.flatnonzero(keep), f"filtered by {', '.join(wanted)}")

    def top(self, count: int = 10) -> Result:
        """The rows with the largest estimates, largest first.

        Their estimates are too high on average: they were chosen by their noise as well. Use
        `simultaneous()` intervals, or ask a fresh cohort about them.
        """
        order = np.argsort(-self.estimate, kind="stable")[:count]
        return self._rows(order, f"the {len(order):,} largest of {len(self):,} rows")

    def _rows(self, rows: NDArray[np.int64], step: str) -> Result:
        old = self._view
        view = _View(
            labels={name: [column[i] for i in rows] for name, column in old.labels.items()},
            rows=old.rows.take(rows),
            bounds=None if old.bounds is None else (old.bounds[0][rows], old.bounds[1][rows]),
            shown=None if old.shown is None else old.shown[rows],
        )
        return replace(self, view=view, steps=(*self.steps, step))

    def adjusted(self, shown: Floats, step: str) -> Result:
        """The same rows with post-processed estimates; intervals stay those of the noise.

        They are cut to what is possible (0 to the number of reports), which loses no coverage.
        """
        values = np.asarray(shown, dtype=np.float64)
        if values.shape != (len(self),):
            raise InvalidInput(f"one estimate a row: {len(self):,}, not {values.shape}")
        most = self.rows.reports.astype(np.float64)
        view = replace(self._view, shown=values, bounds=(np.zeros(len(self)), most))
        return replace(self, view=view, steps=(*self.steps, step))

    def compare(self, other: Result, *, population: bool = False) -> Comparison:
        """How the shares of reports differ, row by row, with intervals of the difference.

        Of the noise alone, unless `population`: then also of the chance that other devices had
        answered, which is what matters if the two results are about two cohorts.
        """
        self._unprocessed("compare")
        other._unprocessed("compare")
        return compare(self, other, population=population)

    def _unprocessed(self, what: str) -> None:
        if self.view is not None and self.view.shown is not None:
            raise InvalidInput(
                f"{what} needs unbiased estimates: call it before {self.steps[-1]!r}"
            )

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
        return json.dumps(
            {
                "format": _FORMAT,
                "recipe": json.loads(self.recipe.canonical()),
                "parts": [
                    {"group": part.group, "reports": part.reports, "sums": pack(part.sums)}
                    for part in self.parts
                ],
                "missing": self.missing,
                "round": self.round,
                "confidence": self.confidence,
                "candidates": self.candidates,
                "steps": self.steps,
                "view": None if self.view is None else _view_to_json(self.view),
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Result:
        """What `to_json` wrote; anything else raises `DecodeError`."""
        if len(text) > _MAX_BYTES:
            raise DecodeError(f"a result has at most {_MAX_BYTES:,} bytes")
        try:
            tree = json.loads(text)
            require_format(tree, _FORMAT)
            return cls(
                recipe=Recipe.model_validate(tree["recipe"], context=WIRE),
                parts=tuple(
                    Part(
                        group=tuple(str(value) for value in part["group"]),
                        reports=int(part["reports"]),
                        sums=unpack(part["sums"]).copy(),
                    )
                    for part in tree["parts"]
                ),
                missing=tuple(tuple(group) for group in tree["missing"]),
                round=tree["round"],
                confidence=float(tree["confidence"]),
                candidates=int(tree["candidates"]),
                steps=tuple(tree["steps"]),
                view=None if tree["view"] is None else _view_from_json(tree["view"]),
            )
        except DecodeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
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


def column_names(recipe: Recipe) -> list[str]:
    """Of the label columns: groups, then features; no two alike."""
    names: list[str] = []
    wanted = [ref.rpartition(".")[2] for ref in recipe.group_by]
    wanted += ["_".join(feature.columns_read) for feature in recipe.features]
    reserved = {"estimate", "std_error", "ci_low", "ci_high"}
    for name in wanted:
        unique, number = name, 1
        while unique in names or unique in reserved:
            number += 1
            unique = f"{name}_{number}"
        names.append(unique)
    return names


def _view_to_json(view: _View) -> dict[str, Any]:
    rows = view.rows
    return {
        "labels": {name: list(column) for name, column in view.labels.items()},
        "value": rows.value.tolist(),
        "base": rows.base.tolist(),
        "slope": rows.slope.tolist(),
        "reports": rows.reports.tolist(),
        "bounds": None if view.bounds is None else [ends.tolist() for ends in view.bounds],
        "shown": None if view.shown is None else view.shown.tolist(),
    }


def _view_from_json(tree: dict[str, Any]) -> _View:
    def floats(values: list[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    bounds = tree["bounds"]
    return _View(
        labels={str(name): [str(v) for v in column] for name, column in tree["labels"].items()},
        rows=Estimates(
            floats(tree["value"]),
            floats(tree["base"]),
            floats(tree["slope"]),
            np.array(tree["reports"], dtype=np.int64),
        ),
        bounds=None if bounds is None else (floats(bounds[0]), floats(bounds[1])),
        shown=None if tree["shown"] is None else floats(tree["shown"]),
    )
