"""Edges near the usual quantiles: narrower intervals at little cost."""

from __future__ import annotations

import numpy as np
import pytest

from chorister.analyst.algorithms.density import (
    Cells,
    DensityFit,
    Floats,
    cumulative_errors,
    expected_errors,
    fit_density,
)
from chorister.analyst.algorithms.density_edges import asked_quantiles, interval_mass
from chorister.analyst.algorithms.density_rules import DensityRules, equal_edges

SIZE = 1024
NOISE = 1e-3


def fitted(truth: Floats, seed: int, noise: float = NOISE) -> tuple[Cells, DensityFit]:
    edges = equal_edges(16, SIZE)
    seen = np.add.reduceat(truth, edges[:-1])
    seen = seen + np.random.default_rng(seed).normal(0.0, noise, 16)
    cells = Cells.between(edges, seen, np.full(16, noise**2))
    return cells, fit_density([cells], SIZE)


def hill() -> Floats:
    at = np.arange(SIZE)
    curve = np.exp(-(((at - 400.0) / 150.0) ** 2))
    found: Floats = curve / curve.sum()
    return found


def test_the_standard_errors_of_the_distribution_function_hold() -> None:
    places, truth = np.array([250, 400, 600]), hill()
    true = np.cumsum(truth)[places - 1]
    errors = []
    for seed in range(20):
        _, fit = fitted(truth, seed)
        errors.append((fit.cumulative[places] - true) / cumulative_errors(fit, places))
    assert 0.4 < np.sqrt(np.mean(np.square(errors))) < 2.0


def test_edges_near_quantiles_make_intervals_narrower() -> None:
    _, fit = fitted(hill(), 1)
    base = equal_edges(9, SIZE)
    finer = asked_quantiles(fit, [base], NOISE)
    assert all(set(base.tolist()) <= set(edges.tolist()) for edges in finer)
    masses = [interval_mass(fit, edges, NOISE) for edges in finer]
    # More cells everywhere are no substitute.
    equal = min(interval_mass(fit, equal_edges(count, SIZE), NOISE) for count in (9, 17, 33, 65))
    assert min(masses) < 0.6 * equal


@pytest.mark.parametrize("rounds", [2, 3])
def test_they_cost_little_of_what_a_fit_errs(rounds: int) -> None:
    shares = (0.15, 0.85) if rounds == 2 else (0.2, 0.4, 0.4)
    rules = DensityRules(shares=shares, cells=(8,) + (5,) * (rounds - 1))
    cells, fit = fitted(hill(), 2)
    last = rules.edges(rounds, [cells], SIZE, noise=NOISE)
    plain = [equal_edges(count, SIZE) for count in (5, 7, 9, 13, 19, 27, 39, 55)]
    found, *others = expected_errors(fit, [last, *plain], NOISE)
    assert found <= 1.3 * min(others)
    if rounds == 3:  # else, little may be spent on intervals
        least = min(interval_mass(fit, edges, NOISE) for edges in plain)
        assert interval_mass(fit, last, NOISE) < least
    limited = rules.edges(rounds, [cells], SIZE, noise=NOISE, most=12)
    assert len(limited) <= 13
