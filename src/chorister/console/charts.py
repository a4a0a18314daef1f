"""Charts as SVG, drawn on the server: light or dark, wide or for a phone.

A result is drawn as bars, as a map of cells, or as a cross table; algorithms draw their own charts.
Here charts get the page's colours and a width. An SVG in an `img` runs no scripts and loads
nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from chorister.analyst.algorithms.map_pictures import result_map
from chorister.analyst.display import row_names
from chorister.analyst.postprocessing import Comparison
from chorister.analyst.result import Result
from chorister.analyst.tables import drawable, needed
from chorister.encoding import Grid

Theme: TypeAlias = Literal["light", "dark"]
Width: TypeAlias = Literal["wide", "narrow"]
Spec: TypeAlias = dict[str, Any]

_MAX_CACHED: Final = 300  # drawings
PIXELS: Final[dict[Width, int]] = {"wide": 620, "narrow": 230}
_NARROW: Final = 280.0  # pixels, for a chart that specifies its own width
# Texts are measured here and drawn by the browser, so all these fonts have the same widths.
_FONT: Final = "Arial, 'Liberation Sans', Helvetica, sans-serif"


@dataclass(frozen=True, slots=True)
class ChartStyle:
    """The theme and width of a chart."""

    theme: Theme
    width: Width


@dataclass(frozen=True, kw_only=True, slots=True)
class _Colours:
    ink: str
    faint: str
    line: str
    paper: str
    accent: str
    mark: str  # for lines on top of bars


_LIGHT: Final = _Colours(
    ink="#1b2330", faint="#5b6575", line="#e3e7ee", paper="#ffffff", accent="#2f6fde",
    mark="#1b2330",
)  # fmt: skip
_DARK: Final = _Colours(
    ink="#e8ecf3", faint="#9aa6b8", line="#2b3442", paper="#161c26", accent="#6ea0ff",
    mark="#e8ecf3",
)  # fmt: skip
# Colours of charts, and their counterparts in the dark theme.
_DARK_COLOURS: Final = {
    "white": _DARK.paper,
    "#ffffff": _DARK.paper,
    "black": _DARK.ink,
    "#000000": _DARK.ink,
    "#1c2430": _DARK.ink,
    "#10151d": _DARK.ink,
    "#f8fafc": _DARK.paper,
    "#c8ccd4": "#3a4555",
    "#cccccc": "#3a4555",
    "#ddd": _DARK.line,
    "#555555": _DARK.faint,
    "#9aa3b2": _DARK.faint,
    "#3b6fb6": _DARK.accent,
    "#4c78a8": _DARK.accent,
    "#b2302e": "#ff9d8c",
}
# Shades that are palest where nobody is; in the dark theme, darkest.
_DARK_SHADES: Final = {"blues": ["#1e2938", "#7fabff"]}
_COLOUR_KEYS: Final = frozenset({"color", "stroke", "fill", "background", "symbolFillColor"})


def chart_style(theme: str | None, width: str | None) -> ChartStyle:
    """Read a style from a query string; the default is light and wide."""
    return ChartStyle(
        "dark" if theme == "dark" else "light", "narrow" if width == "narrow" else "wide"
    )


class Charts:
    """Draws charts, and caches the latest ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, str] = OrderedDict()

    def svg(self, key: Hashable, style: ChartStyle, spec: Callable[[], Spec]) -> str:
        """Return a drawing from the cache, or draw the specification."""
        whole = (key, style)
        with self._lock:
            if whole in self._kept:
                self._kept.move_to_end(whole)
                return self._kept[whole]
        drawn = draw(spec(), style)
        with self._lock:
            self._kept[whole] = drawn
            while len(self._kept) > _MAX_CACHED:
                self._kept.popitem(last=False)
        return drawn

    def warm_up(self) -> None:
        """Load the drawing library: otherwise the first chart would take seconds."""
        needed("altair")
        self.svg(
            "warm", ChartStyle("light", "narrow"), lambda: {"mark": "bar", "data": {"values": []}}
        )


def draw(spec: Spec, style: ChartStyle) -> str:
    """Draw a Vega-Lite specification as SVG, in the page's colours, without a network."""
    vega = needed("vl_convert")
    colours = _DARK if style.theme == "dark" else _LIGHT
    dressed = _drawable(spec)
    if style.theme == "dark":
        dressed = _recoloured(dressed)
    dressed["config"] = _merged(_config(colours, style.width), dressed.get("config", {}))
    dressed["config"]["background"] = "transparent"
    if "width" not in dressed and ("layer" in dressed or "mark" in dressed):
        dressed["width"] = PIXELS[style.width]
    elif style.width == "narrow":
        dressed = _narrowed(dressed)
    dressed.setdefault("padding", {"left": 18, "right": 24, "top": 4, "bottom": 4})
    drawn: str = vega.vegalite_to_svg(dressed, allowed_base_urls=[])
    return drawn


def _drawable(node: Any) -> Any:  # noqa: ANN401 (JSON values)
    """Escape what is invisible, reverses text or can't be drawn: others chose the labels."""
    if isinstance(node, dict):
        return {name: _drawable(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_drawable(value) for value in node]
    return drawable(node) if isinstance(node, str) else node


def _narrowed(spec: Spec) -> Spec:
    """Fit a chart to a phone; maps keep their proportions."""
    found = dict(spec)
    if "vconcat" in spec:
        found["vconcat"] = [_narrowed(part) for part in spec["vconcat"]]
    if "facet" in spec:  # small multiples, one below the other
        found |= {"columns": 1, "spec": {**spec["spec"], "width": PIXELS["narrow"]}}
    width, height = spec.get("width"), spec.get("height")
    if isinstance(width, int | float) and width > _NARROW:
        found["width"] = _NARROW
        if isinstance(height, int | float) and _is_map(spec):
            found["height"] = height * _NARROW / width
    return found


def _is_map(spec: Spec) -> bool:
    """Whether the chart draws rectangles in a plane."""
    return any({"x2", "y2"} <= part.get("encoding", {}).keys() for part in spec.get("layer", ()))


def _recoloured(node: Any, key: str = "") -> Any:  # noqa: ANN401 (JSON values)
    """Replace colours for the dark theme; data stay untouched."""
    if isinstance(node, dict):
        shades = _DARK_SHADES.get(str(node.get("scheme")))
        if shades is not None:
            kept = {name: value for name, value in node.items() if name != "scheme"}
            return {**kept, "range": shades}
        return {
            # A colour may be a value, or depend on a condition.
            name: value
            if name in ("datasets", "data")
            else _recoloured(value, key if name in ("value", "condition") else name)
            for name, value in node.items()
        }
    if isinstance(node, list):
        return [_recoloured(value, key) for value in node]
    if isinstance(node, str) and key in _COLOUR_KEYS:
        return _DARK_COLOURS.get(node.lower(), node)
    return node


def _merged(base: Spec, over: Spec) -> Spec:
    merged = dict(base)
    for name, value in over.items():
        known = merged.get(name)
        both = isinstance(known, dict) and isinstance(value, dict)
        merged[name] = _merged(known, value) if both else value  # type: ignore[arg-type]
    return merged


def _config(colours: _Colours, width: Width) -> Spec:
    axis = {
        "labelColor": colours.faint,
        "titleColor": colours.faint,
        "gridColor": colours.line,
        "domainColor": colours.line,
        "tickColor": colours.line,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 220,
    }
    return {
        "font": _FONT,
        "axis": axis,
        "axisQuantitative": {"tickCount": 4 if width == "narrow" else 7},
        "axisY": {"titlePadding": 16},
        "axisXDiscrete": {"labelAngle": -35},
        "header": {"labelColor": colours.ink, "titleColor": colours.faint},
        "legend": {
            "labelColor": colours.faint, "titleColor": colours.faint, "titleFontWeight": "normal",
        },
        "title": {
            "color": colours.ink, "subtitleColor": colours.faint, "anchor": "start",
            "fontSize": 14, "fontWeight": 600, "subtitleFontSize": 12, "offset": 10,
        },
        "view": {"stroke": None},
        "bar": {"color": colours.accent, "cornerRadiusEnd": 3},
        "circle": {"color": colours.accent},
        "point": {"color": colours.accent},
        "area": {"color": colours.accent},
        "line": {"color": colours.accent},
        "rule": {"color": colours.mark},
        "text": {"color": colours.ink},
        "rect": {"stroke": None},
        "range": {"category": [colours.accent, "#e39a3b", "#2fa57f", "#c66aa0"]},
    }  # fmt: skip


_MAX_SIDE: Final = 40  # cells per side of a cross table
_MAX_BARS: Final = 25
_MAX_DIFFERENCES: Final = 40
_NUMBER_PIXELS: Final = 38  # width of a cell with a number


def picture(result: Result, *, style: ChartStyle) -> dict[str, Any]:
    """Return the Vega-Lite specification of the chart that shows a result best."""
    if len(result.features) == 1 and isinstance(result.features[0], Grid):
        drawn: dict[str, Any] = result_map(result, width=PIXELS[style.width]).to_dict()
        return drawn
    if len(result.labels) == 2 and _crossed(result):
        return _cross_table(result, PIXELS[style.width])
    bars: dict[str, Any] = result.plot(top=_MAX_BARS).to_dict()
    return bars


def alternative_text(result: Result) -> str:
    """Describe a chart in words: its largest rows that are above the noise."""
    found = result.above_noise()
    if not len(found):
        return f"Nothing is above the noise in {len(result):,} rows"
    best = found.top(5)
    parts = [
        f"{name}: {value:,.0f}"
        for name, value in zip(row_names(best), best.estimate.tolist(), strict=True)
    ]
    return (
        f"Estimated numbers of devices; {len(found):,} of {len(result):,} rows are above the "
        f"noise, the largest are {'; '.join(parts)}"
    )


def _crossed(result: Result) -> bool:
    sides = [len(set(column)) for column in result.labels.values()]
    return max(sides) <= _MAX_SIDE and min(sides) >= 2


def _cross_table(result: Result, pixels: int) -> dict[str, Any]:
    """One coloured cell per pair of labels, with its number if that fits.

    Groups are separate cohorts, so their cells are shares of the group. Cells that may be 0
    are empty.
    """
    alt = needed("altair")
    sure = result.simultaneous()
    within = len(result.parts) > 1
    unit = 100.0 / result.rows.reports if within else np.ones(len(result))
    (across, columns), (down, lines) = reversed(list(result.labels.items()))
    rows = [
        {
            "across": column, "down": line, "value": max(value, 0.0) if above else 0.0,
            "shown": (f"{value:,.1f}" if within else f"{value:,.0f}") if above else "–",
        }
        for column, line, value, above in zip(
            columns, lines, (result.estimate * unit).tolist(), (sure.ci_low > 0.0).tolist(),
            strict=True,
        )
    ]  # fmt: skip
    above = sum(row["shown"] != "–" for row in rows)
    title = {
        "text": f"{above:,} of {len(rows):,} cells are above the noise",
        "subtitle": [
            f"{result.n_reports:,} reports, epsilon {result.epsilon}"
            + (f"; % of each {down}" if within else ""),
            f"–: may be 0 (the noise is ± {result.noise_sigma:,.1f})",
        ],
    }
    base = alt.Chart(alt.InlineData(values=rows), title=alt.TitleParams(**title)).encode(
        x=alt.X("across:N", sort=None, title=across),
        y=alt.Y("down:N", sort=None, title=down),
    )
    cells = base.mark_rect().encode(
        color=alt.Color(
            "value:Q", scale=alt.Scale(scheme="blues", domainMin=0),
            title=f"% of {down}" if within else "devices",
        )
    )  # fmt: skip
    found: dict[str, Any] = cells.to_dict()
    if len(rows) <= 120 and len(set(columns)) * _NUMBER_PIXELS <= pixels:
        most = max(float(row["value"]) for row in rows)
        numbers = base.mark_text(fontSize=11).encode(
            text="shown:N",
            color=alt.condition(
                f"datum.value > {most / 2}", alt.value("#f8fafc"), alt.value("#10151d")
            ),
        )
        found = alt.layer(cells, numbers).to_dict()
    return found


def differences(found: Comparison, *, first: str, second: str) -> dict[str, Any]:
    """Draw the differences of two results' shares, with their intervals and 0."""
    alt = needed("altair")
    order = np.argsort(-np.abs(found.difference), kind="stable")[:_MAX_DIFFERENCES]
    chosen = np.sort(order) if len(found.difference) <= _MAX_DIFFERENCES else order
    names = [" · ".join(labels) for labels in zip(*found.labels.values(), strict=True)]
    rows = [
        {
            "label": names[i], "difference": 100.0 * float(found.difference[i]),
            "low": 100.0 * float(found.ci_low[i]), "high": 100.0 * float(found.ci_high[i]),
            "differs": bool(found.ci_low[i] > 0.0 or found.ci_high[i] < 0.0),
        }
        for i in chosen.tolist()
    ]  # fmt: skip
    apart = int(np.sum((found.ci_low > 0.0) | (found.ci_high < 0.0)))
    title = {
        "text": f"{apart:,} of {len(names):,} shares differ by more than chance",
        "subtitle": [
            f"{second} minus {first},",
            "in percentage points of each one's reports",
            f"lines: {found.confidence:.0%} intervals, for all rows at once",
            "grey: may be equal",
        ],
    }
    base = alt.Chart(alt.InlineData(values=rows), title=alt.TitleParams(**title)).encode(
        y=alt.Y("label:N", sort=None, title=" · ".join(found.labels))
    )
    zero = alt.Chart(alt.InlineData(values=[{"zero": 0}]))
    zero = zero.mark_rule(strokeWidth=1, color="#9aa3b2").encode(x="zero:Q")
    lines = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", title="percentage points", scale=alt.Scale(zero=True)), x2="high:Q",
    )  # fmt: skip
    points = base.mark_point(filled=True, size=60, opacity=1.0).encode(
        x="difference:Q",
        color=alt.condition("datum.differs", alt.value("#3b6fb6"), alt.value("#9aa3b2")),
    )
    drawn: dict[str, Any] = alt.layer(zero, lines, points).to_dict()
    return drawn
