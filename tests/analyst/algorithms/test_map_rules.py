"""Where maps are split: what the pilot decides, when rounds pay, and what more budget gains."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from chorister.analyst.algorithms.map_rules import (
    DISJOINT_RULES,
    EVERYONE_RULES,
    SMALL_FLEET_RULES,
    MapRules,
    Partition,
    asked_once,
    enough_left,
    rounds_pay,
)
from chorister.analyst.algorithms.pyramid import Measured, Pyramid, fit_map, summed
from chorister.analyst.estimate import Estimates
from chorister.errors import InvalidInput

Floats = NDArray[np.float64]
DEPTH, DEVICES = 8, 100_000


def lattice(rng: np.random.Generator) -> Floats:
    return (rng.integers(0, 16, (DEVICES, 2)) + 0.5) / 16


def lines(rng: np.random.Generator) -> Floats:
    slope, along = rng.integers(1, 6, DEVICES) / 6.0, rng.random(DEVICES)
    return np.stack([along, slope * along], axis=1)


def hills(rng: np.random.Generator) -> Floats:
    centre = np.array([[0.3, 0.3], [0.6, 0.7]])[rng.integers(0, 2, DEVICES)]
    return np.clip(centre + rng.normal(0.0, 0.06, (DEVICES, 2)), 0.0, 0.999)


def spikes(rng: np.random.Generator) -> Floats:
    points, places = rng.random((DEVICES, 2)), np.random.default_rng(5).random((100, 2))
    there = rng.random(DEVICES) < 0.5
    points[there] = places[rng.integers(0, 100, int(there.sum()))]
    return points


FAMILIES: dict[str, Callable[[np.random.Generator], Floats]] = {
    "lattice": lattice,
    "lines": lines,
    "hills": hills,
    "spikes": spikes,
}


def images(points: Floats) -> list[Floats]:
    size = 2**DEPTH
    column, row = np.floor(points * size).astype(np.int64).T
    counts = np.bincount(row * size + column, minlength=size * size)
    found = [counts.reshape(size, size).astype(np.float64)]
    while found[0].shape[0] > 1:
        found.insert(0, summed(found[0]))
    return found


class Simulated:
    """A whole run with normal noise; `sigma` is that of one question to everybody.

    With disjoint cohorts a round reaches its share of the devices, and the rest is as in `heatmap`.
    """

    def __init__(self, family: str, rules: MapRules, sigma: float, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        points = FAMILIES[family](np.random.default_rng([seed, 0]))
        disjoint = rules is not EVERYONE_RULES
        self.truth = images(points)
        measured, self.partition = Measured(), Partition.uniform(rules.first_level)
        ends = np.round(np.cumsum(rules.shares)[:-1] * DEVICES).astype(np.int64)
        parts = np.split(points, ends) if disjoint else [points] * len(rules.shares)
        for number, (share, part) in enumerate(zip(rules.shares, parts, strict=True)):
            factor = DEVICES / len(part)
            noise = sigma * factor if disjoint else sigma / share**0.5
            if number:
                self.partition = rules.refinements[number - 1].partition(
                    fit_map(measured, DEPTH), noise, depth=DEPTH, most_cells=10**6
                )
            counts = images(part)
            hits: list[NDArray[np.bool_]] = []
            for level, mask in enumerate(self.partition.masks):
                value = counts[level][mask] * factor
                value = value + rng.normal(0.0, noise, value.shape)
                slope = factor - 1.0
                measured.add(level, mask, value, noise**2 + slope * np.maximum(value, 0.0))
                rows = Estimates(
                    value=value,
                    base=np.full(value.shape, noise**2),
                    slope=np.full(value.shape, slope),
                    reports=np.full(value.shape, DEVICES, dtype=np.int64),
                )
                ends_ = rows.interval(step=0.0)  # the noise here is continuous
                true = self.truth[level][mask]
                hits.append((ends_.low <= true) & (true <= ends_.high))
            self.covered = np.concatenate(hits)  # by the intervals of the last round
        self.fit = fit_map(measured, DEPTH)

    @property
    def error(self) -> float:
        return float(np.mean((self.fit.at(DEPTH) - self.truth[-1]) ** 2))


@pytest.mark.parametrize("rules", [EVERYONE_RULES, DISJOINT_RULES], ids=["k3", "k1"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_more_budget_is_never_worse_by_more_than_noise(family: str, rules: MapRules) -> None:
    # The difference of logarithms over 6 seeds is t-distributed with 5 degrees of freedom if
    # nothing was gained: above 25 standard errors with a chance below 1e-6. 3% are allowed.
    errors = np.log(
        [
            [Simulated(family, rules, sigma, seed).error for seed in range(6)]
            for sigma in (60.0, 30.0, 15.0, 7.0)
        ]
    )
    for less, more in pairwise(errors):
        worse = more - less
        assert worse.mean() <= 0.03 + 25.0 * worse.std(ddof=1) / 6**0.5
    assert errors[-1].mean() < errors[0].mean()


@pytest.mark.parametrize("rules", [EVERYONE_RULES, DISJOINT_RULES], ids=["k3", "k1"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_intervals_of_the_last_round_cover_on_every_family(family: str, rules: MapRules) -> None:
    # At least .94 of 95% intervals, and 5 standard errors for chance: a false alarm of 3e-7.
    covered = np.concatenate(
        [Simulated(family, rules, 20.0, seed).covered for seed in range(20, 24)]
    )
    assert len(covered) > 1_000
    assert covered.mean() > 0.94 - 5.0 * (0.94 * 0.06 / len(covered)) ** 0.5


def test_a_rough_map_is_split_further_than_a_smooth_one() -> None:
    smooth = Simulated("hills", EVERYONE_RULES, 10.0, 1)
    assert smooth.fit.roughness < 1.0
    # Every place of the lattice is found, and what it holds.
    found = Simulated("lattice", EVERYONE_RULES, 10.0, 1)
    assert found.fit.roughness > 1.0
    assert len(found.partition.masks) == DEPTH + 1
    places = found.truth[-1] > 0
    assert np.count_nonzero(places) == 256
    assert found.fit.at(DEPTH)[places].sum() > 0.9 * DEVICES


def test_one_report_finds_a_lattice_nearly_as_well_as_three() -> None:
    one, three = (
        np.mean([Simulated("lattice", rules, 7.0, seed).error for seed in range(3)])
        for rules in (DISJOINT_RULES, EVERYONE_RULES)
    )
    # Cells that split late once made this 41. Now it is 3, and single runs vary by a fifth.
    assert one < 8.0 * three


def test_peaks_grow_below_what_was_measured() -> None:
    measured = Measured()
    counts = 100.0 * np.arange(1.0, 17.0)
    measured.add(2, np.ones((4, 4), dtype=np.bool_), counts, np.full(16, 1e-6))
    seen = fit_map(measured, 4)
    np.testing.assert_allclose(seen.peak(2), seen.at(2), rtol=1e-3)
    # The heaviest quarter of a cell holds between a quarter and, on a rough map, two thirds of it.
    part = (1.0 + seen.roughness) / 4.0
    assert 0.25 <= part < 0.7
    corner = float(seen.peak(2)[3, 3])
    assert seen.peak(4)[15, 15] == pytest.approx(max(corner * part**2, seen.at(4)[15, 15]))
    assert seen.peak(5)[31, 31] == pytest.approx(max(corner * part**3, seen.at(5)[31, 31]))
    made = Pyramid((np.ones((1, 1)),))
    np.testing.assert_allclose(made.peak(1), made.at(1))


def test_rounds_pay_unless_everything_stands_out_or_too_few_are_left() -> None:
    assert rounds_pay(100_000, 20.0, depth=10, most_cells=10_000)
    assert not rounds_pay(100_000, 5.0, depth=3, most_cells=10_000)
    assert rounds_pay(100_000, 5.0, depth=3, most_cells=60)  # one question can't ask that
    assert enough_left(8_700, 10_000)
    assert not enough_left(5_000, 10_000)
    assert len(SMALL_FLEET_RULES.shares) < len(DISJOINT_RULES.shares)


@pytest.mark.parametrize(
    ("devices", "sigma", "depth", "most_cells", "level"),
    [(100_000, 22.0, 10, 10**6, 7), (100_000, 22.0, 10, 9_999, 6), (100_000, 5.0, 3, 9_999, 3),
     (500, 20.0, 8, 9_999, 3), (2, 20.0, 8, 4, 1)],
)  # fmt: skip
def test_one_question_is_as_fine_as_the_fit_can_use(
    devices: int, sigma: float, depth: int, most_cells: int, level: int
) -> None:
    rules = asked_once(devices, sigma, depth=depth, most_cells=most_cells)
    assert rules.shares == (1.0,)
    assert rules.first_level == level
    with pytest.raises(InvalidInput, match="four cells"):
        asked_once(devices, sigma, depth=depth, most_cells=3)
