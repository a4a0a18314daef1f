"""Charts of a two-way table: a heat table, or a mosaic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chorister.analyst.estimate import column_names
from chorister.analyst.tables import drawable, needed
from chorister.encoding import OOV
from chorister.errors import InvalidInput

if TYPE_CHECKING:
    import altair

    from chorister.analyst.algorithms.crosstab import Crosstab


def draw(found: Crosstab, *, kind: str) -> altair.LayerChart | altair.Chart:
    if kind == "heat":
        return _heat(found)
    if kind == "mosaic":
        return _mosaic(found)
    raise InvalidInput(f"kind must be heat or mosaic, not {kind!r}")


def _cells(found: Crosstab) -> tuple[list[str], list[str], np.ndarray[Any, np.dtype[np.float64]]]:
    """Labels of both axes, and shares; without OOV if almost nobody is in it."""
    rows, columns = found.both.features
    high, wide = (
        [drawable(feature.label(i)) for i in range(feature.size)] for feature in (rows, columns)
    )
    shares = found.fitted
    if shares[0].sum() < 0.001:
        high, shares = high[1:], shares[1:]
    if shares[:, 0].sum() < 0.001:
        wide, shares = wide[1:], shares[:, 1:]
    return high, wide, shares


def _title(found: Crosstab) -> dict[str, Any]:
    both = found.both
    once = len(found.results) == 1
    rounds, last = ("one round", "at") if once else ("three rounds", "the last at")
    return {
        "text": " by ".join(column_names(both.recipe)),
        "subtitle": [
            f"{found.devices:,} devices in {rounds}",
            f"{last} epsilon {both.epsilon:.3g}",
            "fitted shares in percent",
        ],
        "anchor": "start",
    }


def _heat(found: Crosstab) -> altair.LayerChart:
    alt = needed("altair")
    high, wide, shares = _cells(found)
    names = column_names(found.both.recipe)
    # Print a number only if it is meaningful: at least one standard error of a cell.
    both = found.both
    least = 100.0 * both.noise_sigma / both.n_reports
    rows = [
        {
            "row": high[i], "column": wide[j], "percent": 100.0 * float(shares[i, j]),
            "shown": f"{100.0 * shares[i, j]:.1f}" if 100.0 * shares[i, j] >= max(least, 0.05)
            else "",
        }
        for i in range(len(high))
        for j in range(len(wide))
    ]  # fmt: skip
    most = max(float(shares.max()) * 100.0, 1e-9)
    base = alt.Chart(alt.InlineData(values=rows), title=alt.TitleParams(**_title(found))).encode(
        x=alt.X("column:N", sort=wide, title=names[1], axis=alt.Axis(labelAngle=-45)),
        y=alt.Y("row:N", sort=high, title=names[0]),
    )
    heat = base.mark_rect(stroke="white", strokeWidth=1).encode(
        color=alt.Color(
            "percent:Q",
            title="% of devices",
            scale=alt.Scale(type="sqrt", scheme="blues", domain=[0, most]),
        ),
        tooltip=[
            alt.Tooltip("row:N", title=names[0]),
            alt.Tooltip("column:N", title=names[1]),
            alt.Tooltip("percent:Q", format=".2f", title="% of devices"),
        ],
    )
    text = base.mark_text(fontSize=10).encode(
        text="shown:N",
        color=alt.condition(
            f"datum.percent > {0.35 * most}", alt.value("white"), alt.value("#1c2430")
        ),
    )
    chart: altair.LayerChart = alt.layer(heat, text).properties(
        width=alt.Step(34), height=alt.Step(20)
    )
    return chart


def _mosaic(found: Crosstab) -> altair.Chart:
    alt = needed("altair")
    high, wide, shares = _cells(found)
    names = column_names(found.both.recipe)
    shares = shares / max(float(shares.sum()), 1e-12)
    rows: list[dict[str, Any]] = []
    left = 0.0
    by_row, by_column = shares.sum(axis=1), shares.sum(axis=0)
    for i, row in enumerate(high):
        width, below = float(by_row[i]), 0.0
        for j, column in enumerate(wide):
            part = float(shares[i, j]) / width if width > 0.0 else 0.0
            expected = width * float(by_column[j])
            rows.append(
                {
                    "row": row, "column": column, "x": 100.0 * left, "x2": 100.0 * (left + width),
                    "y": 100.0 * below, "y2": 100.0 * (below + part),
                    "percent": 100.0 * float(shares[i, j]),
                    "ratio": float(np.log2((shares[i, j] + 1e-6) / (expected + 1e-6))),
                }
            )  # fmt: skip
            below += part
        left += width
    tick = [100.0 * float(by_row[:i].sum() + by_row[i] / 2.0) for i in range(len(high))]
    shown = [i for i in range(len(high)) if by_row[i] > 0.02 or high[i] == OOV]
    labels = [{"x": tick[i], "label": high[i]} for i in shown]
    boxes = (
        alt.Chart(alt.InlineData(values=rows), title=alt.TitleParams(**_title(found)))
        .mark_rect(stroke="white", strokeWidth=0.7)
        .encode(
            x=alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, 100], nice=False)),
            x2="x2:Q",
            y=alt.Y("y:Q", title=f"{names[1]}: % within {names[0]}",
                    scale=alt.Scale(domain=[0, 100], nice=False)),
            y2="y2:Q",
            color=alt.Color(
                "ratio:Q",
                title=["times what", "independence predicts"],
                scale=alt.Scale(scheme="blueorange", domain=[-2, 2], domainMid=0, clamp=True),
                legend=alt.Legend(
                    values=[-2, -1, 0, 1, 2],
                    labelExpr="datum.value == -2 ? '1/4' : datum.value == -1 ? '1/2' : "
                    "datum.value == 0 ? '1' : datum.value == 1 ? '2' : '4'",
                ),
            ),
            tooltip=[
                alt.Tooltip("row:N", title=names[0]),
                alt.Tooltip("column:N", title=names[1]),
                alt.Tooltip("percent:Q", format=".2f", title="% of devices"),
            ],
        )
    )  # fmt: skip
    under = (
        alt.Chart(alt.InlineData(values=labels))
        .mark_text(angle=315, align="right", baseline="top", dy=4, fontSize=10)
        .encode(x="x:Q", y=alt.value(400), text="label:N")
    )
    # Cells large enough for their name.
    large = [row for row in rows if row["x2"] - row["x"] > 5.0 and row["y2"] - row["y"] > 6.0]
    inside = (
        alt.Chart(alt.InlineData(values=large))
        .transform_calculate(mx="(datum.x + datum.x2) / 2", my="(datum.y + datum.y2) / 2")
        .mark_text(fontSize=8, color="#1c2430")
        .encode(x="mx:Q", y="my:Q", text="column:N")
    )
    chart: altair.Chart = alt.layer(boxes, inside, under).properties(width=620, height=400)
    return chart
