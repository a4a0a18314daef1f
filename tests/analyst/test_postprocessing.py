"""Combining two results: whose devices they are about decides how much the second one tells."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import pytest
from numpy.typing import NDArray

import chorister as ch
from chorister.analyst.estimate import Part
from chorister.analyst.rehearsal.simulation import draw_sums
from chorister.errors import InvalidInput
from chorister.recipe import Participation, Recipe
from tests.analyst.fleets import decades, fleet
from tests.keyboard import ANALYSIS

COARSE = ch.intervals("age", [10, 20, 40, 80])
PARENTS = [0, 1, 2, 2, 3, 3, 3, 3]
FLAT = (0.02, 0.14, 0.14, 0.14, 0.14, 0.14, 0.14, 0.14)
RARE = (0.0005, 0.002, 0.9, 0.05, 0.03, 0.012, 0.005, 0.0005)
STEEP = (0.004, 0.5, 0.25, 0.12, 0.08, 0.04, 0.005, 0.001)


def recipes(mechanism: str) -> tuple[Recipe, Recipe]:
    """The same privacy for a fine and a coarse question."""
    study = fleet().study("combined", analysis=ANALYSIS)
    fine, coarse = (
        study.histogram(feature, local_epsilon=4, epsilon=1, mechanism=mechanism).recipe(
            number=number, opens=0
        )
        for number, feature in enumerate((decades(), COARSE), start=1)
    )
    return fine, coarse


def drawn(recipe: Recipe, counts: NDArray[np.int64], rng: np.random.Generator) -> ch.Result:
    reports = int(counts.sum())
    sums = draw_sums(recipe, counts, reports, rng)
    return ch.Result(recipe=recipe, parts=(Part(group=(), reports=reports, sums=sums),))


def coarser(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(PARENTS, counts, 4).astype(np.int64)


def hits(
    mechanism: str, shares: Sequence[float], own: int, other: int, runs: int
) -> NDArray[np.float64]:
    """How often each row's interval holds the count among the devices that answered it."""
    fine, coarse = recipes(mechanism)
    rng = np.random.default_rng([own, other, len(mechanism)])
    found = np.zeros(len(shares))
    for _ in range(runs):
        counts, others = (rng.multinomial(size, shares) for size in (own, other))
        combined = drawn(fine, counts, rng).consistent(drawn(coarse, coarser(others), rng), PARENTS)
        ends = combined.intervals()
        found += (ends.low <= counts) & (counts <= ends.high)
    return found / runs


# 1,000 runs: one of the 64 rows below .907 has a chance of 1e-6 where 95% are held.
@pytest.mark.parametrize("mechanism", ["asymmetric", "symmetric"])
@pytest.mark.parametrize(
    ("shares", "own", "other"),
    [
        (FLAT, 20_000, 20_000),
        (STEEP, 60_000, 6_000),
        (STEEP, 3_000, 90_000),
        (RARE, 1_000, 100_000),
    ],
)
def test_another_cohorts_shares_are_a_sample(
    mechanism: str, shares: Sequence[float], own: int, other: int
) -> None:
    assert hits(mechanism, shares, own, other, 1_000).min() > 0.907


def test_the_same_devices_are_no_sample_where_the_caller_knows_it() -> None:
    # 1,000 runs: one of the 8 rows below .910 has a chance of 1e-6 where 95% are held.
    fine, coarse = recipes("symmetric")
    rng = np.random.default_rng(5)
    found, wider = np.zeros(8), np.zeros(8)
    for _ in range(1_000):
        counts = rng.multinomial(20_000, FLAT)
        own, other = drawn(fine, counts, rng), drawn(coarse, coarser(counts), rng)
        combined = own.consistent(other, PARENTS, same_devices=True)
        ends = combined.intervals()
        found += (ends.low <= counts) & (counts <= ends.high)
        wider += own.consistent(other, PARENTS).std_error > combined.std_error
    assert found.min() / 1_000 > 0.910
    assert wider.min() == 1_000


def test_what_can_not_be_combined() -> None:
    fine, coarse = recipes("asymmetric")
    rng = np.random.default_rng(6)
    counts = rng.multinomial(20_000, FLAT)
    own, other = drawn(fine, counts, rng), drawn(coarse, coarser(counts), rng)
    with pytest.raises(InvalidInput, match="same noise"):
        own.consistent(own.marginal(), [0] * 8)
    with pytest.raises(InvalidInput, match="combine the two coarser results first"):
        own.consistent(other, PARENTS).consistent(other, PARENTS)
    fewer = drawn(coarse, coarser(rng.multinomial(9_000, FLAT)), rng)
    with pytest.raises(InvalidInput, match="9,000"):
        own.consistent(fewer, PARENTS, same_devices=True)
    once = coarse.model_copy(
        update={"participation": Participation(probability=Decimal("0.5"), once_per_study=True)}
    )
    with pytest.raises(InvalidInput, match="at most"):
        own.consistent(drawn(once, coarser(counts), rng), PARENTS, same_devices=True)
    grouped = coarse.model_copy(update={"group_by": ("user.locale",)})
    part = Part(group=("de_DE",), reports=20_000, sums=other.parts[0].sums)
    with pytest.raises(InvalidInput, match="different groups"):
        own.consistent(ch.Result(recipe=grouped, parts=(part,)), PARENTS)
