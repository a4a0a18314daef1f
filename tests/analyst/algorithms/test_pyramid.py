"""The fit of maps: sums, known maps, and agreement with least squares on trees."""

from __future__ import annotations

import numpy as np
import pytest

from chorister.analyst.algorithms.map_rules import (
    DISJOINT_RULES,
    EVERYONE_RULES,
    MapRules,
    Partition,
    Refinement,
)
from chorister.analyst.algorithms.pyramid import (
    Image,
    Measured,
    Pyramid,
    fit_map,
    quarters,
    spread_evenly,
    summed,
)
from chorister.analyst.consistency import Tree, least_squares
from chorister.errors import InvalidInput


def full(level: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return np.ones((2**level, 2**level), dtype=np.bool_)


def hills(level: int, mass: float) -> Image:
    """Two hills in an empty land."""
    at = (np.arange(2**level) + 0.5) / 2**level
    x, y = at[None, :], at[:, None]
    image = np.exp(-((x - 0.3) ** 2 + (y - 0.3) ** 2) / 0.005)
    image = image + 0.5 * np.exp(-((x - 0.7) ** 2 + (y - 0.6) ** 2) / 0.02)
    scaled: Image = image / image.sum() * mass
    return scaled


def pyramid_of(image: Image) -> list[Image]:
    levels = [image]
    while levels[0].shape[0] > 1:
        levels.insert(0, summed(levels[0]))
    return levels


def test_what_is_measured_from_below_is_least_squares_on_the_tree() -> None:
    rng = np.random.default_rng(1)
    measured = Measured()
    values = {level: rng.normal(10.0, 5.0, (2**level, 2**level)) for level in range(3)}
    for level, image in values.items():
        measured.add(level, full(level), image.ravel(), np.full(image.size, 1.0 + level))
    found, variances = measured.from_below()
    # The same tree, nodes from the root down; a leaf of a quadtree is its row and column.
    parents, flat, noise = [-1], [values[0][0, 0]], [1.0]
    for level in (1, 2):
        before = len(parents) - 4 ** (level - 1)
        for row in range(2**level):
            for column in range(2**level):
                parents.append(before + (row // 2) * 2 ** (level - 1) + column // 2)
                flat.append(values[level][row, column])
                noise.append(1.0 + level)
    fit = least_squares(Tree(np.array(parents)), flat, noise)
    assert found[0][0, 0] == pytest.approx(fit.values[0])
    assert variances[0][0, 0] == pytest.approx(fit.variances[0])


def test_a_map_measured_without_noise_is_found() -> None:
    truth = pyramid_of(hills(6, 10_000.0))
    measured = Measured()
    measured.add(6, full(6), truth[6].ravel(), np.full(4**6, 1e-6))
    found = fit_map(measured, 6)
    assert np.abs(found.at(6) - truth[6]).max() < 0.01 * truth[6].max()
    assert found.at(8).shape == (256, 256)
    np.testing.assert_allclose(found.at(8).sum(), 10_000.0, rtol=1e-6)


def test_sums_hold_nothing_is_negative_and_the_fit_beats_the_raw_grid() -> None:
    rng = np.random.default_rng(2)
    truth = pyramid_of(hills(7, 20_000.0))
    noisy = truth[6] + rng.normal(0.0, 15.0, truth[6].shape)
    measured = Measured()
    measured.add(6, full(6), noisy.ravel(), np.full(4**6, 225.0))
    found = fit_map(measured, 7)
    for level in range(7):
        np.testing.assert_allclose(summed(found.at(level + 1)), found.at(level), atol=1e-6)
    assert min(float(image.min()) for image in found.levels) >= 0.0
    raw = spread_evenly(noisy, 7)
    assert np.mean((found.at(7) - truth[7]) ** 2) < 0.25 * np.mean((raw - truth[7]) ** 2)


def test_interpolation_keeps_masses() -> None:
    image = hills(4, 100.0)
    np.testing.assert_allclose(summed(quarters(image)), image, atol=1e-12)


def test_partitions_name_their_cells_and_are_read_back() -> None:
    split = [full(0), full(1), np.zeros((4, 4), dtype=np.bool_)]
    split[2][1, 3] = True
    partition = Partition.splitting(split)
    keys = partition.quadkeys()
    assert len(keys) == len(partition) == 16 - 1 + 4
    assert [key for key in keys if len(key) == 3] == ["130", "131", "132", "133"]
    shuffled = tuple(np.random.default_rng(3).permutation(np.array(keys)))
    again, order = Partition.of_quadkeys(shuffled)
    assert [shuffled[i] for i in order] == list(keys)
    for mine, theirs in zip(partition.masks, again.masks, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_cells_split_where_there_is_mass_and_the_limit_holds() -> None:
    seen = Pyramid(tuple(pyramid_of(hills(8, 100_000.0))))
    rules = EVERYONE_RULES.refinements[1]
    free = rules.partition(seen, 30.0, depth=8, most_cells=10**6)
    bound = rules.partition(seen, 30.0, depth=8, most_cells=200)
    assert len(bound) <= 200 < len(free)
    finest = [level for level, mask in enumerate(free.masks) if mask.any()][-1]
    assert finest >= 7
    assert seen.at(finest)[free.masks[finest]].sum() > 50_000.0
    assert np.count_nonzero(free.masks[finest]) < 0.1 * 4**finest
    covered = sum(np.count_nonzero(mask) / 4.0**level for level, mask in enumerate(free.masks))
    assert covered == pytest.approx(1.0)


def test_undecided_hotspots_stay_whole() -> None:
    rng = np.random.default_rng(4)
    seen = Pyramid(tuple(pyramid_of(rng.uniform(50.0, 150.0, (256, 256)))))
    rules = Refinement(thresholds=dict.fromkeys(range(8), 0.1), hotspots=100, hotspot_margin=2.0)
    split = rules.partition(seen, 10.0, depth=8, most_cells=10**6)
    last = np.sort(seen.at(7).ravel())[-100]
    near = np.abs(seen.at(7) - last) < 20.0
    np.testing.assert_array_equal(split.masks[7], near)


def test_bad_input_is_refused() -> None:
    measured = Measured()
    with pytest.raises(InvalidInput, match="nothing was measured"):
        fit_map(measured, 3)
    with pytest.raises(InvalidInput, match="level 2"):
        measured.add(2, full(1), np.ones(4), np.ones(4))
    with pytest.raises(InvalidInput, match="variance"):
        measured.add(1, full(1), np.ones(4), np.zeros(4))
    measured.add(2, full(2), np.ones(16), np.ones(16))
    with pytest.raises(InvalidInput, match="fit at least"):
        fit_map(measured, 1)
    with pytest.raises(InvalidInput, match="shares"):
        MapRules(shares=(0.5, 0.3, 0.3), first_level=3, refinements=DISJOINT_RULES.refinements)
    with pytest.raises(InvalidInput, match="refinement"):
        MapRules(shares=(1.0,), first_level=3, refinements=DISJOINT_RULES.refinements)
    seen = Pyramid(tuple(pyramid_of(hills(4, 10.0))))
    with pytest.raises(InvalidInput, match="four cells"):
        EVERYONE_RULES.refinements[0].partition(seen, 1.0, depth=4, most_cells=3)
