"""Numbers whose quantiles are hard to bound, and what counts as holding a quantile."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

Floats: TypeAlias = NDArray[np.float64]

SHARES = np.array([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
DEVICES = 4_000


def lognormal(rng: np.random.Generator) -> Floats:
    return rng.lognormal(1.6, 0.9, DEVICES)


def narrow(rng: np.random.Generator) -> Floats:
    return rng.normal(37.0, 0.8, DEVICES)


def spikes(rng: np.random.Generator) -> Floats:
    return rng.choice([5.0, 20.0, 21.0, 64.0], DEVICES, p=[0.3, 0.3, 0.25, 0.15])


def steps(rng: np.random.Generator) -> Floats:
    """Atoms whose shares add up to those that are asked about: nothing is to spare."""
    counts = np.diff(np.round(np.array([0.0, *SHARES, 1.0]) * DEVICES)).astype(np.int64)
    return rng.permutation(np.repeat(np.linspace(3.0, 93.0, len(counts)), counts))


def outside(rng: np.random.Generator) -> Floats:
    """A third of the devices have no value inside the range."""
    return np.where(rng.random(DEVICES) < 0.35, -1.0, rng.gamma(2.0, 9.0, DEVICES))


def ends(values: Floats) -> tuple[Floats, Floats]:
    """The least and the largest value that a usual definition gives for each share."""
    inside = np.sort(values[(values >= 0.0) & (values < 100.0)])
    rank = np.floor(SHARES * len(inside) + 1e-9).astype(np.int64)
    last = len(inside) - 1
    return inside[np.clip(rank - 1, 0, last)], inside[np.clip(rank + 1, 0, last)]


def least_hits(runs: int) -> float:
    """Fewer have a chance below 1e-8 for one quantile, and below 1e-6 for all that are tested."""
    return float(binom.ppf(1e-8, runs, 0.95))
