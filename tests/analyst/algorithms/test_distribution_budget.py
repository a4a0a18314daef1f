"""More budget is never worse: the error of range queries as the noise falls, on fresh shapes.

None of these shapes is among those that the rules were chosen or reported on. Runs with less noise
are compared with runs with more, seed by seed, by a sign test: no law of the errors is assumed. If
less noise were no better than more in any comparison, the chance of a false alarm would be at most
1e-6, all comparisons together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import pytest
from scipy.stats import binom, norm

from chorister.analyst.algorithms.density import Cells, Floats, fit_density
from chorister.analyst.algorithms.density_rules import regime

SIZE = 1024
SEEDS = 30
# Around the places where rules used to change, and from weak signals to strong ones.
NOISES = (0.012, 0.004, 0.0013, 0.0003)
Shape: TypeAlias = Callable[[Floats], Floats]


def edge_of_a_range(x: Floats) -> Floats:
    """A steep start and a long tail, as of waiting times."""
    found: Floats = norm.pdf(x, 0.07, 0.01) + 3.0 * np.exp(-x / 0.05) + 0.05
    return found


def ramp(x: Floats) -> Floats:
    return 0.2 + x**1.5


def combs(x: Floats) -> Floats:
    """Narrow teeth on the right, a broad hill on the left."""
    teeth = (x > 0.7) & (np.floor(x * 64) % 4 == 0)
    found: Floats = norm.pdf(x, 0.3, 0.1) + 8.0 * teeth
    return found


def sawtooth(x: Floats) -> Floats:
    """Nine teeth: nine equal cells see nothing of them."""
    return 9.0 * x % 1.0


SHAPES: tuple[Shape, ...] = (edge_of_a_range, ramp, combs)
COMPARISONS = len(SHAPES) * 2 * (len(NOISES) - 1) + 1


def wrong(truth: Floats, noise: float, *, once: bool, seed: int) -> float:
    """Mean squared error of queries of half the range, in one run."""
    rng = np.random.default_rng([seed, int(1e6 * noise), once])
    rules = regime(noise, splitting_costs=once)
    cumulative = np.concatenate([[0.0], np.cumsum(truth)])
    parts: list[Cells] = []
    for number, share in enumerate(rules.shares, start=1):
        sigma = noise / (share if once else math.sqrt(share))
        edges = rules.edges(number, parts, SIZE, noise=sigma)
        values = np.diff(cumulative[edges]) + rng.normal(0.0, sigma, len(edges) - 1)
        parts.append(Cells.between(edges, values, np.full(len(values), sigma**2)))
    density = fit_density(parts, SIZE).density
    deviation = np.concatenate([[0.0], np.cumsum(density)]) - cumulative
    half = SIZE // 2
    return float(np.mean((deviation[half:] - deviation[: half + 1]) ** 2))


@pytest.mark.parametrize("once", [True, False], ids=["one report", "three reports"])
@pytest.mark.parametrize("shape", SHAPES)
def test_more_budget_is_not_worse(shape: Shape, *, once: bool) -> None:
    truth = shape((np.arange(SIZE) + 0.5) / SIZE)
    run = partial(wrong, truth / truth.sum(), once=once)
    errors = np.array([[run(noise, seed=seed) for seed in range(SEEDS)] for noise in NOISES])
    worse = np.count_nonzero(errors[1:] >= errors[:-1], axis=1)
    assert np.all(binom.sf(worse - 1, SEEDS, 0.5) > 1e-6 / COMPARISONS)
    # And over the whole way it is much better.
    assert np.median(errors[-1]) < np.median(errors[0]) / 3.0


def test_waves_that_a_first_round_cannot_see_are_found() -> None:
    """With the smaller noise, the first round has as many cells as there are teeth."""
    truth = sawtooth((np.arange(SIZE) + 0.5) / SIZE)
    run = partial(wrong, truth / truth.sum(), once=True)
    assert [regime(noise, splitting_costs=True).cells[0] for noise in (0.001, 0.0005)] == [6, 9]
    more, less = (np.array([run(noise, seed=seed) for seed in range(SEEDS)])
                  for noise in (0.001, 0.0005))  # fmt: skip
    worse = np.count_nonzero(less >= more)
    assert binom.sf(worse - 1, SEEDS, 0.5) > 1e-6 / COMPARISONS
    assert np.median(less) < 8e-5  # 1e-4 and more if the first round is believed
