"""Pictures in the page's colours, and as narrow as a phone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from chorister.console.charts import ChartStyle, Theme, Width, draw

TABLE: dict[str, Any] = {
    "data": {"values": [{"x": "a", "n": 0}, {"x": "b", "n": 9}]},
    "encoding": {"x": {"field": "x", "type": "nominal", "axis": None}},
    "layer": [
        {
            "mark": "rect",
            "encoding": {
                "color": {
                    "field": "n", "type": "quantitative", "legend": None,
                    "scale": {"scheme": "blues"},
                }
            },
        },
        {
            "mark": "text",
            "encoding": {
                "text": {"field": "n"},
                "color": {
                    "condition": {"test": "datum.n > 4", "value": "#f8fafc"}, "value": "#10151d",
                },
            },
        },
    ],
}  # fmt: skip


def square(mark: dict[str, Any], **more: object) -> dict[str, Any]:
    """A picture of 600 by 600 pixels."""
    return {
        "data": {"values": [{"low": 0, "high": 1}]},
        "layer": [{"mark": "rect", "encoding": mark}],
        "width": 600,
        "height": 600,
        **more,
    }


PLANE = {
    "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"},
    "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"},
}  # fmt: skip
ROWS = {name: PLANE[name] for name in ("x", "x2")}


def lightness(colour: str) -> int:
    parts = re.findall(r"[0-9a-f]{2}", colour) if colour[0] == "#" else re.findall(r"\d+", colour)
    return sum(int(part, 16 if colour[0] == "#" else 10) for part in parts[:3])


def size(spec: dict[str, Any], width: Width) -> tuple[float, float]:
    found = re.search(r'width="([\d.]+)" height="([\d.]+)"', draw(spec, ChartStyle("light", width)))
    assert found is not None
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_empty_cell_is_like_the_page_and_numbers_can_be_read(theme: Theme) -> None:
    svg = draw(TABLE, ChartStyle(theme, "wide"))
    shapes = re.findall(r'<(path|text)[^>]* fill="(#[0-9a-f]{6}|rgb\([^)]*\))"', svg)
    empty, full = (lightness(colour) for kind, colour in shapes if kind == "path")
    zero, nine = (lightness(colour) for kind, colour in shapes if kind == "text")
    assert (empty > full) == (theme == "light")
    assert min(abs(zero - empty), abs(nine - full)) > 250  # of 765


def test_a_map_stays_to_scale_on_a_phone() -> None:
    wide, high = size(square(PLANE), "narrow")
    assert wide < 400
    assert abs(wide - high) < 60  # the axes
    assert size(square(PLANE), "wide")[1] > 600


def test_rows_keep_their_height_on_a_phone() -> None:
    assert size(square(ROWS), "narrow")[1] > 600


def test_pictures_below_each_other_fit_a_phone() -> None:
    wide, high = size({"vconcat": [square(ROWS), square(ROWS)]}, "narrow")
    assert wide < 400
    assert high > 1200
