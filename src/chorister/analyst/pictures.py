"""Charts of results, by Altair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chorister.analyst.extras import needed

if TYPE_CHECKING:
    import altair

    from chorister.analyst.result import Result

__all__ = ["bars"]


def bars(result: Result, *, top: int) -> altair.LayerChart:
    """A bar a row with its interval; only the largest rows if there are more than `top`."""
    alt = needed("altair")
    chosen = result.top(top) if len(result) > top else result
    columns = chosen.columns()
    names = list(chosen.labels)
    rows = [
        {
            "label": " · ".join(labels),
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
