"""Charts of maps, with outlines of land from GeoJSON, or TopoJSON such as world-atlas."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.estimate import Floats
from chorister.analyst.tables import needed
from chorister.encoding import Grid
from chorister.errors import DecodeError, InvalidInput

if TYPE_CHECKING:
    import altair

    from chorister.analyst.algorithms.heatmap import HeatMap
    from chorister.analyst.result import Result

_CORNERS: Final = ("x0", "y0", "x1", "y1")


def cells(
    found: HeatMap,
    *,
    outline: Mapping[str, Any] | str | os.PathLike[str] | None,
    width: int,
) -> altair.LayerChart:
    """Draw every cell of the last round, coloured by devices per area."""
    alt = needed("altair")
    columns = found.columns()
    corners = [columns[name] for name in ("x0", "y0", "x1", "y1")]
    density = _density(columns["estimate"] / found.devices, corners, found.feature)
    tips = {
        "cell": columns["cell"], "fitted": columns["estimate"], "measured": columns["measured"],
        "low": columns["ci_low"], "high": columns["ci_high"],
    }  # fmt: skip
    cohort = "each answering every round" if found.cohorts == "everyone" else "each answering once"
    title = alt.TitleParams(
        text=f"{found.devices:,} devices in {len(density):,} cells",
        subtitle=f"density after {len(found.results)} rounds, {cohort}",
        anchor="start",
    )
    chart = _shaded(
        found.feature, corners, density, tips, top=max(float(density.max()), 1.0), title=title,
        outline=outline, width=width,
    )  # fmt: skip
    framed: altair.LayerChart = chart.configure_view(stroke=None)
    return framed


def result_map(result: Result, *, width: int) -> altair.LayerChart | altair.VConcatChart:
    """Draw one round over a grid, like a heat map; several groups on one scale.

    Cells whose simultaneous interval contains 0 are grey.
    """
    alt = needed("altair")
    (feature,) = result.features
    if not isinstance(feature, Grid):
        raise InvalidInput("a map needs one grid")
    sure = result if result.candidates > 1 else result.simultaneous()
    size, inner = feature.size, np.arange(1, feature.size)
    corners = list(np.array([feature.rectangle(int(i)) for i in inner]).T)
    interval = sure.intervals()
    parts, top = [], 1.0
    for i, part in enumerate(result.parts):
        here = i * size + inner
        density = _density(result.estimate[here] / part.reports, corners, feature)
        top = max(top, float(density.max()))
        tips = {
            "cell": [feature.label(int(cell)) for cell in inner], "devices": result.estimate[here],
            "low": interval.low[here], "high": interval.high[here],
        }  # fmt: skip
        parts.append((part, density, interval.low[here] > 0.0, tips))
    charts = []
    for part, density, above, tips in parts:
        name = f"{', '.join(part.group)}: " if part.group else ""
        title = alt.TitleParams(
            text=f"{name}{int(above.sum()):,} of {len(inner):,} cells are above the noise",
            subtitle=[
                f"{part.reports:,} reports, epsilon {result.epsilon}",
                f"grey: may be 0 (the noise is ± {result.noise_sigma:,.1f})",
            ],
            anchor="start",
        )
        charts.append(
            _shaded(feature, corners, density, tips, top=top, title=title, width=width, above=above)
        )
    if len(charts) == 1:
        alone: altair.LayerChart = charts[0]
        return alone
    stacked: altair.VConcatChart = alt.vconcat(*charts)
    return stacked


def _density(shares: Floats, corners: list[Floats], feature: Grid) -> Floats:
    """Devices per area, in multiples of the mean over the box."""
    x0, y0, x1, y1 = (float(edge) for edge in feature.box)
    left, lower, right, upper = corners
    found: Floats = shares / ((right - left) * (upper - lower)) * ((x1 - x0) * (y1 - y0))
    return np.maximum(found, 0.0)


def _shaded(
    feature: Grid,
    corners: list[Floats],
    density: Floats,
    tips: Mapping[str, Any],
    *,
    top: float,
    title: Any,  # noqa: ANN401 (of Altair)
    width: int,
    outline: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    above: NDArray[np.bool_] | None = None,
) -> altair.LayerChart:
    """Rectangles with coordinates, shaded from 0 to `top` times the mean."""
    alt = needed("altair")
    x0, y0, x1, y1 = box = tuple(float(edge) for edge in feature.box)
    values = {
        **{name: column.tolist() for name, column in zip(_CORNERS, corners, strict=True)},
        "density": density.tolist(),
        "above": [True] * len(density) if above is None else above.tolist(),
        **{name: _rounded(column) for name, column in tips.items()},
    }
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
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
    data = alt.InlineData(values=rows)
    shown = [f"{name}:{'Q' if isinstance(rows[0][name], float) else 'N'}" for name in tips]
    place = {"x": x, "x2": "x1:Q", "y": y, "y2": "y1:Q", "tooltip": shown}
    chart = (
        alt.Chart(data)
        .transform_filter("datum.above")
        .mark_rect(clip=True, strokeWidth=0.7)  # hides the seams between neighbours
        .encode(color=color, stroke=stroke, **place)
    )
    layers = [chart]
    if above is not None:
        grey = alt.Chart(data).transform_filter("!datum.above")
        layers.insert(0, grey.mark_rect(clip=True, color="#c8ccd4", stroke=None).encode(**place))
    if outline is not None:
        layers.append(_outline(alt, outline, (x0, y0, x1, y1)))
    height = round(width * _aspect(*box, geographic=_geographic(feature.columns)))
    layered: altair.LayerChart = alt.layer(*layers).properties(
        width=width, height=min(max(height, 120), 4 * width), title=title
    )
    return layered


def _rounded(column: Any) -> list[Any]:  # noqa: ANN401 (a list or an array)
    return [round(float(v), 1) for v in column] if isinstance(column, np.ndarray) else list(column)


def _ticks(top: float) -> list[float]:
    """0, 1, 3, 10, 30, ... up to the densest cell."""
    powers = range(math.floor(math.log10(top)) + 1)
    return [0.0, *(f * 10.0**power for power in powers for f in (1.0, 3.0) if f * 10**power <= top)]


def _geographic(columns: tuple[str, str]) -> bool:
    """Whether the names of the columns suggest degrees."""
    names = [column.lower() for column in columns]
    return names[0].startswith(("lon", "lng")) and names[1].startswith("lat")


def _aspect(x0: float, y0: float, x1: float, y1: float, *, geographic: bool) -> float:
    """Height over width. A degree of longitude is shorter than one of latitude."""
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


Path2D: TypeAlias = NDArray[np.float64]  # one row per point: x, y
_MAX_BYTES = 200_000_000


def outline_paths(
    source: Mapping[str, Any] | str | os.PathLike[str], box: tuple[float, float, float, float]
) -> list[Path2D]:
    """Return the pieces of an outline that touch the box, each with one point beyond its edges."""
    tree = source if isinstance(source, Mapping) else _read(Path(source))
    try:
        rings = list(_topojson(tree) if tree.get("type") == "Topology" else _geojson(tree))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DecodeError(f"not an outline in GeoJSON or TopoJSON: {error}") from None
    return [piece for ring in rings for piece in _inside(ring, box)]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidInput(f"{path} is larger than {_MAX_BYTES:,} bytes")
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise DecodeError(f"{path} is not an outline in GeoJSON or TopoJSON")
    return tree


def _line(points: Any) -> Path2D:  # noqa: ANN401 (any JSON)
    line = np.array([point[:2] for point in points], dtype=np.float64)
    if line.ndim != 2 or line.shape[1] != 2 or not np.all(np.isfinite(line)):
        raise ValueError("a line is a list of points")
    return line


def _geojson(tree: Mapping[str, Any]) -> Iterator[Path2D]:
    kind = tree["type"]
    if kind == "FeatureCollection":
        for feature in tree["features"]:
            yield from _geojson(feature)
    elif kind == "Feature":
        if tree["geometry"] is not None:
            yield from _geojson(tree["geometry"])
    elif kind == "GeometryCollection":
        for geometry in tree["geometries"]:
            yield from _geojson(geometry)
    elif kind == "LineString":
        yield _line(tree["coordinates"])
    elif kind in ("Polygon", "MultiLineString"):
        yield from map(_line, tree["coordinates"])
    elif kind == "MultiPolygon":
        for polygon in tree["coordinates"]:
            yield from map(_line, polygon)
    elif kind not in ("Point", "MultiPoint"):
        raise ValueError(f"unknown type {str(kind)[:40]!r}")


def _topojson(tree: Mapping[str, Any]) -> Iterator[Path2D]:
    """Yield every arc once, so that shared borders are not drawn twice."""
    transform = tree.get("transform")
    for arc in tree["arcs"]:
        line = _line(arc)
        if transform is not None:  # quantized: integer steps from point to point
            line = line.cumsum(axis=0) * _line([transform["scale"]]) + _line(
                [transform["translate"]]
            )
        yield line


def _inside(line: Path2D, box: tuple[float, float, float, float]) -> Iterator[Path2D]:
    x0, y0, x1, y1 = box
    low, high = np.minimum(line[:-1], line[1:]), np.maximum(line[:-1], line[1:])
    touches = (high[:, 0] >= x0) & (low[:, 0] <= x1) & (high[:, 1] >= y0) & (low[:, 1] <= y1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], touches, [False]]).astype(np.int8)))
    for start, end in edges.reshape(-1, 2):
        yield line[start : end + 1]
