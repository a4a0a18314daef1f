"""Outlines of land as lines to draw over a map: GeoJSON, or TopoJSON such as world-atlas."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.errors import DecodeError, InvalidInput

__all__ = ["outline_paths"]

Path2D: TypeAlias = NDArray[np.float64]  # one row a point: x, y
_MAX_BYTES = 200_000_000


def outline_paths(
    source: Mapping[str, Any] | str | os.PathLike[str], box: tuple[float, float, float, float]
) -> list[Path2D]:
    """The parts of an outline's lines that touch the box, each with one point beyond its edges."""
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
    """Every arc once: shared borders are not drawn twice."""
    transform = tree.get("transform")
    for arc in tree["arcs"]:
        line = _line(arc)
        if transform is not None:  # quantised: integer steps from point to point
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
