"""The aggregators' noise, and what an analyst with Sybils and a leader of his own is left with."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from chorister.aggregator.jobs.release import sample_noise
from chorister.aggregator.known_tasks import Noise
from tests.aggregator.world import Counts, Pair, small_recipe

BINS = 6_000
COHORT = 60


def test_the_law_is_the_recipes() -> None:
    recipe = small_recipe(min_cohort=60)
    noise = Noise.of(recipe)
    assert noise == Noise(trials=59, threshold=recipe.randomizer.q_threshold)
    assert Noise.of(small_recipe(crowd="honest")) is None


def test_draws_are_exact_binomials() -> None:
    """A chi-square test; false alarms at most 1e-6."""
    noise = Noise(trials=7, threshold=2**62)
    drawn = np.frombuffer(sample_noise(40_000, noise), np.uint64)
    expected = stats.binom.pmf(np.arange(8), 7, 0.25) * len(drawn)
    observed = np.bincount(drawn.astype(np.int64), minlength=8)
    # The rare counts together, so that each cell expects more than five.
    cells = [
        *zip(observed[:6], expected[:6], strict=True),
        (observed[6:].sum(), expected[6:].sum()),
    ]
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    assert statistic < stats.chi2.isf(1e-6, len(cells) - 1)


def gained(folder: Path, crowd: str) -> tuple[Counts, float, float]:
    """What the analyst has of the victim, bin by bin, and the promised epsilon and delta.

    He uploads min_cohort - 1 reports of zeros, and the leader is his own, so that he knows its
    noise: what is left is the victim's bit and the honest helper's noise. In the first half of
    the bins the victim's bit is 1 with the chance h of a value that he has, in the other half with
    the chance q of one that he has not: each bin is one trial of the attack.
    """
    folder.mkdir()
    pair = Pair.in_folder(folder)
    recipe = small_recipe(min_cohort=COHORT, bins=BINS, crowd=crowd, report="plain")
    (task,) = pair.accept(recipe)
    random = np.random.default_rng(20_261_116)
    chances = np.where(np.arange(BINS) < BINS // 2, recipe.randomizer.h, recipe.randomizer.q)
    bits = np.zeros((COHORT, BINS), np.uint8)
    bits[0] = random.random(BINS) < chances
    pair.upload(task, *pair.reports(task, bits))
    pair.work()
    pair.collect(task)
    pair.work()
    collected = pair.result(task)
    assert collected is not None
    left = collected[1] - sum(pair.noise[0].draws, np.zeros(BINS, np.uint64))
    pair.stop()
    epsilon = recipe.privacy.claim.certified_epsilon(COHORT)
    return left, float(epsilon), float(recipe.privacy.delta)


def advantage(left: Counts, epsilon: float) -> float:
    """The largest delta at this epsilon that a threshold test achieves on what was seen."""
    with_value, without = left[: BINS // 2], left[BINS // 2 :]
    return max(
        float(np.mean(with_value >= cut) - math.exp(epsilon) * np.mean(without >= cut))
        for cut in np.unique(left)
    )


@pytest.mark.parametrize("crowd", ["noised", "honest"])
def test_sybils_gain_nothing_beyond_epsilon(tmp_path: Path, crowd: str) -> None:
    """False alarms at most 1e-6 (Dvoretzky, Kiefer and Wolfowitz, for each half of the bins)."""
    left, epsilon, delta = gained(tmp_path / crowd, crowd)
    each = math.sqrt(math.log(2 / 5e-7) / (2 * (BINS // 2)))
    slack = each * (1 + math.exp(epsilon))
    if crowd == "noised":
        assert epsilon < 1.5  # where the local epsilon is 2
        assert advantage(left, epsilon) <= delta + slack
    else:
        # The same attack where nobody adds noise: the bits themselves, at the local epsilon.
        assert set(left.tolist()) == {0, 1}
        assert advantage(left, epsilon) > delta + slack
