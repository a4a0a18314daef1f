"""How a result is shown: in words, as a chart, and in a notebook. These are its methods."""

from __future__ import annotations

import html
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from chorister.analyst import report
from chorister.analyst.estimate import column_names, part_columns
from chorister.analyst.tables import ROWS_SHOWN, drawable, html_table, needed
from chorister.canonical import decimal_text
from chorister.encoding import OOV, Grid
from chorister.policy.values import number_text

if TYPE_CHECKING:
    import altair

    from chorister.analyst.result import Result


def explain(result: Result) -> str:
    """Say what was asked, of whom, what it cost, and what the numbers mean."""
    privacy = result.recipe.privacy
    parts = f" in {len(result.parts):,} groups" if result.recipe.group_by else ""
    lines = [
        f"{result.n_reports:,} devices{parts} each answered once with one of "
        f"{result.encoding.size:,} bins, plus noise; a bin that nobody holds reads 0 ± "
        f"{result.noise_sigma:,.1f} devices.",
        f"Each of these devices was charged epsilon {decimal_text(privacy.epsilon)}, delta "
        f"{number_text(privacy.delta)}; to both aggregators together, its report alone has "
        f"epsilon {decimal_text(result.recipe.randomizer.replacement_epsilon)}.",
        _crowd(result),
        _intervals(result),
    ]
    if result.missing:
        names = "; ".join(", ".join(group) for group in result.missing)
        lines.append(
            f"These groups had fewer than {result.min_cohort:,} reports, so nothing was released "
            f"about them: {names}."
        )
    hostile = result.hostile_influence
    lines.append(
        f"One hostile report can raise at most {hostile.bins:,} bins by {hostile.up:,.2f} devices "
        f"each; it lowers every other bin by {hostile.down:,.2g}."
    )
    lines.extend(check.explain() for check in result.weight)
    if result.steps:
        lines.append(f"Then: {'; '.join(result.steps)}.")
    return "\n".join(lines)


def _crowd(result: Result) -> str:
    if result.noise_trials:
        return (
            f"Each aggregator added as much noise to every bin as {result.noise_trials:,} more "
            "devices would: epsilon holds if one of the two is honest, whoever else answered."
        )
    return (
        f"Epsilon holds if {result.recipe.privacy.honest_fraction} of at least "
        f"{result.min_cohort:,} devices are honest: the aggregators added no noise."
    )


def _intervals(result: Result) -> str:
    which = "each contains the true count"
    if result.candidates > 1:
        which = f"all {result.candidates:,} of them contain the true counts"
    return (
        f"Intervals reflect the noise: with {result.confidence:.0%} confidence, {which} among the "
        "devices that answered. How well those devices represent the others is another question."
    )


def row_names(result: Result) -> list[str]:
    """The labels of each row in one text; cells of a map by their coordinates."""
    features = {
        name: feature
        for name, feature in zip(
            column_names(result.recipe)[part_columns(result.recipe) :], result.features, strict=True
        )
        if isinstance(feature, Grid)
    }
    named = [
        [place_name(features[name], label) for label in column] if name in features else column
        for name, column in result.labels.items()
    ]
    return [" · ".join(labels) for labels in zip(*named, strict=True)]


def place_name(grid: Grid, label: str) -> str:
    """Name a cell of a map by its coordinates."""
    if label == OOV:
        return label
    x0, y0, x1, y1 = grid.rectangle(grid.index(label))
    x, y = grid.columns
    return f"{x} {x0:,.6g} to {x1:,.6g}, {y} {y0:,.6g} to {y1:,.6g}"


def as_shown(result: Result) -> Result:
    """The same rows with intervals that hold for all of them at once, as charts and tables show.

    Among many rows, some intervals that hold each by itself exclude 0 by chance.
    """
    if result.candidates > 1:
        return result
    return replace(result, candidates=result.simultaneous().candidates)


def html_file(
    result: Result, path: str | os.PathLike[str] | None = None, *, title: str = ""
) -> str | None:
    """Write a report in one HTML file that needs nothing else, or return it as text."""
    shown = as_shown(result)
    words = shown.explain()
    if len(shown) > report.ROWS:
        words += (
            f"\nThe table has the {report.ROWS:,} largest of {len(shown):,} rows. CSV, Parquet and "
            "JSON have all of them."
        )
        shown = shown.top(report.ROWS)
    return report.written(
        path, title=title or f"{result.recipe.study}, {result.recipe.analysis}", words=words,
        columns=shown.columns(), results=[result], chart=result.plot().to_dict(),
    )  # fmt: skip


def notebook_html(result: Result) -> str:
    """The rows above the noise, and how to read them."""
    sure = as_shown(result)
    found = sure.above_noise()
    shown = sure if len(result) <= ROWS_SHOWN else found.top(ROWS_SHOWN)
    more = ""
    if len(result) > ROWS_SHOWN:
        more = (
            f"<p>{len(shown):,} of {len(found):,} rows above the noise; the other "
            f"{len(result) - len(found):,} of {len(result):,} may be 0.</p>"
        )
    summary = result.explain().split("\n")[0]
    warning = ""
    if result.marked:
        checks = " ".join(check.explain() for check in result.weight if check.marked)
        warning = f"<p><strong>{html.escape(checks)}</strong></p>"
    chart = report.inline_chart(result.plot)
    words = f"<p>{html.escape(summary)}</p>{warning}"
    return f"<div>{chart}{words}{html_table(shown.columns())}{more}</div>"


def bar_chart(result: Result, *, top: int = 30) -> altair.LayerChart:
    """One bar per row, with simultaneous intervals.

    Rows that may be 0 are grey. If there are more than `top` rows, these are left out,
    and the others are sorted. With groups or arms, bars are shares of each group's reports.
    """
    alt = needed("altair")
    sure = as_shown(result)
    found = sure.above_noise()
    few = len(result) <= top
    chosen = sure if few else (found if len(found) else sure).top(min(top, len(found) or 10))
    within = part_columns(result.recipe) > 0 and len(result.parts) > 1
    unit = 100.0 / chosen.rows.reports if within else np.ones(len(chosen))
    columns = chosen.columns()
    rows = [
        {
            "label": drawable(label),
            "estimate": float(columns["estimate"][i] * unit[i]),
            "low": float(columns["ci_low"][i] * unit[i]),
            "high": float(columns["ci_high"][i] * unit[i]),
            "above": bool(columns["ci_low"][i] > 0.0),
        }
        for i, label in enumerate(row_names(chosen))
    ]
    if len(found):
        text = f"{len(found):,} of {len(result):,} rows are above the noise"
    else:
        text = f"Nothing is above the noise in {len(result):,} rows"
    title: dict[str, Any] = {
        "text": text,
        "subtitle": [
            f"{result.n_reports:,} reports, epsilon {result.epsilon}",
            f"lines: {result.confidence:.0%} intervals, simultaneous for {sure.candidates:,} rows",
            *(["grey: may be 0"] if not all(row["above"] for row in rows) else []),
        ],
        "anchor": "start",
    }
    base = alt.Chart(alt.InlineData(values=rows), title=alt.TitleParams(**title)).encode(
        y=alt.Y("label:N", sort=None, title=" · ".join(chosen.labels))
    )
    axis = alt.X(
        "estimate:Q", title="% of the group's reports" if within else "devices",
        scale=alt.Scale(zero=True),
    )  # fmt: skip
    marks = base.mark_bar(opacity=0.7).encode(
        x=axis, color=alt.condition("datum.above", alt.value("#3b6fb6"), alt.value("#c8ccd4"))
    )
    lines = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    zero = alt.Chart(alt.InlineData(values=[{"zero": 0}]))
    zero = zero.mark_rule(strokeWidth=1, color="#9aa3b2").encode(x="zero:Q")
    chart: altair.LayerChart = alt.layer(marks, zero, lines)
    return chart
