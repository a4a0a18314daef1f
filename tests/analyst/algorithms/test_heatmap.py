"""Heat maps over a rehearsal, end to end: plan, rounds, resume, coverage, pictures, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister.analyst.algorithms.heatmap import HeatMap, heatmap
from chorister.analyst.algorithms.map_pictures import outline_paths
from chorister.analyst.rehearsal import Rehearsal, rehearse
from chorister.errors import ChoristerError, DecodeError, InvalidInput
from tests.analyst.algorithms.places import rows_of, three_towns, trips_policy

BOX = (0, 0, 1, 1)
DEVICES = 20_000
FRAME, POINTS = three_towns(DEVICES, 1)


def fleet(*, reports: int, seed: int = 3, folder: Path | None = None) -> Rehearsal:
    return rehearse(FRAME, trips_policy(reports=reports), seed=seed, folder=folder)


@pytest.fixture(scope="module")
def found() -> HeatMap:
    return heatmap(fleet(reports=3).study("towns"), ("x", "y"), BOX, depth=7).result


def test_the_plan_is_stated_before_anything_is_asked() -> None:
    study = fleet(reports=3).study("towns")
    run = heatmap(study, ("x", "y"), BOX, depth=7)
    assert run.plan.cohorts == "everyone"
    assert float(run.plan.epsilon) <= 1.0
    assert study.rounds == []


def test_towns_are_found_and_cells_are_finer_there(found: HeatMap) -> None:
    frame = found.to_polars()
    assert frame["estimate"].sum() == pytest.approx(DEVICES, rel=0.05)
    small = frame.filter(frame["cell"].str.len_chars() >= 6)
    assert small["estimate"].sum() > 0.7 * DEVICES
    big = frame.filter((frame["x0"] >= 0.0) & (frame["x1"] <= 0.5) & (frame["y1"] <= 0.5))
    truth = np.count_nonzero((POINTS < 0.5).all(axis=1))
    assert big["estimate"].sum() == pytest.approx(truth, rel=0.05)


def test_intervals_of_adaptively_chosen_cells_cover() -> None:
    # 4 runs of some hundred cells each. Noise is independent from cell to cell; at 95% the
    # limit is 5 standard errors below, a false alarm of 3e-7.
    hits, cells = 0, 0
    for seed in range(4):
        study = fleet(reports=3, seed=100 + seed).study("towns")
        columns = heatmap(study, ("x", "y"), BOX, depth=6).result.columns()
        x, y = POINTS.T
        for i in range(len(columns["cell"])):
            inside = (x >= columns["x0"][i]) & (x < columns["x1"][i])
            truth = np.count_nonzero(inside & (y >= columns["y0"][i]) & (y < columns["y1"][i]))
            hits += bool(columns["ci_low"][i] <= truth <= columns["ci_high"][i])
            cells += 1
    assert cells > 500
    assert hits / cells > 0.95 - 5.0 * np.sqrt(0.95 * 0.05 / cells)


def test_intervals_are_around_what_the_last_round_measured(found: HeatMap) -> None:
    columns = found.columns()
    measured = np.clip(columns["measured"], 0.0, DEVICES)
    assert np.all(columns["ci_low"] <= measured)
    assert np.all(measured <= columns["ci_high"])
    assert "Measured values" in found.explain()


def test_a_run_that_was_stopped_goes_on_without_asking_again(tmp_path: Path) -> None:
    first = heatmap(fleet(reports=3, folder=tmp_path).study("towns"), ("x", "y"), BOX, depth=6)
    next(iter(first))
    study = fleet(reports=3, folder=tmp_path).study("towns")
    assert len(study.rounds) == 1
    run = heatmap(study, ("x", "y"), BOX, depth=6)
    numbers = [step.number for step in run]
    assert numbers == [1, 2, 3]
    assert len(study.rounds) == 3
    assert [step.number for step in run] == numbers  # iterating again asks nothing
    assert len(study.rounds) == 3
    assert run.result.results[0].parts[0].sums.sum() > 0


# The minimum cohort leaves six standard deviations to the coins: a false alarm of 1e-9 a seed.
@pytest.mark.parametrize("seed", [11, 12, 13, 14])
def test_disjoint_cohorts_where_a_device_answers_once(seed: int) -> None:
    study = fleet(reports=1, seed=seed).study("towns")
    run = heatmap(study, ("x", "y"), BOX, depth=6)
    assert run.plan.cohorts == "disjoint"
    result = run.result
    assert result.devices == DEVICES
    assert result.image(0)[0, 0] == pytest.approx(DEVICES, rel=0.05)


def test_the_largest_domain_holds() -> None:
    fleet_ = rehearse(FRAME, trips_policy(reports=3, max_bins=120), seed=3)
    run = heatmap(fleet_.study("towns"), ("x", "y"), BOX, depth=7)
    assert max(len(step.result) for step in run) <= 120


def test_a_saved_map_is_read_back(found: HeatMap, tmp_path: Path) -> None:
    found.save(tmp_path / "map.json")
    again = HeatMap.load(tmp_path / "map.json")
    np.testing.assert_allclose(again.image(), found.image())
    assert again.explain() == found.explain()
    assert "20,000 devices" in found.explain()
    assert "<table" in found._repr_html_()
    with pytest.raises(InvalidInput, match="can't read"):
        HeatMap.load(tmp_path / "other.json")


@given(st.binary(max_size=60) | st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_what_is_no_map_is_refused(text: bytes | str) -> None:
    with pytest.raises(DecodeError):
        HeatMap.from_json(text)


def test_pictures_hold_every_cell_and_the_outline(found: HeatMap) -> None:
    square = {"type": "LineString", "coordinates": [[0.2, 0.2], [0.8, 0.2], [0.8, 2.0]]}
    spec = found.plot(outline=square).to_dict()
    assert len(spec["layer"]) == 2
    assert len(rows_of(spec, spec["layer"][0])) == len(found.columns()["cell"])
    assert len(rows_of(spec, spec["layer"][1])) == 3


def test_outlines_of_both_kinds_are_cut_to_the_box() -> None:
    ring = [[-5.0, 0.5], [0.5, 0.5], [5.0, 0.5], [5.0, 9.0]]
    land = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}}
    (piece,) = outline_paths(land, (0.0, 0.0, 1.0, 1.0))
    np.testing.assert_allclose(piece, ring[:3])
    world = {
        "type": "Topology",
        "transform": {"scale": [0.1, 0.1], "translate": [0.0, 0.0]},
        "arcs": [[[1, 1], [2, 0], [0, 3]], [[90, 90], [1, 1]]],
    }
    (arc,) = outline_paths(world, (0.0, 0.0, 1.0, 1.0))
    np.testing.assert_allclose(arc, [[0.1, 0.1], [0.3, 0.1], [0.3, 0.4]])
    with pytest.raises(DecodeError, match="GeoJSON"):
        outline_paths({"type": "Nonsense"}, (0.0, 0.0, 1.0, 1.0))


json_values = st.recursive(
    st.none() | st.integers(-5, 5) | st.sampled_from(["Polygon", "Topology", "Feature"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "arcs", "coordinates", "geometry"]), inner)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["type", "arcs", "coordinates", "geometry"]), json_values))
@settings(max_examples=200, deadline=None)
def test_any_outline_is_read_or_refused(tree: dict[str, object]) -> None:
    try:
        paths = outline_paths(tree, (0.0, 0.0, 1.0, 1.0))
    except ChoristerError:
        return
    assert all(path.shape[1] == 2 for path in paths)


def test_levels_of_an_image(found: HeatMap) -> None:
    assert [found.image(level).shape for level in (None, 0, 3)] == [(128, 128), (1, 1), (8, 8)]
    wrongs: list[Any] = [-1, 1.5, "x", 13]
    for wrong in wrongs:
        with pytest.raises(InvalidInput, match="level"):
            found.image(wrong)


def test_bad_input_is_refused() -> None:
    study = fleet(reports=3).study("towns")
    with pytest.raises(InvalidInput, match="depth"):
        heatmap(study, ("x", "y"), BOX, depth=13)
    for box in (("1", 0, "1.000000000000001", 1), (0, "1e15", 1, "1000000000000004")):
        with pytest.raises(InvalidInput, match="too narrow for cells of level 6"):
            heatmap(study, ("x", "y"), box, depth=6)
    assert not study.rounds
    with pytest.raises(InvalidInput, match="at least one round"):
        HeatMap(results=(), cohorts="everyone", depth=3)
