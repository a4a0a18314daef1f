"""Intervals of quantiles: they hold the truth whatever the data, and whoever answered."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

import chorister as ch
from chorister.analyst.algorithms.density_bands import distribution_band
from chorister.analyst.algorithms.distribution import Distribution
from chorister.analyst.arguments import as_exact
from chorister.analyst.cohorts import Cohorts
from chorister.analyst.estimate import Part
from chorister.analyst.rehearsal import rehearse
from chorister.analyst.rehearsal.simulation import draw_sums
from chorister.encoding import Intervals
from chorister.errors import InvalidInput
from chorister.privacy import Mechanism
from chorister.recipe import Recipe
from tests.analyst.algorithms.places import trips_policy
from tests.analyst.algorithms.shapes import DEVICES, SHARES, ends, least_hits

Floats: TypeAlias = NDArray[np.float64]


def asked(edges: list[float], mechanism: str = "asymmetric", local: int = 5) -> Recipe:
    fleet = rehearse({"fare": [1.0], "count": [20_000]}, trips_policy(reports=3), seed=1)
    question = fleet.study("fares").histogram(
        ch.intervals("fare", edges), local_epsilon=local, epsilon=1, mechanism=mechanism
    )
    return question.recipe(number=1, opens=0)


def answered(recipe: Recipe, values: Floats, rng: np.random.Generator) -> ch.Result:
    (feature,) = recipe.features
    assert isinstance(feature, Intervals)
    counts = np.histogram(values, np.array(feature.edges, dtype=np.float64))[0]
    counts = np.concatenate([[len(values) - counts.sum()], counts])
    sums = draw_sums(recipe, counts, len(values), rng)
    return ch.Result(recipe=recipe, parts=(Part(group=(), reports=len(values), sums=sums),))


def test_an_earlier_round_may_have_had_other_devices() -> None:
    """Its edges are finer: taken for the last devices' own, it would decide and often be wrong."""
    fine = asked([float(edge) for edge in range(0, 101, 10)], "symmetric", local=7)
    coarse = asked([0.0, 50.0, 100.0], "symmetric", local=7)
    rng = np.random.default_rng(2)
    values = np.linspace(5.0, 75.0, 8)
    chances = np.diff(np.array([0.0, *SHARES, 1.0]))  # each share lies between two values
    hits, narrower, runs = np.zeros(len(SHARES)), 0, 250
    for _ in range(runs):
        earlier, last = rng.choice(values, (2, 20_000), p=chances)
        results = answered(fine, earlier, rng), answered(coarse, last, rng)
        low, high = distribution_band(results, "everyone", 0.95).quantiles(SHARES)
        least, most = ends(last)
        hits += (low <= least) & (most <= high)
        narrower += int(np.all(high - low <= 30.0))
    assert hits.min() >= least_hits(runs)
    assert narrower == runs  # but what it tells is used


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("cohorts", ["everyone", "disjoint"])
def test_the_distribution_functions_band_holds_at_every_edge(
    mechanism: Mechanism, cohorts: Cohorts
) -> None:
    """Few rare bits, so that the noise is skewed; disjoint cohorts of one population."""
    recipe = asked([0.0, 10.0, 20.0, 30.0, 60.0, 100.0], mechanism)
    rng = np.random.default_rng(3)
    places = np.array([0.0, 5.0, 10.0, 20.0, 25.0, 30.0, 60.0, 80.0, 100.0])
    hits, runs = np.zeros(len(places)), 400
    values = rng.exponential(12.0, DEVICES).clip(0.0, 99.0)
    truth = np.array([np.mean(values < place) for place in places])
    for _ in range(runs):
        rng.shuffle(values)
        groups = [values, values] if cohorts == "everyone" else [values[:1_500], values[1_500:]]
        results = [answered(recipe, group, rng) for group in groups]
        lower, upper = distribution_band(results, cohorts, 0.95).at(places)
        assert (np.diff(lower) >= 0).all()
        assert (np.diff(upper) >= 0).all()
        hits += (lower <= truth + 1e-9) & (truth - 1e-9 <= upper)
    assert hits.min() >= least_hits(runs)


def test_an_interval_is_no_wider_than_it_must_be() -> None:
    """With little noise: the cell that the quantile lies in, and no end of the range."""
    recipe = asked([0.0, 10.0, 20.0, 30.0, 100.0])
    values = np.repeat([2.0, 12.0, 22.0, 40.0], 100_000)
    result = answered(recipe, values, np.random.default_rng(4))
    shares = np.array([0.1, 0.4, 0.6, 0.9])
    low, high = distribution_band([result], "everyone", 0.95).quantiles(shares)
    assert low.tolist() == [0.0, 10.0, 20.0, 30.0]
    assert high.tolist() == [10.0, 20.0, 30.0, 100.0]


def test_an_interval_that_the_range_bounds_says_so() -> None:
    recipe = asked([0.0, 10.0, 20.0, 30.0, 100.0])
    values = np.repeat([2.0, 12.0, 22.0, 40.0], 10_000)
    result = answered(recipe, values, np.random.default_rng(5))
    found = Distribution(results=(result,), cohorts="everyone", low=as_exact(0), high=as_exact(100))
    assert "the range bounds it" in found.explain()
    columns = found.columns()
    assert (columns["ci_low"] <= columns["cdf"]).all()
    assert (columns["cdf"] <= columns["ci_high"]).all()


def test_results_that_were_changed_are_refused() -> None:
    recipe = asked([0.0, 50.0, 100.0])
    result = answered(recipe, np.full(DEVICES, 7.0), np.random.default_rng(6))
    with pytest.raises(InvalidInput, match="as released"):
        Distribution(
            results=(result.summing_to_reports(),), cohorts="everyone",
            low=as_exact(0), high=as_exact(100),
        )  # fmt: skip
    wrongs: list[Any] = [1.0, 0.0, "95%", None]
    for wrong in wrongs:
        with pytest.raises(InvalidInput, match="confidence"):
            distribution_band([result], "everyone", wrong)
