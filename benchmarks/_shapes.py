"""Families of numbers, made up and real, on which distributions and their intervals are measured.

The made-up ones lie on a range from 0 to 100; what falls outside is outside the range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl

from _accuracy import Floats

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)

Rng = np.random.Generator
Shape = Callable[[Rng, int], Floats]


def bimodal(rng: Rng, n: int) -> Floats:
    return np.where(rng.random(n) < 0.6, rng.normal(25, 3, n), rng.normal(70, 6, n))


def spikes(rng: Rng, n: int) -> Floats:
    """Four values that many hold, and a few devices anywhere."""
    values = rng.choice([5.0, 20.0, 21.0, 64.0], n, p=[0.3, 0.3, 0.25, 0.15])
    return np.where(rng.random(n) < 0.9, values, rng.uniform(0, 100, n))


def gap(rng: Rng, n: int) -> Floats:
    """Half on either side of a wide gap: every value inside it is a median."""
    side = rng.permutation(n) < n // 2
    return np.where(side, rng.gamma(3.0, 3.0, n).clip(0, 40), 70 + rng.exponential(4.0, n))


def steps(rng: Rng, n: int) -> Floats:
    """Atoms whose shares add up to the quantiles that are asked: the hardest case."""
    counts = np.diff(np.round(np.array([0.0, *SHARES, 1.0]) * n)).astype(np.int64)
    return rng.permutation(np.repeat(np.linspace(3.0, 93.0, len(counts)), counts))


def outside(rng: Rng, n: int) -> Floats:
    """A third of the devices have values outside the range."""
    return np.where(rng.random(n) < 0.35, -1.0, rng.gamma(2.0, 9.0, n))


def absent(rng: Rng, n: int) -> Floats:
    """Nearly all devices have values outside the range."""
    return np.where(rng.random(n) < 0.98, 120.0, rng.normal(30, 10, n))


def edges(rng: Rng, n: int) -> Floats:
    """Most devices hold the least or the largest value that the range has room for."""
    return rng.choice([0.0, 50.0, 99.999], n, p=[0.45, 0.1, 0.45])


def mixture(rng: Rng, n: int) -> Floats:
    """A wide, a narrow and a very narrow part."""
    wide, narrow = rng.normal(60, 15, n), rng.normal(20, 1, n)
    part = rng.random(n)
    return np.where(part < 0.4, wide, np.where(part < 0.8, narrow, rng.normal(88, 0.05, n)))


def parted(rng: Rng, n: int) -> Floats:
    """Uniform but for a gap."""
    value = rng.uniform(0, 60, n)
    return np.where(value < 25, value, value + 40)


def staircase(rng: Rng, n: int) -> Floats:
    """Levels between jumps."""
    levels = rng.choice([0.0, 20.0, 30.0, 60.0], n, p=[0.1, 0.45, 0.15, 0.3])
    return levels + rng.uniform(0, 1, n) * np.where(levels == 30.0, 30.0, 10.0)


DESIGNED: dict[str, Shape] = {
    "uniform": lambda rng, n: rng.uniform(0, 100, n),
    "normal": lambda rng, n: rng.normal(50, 12, n),
    "narrow": lambda rng, n: rng.normal(37, 0.8, n),
    "bimodal": bimodal,
    "lognormal": lambda rng, n: rng.lognormal(1.6, 0.9, n),
    "exponential": lambda rng, n: rng.exponential(8.0, n),
    "pareto": lambda rng, n: np.minimum(rng.pareto(1.1, n) + 1.0, 99.0),
    "spikes": spikes,
}
UNSEEN: dict[str, Shape] = {
    "gap": gap,
    "lattice": lambda rng, n: np.round(rng.normal(48, 14, n) / 5.0) * 5.0,
    "triangular": lambda rng, n: rng.triangular(0, 10, 100, n),
    "cauchy": lambda rng, n: 30 + 2.0 * rng.standard_cauchy(n),
    "steps": steps,
    "outside": outside,
    "absent": absent,
    "edges": edges,
    "mixture": mixture,
    "parted": parted,
    "single": lambda _, n: np.full(n, 41.0),
    "integers": lambda rng, n: rng.poisson(3.0, n).astype(np.float64),
    "heavy": lambda rng, n: 2.0 * (rng.pareto(0.7, n) + 1.0),
    "arcsine": lambda rng, n: 100.0 * rng.beta(0.5, 0.5, n),
    "zipf": lambda rng, n: rng.zipf(1.4, n).astype(np.float64),
    "staircase": staircase,
}
COLUMNS: dict[str, tuple[str, str]] = {
    "ages": ("adult.csv.gz", "age"),
    "hours": ("adult.csv.gz", "hours_per_week"),
    "latitudes": ("cities.csv.gz", "latitude"),
    "carats": ("diamonds.csv.gz", "age"),
    "delays": ("flights_delay.csv.gz", "age"),
    "prices": ("diamonds_price.csv.gz", "age"),
}


@lru_cache(maxsize=4)
def real_column(file: str, column: str) -> Floats:
    """A column of numbers, on the range of the made-up ones: 0 to 100 at its .1% quantiles."""
    values = pl.read_csv(file)[column].drop_nulls().to_numpy().astype(np.float64)
    low, high = np.quantile(values, [0.001, 0.999])
    scaled: Floats = (values - low) / (high - low) * 100.0
    return scaled
