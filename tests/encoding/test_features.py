"""Intervals, categories and grids: what falls where, and labels both ways."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chorister.encoding import Categories, Grid, Intervals
from chorister.errors import InvalidInput

AGE = Intervals(column="age", edges=tuple(Decimal(n) for n in range(10, 90, 10)))
# What SQLite can return, and what it can't but a caller might pass.
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (10, "[10, 20)"),
        (19.999, "[10, 20)"),
        (20, "[20, 30)"),
        (79, "[70, 80)"),
        (80, "OOV"),
        (9, "OOV"),
        (None, "OOV"),
        (math.nan, "OOV"),
        (math.inf, "OOV"),
        (-math.inf, "OOV"),
        ("25", "OOV"),
        (b"25", "OOV"),
        (True, "OOV"),
        (10**400, "OOV"),
        (-(10**400), "OOV"),
    ],
)
def test_intervals(value: object, label: str) -> None:
    alone = AGE.find([value])
    assert AGE.label(int(alone[0])) == label
    # Neighbours of another type take another path through the code.
    assert AGE.find([15, value, "x"])[1] == alone[0]
    assert AGE.find([15, value, 15])[1] == alone[0]


@given(st.lists(st.one_of(st.integers(-100, 200), st.floats(), st.none()), max_size=50))
def test_intervals_by_comparison(values: list[Any]) -> None:
    def slowly(value: float | None) -> int:
        for i in range(1, AGE.size):
            low, high = map(float, AGE.bounds(i))
            if value is not None and low <= value < high:
                return i
        return 0

    assert AGE.find(values) == [slowly(value) for value in values]


def test_a_decimal_edge_is_the_double_that_sqlite_stores() -> None:
    tenths = Intervals(column="x", edges=(Decimal("0.1"), Decimal("0.2"), Decimal("0.3")))
    assert tenths.find([0.1, 0.2, 0.1 + 0.2, 0.3]) == [1, 2, 0, 0]


@pytest.mark.parametrize("edges", [(), (1,), (1, 1), (2, 1), (0, Decimal("1e-400"))])
def test_edges_must_increase(edges: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError):
        Intervals(column="x", edges=edges)


def test_edges_that_are_one_double_are_refused() -> None:
    with pytest.raises(ValidationError, match="increase"):
        Intervals(column="x", edges=(Decimal(2**53), Decimal(2**53 + 1)))


def test_categories_are_exact() -> None:
    feature = Categories(column="x", values=("en_US", "de_DE", 7))
    values: list[Any] = ["en_US", "EN_us", "de_DE", 7, 7.0, "7", True, None, math.nan, b"en_US"]
    assert feature.find(values) == [1, 0, 2, 3, 0, 0, 0, 0, 0, 0]
    assert feature.find(["de_DE", None, 7]) == [2, 0, 3]
    assert Categories(column="x", values=(1,)).find([True, 1.0, 1]) == [0, 0, 1]


@pytest.mark.parametrize("values", [("OOV",), ("a", "a"), (1, "1"), ()])
def test_category_labels_are_distinct(values: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError):
        Categories(column="x", values=values)


@given(st.lists(ODD, max_size=20))
def test_odd_values_never_raise(values: list[Any]) -> None:
    grid = Grid(columns=("x", "y"), box=(Decimal(0), Decimal(0), Decimal(1), Decimal(1)), level=2)
    for feature, columns in (
        (AGE, (values,)),
        (Categories(column="x", values=("a", 1)), (values,)),
        (grid, (values, values)),
    ):
        found = feature.find(*columns)
        assert len(found) == len(values)
        assert all(0 <= cell < feature.size for cell in found)


BOX = (Decimal(-74), Decimal("40.5"), Decimal(-73), Decimal("41.5"))


def test_grid_digits() -> None:
    grid = Grid(columns=("lon", "lat"), box=BOX, level=1)
    lon, lat = [-73.9, -73.1, -73.9, -73.1, -75.0], [40.6, 40.6, 41.4, 41.4, 40.6]
    assert [grid.label(int(i)) for i in grid.find(lon, lat)] == ["0", "1", "2", "3", "OOV"]


@given(st.integers(1, 5), st.floats(-74.1, -72.9), st.floats(40.4, 41.6))
def test_grid_points_lie_in_their_rectangles(level: int, x: float, y: float) -> None:
    grid = Grid(columns=("lon", "lat"), box=BOX, level=level)
    cell = int(grid.find([x], [y])[0])
    inside = -74 <= x < -73 and 40.5 <= y < 41.5
    assert (cell > 0) == inside
    if inside:
        x0, y0, x1, y1 = grid.rectangle(cell)
        slack = 1e-12  # a rectangle's corner is rounded
        assert x0 - slack <= x < x1 + slack
        assert y0 - slack <= y < y1 + slack
        # Levels nest: the parent of the cell is the cell of the coarser grid.
        if level > 1:
            coarser = Grid(columns=("lon", "lat"), box=BOX, level=level - 1)
            assert coarser.label(int(coarser.find([x], [y])[0])) == grid.label(cell)[:-1]


def test_grid_of_chosen_cells_agrees_with_the_level_grid() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.uniform(-74.2, -72.8, 2000).tolist(), rng.uniform(40.3, 41.7, 2000).tolist()
    chosen = Grid(columns=("lon", "lat"), box=BOX, cells=("31", "0", "120", "123", "3333"))
    fine = Grid(columns=("lon", "lat"), box=BOX, level=4)
    for found, key in zip(chosen.find(x, y), map(fine.label, fine.find(x, y)), strict=True):
        expected = [cell for cell in chosen.cells or () if key.startswith(cell)]
        assert chosen.label(int(found)) == (expected[0] if expected else "OOV")


def test_grid_upper_edge_lies_outside_and_just_below_it_inside() -> None:
    grid = Grid(columns=("x", "y"), box=(Decimal(0), Decimal(0), Decimal(3), Decimal(3)), level=3)
    below = math.nextafter(3, 0)
    assert grid.label(int(grid.find([below], [below])[0])) == "333"
    assert grid.find([3.0], [1.0])[0] == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"level": 1, "cells": ("0",)},
        {"cells": ("0", "01")},
        {"cells": ("0", "0")},
        {"cells": ("4",)},
        {"cells": ("",)},
        {"level": 0},
        {"level": 13},
    ],
)
def test_grids_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Grid(columns=("x", "y"), box=BOX, **options)


@pytest.mark.parametrize(
    "feature",
    [
        AGE,
        Categories(column="x", values=("a", 3)),
        Grid(columns=("x", "y"), box=BOX, level=3),
        Grid(columns=("x", "y"), box=BOX, cells=("0", "13", "20")),
    ],
    ids=lambda feature: type(feature).__name__,
)
def test_labels_and_indices_are_inverse(feature: Any) -> None:
    labels = [feature.label(i) for i in range(feature.size)]
    assert labels[0] == "OOV"
    assert len(set(labels)) == feature.size
    assert [feature.index(label) for label in labels] == list(range(feature.size))
    for wrong in ("", "nowhere", "oov"):
        with pytest.raises(InvalidInput):
            feature.index(wrong)
    for index in (-1, feature.size):
        with pytest.raises(InvalidInput):
            feature.label(index)
