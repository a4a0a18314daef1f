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


def test_the_posterior_is_that_of_a_dense_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model, all steps at once: the mean of a Gaussian given sums of it."""
    length, amplitude, roughness = 0.3, 0.5, 0.01
    monkeypatch.setattr(module, "_LENGTHS", (length,))
    monkeypatch.setattr(module, "_AMPLITUDES", (amplitude,))
    monkeypatch.setattr(module, "_ROUGHNESS", (roughness,))
    module._kernels.cache_clear()
    base = bell()
    cells = measured(base[::-1], 8, 0.003, np.random.default_rng(1))
    found = module._posterior_mean(base, cells.low, cells.high, cells.values, cells.variances)
    module._kernels.cache_clear()
    places = (np.arange(SIZE) + 0.5) / SIZE
    scaled = np.sqrt(3.0) * np.abs(places[:, None] - places[None, :]) / length
    process = amplitude * (1.0 + scaled) * np.exp(-scaled) + roughness * SIZE * np.eye(SIZE)
    prior = base[:, None] * process * base[None, :]
    sums = ((np.arange(SIZE) >= cells.low[:, None]) & (np.arange(SIZE) < cells.high[:, None])) * 1.0
    gain = prior @ sums.T @ np.linalg.inv(sums @ prior @ sums.T + np.diag(cells.variances))
    wanted = base + gain @ (cells.values - sums @ base)
    # Between nodes the process is interpolated: close, not equal.
    np.testing.assert_allclose(np.cumsum(found), np.cumsum(wanted), atol=2e-4)


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
    # Where a pilot could not see anything, everybody is asked once.
    assert regime(0.2, splitting_costs=False).shares == (1.0,)
    assert regime(0.06, splitting_costs=True).shares == (1.0,)
    assert "asked once" in regime(0.06, splitting_costs=True).note
    # Where cohorts cost, the pilot is small and one round follows; a device may answer two rounds.
    assert regime(0.002, splitting_costs=True).shares == (0.15, 0.85)
    assert len(regime(0.002, splitting_costs=False, answers=2).shares) == 2
    assert "Rounds pay" in weak.note
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


def test_the_pilot_decides_how_many_cells_follow() -> None:
    rules = regime(0.005, splitting_costs=True)
    flat, peak = np.full(SIZE, 1.0 / SIZE), np.zeros(SIZE)
    peak[100:104] = 0.25
    np.testing.assert_array_equal(rules.edges(2, flat, SIZE), equal_edges(rules.cells[1], SIZE))
    assert len(rules.edges(2, peak, SIZE)) > len(rules.edges(2, flat, SIZE))
    for most in (2, 3, 5, 9):
        for three in (rules, regime(0.005, splitting_costs=False)):
            for number in range(1, len(three.shares) + 1):
                assert len(three.edges(number, peak, SIZE, most)) - 1 <= most


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
