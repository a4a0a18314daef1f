"""Results as JSON, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from chorister.analyst.estimate import Estimates, Floats
from chorister.analyst.files import pack, require_format, unpack
from chorister.analyst.view import Part, View
from chorister.canonical import WIRE
from chorister.errors import DecodeError
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.analyst.result import Result

__all__ = ["fields_from_tree", "result_to_tree"]

_FORMAT: Final = "chorister-result-1"
MAX_BYTES: Final = 1_000_000_000


def result_to_tree(result: Result) -> dict[str, Any]:
    """Everything, as JSON values."""
    return {
        "format": _FORMAT,
        "recipe": json.loads(result.recipe.canonical()),
        "parts": [
            {"group": part.group, "reports": part.reports, "sums": pack(part.sums)}
            for part in result.parts
        ],
        "missing": result.missing,
        "round": result.round,
        "confidence": result.confidence,
        "candidates": result.candidates,
        "steps": result.steps,
        "view": None if result.view is None else _view_to_json(result.view),
    }


def fields_from_tree(tree: Any) -> dict[str, Any]:  # noqa: ANN401 (any JSON)
    """The fields of a result; anything but what `result_to_tree` gives raises `DecodeError`."""
    require_format(tree, _FORMAT)
    try:
        return {
            "recipe": Recipe.model_validate(tree["recipe"], context=WIRE),
            "parts": tuple(
                Part(
                    group=tuple(str(value) for value in part["group"]),
                    reports=int(part["reports"]),
                    sums=unpack(part["sums"]),
                )
                for part in tree["parts"]
            ),
            "missing": tuple(tuple(str(v) for v in group) for group in tree["missing"]),
            "round": None if tree["round"] is None else int(tree["round"]),
            "confidence": float(tree["confidence"]),
            "candidates": int(tree["candidates"]),
            "steps": tuple(str(step) for step in tree["steps"]),
            "view": None if tree["view"] is None else _view_from_json(tree["view"]),
        }
    except DecodeError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DecodeError(f"not a saved result: {error}") from None


def _view_to_json(view: View) -> dict[str, Any]:
    rows = view.rows
    return {
        "labels": {name: list(column) for name, column in view.labels.items()},
        "value": rows.value.tolist(),
        "base": rows.base.tolist(),
        "slope": rows.slope.tolist(),
        "reports": rows.reports.tolist(),
        "bounds": None if view.bounds is None else [ends.tolist() for ends in view.bounds],
        "shown": None if view.shown is None else view.shown.tolist(),
    }


def _view_from_json(tree: dict[str, Any]) -> View:
    def floats(values: list[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    bounds = tree["bounds"]
    return View(
        labels={str(name): [str(v) for v in column] for name, column in tree["labels"].items()},
        rows=Estimates(
            floats(tree["value"]),
            floats(tree["base"]),
            floats(tree["slope"]),
            np.array(tree["reports"], dtype=np.int64),
        ),
        bounds=None if bounds is None else (floats(bounds[0]), floats(bounds[1])),
        shown=None if tree["shown"] is None else floats(tree["shown"]),
    )
