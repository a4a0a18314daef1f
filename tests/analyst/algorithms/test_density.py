"""The fit of densities on known ones: accuracy, agreement with a dense solve, rules."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from chorister.analyst.algorithms import density as module
from chorister.analyst.algorithms.density import Cells, Floats, expected_errors, fit_density
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
    monkeypatch.setattr(module, "_MODELS", [(0, amplitude, roughness)])
    module._kernels.cache_clear()
    base = bell()
    cells = measured(base[::-1], 8, 0.003, np.random.default_rng(1))
    found = module._posterior_mean(module._Prior(base), cells)[0]
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
    assert weak.cells[0] < strong.cells[0]
    # Where a pilot could not see anything, everybody is asked once.
    assert regime(0.2, splitting_costs=False).shares == (1.0,)
    assert regime(0.06, splitting_costs=True).shares == (1.0,)
    assert "asked once" in regime(0.06, splitting_costs=True).note
    # Where cohorts cost, the pilot is small and one round follows; a device may answer two rounds.
    assert regime(0.002, splitting_costs=True).shares == (0.15, 0.85)
    assert len(regime(0.002, splitting_costs=False, answers=2).shares) == 2
    assert "Several rounds pay off" in weak.note
    asked = []
    for rules, noise in ((weak, 0.02), (strong, 1e-4)):
        assert sum(rules.shares) == pytest.approx(1.0)
        seen = [measured(bell(), 8, noise, np.random.default_rng(1))]
        for number in range(1, len(rules.shares) + 1):
            edges = rules.edges(number, seen, SIZE, noise=noise)
            assert edges[0] == 0
            assert edges[-1] == SIZE
            assert np.all(np.diff(edges) > 0)
            asked.append(len(edges))
    assert max(asked[: len(weak.shares)]) < max(asked[len(weak.shares) :])


def test_edges_go_where_the_mass_is() -> None:
    truth = np.zeros(SIZE)
    truth[100:120] = 0.05
    quantiles = staggered_edges(truth, 10, 0.5)
    assert np.count_nonzero((quantiles >= 99) & (quantiles <= 121)) >= 7


def test_the_pilot_decides_how_many_cells_follow() -> None:
    rules = regime(0.005, splitting_costs=True)
    flat, peak = np.full(SIZE, 1.0 / SIZE), np.full(SIZE, 0.1 / SIZE)
    peak[[20, 90, 91, 200]] += 0.225
    rng = np.random.default_rng(4)
    smooth, rough = ([measured(each, 6, 0.01, rng)] for each in (flat, peak))
    few = rules.edges(2, smooth, SIZE, noise=0.005)
    assert len(rules.edges(2, rough, SIZE, noise=0.005)) > 2 * len(few)
    for most in (2, 3, 5, 9):
        for three in (rules, regime(0.005, splitting_costs=False)):
            for number in range(1, len(three.shares) + 1):
                edges = three.edges(number, rough, SIZE, noise=0.005, most=most)
                assert len(edges) - 1 <= most


@pytest.mark.parametrize(("once", "many"), [(True, 25), (False, 35)])
def test_what_a_first_round_cannot_see_is_provided_for_where_noise_is_small(
    *, once: bool, many: int
) -> None:
    """Nine teeth in nine cells look flat; the rounds that follow have enough cells for them."""
    flat, rng = np.full(SIZE, 1.0 / SIZE), np.random.default_rng(6)
    cells = []
    for noise in (0.004, 0.0005):
        rules = regime(noise, splitting_costs=once)
        parts = [measured(flat, 9, noise / 0.15, rng)]
        for number in range(2, len(rules.shares) + 1):
            edges = rules.edges(number, parts, SIZE, noise=noise)
            seen = np.diff(edges) / SIZE + rng.normal(0.0, noise, len(edges) - 1)
            variances = np.full(len(edges) - 1, noise**2)
            parts.append(Cells.between(edges, seen, variances))
        cells.append(max(len(each.values) for each in parts[1:]))
    assert cells[0] < 15
    assert cells[1] > many


def test_the_expected_error_is_what_a_fit_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Densities drawn from the prior itself: the mean error is the one that was expected."""
    monkeypatch.setattr(module, "_MODELS", [(4, 0.1, 0.0)])
    monkeypatch.setattr(module, "_SURPRISE", 0.0)
    monkeypatch.setattr(module, "_SURPRISING", 0)
    base, noise, rng = np.full(SIZE, 1.0 / SIZE), 0.01, np.random.default_rng(5)
    monkeypatch.setattr(module, "norm_sub", lambda values, _: values * 0.0 + base)
    pilot, edges = equal_edges(4, SIZE), equal_edges(8, SIZE)
    prior = module._Prior(base)
    steps = prior.covariances(np.arange(SIZE), np.arange(1, SIZE + 1))[0]
    # Given that shares add up to 1.
    steps -= np.outer(steps.sum(axis=1), steps.sum(axis=0)) / steps.sum()
    drawn = rng.multivariate_normal(base, steps, 400, method="eigh")
    wrong = []
    for truth in drawn:
        sums = np.concatenate([[0.0], np.cumsum(truth)])
        parts = [
            Cells.between(
                each, np.diff(sums[each]) + rng.normal(0.0, noise, len(each) - 1),
                np.full(len(each) - 1, noise**2),
            )
            for each in (pilot, edges)
        ]  # fmt: skip
        low, high, values, variances = (
            np.concatenate([getattr(part, name) for part in parts] + [last])
            for name, last in (
                ("low", [0]), ("high", [SIZE]), ("values", [1.0]), ("variances", [1e-10]),
            )
        )  # fmt: skip
        known = Cells(low=low, high=high, values=values, variances=variances)
        found, _ = module._posterior_mean(prior, known)
        off = np.concatenate([[0.0], np.cumsum(found - truth)])
        wrong.append(np.mean((off[SIZE // 2 :] - off[: SIZE // 2 + 1]) ** 2))
    (expected,) = expected_errors(fit_density(parts[:1], SIZE), [edges], noise)
    # The mean of 400 errors, each about as large as its mean: six standard errors.
    assert np.mean(wrong) == pytest.approx(expected, rel=0.3)


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


@pytest.mark.parametrize("noise", [1e-7, 2e-8, 1e-9])
def test_next_to_no_noise_is_no_reason_to_fail(noise: float) -> None:
    """As in a rehearsal of 10^16 devices: covariances were singular."""
    rng = np.random.default_rng(16)
    spike, ends = np.zeros(SIZE), np.zeros(SIZE)
    spike[77] = ends[0] = ends[-1] = 1.0
    for truth in (spike, ends / 2.0, np.full(SIZE, 1.0 / SIZE)):
        rules = regime(noise, splitting_costs=True)
        parts: list[Cells] = []
        for number in range(1, len(rules.shares) + 1):
            edges = rules.edges(number, parts, SIZE, noise=noise)
            seen = np.add.reduceat(truth, edges[:-1])
            seen = seen + rng.normal(0.0, noise, len(seen))
            parts.append(Cells.between(edges, seen, np.full(len(seen), noise**2)))
        found = fit_density(parts, SIZE)
        assert found.density.sum() == pytest.approx(1.0)
        assert np.abs(np.add.reduceat(found.density, edges[:-1]) - seen).max() < 1e-3
