"""JSON files of an analyst: replaced atomically, with a stated format. Results as JSON."""

from __future__ import annotations

import base64
import binascii
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from chorister.analyst.estimate import Estimates, Floats, Part, ResultView
from chorister.canonical import WIRE
from chorister.errors import DecodeError
from chorister.recipe import Recipe

if TYPE_CHECKING:
    from chorister.analyst.result import Result


MAX_BYTES: Final = 1_000_000_000  # of a result
_MAX_ARRAY_BYTES: Final = 800_000_000
_RESULT_FORMAT: Final = "chorister-result-1"


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace a file: after a crash there is either the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)  # noqa: PTH101 (the descriptor's name)
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def require_format(tree: Any, wanted: str) -> None:  # noqa: ANN401 (any JSON)
    """Raise unless a document states this format."""
    found = tree.get("format") if isinstance(tree, dict) else None
    if found != wanted:
        raise DecodeError(
            f"found {str(found)[:40]!r} instead of {wanted!r}; if a newer Chorister wrote it, "
            "upgrade this one",
            field="format",
        )


def pack(sums: NDArray[np.uint64]) -> str:
    """Encode an array as text: little-endian, deflated, base64."""
    raw = np.ascontiguousarray(sums, dtype="<u8").tobytes()
    return base64.b64encode(zlib.compress(raw, 1)).decode("ascii")


def unpack(text: str) -> NDArray[np.uint64]:
    """The inverse of `pack`."""
    try:
        unzipper = zlib.decompressobj()
        raw = unzipper.decompress(base64.b64decode(text, validate=True), _MAX_ARRAY_BYTES)
    except (binascii.Error, zlib.error, ValueError, TypeError) as error:
        raise DecodeError(f"not packed sums: {error}") from None
    if unzipper.unconsumed_tail or not unzipper.eof or len(raw) % 8:
        raise DecodeError("not packed sums: truncated, or too long")
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64)


def result_to_tree(result: Result) -> dict[str, Any]:
    return {
        "format": _RESULT_FORMAT,
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
    """Read the fields of a result; raise `DecodeError` unless `result_to_tree` wrote them."""
    require_format(tree, _RESULT_FORMAT)
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


def _view_to_json(view: ResultView) -> dict[str, Any]:
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


def _view_from_json(tree: dict[str, Any]) -> ResultView:
    def floats(values: list[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    bounds = tree["bounds"]
    return ResultView(
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
