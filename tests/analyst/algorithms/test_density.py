"""The fit of densities on known ones: accuracy, agreement with a dense solve, rules."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from chorister.analyst.algorithms import density as module
from chorister.analyst.algorithms.density import Cells, Floats, fit_density
from chorister.analyst.algorithms.density_rules import (
    DensityRules,
    equal_edges,
    regime,
    staggered_edges,
)
from chorister.errors import InvalidInput

SIZE = 256


def bell(size: int = SIZE) -> Floats:
    shares = np.diff(norm.cdf(np.linspace(-4.0, 4.0, size + 1), loc=0.5))
    found: Floats = shares / shares.sum()
    return found


def measured(
    truth: Floats, count: int, noise: float, rng: np.random.Generator, shift: int = 0
) -> Cells:
    edges = equal_edges(count, len(truth))
    edges[1:-1] += shift
    sums = np.diff(np.concatenate([[0.0], np.cumsum(truth)])[edges])
    values = sums + rng.normal(0.0, noise, count)
    return Cells.between(edges, values, np.full(count, noise**2))


def test_the_filter_is_the_kernels_matrix() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(SIZE, 3))
    places = (np.arange(SIZE) + 0.5) / SIZE
    for length in (0.02, 0.3):
        scaled = np.sqrt(3.0) * np.abs(places[:, None] - places[None, :]) / length
        matrix = (1.0 + scaled) * np.exp(-scaled)
        np.testing.assert_allclose(module._smoothed(values, length), matrix @ values, atol=1e-9)


def test_a_smooth_density_is_found_between_the_edges() -> None:
    truth = bell()
    fit = fit_density([measured(truth, 16, 1e-4, np.random.default_rng(2))], SIZE)
    assert fit.density.min() >= 0.0
    assert fit.density.sum() == pytest.approx(1.0)
    assert np.abs(fit.cumulative[1:] - np.cumsum(truth)).max() < 0.002


def test_staggered_rounds_add_up() -> None:
    truth = bell()
    rng = np.random.default_rng(3)
    one = [measured(truth, 4, 0.005, rng)]
    more = one + [measured(truth, 4, 0.005, rng, shift) for shift in (16, 32, 48)]
    wrong = [
        np.mean((fit_density(parts, SIZE).cumulative[1:] - np.cumsum(truth)) ** 2)
        for parts in (one, more)
    ]
    assert wrong[1] < wrong[0]


def test_rules_follow_the_signal() -> None:
    weak, strong = regime(0.02, splitting_costs=False), regime(1e-4, splitting_costs=False)
    assert max(weak.cells) < max(strong.cells)
    # Where rounds would not pay for themselves, everybody is asked once.
    assert regime(0.02, splitting_costs=True).cells == (5,)
    assert regime(0.002, splitting_costs=True).shares == (1.0,)
    assert regime(1e-4, splitting_costs=True).cells == (25,)
    for rules in (weak, strong):
        assert sum(rules.shares) == pytest.approx(1.0)
        for number in range(1, len(rules.shares) + 1):
            edges = rules.edges(number, None if number == 1 else bell(), SIZE)
            assert edges[0] == 0
            assert edges[-1] == SIZE
            assert np.all(np.diff(edges) > 0)


def test_edges_go_where_the_mass_is() -> None:
    truth = np.zeros(SIZE)
    truth[100:120] = 0.05
    quantiles = staggered_edges(truth, 10, 0.5)
    assert np.count_nonzero((quantiles >= 99) & (quantiles <= 121)) >= 7


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least one round"):
        fit_density([], SIZE)
    wrong = Cells.between(np.array([0, SIZE + 1]), np.ones(1), np.ones(1))
    with pytest.raises(InvalidInput, match="inside a grid"):
        fit_density([wrong], SIZE)
    with pytest.raises(InvalidInput, match="noise"):
        regime(0.0, splitting_costs=False)
    with pytest.raises(InvalidInput, match="two cells"):
        DensityRules(shares=(1.0,), cells=(1,))
