"""Maps as charts, by Altair."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from chorister.analyst.algorithms.outlines import outline_paths
from chorister.analyst.extras import needed

if TYPE_CHECKING:
    import altair

    from chorister.analyst.algorithms.heatmap import HeatMap

__all__ = ["cells"]


def cells(
    found: HeatMap,
    *,
    outline: Mapping[str, Any] | str | os.PathLike[str] | None,
    width: int,
) -> altair.LayerChart:
    """Every cell of the last round, coloured by devices per unit of area."""
    alt = needed("altair")
    columns = found.columns()
    feature = found.feature
    x0, y0, x1, y1 = (float(edge) for edge in feature.box)
    area = (columns["x1"] - columns["x0"]) * (columns["y1"] - columns["y0"])
    density = columns["estimate"] / area * ((x1 - x0) * (y1 - y0)) / found.devices
    rows = [
        {
            "x0": a, "y0": b, "x1": c, "y1": d, "cell": name, "density": max(dense, 0.0),
            "fitted": round(devices, 1), "measured": round(seen, 1), "low": round(low, 1),
            "high": round(high, 1),
        }
        for a, b, c, d, name, dense, devices, seen, low, high in zip(
            columns["x0"].tolist(), columns["y0"].tolist(), columns["x1"].tolist(),
            columns["y1"].tolist(), columns["cell"], density.tolist(),
            columns["estimate"].tolist(), columns["measured"].tolist(),
            columns["ci_low"].tolist(), columns["ci_high"].tolist(), strict=True,
        )
    ]  # fmt: skip
    top = max(float(density.max()), 1.0)
    x = alt.X("x0:Q", scale=alt.Scale(domain=[x0, x1], nice=False), title=feature.columns[0]).axis(
        grid=False
    )
    y = alt.Y("y0:Q", scale=alt.Scale(domain=[y0, y1], nice=False), title=feature.columns[1]).axis(
        grid=False
    )
    shades = alt.Scale(type="symlog", constant=1.0, domain=[0.0, top], scheme="inferno")
    color = alt.Color(
        "density:Q",
        scale=shades,
        title="times the mean",
        legend=alt.Legend(values=_ticks(top), format=",~f"),
    )
    stroke = alt.Stroke("density:Q", scale=shades, legend=None)
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_rect(clip=True, strokeWidth=0.7)  # hides the seams between neighbours
        .encode(
            x=x, x2="x1:Q", y=y, y2="y1:Q", color=color, stroke=stroke,
            tooltip=["cell:N", "fitted:Q", "measured:Q", "low:Q", "high:Q"],
        )
    )  # fmt: skip
    layers = [chart]
    if outline is not None:
        layers.append(_outline(alt, outline, (x0, y0, x1, y1)))
    cohort = "each answering every round" if found.cohorts == "everyone" else "each answering once"
    title = alt.TitleParams(
        text=f"{found.devices:,} devices in {len(rows):,} cells",
        subtitle=f"density after {len(found.results)} rounds, {cohort}",
        anchor="start",
    )
    height = round(width * _aspect(x0, y0, x1, y1, geographic=_geographic(feature.columns)))
    layered: altair.LayerChart = alt.layer(*layers).properties(
        width=width, height=min(max(height, 120), 4 * width), title=title
    )
    framed: altair.LayerChart = layered.configure_view(stroke=None)
    return framed


def _ticks(top: float) -> list[float]:
    """0, 1, 10, 100, ... up to the densest cell."""
    return [0.0, *(10.0**power for power in range(math.floor(math.log10(top)) + 1))]


def _geographic(columns: tuple[str, str]) -> bool:
    """Whether the columns say that they are degrees."""
    names = [column.lower() for column in columns]
    return names[0].startswith(("lon", "lng")) and names[1].startswith("lat")


def _aspect(x0: float, y0: float, x1: float, y1: float, *, geographic: bool) -> float:
    """Height over width; a degree of longitude is shorter than one of latitude."""
    stretch = math.cos(math.radians(min(abs(y0 + y1) / 2.0, 85.0))) if geographic else 1.0
    return (y1 - y0) / ((x1 - x0) * stretch)


def _outline(
    alt: Any,  # noqa: ANN401 (the module)
    outline: Mapping[str, Any] | str | os.PathLike[str],
    box: tuple[float, float, float, float],
) -> altair.Chart:
    rows = [
        {"line": i, "order": j, "x": float(x), "y": float(y)}
        for i, line in enumerate(outline_paths(outline, box))
        for j, (x, y) in enumerate(np.asarray(line))
    ]
    x0, y0, x1, y1 = box
    chart: altair.Chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_line(color="#9fd3ff", strokeWidth=0.8, opacity=0.9, clip=True)
        .encode(
            x=alt.X("x:Q", scale=alt.Scale(domain=[x0, x1], nice=False)),
            y=alt.Y("y:Q", scale=alt.Scale(domain=[y0, y1], nice=False)),
            detail="line:N",
            order="order:Q",
        )
    )
    return chart
