"""Densities as charts, by Altair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chorister.analyst.tables import needed

if TYPE_CHECKING:
    import altair

    from chorister.analyst.algorithms.distribution import Distribution


_POINTS = 512  # finer than a screen shows


def density(found: Distribution, *, shares: Sequence[float], width: int) -> altair.VConcatChart:
    """The density with quantiles above, the distribution function with its 95% band below."""
    alt = needed("altair")
    columns = found.columns()
    x_name = found.column
    every = max(1, len(columns["cdf"]) // _POINTS)
    blocks = columns["density"][: len(columns["density"]) // every * every].reshape(-1, every)
    rows: list[dict[str, Any]] = [
        {"x": float(x), "density": float(d), "cdf": float(c), "low": float(lo), "high": float(hi)}
        for x, d, c, lo, hi in zip(
            columns[x_name][every - 1 :: every],
            blocks.mean(axis=1),
            columns["cdf"][every - 1 :: every],
            columns["ci_low"][every - 1 :: every],
            columns["ci_high"][every - 1 :: every],
            strict=True,
        )
    ]
    quantiles = found.quantiles(shares)
    marks = [
        {"share": f"{share:.0%}", "at": float(at), "low": float(lo), "high": float(hi),
         "height": float(share)}
        for share, at, lo, hi in zip(*quantiles.values(), strict=True)
    ]  # fmt: skip
    domain = [float(found.low), float(found.high)]
    scale = alt.Scale(domain=domain, nice=False)
    data, lines = alt.InlineData(values=rows), alt.InlineData(values=marks)
    area = (
        alt.Chart(data)
        .mark_area(color="#4c78a8", opacity=0.35, line={"color": "#4c78a8", "strokeWidth": 1.5})
        .encode(x=alt.X("x:Q", scale=scale, title=None), y=alt.Y("density:Q", title="density"))
    )
    spans = (
        alt.Chart(lines)
        .mark_rect(color="#e45756", opacity=0.22)
        .encode(x=alt.X("low:Q", scale=scale, title=None), x2="high:Q")
    )
    rules = alt.Chart(lines).mark_rule(color="#e45756", strokeWidth=1.5).encode(x="at:Q")
    names = (
        alt.Chart(lines)
        .mark_text(align="center", color="#b2302e", baseline="bottom")
        .encode(x="at:Q", y=alt.value(-4), text="share:N")  # above, where nothing is drawn
    )
    title = alt.TitleParams(
        text=f"{x_name} of {found.devices:,} devices",
        subtitle=f"after {len(found.results)} rounds; red: quantiles with 95% intervals",
        anchor="start",
        offset=20,
    )
    upper = alt.layer(area, spans, rules, names).properties(width=width, height=220, title=title)
    band = (
        alt.Chart(data)
        .mark_area(color="#4c78a8", opacity=0.3)
        .encode(x=alt.X("x:Q", scale=scale, title=x_name), y="low:Q", y2="high:Q")
    )
    curve = (
        alt.Chart(data)
        .mark_line(color="#4c78a8", strokeWidth=1.5)
        .encode(
            x=alt.X("x:Q", scale=scale, title=x_name),
            y=alt.Y("cdf:Q", title="share below", scale=alt.Scale(domain=[0, 1])),
        )
    )
    points = (
        alt.Chart(lines)
        .mark_point(color="#e45756", filled=True, size=40, opacity=1.0)
        .encode(x="at:Q", y="height:Q")
    )
    lower = alt.layer(band, curve, points).properties(width=width, height=160)
    chart: altair.VConcatChart = alt.vconcat(upper, lower, spacing=8)
    return chart
