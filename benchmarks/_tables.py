"""Families of two-way tables: files of the shared data, and shapes that are easy to get wrong.

The rules of two-way tables were chosen on the families in `CHOSEN_ON` and are reported on the
others apart. Generated families are the same on every machine: they have seeds of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pairs = tuple[Ints, Ints]

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
CHOSEN_ON = (
    "adult", "schedule", "normal", "uniform", "timetable", "band", "flights", "blocks", "board",
    "terraces",
)  # fmt: skip
HELD_OUT = (
    "diamonds", "zipf", "ring", "heaped", "tiles", "stripes", "latin", "sparse", "quilt",
)  # fmt: skip
FILES = {
    "adult": "adult.csv.gz",
    "diamonds": "diamonds.csv.gz",
    "flights": "flights_delay.csv.gz",
}
MOST_VALUES = 99  # per axis: the full table has at most 10,000 cells


def read_pairs(path: Path) -> Pairs:
    """Columns age and hours_per_week, or the first two columns, of a CSV file."""
    import polars as pl

    frame = pl.read_csv(path)
    names = ("age", "hours_per_week")
    if not set(names) <= set(frame.columns):
        names = (frame.columns[0], frame.columns[1])
    known = frame.select(names).drop_nulls()
    a, b = (_whole(known[name].cast(pl.Float64).to_numpy()) for name in names)
    return a, b


def _whole(values: Floats) -> Ints:
    """As numbers from 0 on: whole ones stay as they are, others and wide ranges get equal steps."""
    low, high = (float(each) for each in (values.min(), values.max()))
    if np.all(values == np.round(values)) and high - low < 128:
        return (values - low).astype(np.int64)
    low, high = (float(each) for each in np.quantile(values, [0.001, 0.999]))
    steps = np.clip((values - low) / max(high - low, 1e-300), 0.0, 1.0) * MOST_VALUES
    return np.minimum(steps.astype(np.int64), MOST_VALUES - 1)


def pairs(source: str) -> Pairs:
    """The pairs of a family, or of any other CSV file."""
    if source in GENERATED:
        return GENERATED[source]()
    if source == "flights":
        return _successive(SHARED / FILES[source])
    return read_pairs(SHARED / FILES[source] if source in FILES else Path(source))


def at_hand() -> list[str]:
    """The families whose data is here."""
    found = []
    for name in (*CHOSEN_ON, *HELD_OUT):
        if name in GENERATED or (SHARED / FILES[name]).exists():
            found.append(name)
        else:
            print(f"{name} is left out: {FILES[name]} is absent")
    return found


def _successive(path: Path) -> Pairs:
    """A delay and the next one in the file."""
    import polars as pl

    delays = pl.read_csv(path)["age"].cast(pl.Float64).to_numpy()
    steps = _whole(delays)
    return steps[:-1], steps[1:]


def schedule() -> Pairs:
    """Start by length of 300,000 shifts: a few usual pairs hold most, the rest is anywhere."""
    rng = np.random.default_rng(21)
    count = 300_000
    usual = np.stack([rng.integers(0, 96, 60), rng.integers(0, 60, 60)])
    which = rng.choice(60, count, p=rng.dirichlet(np.full(60, 0.7)))
    free = rng.random(count) < 0.15
    a = np.where(free, rng.integers(0, 96, count), usual[0, which])
    b = np.where(free, rng.integers(0, 60, count), usual[1, which])
    return a, b


def normal() -> Pairs:
    """Two correlated normal values of 50,000 devices."""
    rng = np.random.default_rng(22)
    x, noise = rng.standard_normal((2, 50_000))
    y = 0.7 * x + 0.714 * noise
    return _cut(x), _cut(y)


def _cut(values: Floats) -> Ints:
    return np.clip((values + 3.5) / 7.0 * 80, 0, 79).astype(np.int64)


def uniform() -> Pairs:
    rng = np.random.default_rng(23)
    a, b = rng.integers(0, 64, (2, 40_000))
    return a, b


def timetable() -> Pairs:
    """Departure and arrival of 200,000 trips: lines at whole quarters, lengths of a few kinds."""
    rng = np.random.default_rng(24)
    count = 200_000
    start = rng.integers(0, 80, count)
    whole = rng.random(count) < 0.7
    start = np.where(whole, start // 4 * 4, start)
    length = np.array([2, 5, 9, 14])[rng.choice(4, count, p=[0.5, 0.3, 0.15, 0.05])]
    return start, np.minimum(start + length, 95)


def band() -> Pairs:
    """The second value is close to the first: a narrow diagonal, 100,000 devices."""
    rng = np.random.default_rng(25)
    a = np.minimum(rng.gamma(3.0, 11.0, 100_000), 89.0)
    b = np.clip(a + rng.normal(0.0, 2.0, 100_000), 0.0, 89.0)
    return a.astype(np.int64), b.astype(np.int64)


def zipf() -> Pairs:
    """Two independent values with Zipf tails in random order, 60,000 devices."""
    rng = np.random.default_rng(26)
    weights = 1.0 / np.arange(1, 71)
    weights /= weights.sum()
    a, b = (rng.permutation(70)[rng.choice(70, 60_000, p=weights)] for _ in range(2))
    return a, b


def ring() -> Pairs:
    """A circle, a few steps wide, 80,000 devices: both margins are smooth and say nothing."""
    rng = np.random.default_rng(27)
    angle, width = rng.uniform(0.0, 2.0 * np.pi, 80_000), rng.normal(30.0, 2.0, 80_000)
    a, b = 40.0 + width * np.cos(angle), 40.0 + width * np.sin(angle)
    return np.clip(a, 0.0, 79.0).astype(np.int64), np.clip(b, 0.0, 79.0).astype(np.int64)


def blocks() -> Pairs:
    """A board of 5 by 5 squares of very different weights, 120,000 devices."""
    rng = np.random.default_rng(28)
    square = rng.choice(25, 120_000, p=rng.dirichlet(np.full(25, 0.5)))
    inside = rng.integers(0, 15, (2, 120_000))
    return square // 5 * 15 + inside[0], square % 5 * 15 + inside[1]


def heaped() -> Pairs:
    """Skewed values, half of them rounded to tens, by one that follows the first, 90,000."""
    rng = np.random.default_rng(29)
    a = np.minimum(rng.lognormal(2.8, 0.7, 90_000), 98.0).astype(np.int64)
    a = np.where(rng.random(90_000) < 0.5, a // 10 * 10, a)
    return a, np.minimum(rng.poisson(5.0 + a / 3.0), 59)


def board() -> Pairs:
    """A board of 4 by 6 rectangles of very different weights, 80,000 devices."""
    rng = np.random.default_rng(42)
    square = rng.choice(24, 80_000, p=rng.dirichlet(np.full(24, 0.5)))
    down, across = rng.integers(0, 18, 80_000), rng.integers(0, 16, 80_000)
    return square // 6 * 18 + down, square % 6 * 16 + across


def tiles() -> Pairs:
    """The same with 7 by 4 tiles of all sizes, 100,000 devices: no equal grid has their borders."""
    return _tiled(np.random.default_rng(41), (84, 60), (7, 4), 100_000)


def quilt() -> Pairs:
    """The same with 6 by 9 tiles, 150,000 devices."""
    return _tiled(np.random.default_rng(52), (60, 99), (6, 9), 150_000)


def terraces() -> Pairs:
    """Tiles with a diagonal in each: the margins have steps, but inside them there is more."""
    return _tiled(np.random.default_rng(53), (80, 72), (4, 4), 120_000, follows=0.7)


def _tiled(
    rng: np.random.Generator,
    size: tuple[int, int],
    parts: tuple[int, int],
    count: int,
    follows: float = 0.0,
) -> Pairs:
    edges = [
        np.concatenate([[0], np.sort(rng.choice(np.arange(3, n - 3), k - 1, replace=False)), [n]])
        for n, k in zip(size, parts, strict=True)
    ]
    tile = rng.choice(
        parts[0] * parts[1], count, p=rng.dirichlet(np.full(parts[0] * parts[1], 0.7))
    )
    at = np.divmod(tile, parts[1])
    inside = rng.random((2, count))
    near = (inside[0] + rng.normal(0.0, 0.1, count)) % 1.0
    inside[1] = np.where(rng.random(count) < follows, near, inside[1])
    a, b = (
        edge[i] + (part * (edge[i + 1] - edge[i])).astype(np.int64)
        for edge, i, part in zip(edges, at, inside, strict=True)
    )
    return a, b


def latin() -> Pairs:
    """5 by 5 squares whose weights are a Latin square, 120,000 devices: both margins are flat."""
    rng = np.random.default_rng(43)
    row = rng.integers(0, 5, 120_000)
    column = (rng.choice(5, 120_000, p=[0.45, 0.3, 0.15, 0.07, 0.03]) + 2 * row) % 5
    inside = rng.integers(0, 15, (2, 120_000))
    return row * 15 + inside[0], column * 15 + inside[1]


def stripes() -> Pairs:
    """Rows in bands of several heights, each with a normal second value of its own, 90,000."""
    rng = np.random.default_rng(44)
    edges = np.array([0, 9, 22, 31, 52, 70])
    band = rng.choice(5, 90_000, p=[0.1, 0.35, 0.2, 0.05, 0.3])
    a = edges[band] + (rng.random(90_000) * (edges[band + 1] - edges[band])).astype(np.int64)
    b = rng.normal(np.array([20, 50, 35, 60, 10])[band], 8.0, 90_000)
    return a, np.clip(b, 0.0, 79.0).astype(np.int64)


def sparse() -> Pairs:
    """Forty single cells hold nine tenths of 70,000 devices, the rest is anywhere."""
    rng = np.random.default_rng(45)
    count = 70_000
    cells = rng.integers(0, [[64], [90]], (2, 40))
    which = rng.choice(40, count, p=rng.dirichlet(np.ones(40)))
    free = rng.random(count) < 0.1
    a = np.where(free, rng.integers(0, 64, count), cells[0, which])
    return a, np.where(free, rng.integers(0, 90, count), cells[1, which])


GENERATED: dict[str, Callable[[], Pairs]] = {
    "schedule": schedule,
    "normal": normal,
    "uniform": uniform,
    "timetable": timetable,
    "band": band,
    "zipf": zipf,
    "ring": ring,
    "blocks": blocks,
    "heaped": heaped,
    "board": board,
    "tiles": tiles,
    "stripes": stripes,
    "latin": latin,
    "sparse": sparse,
    "quilt": quilt,
    "terraces": terraces,
}
