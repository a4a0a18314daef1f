"""Families of points on a map: files of the shared data, and shapes that are easy to get wrong.

The rules of maps were chosen on the families in `CHOSEN_ON` and are reported on the others apart.
Generated families are the same on every machine: they have seeds of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Points = tuple[Floats, Floats]

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
COUNT = 100_000
CHOSEN_ON = ("new york", "adult", "diamonds", "lattice", "lines", "mixture", "spikes")
HELD_OUT = ("cities", "flights", "uniform", "streets", "zipf")
FILES = {
    "new york": "nyc_pickups.csv.gz",
    "cities": "cities.csv.gz",
    "diamonds": "diamonds.csv.gz",
    "flights": "flights_delay.csv.gz",
    "adult": "adult.csv.gz",
}


def read_points(path: Path) -> Points:
    """The first two columns of a CSV file: x and y."""
    import polars as pl

    frame = pl.read_csv(path)
    x, y = (frame[name].cast(pl.Float64).to_numpy() for name in frame.columns[:2])
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known]


def points(source: str) -> Points:
    """The points of a family, or of any other CSV file."""
    if source in GENERATED:
        return GENERATED[source]()
    if source == "flights":
        return _successive(SHARED / "flights_delay.csv.gz")
    if source == "adult":
        return _adult(SHARED / "adult.csv.gz")
    return read_points(SHARED / FILES[source] if source in FILES else Path(source))


def at_hand() -> list[str]:
    """The families whose data is here."""
    found = []
    for name in (*CHOSEN_ON, *HELD_OUT):
        if name in GENERATED or (SHARED / FILES[name]).exists():
            found.append(name)
        else:
            print(f"{name} is left out: {FILES[name]} is absent")
    return found


def _successive(path: Path) -> Points:
    """A delay and the next one in the file."""
    import polars as pl

    delays = pl.read_csv(path)["age"].to_numpy().astype(np.float64)
    return delays[:-1], delays[1:]


def _adult(path: Path) -> Points:
    import polars as pl

    frame = pl.read_csv(path)
    ages, hours = (frame[name].to_numpy() for name in ("age", "hours_per_week"))
    return ages.astype(np.float64), hours.astype(np.float64)


def streets() -> Points:
    """A city of streets and some towns."""
    rng = np.random.default_rng(7)
    town = rng.choice(6, COUNT, p=[0.55, 0.2, 0.1, 0.07, 0.05, 0.03])
    centre = rng.uniform(0.2, 0.8, (6, 2))
    spread = np.array([0.02, 0.05, 0.01, 0.03, 0.08, 0.15])
    points = centre[town] + rng.standard_normal((COUNT, 2)) * spread[town][:, None]
    street = rng.random(COUNT) < 0.6
    points[street, 0] = np.round(points[street, 0] * 128) / 128
    return points[:, 0], points[:, 1]


def lattice() -> Points:
    """32 by 32 places, all alike, and nothing between them."""
    rng = np.random.default_rng(11)
    x, y = (rng.integers(0, 32, (2, COUNT)) + 0.5) / 32
    return x, y


def uniform() -> Points:
    rng = np.random.default_rng(12)
    x, y = rng.random((2, COUNT))
    return x, y


def mixture() -> Points:
    """Twelve Gaussians of very different widths."""
    rng = np.random.default_rng(13)
    which = rng.choice(12, COUNT, p=rng.dirichlet(np.ones(12)))
    centre, width = rng.uniform(0.1, 0.9, (12, 2)), 10 ** rng.uniform(-2.5, -0.8, 12)
    points = centre[which] + rng.standard_normal((COUNT, 2)) * width[which][:, None]
    return points[:, 0], points[:, 1]


def lines() -> Points:
    """Forty straight roads in all directions, one cell wide."""
    rng = np.random.default_rng(14)
    ends = rng.random((40, 4))
    which = rng.choice(40, COUNT, p=rng.dirichlet(np.ones(40)))
    along = rng.random(COUNT)
    x = ends[which, 0] + along * (ends[which, 2] - ends[which, 0])
    y = ends[which, 1] + along * (ends[which, 3] - ends[which, 1])
    return x, y


def spikes() -> Points:
    """Half of everybody at 300 places, the rest anywhere."""
    rng = np.random.default_rng(15)
    places = rng.random((300, 2))
    points = rng.random((COUNT, 2))
    there = rng.random(COUNT) < 0.5
    points[there] = places[rng.integers(0, 300, int(there.sum()))]
    return points[:, 0], points[:, 1]


def zipf() -> Points:
    """Two thousand towns whose sizes fall as 1/rank, and whose widths grow with them."""
    rng = np.random.default_rng(16)
    weights = 1.0 / np.arange(1, 2001)
    which = rng.choice(2000, COUNT, p=weights / weights.sum())
    centre, width = rng.random((2000, 2)), 0.02 * np.sqrt(weights)
    points = centre[which] + rng.standard_normal((COUNT, 2)) * width[which][:, None]
    return points[:, 0], points[:, 1]


GENERATED: dict[str, Callable[[], Points]] = {
    "streets": streets,
    "lattice": lattice,
    "uniform": uniform,
    "mixture": mixture,
    "lines": lines,
    "spikes": spikes,
    "zipf": zipf,
}
