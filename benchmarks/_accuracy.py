"""What the accuracy benchmarks share: equal aggregate epsilon, exact draws, tables, comparisons."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, TypeVar

# Two processes share two cores: more threads only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from chorister.privacy import FixedSequence, OneHotRandomizer, Release, Setting
from chorister.privacy.composition import compose_exact

DELTA = 1e-6
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")
A = TypeVar("A")


@dataclass(frozen=True)
class Release1:
    """One round's mechanism: what is needed to draw its sums and to read them."""

    local: Decimal
    reports: int
    noised: bool

    @property
    def trials(self) -> int:
        """Of the noise of each aggregator: everyone who is expected is needed."""
        return self.reports - 1 if self.noised else 0

    @property
    def randomizer(self) -> OneHotRandomizer:
        return OneHotRandomizer(mechanism="asymmetric", local_epsilon=self.local, length=2)

    @property
    def base(self) -> float:
        """Variance of a bin that nobody holds."""
        return float(self.randomizer.variance(self.reports, 0.0, self.trials))

    @property
    def slope(self) -> float:
        """Variance that one holder adds."""
        return float(self.randomizer.variance(self.reports, 1.0, self.trials)) - self.base

    def draw(self, rng: np.random.Generator, counts: Ints) -> Floats:
        """Estimates of the counts: two binomials per bin, the exact law, and the noise's."""
        law = self.randomizer
        others = self.reports - counts + 2 * self.trials
        sums = rng.binomial(counts, law.h) + rng.binomial(others, law.q)
        return law.debias(sums, self.reports, self.trials)


@lru_cache(maxsize=512)
def single(epsilon: float, reports: int, noised: bool) -> Release1:
    """One release at this aggregate epsilon."""
    return split(epsilon, reports, noised, (1.0,))[0]


@lru_cache(maxsize=512)
def split(epsilon: float, reports: int, noised: bool, shares: tuple[float, ...]) -> list[Release1]:
    """Rounds that everyone answers, together at this epsilon, split by 1/sigma^2.

    The rounds' parameters are fixed before the first, so they compose exactly; one round is priced
    by the same rule, so that competitors are on equal terms to the last digit.
    """
    crowd = "noised" if noised else "honest"

    def at(variance: float) -> list[Release1]:
        # The variance of the reports alone, 4 n E / (E - 1)^2, solved for E.
        rounds = []
        for share in shares:
            middle = 2.0 + share * 4.0 * reports / variance
            power = math.log((middle + math.sqrt(middle * middle - 4.0)) / 2.0)
            local = Decimal(power).quantize(Decimal("0.0001"), rounding=ROUND_DOWN)
            rounds.append(Release1(local, reports, noised))
        return rounds

    def spent(rounds: list[Release1]) -> float:
        releases = tuple(
            Release(setting=Setting(local_epsilon=each.local, crowd=crowd), cohort=reports)
            for each in rounds
        )
        return compose_exact(FixedSequence(releases=releases), DELTA)

    # An empty cell's standard deviation is about 5.2 / epsilon devices, whatever the cohort.
    low, high = (2.0 / epsilon) ** 2, (12.0 / epsilon) ** 2
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(at(middle)) <= epsilon else (middle, high)
    return at(high)


def in_parallel(work: Callable[[A], T], tasks: Iterable[A]) -> list[T]:
    """On both cores."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, list(tasks)))


def mean_and_error(values: Floats) -> tuple[Floats, Floats]:
    """Over seeds (the first axis)."""
    return values.mean(axis=0), values.std(axis=0, ddof=1) / math.sqrt(len(values))


def verdict(ours: Floats, theirs: Floats, *, larger_is_better: bool) -> str:
    """Beaten by two standard errors of the difference, seed by seed (same populations)."""
    gain = (ours - theirs) if larger_is_better else (theirs - ours)
    error = float(gain.std(ddof=1)) / math.sqrt(len(gain))
    mean = float(gain.mean())
    if mean > 2.0 * error:
        return "beaten"
    return "lost" if mean < -2.0 * error else "even"


def print_json(numbers: Mapping[str, Any]) -> None:
    """The last line."""
    print(json.dumps({key: round(float(value), 12) for key, value in numbers.items()}))
