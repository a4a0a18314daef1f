"""Trends as charts, by Altair: lines with intervals, small multiples, a heat strip."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from chorister.analyst.tables import drawable, needed

if TYPE_CHECKING:
    import altair

    from chorister.analyst.trend import Trend
    from chorister.analyst.trend_statistics import TrendStatistics

_MOST_PANELS: Final = 12  # with more lines than this, a heat strip
_MOST_ROWS: Final = 60  # of a heat strip: more can't be read, and thousands can't be drawn
_COLOR: Final = "#3b6fb6"


def draw(trend: Trend, *, width: int) -> altair.TopLevelMixin:
    """One line, a panel for each of several, or one row of colours for each of many."""
    columns = trend.columns()
    names = _series_names(columns)
    distinct = list(dict.fromkeys(names))
    rows = [
        {
            "line": drawable(name),
            "opens": _milliseconds(columns["opens"][i]),
            "share": 100.0 * float(columns["estimate"][i]),
            "low": 100.0 * max(float(columns["ci_low"][i]), 0.0),
            "high": 100.0 * min(float(columns["ci_high"][i]), 1.0),
            "window": int(columns["window"][i]),
            "reports": int(columns["reports"][i]),
        }
        for i, name in enumerate(names)
    ]
    subtitle = [
        f"{len(trend.results)} of {trend.planned} windows",
        f"{trend.confidence:.0%} intervals, for all {trend.candidates:,} levels at once",
    ]
    order = [drawable(name) for name in distinct]
    if len(distinct) > _MOST_PANELS:
        return _strip(trend, rows, order, subtitle, width)
    if len(distinct) > 1:
        subtitle.append("each panel has its own scale")
    title = _title(f"% of devices over time: {', '.join(trend.labels)}", subtitle)
    return _panels(trend, rows, order, title, "% of devices", width)


def draw_statistics(found: TrendStatistics, *, width: int) -> altair.TopLevelMixin:
    """A panel per group with the mean, one per quantile."""
    columns = found.columns()
    groups = [c for name, c in columns.items() if name not in _STATISTIC_COLUMNS]
    names = [
        " · ".join((*(group[i] for group in groups), _statistic_name(text)))
        for i, text in enumerate(columns["statistic"])
    ]
    rows = [
        {
            "line": drawable(name),
            "opens": _milliseconds(columns["opens"][i]),
            "share": float(columns["estimate"][i]),
            "low": float(columns["ci_low"][i]),
            "high": float(columns["ci_high"][i]),
        }
        for i, name in enumerate(names)
    ]
    trend = found.trend
    column = next(iter(trend.labels))
    title = _title(
        f"{column} over time",
        [f"{trend.confidence:.0%} intervals, for all windows and statistics at once"],
    )
    order = list(dict.fromkeys(drawable(name) for name in names))
    return _panels(trend, rows, order, title, column, width)


_STATISTIC_COLUMNS: Final = {"window", "opens", "statistic", "estimate", "ci_low", "ci_high"}


def _statistic_name(text: str) -> str:
    return text if text == "mean" else f"{float(text):.4g} quantile"


def _series_names(columns: dict[str, Any]) -> list[str]:
    """Which line each row belongs to: its group and bin."""
    measured = {"window", "opens", "reports", "estimate", "std_error", "ci_low", "ci_high"}
    labels = [column for name, column in columns.items() if name not in measured]
    return [" · ".join(each) for each in zip(*labels, strict=True)]


def _milliseconds(time: Any) -> int:  # noqa: ANN401 (a numpy time)
    """What Vega takes for a time."""
    return int(time.astype("datetime64[ms]").astype("int64"))


def _title(text: str, subtitle: list[str]) -> altair.TitleParams:
    title: altair.TitleParams = needed("altair").TitleParams(
        text=drawable(text), subtitle=subtitle, anchor="start"
    )
    return title


def _domain(trend: Trend) -> list[int]:
    """From the first opening to the last, future windows included."""
    last = trend.recipe.window_at(trend.planned - 1).opens
    return [1000 * trend.recipe.window.opens, 1000 * last]


def _panels(
    trend: Trend,
    rows: list[dict[str, Any]],
    order: list[str],
    title: altair.TitleParams,
    unit: str,
    width: int,
) -> altair.TopLevelMixin:
    alt = needed("altair")
    several = len(order) > 1
    x = alt.X(
        "opens:T",
        title=None,
        scale=alt.Scale(type="utc", domain=_domain(trend)),
        axis=alt.Axis(labelOverlap=True, tickCount=4 if several else 8, grid=False),
    )
    base = alt.Chart().encode(x=x)
    y = alt.Y("share:Q", title=None if several else unit, scale=alt.Scale(zero=not several))
    low = alt.Y("low:Q", title=None if several else unit)
    band = base.mark_area(opacity=0.22, color=_COLOR).encode(y=low, y2="high:Q")
    # A window between two missing ones has no area: a line of its own shows its interval.
    spans = base.mark_rule(opacity=0.35, color=_COLOR).encode(y="low:Q", y2="high:Q")
    line = base.mark_line(color=_COLOR, strokeWidth=1.5).encode(y=y)
    dots = base.mark_point(color=_COLOR, filled=True, size=22, opacity=1.0).encode(y=y)
    data = alt.InlineData(values=rows)
    if not several:
        chart = alt.layer(band, spans, line, dots, data=data)
        return chart.properties(width=width, height=240, title=title)  # type: ignore[no-any-return]
    columns = 3 if len(order) > 4 else 2
    panel = alt.layer(band, spans, line, dots).properties(width=width // columns - 30, height=110)
    facet = alt.Facet("line:N", sort=order, title=None, header=alt.Header(labelLimit=220))
    small = panel.facet(facet=facet, columns=columns, data=data, spacing=14)
    return small.resolve_scale(y="independent").properties(title=title)  # type: ignore[no-any-return]


def _strip(
    trend: Trend, rows: list[dict[str, Any]], order: list[str], subtitle: list[str], width: int
) -> altair.TopLevelMixin:
    """Windows from left to right, bins from top to bottom; colour is the share."""
    alt = needed("altair")
    windows = list(range(trend.planned))
    lines = [subtitle[0], "colour: % of devices; faint where it may be 0"]
    if len(order) > _MOST_ROWS:
        lines.append(f"the {_MOST_ROWS} of {len(order):,} rows that were ever largest")
        most: dict[str, float] = {}
        for row in rows:
            most[row["line"]] = max(most.get(row["line"], -math.inf), row["share"])
        kept = set(sorted(order, key=lambda line: -most[line])[:_MOST_ROWS])
        order = [line for line in order if line in kept]
        rows = [row for row in rows if row["line"] in kept]
    least = min(row["share"] for row in rows)
    title = _title(f"% of devices over time: {', '.join(trend.labels)}", lines)
    chart = (
        alt.Chart(alt.InlineData(values=[{**row, "sure": row["low"] > 0.0} for row in rows]))
        .mark_rect()
        .encode(
            x=alt.X(
                "window:O",
                title="window",
                scale=alt.Scale(domain=windows),
                axis=alt.Axis(labelOverlap=True, labelAngle=0),
            ),
            y=alt.Y("line:N", sort=order, title=None, axis=alt.Axis(labelLimit=220)),
            color=alt.Color(
                "share:Q",
                title="% of devices",
                scale=alt.Scale(scheme="blues", domainMin=min(least, 0.0), clamp=True),
            ),
            opacity=alt.condition("datum.sure", alt.value(1.0), alt.value(0.35)),
        )
    )
    height = max(8, min(18, 600 // len(order))) * len(order)
    return chart.properties(width=width, height=height, title=title)  # type: ignore[no-any-return]
