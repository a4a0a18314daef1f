"""Steps from one result to another: sums, choices, and what must be true.

Rows' noises are independent, so sums of rows have the sum of the variances. Steps that bend
estimates (`nonnegative`) leave the intervals those of the unbiased estimates, cut to what is
possible and stretched to hold what is shown: that loses no coverage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chorister.analyst import consistency
from chorister.analyst.estimate import Estimates, Floats
from chorister.analyst.view import View, column_names, part_columns
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    from chorister.analyst.result import Result

__all__ = [
    "consistent",
    "filtered",
    "group",
    "marginal",
    "nonnegative",
    "rows",
    "summing_to_reports",
    "unprocessed",
]


def unprocessed(result: Result, what: str) -> None:
    """Raise where estimates were bent: some steps need unbiased ones."""
    if result.view is not None and result.view.shown is not None:
        raise InvalidInput(f"{what} needs unbiased estimates: call it before {result.steps[-1]!r}")


def with_view(result: Result, view: View, step: str) -> Result:
    """The same result with other rows."""
    return replace(result, view=view, steps=(*result.steps, step))


def rows(result: Result, chosen: NDArray[np.int64], step: str) -> Result:
    """Some of the rows."""
    old = result.table
    view = View(
        labels={name: [column[i] for i in chosen] for name, column in old.labels.items()},
        rows=old.rows.take(chosen),
        bounds=None if old.bounds is None else (old.bounds[0][chosen], old.bounds[1][chosen]),
        shown=None if old.shown is None else old.shown[chosen],
    )
    return with_view(result, view, step)


def group(result: Result, values: tuple[str, ...]) -> Result:
    """The result of one group and arm."""
    named = ", ".join(values)
    for part in result.parts:
        if part.group == values:
            alone = replace(result, parts=(part,), missing=(), view=None)
            hidden = column_names(result.recipe)[: len(values)]
            labels = {name: c for name, c in alone.labels.items() if name not in hidden}
            return with_view(alone, View(labels=labels, rows=alone.rows), f"group {named}")
    if values in result.missing:
        raise InvalidInput(
            f"group {named} had fewer than {result.min_cohort:,} reports: nothing was released"
        )
    known = "; ".join(", ".join(part.group) for part in result.parts)
    raise InvalidInput(f"there is no group {named!r}; there are: {known}")


def marginal(result: Result, columns: tuple[str, ...]) -> Result:
    """Sums over all other label columns."""
    unprocessed(result, "marginal")
    labels = result.labels
    for column in columns:
        if column not in labels:
            raise InvalidInput(f"there is no column {column!r}, but {', '.join(labels)}")
    groups = column_names(result.recipe)[: part_columns(result.recipe)]
    lost = [name for name in groups if name in labels and name not in columns]
    if lost and len(result.parts) > 1:
        raise InvalidInput(
            f"{', '.join(lost)} forms groups, each a cohort of its own: keep it as a column, "
            "or take one with `result.group(...)`"
        )
    keys = list(zip(*(labels[column] for column in columns), strict=True)) or [()] * len(result)
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    into = np.array([index[key] for key in keys], dtype=np.int64)
    kept = {column: [key[i] for key in index] for i, column in enumerate(columns)}
    view = View(labels=kept, rows=result.rows.summed(into, len(index)))
    return with_view(result, view, f"summed to {', '.join(columns) or 'one total'}")


def filtered(result: Result, wanted: Mapping[str, str | Sequence[str]]) -> Result:
    """The rows whose labels are among those given."""
    keep = np.ones(len(result), dtype=np.bool_)
    for column, value in wanted.items():
        if column not in result.labels:
            raise InvalidInput(f"there is no column {column!r}, but {', '.join(result.labels)}")
        values = {value} if isinstance(value, str) else set(value)
        unknown = values.difference(result.labels[column])
        if unknown:
            raise InvalidInput(f"{column} has no label {min(unknown)!r}")
        keep &= np.fromiter((label in values for label in result.labels[column]), np.bool_)
    return rows(result, np.flatnonzero(keep), f"filtered by {', '.join(wanted)}")


def adjusted(result: Result, shown: Floats, step: str) -> Result:
    """The same rows with other estimates; intervals stay those of the noise."""
    values = np.asarray(shown, dtype=np.float64)
    if values.shape != (len(result),):
        raise InvalidInput(f"one estimate a row: {len(result):,}, not {values.shape}")
    most = result.rows.reports.astype(np.float64)
    view = replace(result.table, shown=values, bounds=(np.zeros(len(result)), most))
    return with_view(result, view, step)


def _all_bins(result: Result, what: str) -> None:
    if len(result) != result.encoding.size * len(result.parts):
        raise InvalidInput(f"{what} needs all bins of the question: call it before filtering")


def nonnegative(result: Result) -> Result:
    """The nearest counts that are not negative and add up to the reports, part by part."""
    _all_bins(result, "nonnegative")
    size = result.encoding.size
    part_of = np.repeat(np.arange(len(result.parts)), size)
    totals = np.array([part.reports for part in result.parts], dtype=np.float64)
    shown = consistency.norm_sub(result.estimate, totals, part_of)
    return adjusted(result, shown, "no count is negative, all add up to the reports (Norm-Sub)")


def summing_to_reports(result: Result) -> Result:
    """Every device is in exactly one bin, so all bins add up to the reports: unbiased still."""
    unprocessed(result, "summing_to_reports")
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


def consistent(result: Result, coarser: Result, parents: Sequence[int]) -> Result:
    """Combined with a coarser result whose rows this one's rows make up: unbiased still."""
    for each in (result, coarser):
        unprocessed(each, "consistent")
        if len(each.parts) != 1:
            raise InvalidInput("take one group of each result first: `result.group(...)`")
    above = np.asarray(parents, dtype=np.int64)
    if above.shape != (len(result),) or (above < -1).any() or (above >= len(coarser)).any():
        raise InvalidInput(
            f"parents says for each of {len(result):,} rows in which of the coarser result's "
            f"{len(coarser):,} rows it lies, or -1"
        )
    scale = result.n_reports / coarser.n_reports  # another cohort: shares are comparable
    tree = consistency.Tree(np.concatenate((np.full(len(coarser), -1), above)))
    fit = consistency.least_squares(
        tree,
        np.concatenate((coarser.rows.value * scale, result.rows.value)),
        np.concatenate((coarser.rows.variance * scale**2, result.rows.variance)),
    )
    here = slice(len(coarser), None)
    step = f"combined with {len(coarser):,} coarser rows of {coarser.n_reports:,} reports"
    return _refitted(result, fit.unbiased[here], fit.variances[here], step)


def _refitted(result: Result, value: Floats, variance: Floats, step: str) -> Result:
    fitted = Estimates(value, variance, np.zeros(len(value)), result.rows.reports)
    return with_view(result, replace(result.table, rows=fitted), step)
