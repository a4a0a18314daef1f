"""Which picture shows a result best: bars, a map of cells, or a cross table."""

from __future__ import annotations

from typing import Any, Final

from chorister.analyst.extras import needed
from chorister.analyst.result import Result
from chorister.console.charts import PIXELS, Look
from chorister.encoding import Grid

__all__ = ["alternative_text", "picture"]

_MOST_CELLS: Final = 40  # a side of a cross table
_NUMBER_PIXELS: Final = 38  # of a cell that has a number in it


def picture(result: Result, *, look: Look, top: int = 25) -> dict[str, Any]:
    """The Vega-Lite specification of a result's picture."""
    if len(result.features) == 1 and isinstance(result.features[0], Grid) and _alone(result):
        return _map(result, result.features[0])
    if len(result.labels) == 2 and _crossed(result):
        return _cross_table(result, PIXELS[look.width])
    found: dict[str, Any] = result.plot(top=top).to_dict()
    return found


def alternative_text(result: Result) -> str:
    """The same for those who can't see it: the largest rows in words."""
    best = result.top(5)
    names = [" · ".join(labels) for labels in zip(*best.labels.values(), strict=True)]
    parts = [
        f"{name}: {value:,.0f}" for name, value in zip(names, best.estimate.tolist(), strict=True)
    ]
    return f"Estimated numbers of devices; the largest are {'; '.join(parts)}"


def _alone(result: Result) -> bool:
    return not result.recipe.group_by


def _crossed(result: Result) -> bool:
    sides = [len(set(column)) for column in result.labels.values()]
    return max(sides) <= _MOST_CELLS and min(sides) >= 2


def _title(result: Result) -> dict[str, Any]:
    return {
        "text": f"{result.n_reports:,} reports, epsilon {result.epsilon}",
        "subtitle": f"noise of an empty cell: ±{result.noise_sigma:,.1f} devices",
    }


def _map(result: Result, grid: Grid) -> dict[str, Any]:
    """A rectangle a cell; what the noise made negative is empty."""
    alt = needed("altair")
    rows = []
    for cell in range(1, grid.size):
        x0, y0, x1, y1 = grid.rectangle(cell)
        value = max(float(result.estimate[cell]), 0.0)
        rows.append({"x": x0, "y": y0, "x2": x1, "y2": y1, "devices": value})
    x0, y0, x1, y1 = (float(edge) for edge in grid.box)
    chart = (
        alt.Chart(alt.InlineData(values=rows), title=alt.TitleParams(**_title(result)))
        .mark_rect()
        .encode(
            x=alt.X(
                "x:Q", title=grid.columns[0], scale=alt.Scale(domain=[x0, x1], nice=False)
            ).axis(grid=False),
            y=alt.Y(
                "y:Q", title=grid.columns[1], scale=alt.Scale(domain=[y0, y1], nice=False)
            ).axis(grid=False),
            x2="x2:Q",
            y2="y2:Q",
            color=alt.Color("devices:Q", scale=alt.Scale(scheme="blues"), title="devices"),
        )
        .properties(height=320)
    )
    found: dict[str, Any] = chart.to_dict()
    return found


def _cross_table(result: Result, pixels: int) -> dict[str, Any]:
    """A coloured cell for every pair of labels, with its number if that fits."""
    alt = needed("altair")
    (across, columns), (down, lines) = reversed(list(result.labels.items()))
    rows = [
        {"across": column, "down": line, "devices": max(value, 0.0), "shown": f"{value:,.0f}"}
        for column, line, value in zip(columns, lines, result.estimate.tolist(), strict=True)
    ]
    base = alt.Chart(alt.InlineData(values=rows), title=alt.TitleParams(**_title(result))).encode(
        x=alt.X("across:N", sort=None, title=across),
        y=alt.Y("down:N", sort=None, title=down),
    )
    cells = base.mark_rect().encode(
        color=alt.Color("devices:Q", scale=alt.Scale(scheme="blues"), title="devices")
    )
    found: dict[str, Any] = cells.to_dict()
    if len(rows) <= 120 and len(set(columns)) * _NUMBER_PIXELS <= pixels:
        most = max(row["devices"] for row in rows)
        numbers = base.mark_text(fontSize=11).encode(
            text="shown:N",
            color=alt.condition(
                f"datum.devices > {most / 2}", alt.value("#f8fafc"), alt.value("#10151d")
            ),
        )
        found = alt.layer(cells, numbers).to_dict()
    return found
