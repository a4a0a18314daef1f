"""Pictures as SVG, drawn on the server by Vega: light or dark, wide or for a phone.

What a picture shows is decided by `chorister.analyst`; here it only gets the page's colours and a
width. An SVG in an `img` runs no scripts and loads nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from chorister.analyst.extras import needed

__all__ = ["PIXELS", "Charts", "Look", "Theme", "Width", "as_look"]

Theme: TypeAlias = Literal["light", "dark"]
Width: TypeAlias = Literal["wide", "narrow"]
Spec: TypeAlias = dict[str, Any]

_KEPT: Final = 300  # drawings
PIXELS: Final[dict[Width, int]] = {"wide": 620, "narrow": 230}
_NARROW: Final = 280.0  # of a picture that says how wide it would be
# Texts are measured here and drawn by the browser: fonts that are as wide as each other.
_FONT: Final = "Arial, 'Liberation Sans', Helvetica, sans-serif"


@dataclass(frozen=True, slots=True)
class Look:
    """How a picture is to look."""

    theme: Theme
    width: Width


@dataclass(frozen=True, kw_only=True, slots=True)
class _Colours:
    ink: str
    faint: str
    line: str
    paper: str
    accent: str
    mark: str  # of lines on top of bars


_LIGHT: Final = _Colours(
    ink="#1b2330", faint="#5b6575", line="#e3e7ee", paper="#ffffff", accent="#2f6fde",
    mark="#1b2330",
)  # fmt: skip
_DARK: Final = _Colours(
    ink="#e8ecf3", faint="#9aa6b8", line="#2b3442", paper="#161c26", accent="#6ea0ff",
    mark="#e8ecf3",
)  # fmt: skip
# What pictures say by name or number, in the dark.
_IN_THE_DARK: Final = {
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
# Shades that are palest where nobody is: in the dark, darkest there.
_SHADES_IN_THE_DARK: Final = {"blues": ["#1e2938", "#7fabff"]}
_COLOUR_KEYS: Final = frozenset({"color", "stroke", "fill", "background", "symbolFillColor"})


def as_look(theme: str | None, width: str | None) -> Look:
    """From a query string; whatever is unknown is light and wide."""
    return Look("dark" if theme == "dark" else "light", "narrow" if width == "narrow" else "wide")


class Charts:
    """Draws, and keeps the latest drawings. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, str] = OrderedDict()

    def svg(self, key: Hashable, look: Look, spec: Callable[[], Spec]) -> str:
        """The drawing of a specification, which is asked for only if it is not kept."""
        whole = (key, look)
        with self._lock:
            if whole in self._kept:
                self._kept.move_to_end(whole)
                return self._kept[whole]
        drawn = draw(spec(), look)
        with self._lock:
            self._kept[whole] = drawn
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return drawn

    def warm_up(self) -> None:
        """Load what draws: the first picture would take seconds otherwise."""
        needed("altair")
        self.svg("warm", Look("light", "narrow"), lambda: {"mark": "bar", "data": {"values": []}})


def draw(spec: Spec, look: Look) -> str:
    """A Vega-Lite specification as SVG, in the page's colours; nothing is loaded from anywhere."""
    vega = needed("vl_convert")
    colours = _DARK if look.theme == "dark" else _LIGHT
    dressed = _recoloured(spec) if look.theme == "dark" else dict(spec)
    dressed["config"] = _merged(_config(colours, look.width), dressed.get("config", {}))
    dressed["config"]["background"] = "transparent"
    if "width" not in dressed and ("layer" in dressed or "mark" in dressed):
        dressed["width"] = PIXELS[look.width]
    elif look.width == "narrow":
        dressed = _narrowed(dressed)
    dressed.setdefault("padding", {"left": 18, "right": 24, "top": 4, "bottom": 4})
    drawn: str = vega.vegalite_to_svg(dressed, allowed_base_urls=[])
    return drawn


def _narrowed(spec: Spec) -> Spec:
    """A picture, or several below each other, for a phone; what is drawn to scale stays so."""
    found = dict(spec)
    if "vconcat" in spec:
        found["vconcat"] = [_narrowed(part) for part in spec["vconcat"]]
    width, height = spec.get("width"), spec.get("height")
    if isinstance(width, int | float) and width > _NARROW:
        found["width"] = _NARROW
        if isinstance(height, int | float) and _is_map(spec):
            found["height"] = height * _NARROW / width
    return found


def _is_map(spec: Spec) -> bool:
    """Whether rectangles in a plane are drawn."""
    return any({"x2", "y2"} <= part.get("encoding", {}).keys() for part in spec.get("layer", ()))


def _recoloured(node: Any, key: str = "") -> Any:  # noqa: ANN401 (JSON values)
    """The same specification with the colours that suit a dark page; data stay untouched."""
    if isinstance(node, dict):
        shades = _SHADES_IN_THE_DARK.get(str(node.get("scheme")))
        if shades is not None:
            kept = {name: value for name, value in node.items() if name != "scheme"}
            return {**kept, "range": shades}
        return {
            # A colour may be a value, or one of two under a condition.
            name: value
            if name in ("datasets", "data")
            else _recoloured(value, key if name in ("value", "condition") else name)
            for name, value in node.items()
        }
    if isinstance(node, list):
        return [_recoloured(value, key) for value in node]
    if isinstance(node, str) and key in _COLOUR_KEYS:
        return _IN_THE_DARK.get(node.lower(), node)
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
