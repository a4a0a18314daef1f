"""Pictures in the page's colours, and as narrow as a phone."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import chorister as ch
from chorister.analyst.estimate import Part
from chorister.console.charts import ChartStyle, Theme, Width, draw, picture
from chorister.policy.values import find_hidden
from tests.keyboard import recipe_with

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


HOSTILE = [
    "<script>alert(1)</script>",
    "]]> & \"quoted\" 'single' <!-- comment",
    "\x00\x01\x08\x1b[2J\x7f\x9f",
    "\u202eesrever\u202c \u2066inside\u2069 \u200f\u061c",
    "\u200b\ufeff\u00ad\U000e0041\ufff9\ue000",
    "\ufffe\uffff\ud800\U0001fffe",
    "tab\there\nand a line",
    "\\u{202e} datum.n [0] .dot",
    "https://example.org/?a=b&amp;c#" + "long" * 100,
]


def texts(svg: str) -> str:
    """All text of a well-formed picture that loads and runs nothing."""
    root = ElementTree.fromstring(svg)  # noqa: S314 (we drew it)
    assert not [each for each in root.iter() if each.tag.endswith(("script", "image", "}a"))]
    return "".join(root.itertext())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_label_that_somebody_else_chose_can_not_break_a_chart(theme: Theme) -> None:
    values = [{"x": label, "n": i} for i, label in enumerate(HOSTILE)]
    spec = {
        "data": {"values": values},
        "title": {"text": HOSTILE[3], "subtitle": HOSTILE[2]},
        "mark": {"type": "bar", "tooltip": None},
        "encoding": {
            "y": {"field": "x", "type": "nominal", "title": HOSTILE[0], "sort": HOSTILE},
            "x": {"field": "n", "type": "quantitative"},
        },
    }
    shown = texts(draw(spec, ChartStyle(theme, "wide")))
    assert "<script>alert(1)</script>" in shown
    assert find_hidden(shown) is None
    assert "\\u{202e}esrever" in shown


def test_a_result_with_hostile_labels_is_drawn_as_a_cross_table() -> None:
    """Also where labels become columns, and in the words of the picture."""
    words = {"kind": "categories", "column": "ngram", "values": [HOSTILE[0], HOSTILE[3]]}
    ages = {"kind": "intervals", "column": "age", "edges": ["0", "50", "99"]}
    recipe = recipe_with(features=[ages, words])
    sums = np.full(recipe.encoding.size, 700, dtype=np.uint64)
    parts = (Part(group=("de_DE",), reports=1000, sums=sums),)
    result = ch.Result(recipe=recipe, parts=parts).group("de_DE")
    style = ChartStyle("light", "wide")
    for spec in (picture(result, style=style), result.plot().to_dict()):
        shown = texts(draw(spec, style))
        assert "alert(1)" in shown
        assert find_hidden(shown) is None
    assert find_hidden(json.dumps(result.plot().to_dict(), ensure_ascii=False)) is None
