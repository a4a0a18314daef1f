"""Equal aggregate epsilon for one question to everybody and for several rounds.

One report per device (k = 1): the rounds go to disjoint cohorts, each at the whole epsilon. Several
(k >= rounds): everybody answers every round; the rounds' mechanisms are fixed in advance, so their
privacy losses are convolved (exact accounting), and 1/sigma^2 is split as the shares say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister.privacy import (
    Crowd,
    FixedSequence,
    OneHotRandomizer,
    Release,
    Setting,
    local_epsilon,
)
from chorister.privacy.certified import noise_trials
from chorister.privacy.composition import compose_exact
from chorister.privacy.randomizers import bits_per_bin

DELTA = 1e-6
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RoundNoise:
    """What one round's noise is."""

    reports: int
    local_epsilon: float
    crowd: str

    @property
    def noise_trials(self) -> int:
        """M of each aggregator: here the whole cohort is the minimum cohort."""
        return noise_trials(self.crowd, self.reports)

    @property
    def trials(self) -> int:
        return bits_per_bin(self.reports, self.noise_trials)

    @property
    def randomizer(self) -> OneHotRandomizer:
        return OneHotRandomizer(
            mechanism="asymmetric", local_epsilon=self.local_epsilon, length=1000
        )

    @property
    def sigma(self) -> float:
        """Standard error of an empty cell, in devices."""
        return float(self.randomizer.std_error(self.reports, 0.0, self.noise_trials))

    def draw(self, counts: Ints, rng: np.random.Generator) -> Ints:
        """The released sums: two binomials per cell, the exact law."""
        law = self.randomizer
        sums = rng.binomial(self.trials - counts, law.q)
        held = np.flatnonzero(counts)
        sums[held] += rng.binomial(counts[held], law.h)
        return sums

    def estimates(self, sums: Ints) -> Floats:
        return self.randomizer.debias(sums, self.reports, self.noise_trials)


@lru_cache(maxsize=256)
def one_question(eps: float, crowd: str, devices: int) -> RoundNoise:
    """Everybody answers once."""
    found = local_epsilon(cohort=devices, epsilon=eps, delta=DELTA, crowd=Crowd(crowd))
    return RoundNoise(reports=devices, local_epsilon=float(found), crowd=crowd)


@lru_cache(maxsize=256)
def rounds(
    eps: float, crowd: str, devices: int, shares: tuple[float, ...], k: int
) -> tuple[RoundNoise, ...]:
    """Several rounds that cost any one device the same as one question does."""
    if k == 1:
        return tuple(one_question(eps, crowd, round(devices * share)) for share in shares)
    if k < len(shares):
        raise ValueError(f"{len(shares)} rounds need {len(shares)} reports per device, not {k}")

    def at(sigma: float) -> list[float]:
        return [_local(devices, sigma * sigma / share) for share in shares]

    low, high = 0.5, 1e5
    for _ in range(40):
        middle = math.sqrt(low * high)
        if spent(at(middle), crowd, devices) <= eps:
            high = middle
        else:
            low = middle
        if high / low < 1.0002:
            break
    return tuple(RoundNoise(reports=devices, local_epsilon=each, crowd=crowd) for each in at(high))


def spent(locals_: Sequence[float], crowd: str, devices: int) -> float:
    """Certified epsilon of rounds that everybody answers."""
    releases = tuple(
        Release(setting=Setting(local_epsilon=each, crowd=crowd), cohort=devices)
        for each in locals_
    )
    return compose_exact(FixedSequence(releases=releases), DELTA)


def _local(devices: int, variance: float) -> float:
    """eps0 with `4 n E / (E - 1)^2 = variance`, rounded down to 0.0001."""
    x = variance / (4.0 * devices)
    big = (2.0 * x + 1.0 + math.sqrt(4.0 * x + 1.0)) / (2.0 * x)
    return max(math.floor(math.log(big) * 1e4) / 1e4, 0.001)
