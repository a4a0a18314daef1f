"""From one result to another: sums, filters, known constraints; and two results compared.

The public functions are methods of `Result`. The noise of different rows is independent, so
variances of sums add up. A step that biases estimates (`nonnegative`) keeps the intervals of the
unbiased estimates, clipped to what is possible and extended to contain what is shown: that loses no
coverage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chorister.analyst import consistency
from chorister.analyst.arguments import as_count, as_texts
from chorister.analyst.estimate import (
    Estimates,
    Floats,
    ResultView,
    column_names,
    part_columns,
    quantile,
)
from chorister.analyst.tables import Tabular, html_table, paragraphs
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    from chorister.analyst.result import Result


_OTHERS: Final = " of other devices, whose sampling is in the intervals"  # stored in results


def _unprocessed(result: Result, what: str) -> None:
    """Raise if estimates are biased by an earlier step."""
    if result.view is not None and result.view.shown is not None:
        raise InvalidInput(f"{what} needs unbiased estimates: call it before {result.steps[-1]!r}")


def _with_view(result: Result, view: ResultView, step: str) -> Result:
    return replace(result, view=view, steps=(*result.steps, step))


def _rows(result: Result, chosen: NDArray[np.int64], step: str) -> Result:
    old = result.table
    view = ResultView(
        labels={name: [column[i] for i in chosen] for name, column in old.labels.items()},
        rows=old.rows.take(chosen),
        bounds=None if old.bounds is None else (old.bounds[0][chosen], old.bounds[1][chosen]),
        shown=None if old.shown is None else old.shown[chosen],
    )
    return _with_view(result, view, step)


def with_confidence(result: Result, confidence: float) -> Result:
    """Return the same estimates with other intervals."""
    return replace(result, confidence=confidence)


def simultaneous(result: Result) -> Result:
    """Return simultaneous intervals: with the stated confidence, all of them contain the truth.

    This is Bonferroni over all candidates of the round, not only those shown: which rows are
    largest depends on the noise.
    """
    every = result.encoding.size * len(result.parts)
    step = f"the intervals of all {every:,} candidates are simultaneous"
    return replace(result, candidates=every, steps=(*result.steps, step))


def group(result: Result, *values: str) -> Result:
    """Return the result of one group, or of one arm of an experiment (its name comes last)."""
    named = ", ".join(values)
    for part in result.parts:
        if part.group == values:
            alone = replace(result, parts=(part,), missing=(), view=None)
            hidden = column_names(result.recipe)[: len(values)]
            labels = {name: c for name, c in alone.labels.items() if name not in hidden}
            return _with_view(alone, ResultView(labels=labels, rows=alone.rows), f"group {named}")
    if values in result.missing:
        raise InvalidInput(
            f"the group {named} had fewer than {result.min_cohort:,} reports: nothing was released"
        )
    known = "; ".join(", ".join(part.group) for part in result.parts)
    raise InvalidInput(f"there is no group {named!r}; the groups are: {known}")


def marginal(result: Result, *columns: str) -> Result:
    """Sum over all other label columns."""
    _unprocessed(result, "marginal")
    labels = result.labels
    for column in columns:
        if column not in labels:
            raise InvalidInput(
                f"there is no column {column!r}; the columns are {', '.join(labels)}"
            )
    groups = column_names(result.recipe)[: part_columns(result.recipe)]
    lost = [name for name in groups if name in labels and name not in columns]
    if lost and len(result.parts) > 1:
        raise InvalidInput(
            f"the groups of {', '.join(lost)} are separate cohorts: keep it as a column, or take "
            "one group with `result.group(...)`"
        )
    keys = list(zip(*(labels[column] for column in columns), strict=True)) or [()] * len(result)
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    into = np.array([index[key] for key in keys], dtype=np.int64)
    kept = {column: [key[i] for key in index] for i, column in enumerate(columns)}
    view = ResultView(labels=kept, rows=result.rows.summed(into, len(index)))
    return _with_view(result, view, f"summed to {', '.join(columns) or 'one total'}")


def filtered(result: Result, **wanted: str | Sequence[str]) -> Result:
    """Keep the rows with these labels: `result.filter(age=["[10, 20)"])`."""
    keep = np.ones(len(result), dtype=np.bool_)
    for column, value in wanted.items():
        if column not in result.labels:
            raise InvalidInput(
                f"there is no column {column!r}; the columns are {', '.join(result.labels)}"
            )
        known = set(result.labels[column])
        values = {value} if isinstance(value, str) else set(as_texts(value, column))
        if unknown := values - known:
            raise InvalidInput(f"{column} has no label {min(unknown)!r}")
        keep &= np.fromiter((label in values for label in result.labels[column]), np.bool_)
    return _rows(result, np.flatnonzero(keep), f"filtered by {', '.join(wanted)}")


def top(result: Result, count: int = 10) -> Result:
    """Keep the rows with the largest estimates, largest first.

    On average their estimates are too high, because their noise helped to select them. Use
    `simultaneous()` intervals, or ask a fresh cohort about them.
    """
    most = as_count(count, "count")
    if most is None or most < 0:
        raise InvalidInput(f"count is a number of rows, 0 or more, not {count!r}", field="count")
    order = np.argsort(-result.estimate, kind="stable")[:most]
    return _rows(result, order, f"the {len(order):,} largest of {len(result):,} rows")


def above_noise(result: Result) -> Result:
    """Keep the rows whose simultaneous interval lies above 0.

    With 95% confidence, somebody holds each row that is left. The other rows may be real as well,
    or noise.
    """
    sure = result if result.candidates > 1 else simultaneous(result)
    kept = np.flatnonzero(sure.ci_low > 0.0)
    return _rows(sure, kept, f"the {len(kept):,} of {len(result):,} rows above the noise")


def shares(result: Result) -> Floats:
    """Each row's share of its group's reports: none is negative, and a group's add up to 1.

    These are the shares nearest to the estimates (Norm-Sub), so they are biased near 0.
    """
    fitted = result if result.view is not None and result.view.shown is not None else None
    found: Floats = (fitted or nonnegative(result)).estimate / result.rows.reports
    return found


def _all_bins(result: Result, what: str) -> None:
    if len(result) != result.encoding.size * len(result.parts):
        raise InvalidInput(f"{what} needs all bins of the question: call it before filtering")


def nonnegative(result: Result) -> Result:
    """Find the nearest non-negative counts that add up to the reports (Norm-Sub), part by part.

    Estimates are then biased near 0; the intervals still cover the noise, clipped to what is
    possible.
    """
    _all_bins(result, "nonnegative")
    size = result.encoding.size
    part_of = np.repeat(np.arange(len(result.parts)), size)
    totals = np.array([part.reports for part in result.parts], dtype=np.float64)
    shown = consistency.norm_sub(result.estimate, totals, part_of)
    most = result.rows.reports.astype(np.float64)
    view = replace(result.table, shown=shown, bounds=(np.zeros(len(result)), most))
    return _with_view(result, view, "no count is negative, all add up to the reports (Norm-Sub)")


def summing_to_reports(result: Result) -> Result:
    """Use that every device is in exactly one bin: unbiased and slightly more precise."""
    _unprocessed(result, "summing_to_reports")
    _all_bins(result, "summing_to_reports")
    size = result.encoding.size
    value, variance = np.empty(len(result)), np.empty(len(result))
    for i, part in enumerate(result.parts):
        here = slice(i * size, (i + 1) * size)
        fit = consistency.known_sum(
            result.rows.value[here], result.rows.variance[here], float(part.reports)
        )
        value[here], variance[here] = fit.unbiased, fit.variances
    return _refitted(result, value, variance, "bins add up to the reports (least squares)")


def consistent(
    result: Result, coarser: Result, parents: Sequence[int], *, same_devices: bool = False
) -> Result:
    """Combine with a coarser result; `parents[i]` is its row that contains row i, or -1.

    This is precision-weighted least squares on shares of the reports: unbiased if both are. The
    intervals still concern the devices that answered *this* question. The coarser result counts
    as another sample of the fleet, with its sampling variance, unless you know that the same
    devices answered both and pass `same_devices=True`.

    The share s among the n' devices that answered the coarser question differs from the share among
    the n devices that answered this one. Between two samples of a fleet, the difference has the
    variance `s (1 - s) (1/n + 1/n')` if no device answered both, and less if some did. A result
    does not know who answered, so this variance is added.
    """
    if not isinstance(coarser, type(result)):
        raise InvalidInput(f"a result is combined with another result, not {coarser!r}")
    for each in (result, coarser):
        _unprocessed(each, "consistent")
        if len(each.parts) != 1:
            raise InvalidInput("take one group of each result first: `result.group(...)`")
    above = np.asarray(parents, dtype=np.int64)
    if above.shape != (len(result),) or (above < -1).any() or (above >= len(coarser)).any():
        raise InvalidInput(
            f"`parents` has to name, for each of {len(result):,} rows, the row of the coarser "
            f"result (0 to {len(coarser) - 1:,}) that contains it, or -1"
        )
    _combinable(result, coarser, same_devices=same_devices)
    scale = result.n_reports / coarser.n_reports  # another cohort: only shares are comparable
    variance = coarser.rows.variance * scale**2
    step = f"combined with {len(coarser):,} coarser rows of {coarser.n_reports:,} reports"
    if not same_devices:
        share = np.clip(coarser.rows.value / coarser.n_reports, 0.0, 1.0)
        # Plus one device: small counts are skewed, and a share may be estimated as 0.
        held = share * (1.0 - share) * result.n_reports + 1.0
        variance = variance + held * (1.0 + scale)
        step += _OTHERS
    tree = consistency.Tree(np.concatenate((np.full(len(coarser), -1), above)))
    fit = consistency.least_squares(
        tree,
        np.concatenate((coarser.rows.value * scale, result.rows.value)),
        np.concatenate((variance, result.rows.variance)),
    )
    here = slice(len(coarser), None)
    return _refitted(result, fit.unbiased[here], fit.variances[here], step)


def _combinable(result: Result, coarser: Result, *, same_devices: bool) -> None:
    """Raise unless two results are two measurements of the same shares."""
    first, second = result.recipe, coarser.recipe
    if (first.group_by, result.parts[0].group) != (second.group_by, coarser.parts[0].group):
        raise InvalidInput(
            "the two results belong to different groups or arms, whose shares differ by more than "
            "chance: combine results of the same group"
        )
    if first == second:
        raise InvalidInput(
            "a result can't be combined with its own rows: they have the same noise and say "
            "nothing new"
        )
    if any(step.endswith(_OTHERS) for step in result.steps) and not same_devices:
        raise InvalidInput(
            "this result was already combined with one of other devices, so the errors are no "
            "longer independent: combine the two coarser results first, then this one with both"
        )
    if not same_devices:
        return
    if result.n_reports != coarser.n_reports:
        raise InvalidInput(
            f"{result.n_reports:,} devices answered this question and {coarser.n_reports:,} "
            "answered the coarser one, so they can't be the same devices"
        )
    once = first.participation.once_per_study or second.participation.once_per_study
    if once and first.study == second.study:
        raise InvalidInput(
            f"a device answers at most one of the two questions of the study {first.study}, so "
            "they can't be the same devices"
        )


def _refitted(result: Result, value: Floats, variance: Floats, step: str) -> Result:
    fitted = Estimates(value, variance, np.zeros(len(value)), result.rows.reports)
    return _with_view(result, replace(result.table, rows=fitted), step)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Comparison(Tabular):
    """Differences of shares, second minus first, row by row."""

    labels: Mapping[str, Sequence[str]]
    first: Floats  # share of the first result's reports
    second: Floats
    difference: Floats
    std_error: Floats
    ci_low: Floats
    ci_high: Floats
    confidence: float
    candidates: int  # for how many rows the intervals hold at once
    population: bool  # whether the intervals also cover who happened to answer

    @property
    def by_chance(self) -> float:
        """How many rows would differ by chance, on average, if no share did."""
        return (1.0 - self.confidence) / self.candidates * len(self.difference)

    def columns(self) -> dict[str, Any]:
        return {
            **{name: list(column) for name, column in self.labels.items()},
            "first": self.first,
            "second": self.second,
            "difference": self.difference,
            "std_error": self.std_error,
            "ci_low": self.ci_low,
            "ci_high": self.ci_high,
        }

    def explain(self) -> str:
        apart = int(np.sum((self.ci_low > 0.0) | (self.ci_high < 0.0)))
        what = "the noise and who happened to answer" if self.population else "the noise alone"
        whose = "in the fleet" if self.population else "among the devices that answered"
        if self.candidates == 1:
            chance = f"about {self.by_chance:.1f} would still do so by chance"
        else:
            chance = (
                f"the chance that any would is at most {1.0 - self.confidence:.0%}, because the "
                f"intervals hold for {self.candidates:,} rows at once"
            )
        return (
            f"{apart:,} of {len(self.difference):,} shares differ by more than their "
            f"{self.confidence:.0%} interval, which reflects {what}. If no share differed {whose}, "
            f"{chance}."
        )

    def _repr_html_(self) -> str:
        return f"<div>{paragraphs(self.explain())}{html_table(self.columns())}</div>"


def compare(first: Result, other: Result, *, population: bool = False) -> Comparison:
    """Compare the shares of reports, row by row, with intervals of the difference.

    The intervals cover the noise alone. With `population=True` they also cover the chance that
    other devices had answered, which matters if the two results come from different cohorts.
    """
    if not isinstance(other, type(first)):
        raise InvalidInput(f"a result is compared with another result, not {other!r}")
    for each in (first, other):
        _unprocessed(each, "compare")
    if {name: list(c) for name, c in first.labels.items()} != {
        name: list(c) for name, c in other.labels.items()
    }:
        raise InvalidInput("results are compared row by row, so their labels must be the same")
    one, two = (_shares(result, population=population) for result in (first, other))
    variance = one.variance + two.variance
    error = np.sqrt(variance)
    difference = two.value - one.value
    candidates = max(first.candidates, other.candidates)
    z = quantile(first.confidence, candidates)
    # So far out a sum of rare bits reaches further on one side: the term of Cornish and Fisher. It
    # cancels where both cohorts are alike, and is the smaller one's where they are not.
    skew = np.zeros_like(error)
    if candidates > 1:
        skew = (two.third - one.third) / variance * max(z * z - 1.0, 0.0) / 6.0
    # Sums are whole numbers: half a bit of each allows for what lies between them.
    lattice = (one.step + two.step) / 2.0
    return Comparison(
        labels=first.labels,
        first=one.value,
        second=two.value,
        difference=difference,
        std_error=error,
        ci_low=difference - z * error - np.maximum(skew, 0.0) - lattice,
        ci_high=difference + z * error + np.maximum(-skew, 0.0) + lattice,
        confidence=first.confidence,
        candidates=candidates,
        population=population,
    )


class _Shares(NamedTuple):
    """Shares of the reports, with the second and third cumulants of their error."""

    value: Floats
    variance: Floats
    third: Floats
    step: Floats  # what one bit changes


def _shares(result: Result, *, population: bool) -> _Shares:
    """Cumulants at the estimate: each holder's bit changes both by its difference from other bits.

    With `population`, they include who happened to answer, f of n at random: the cumulants of a
    binomial, plus three times the covariance of f with the noise's variance, which rises with f.
    """
    rows, law = result.rows, result.recipe.randomizer
    reports = rows.reports.astype(np.float64)
    held = np.clip(rows.value, 0.0, reports)
    own, other = (p * (1.0 - p) * (1.0 - 2.0 * p) for p in (law.h, law.q))
    variance = rows.variance
    third = law.step * (1.0 - 2.0 * law.q) * rows.base + law.step**3 * (own - other) * held
    if population:
        drawn = held * (1.0 - held / reports)
        variance = variance + drawn
        third = third + drawn * (1.0 - 2.0 * held / reports) + 3.0 * rows.slope * drawn
    return _Shares(
        value=rows.value / reports,
        variance=variance / reports**2,
        third=third / reports**3,
        step=law.step / reports,
    )
