"""Charts of algorithms whose labels somebody else chose."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import chorister as ch
from chorister.analyst.algorithms.character_model import END
from chorister.analyst.algorithms.crosstab import Crosstab
from chorister.analyst.algorithms.ngrams import Ngrams
from chorister.analyst.algorithms.words import Words
from chorister.analyst.estimate import Part
from chorister.console.charts import ChartStyle, draw
from chorister.policy.values import find_hidden
from tests.keyboard import recipe_with

HOSTILE = ["\x00\x01\x1b[2J\x7f\x9f", "\u202eesrever", "\ufffe\uffff\U0001fffe", "<script>"]


def result_about(*features: dict[str, Any]) -> ch.Result:
    """A result in which everything stands out from the noise."""
    recipe = recipe_with(features=list(features), group_by=[])
    sums = np.full(recipe.encoding.size, 1000, dtype=np.uint64)
    return ch.Result(recipe=recipe, parts=(Part(group=(), reports=1000, sums=sums),))


def categories(column: str, values: list[str]) -> dict[str, Any]:
    return {"kind": "categories", "column": column, "values": values}


def words() -> Any:
    result = result_about(categories("ngram", [label + END for label in HOSTILE]))
    return Words(results=(result,), cohorts="disjoint", rounds=1).plot()


def ngrams() -> Any:
    tree = {"kind": "prefix_tree", "column": "ngram", "prefixes": [""], "vocabulary": ["good"]}
    pairs = categories("ngram", [f"good {label}" for label in HOSTILE])
    results = (result_about(tree), result_about(pairs))
    return Ngrams(results=results, cohorts="disjoint").plot()


def crosstab(kind: str) -> Any:
    ages = {"kind": "intervals", "column": "age", "edges": ["0", "50", "99"]}
    found = Crosstab(
        results=(result_about(categories("ngram", HOSTILE), ages),), cohorts="disjoint"
    )
    return found.plot(kind=kind)


@pytest.mark.parametrize(
    "plot",
    [words, ngrams, lambda: crosstab("heat"), lambda: crosstab("mosaic")],
    ids=["words", "ngrams", "heat", "mosaic"],
)
def test_a_label_can_not_break_a_chart(plot: Any) -> None:
    """A control character or a noncharacter in a label would end the process that draws it."""
    spec = plot().to_dict()
    assert find_hidden(json.dumps(spec, ensure_ascii=False)) is None
    root = ElementTree.fromstring(draw(spec, ChartStyle("light", "wide")))  # noqa: S314 (we drew it)
    shown = "".join(root.itertext())
    assert "\\u{fffe}\\u{ffff}" in shown
    assert "<script>" in shown
