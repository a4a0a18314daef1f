"""How a result is shown: in words, as a chart, and in a notebook. These are its methods."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from chorister.analyst.tables import ROWS_SHOWN, drawable, html_table, needed
from chorister.canonical import decimal_text
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
        f"{number_text(privacy.delta)}; to both aggregators together, its report alone is "
        f"{decimal_text(result.recipe.randomizer.replacement_epsilon)}-DP.",
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
    which = "each contains"
    if result.candidates > 1:
        which = f"those of all {result.candidates:,} candidates at once contain"
    return (
        f"Intervals cover the noise: with {result.confidence:.0%} confidence, {which} the true "
        "count among the devices that answered. How well those devices represent the others is "
        "another question."
    )


def notebook_html(result: Result) -> str:
    """The largest rows, and how to read them."""
    shown = result.top(ROWS_SHOWN) if len(result) > ROWS_SHOWN else result
    more = ""
    if len(result) > len(shown):
        more = f"<p>The {len(shown):,} largest of {len(result):,} rows.</p>"
    summary = result.explain().split("\n")[0]
    warning = ""
    if result.marked:
        checks = " ".join(check.explain() for check in result.weight if check.marked)
        warning = f"<p><strong>{html.escape(checks)}</strong></p>"
    return f"<div><p>{html.escape(summary)}</p>{warning}{html_table(shown.columns())}{more}</div>"


def bar_chart(result: Result, *, top: int = 30) -> altair.LayerChart:
    """One bar per row with its interval: the largest rows if there are more than `top`."""
    alt = needed("altair")
    chosen = result.top(top) if len(result) > top else result
    columns = chosen.columns()
    names = list(chosen.labels)
    rows = [
        {
            "label": drawable(" · ".join(labels)),
            "estimate": float(columns["estimate"][i]),
            "low": float(columns["ci_low"][i]),
            "high": float(columns["ci_high"][i]),
        }
        for i, labels in enumerate(zip(*chosen.labels.values(), strict=True))
    ]
    title: dict[str, Any] = {
        "text": f"{result.n_reports:,} reports, epsilon {result.epsilon}",
        "subtitle": f"bars: devices; lines: {result.confidence:.0%} intervals of the noise",
        "anchor": "start",
    }
    base = alt.Chart(alt.InlineData(values=rows), title=alt.TitleParams(**title)).encode(
        y=alt.Y("label:N", sort=None, title=" · ".join(names))
    )
    marks = base.mark_bar(opacity=0.7).encode(x=alt.X("estimate:Q", title="devices"))
    lines = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    chart: altair.LayerChart = alt.layer(marks, lines)
    return chart
