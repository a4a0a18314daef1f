"""Which bin each simulated device reports: the device's rule, for many devices at once.

A *class* of devices shares its rows. `Encoding.select` picks among a device's rows those that are
OOV in the fewest features, then one of these by chance (`uniform`) or the smallest bin (`first`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chorister.encoding import Encoding, Selection

__all__ = ["choose"]

Ints = NDArray[np.int64]


def choose(
    encoding: Encoding,
    owners: Ints,
    bins: Ints,
    answering: Ints,
    selection: Selection,
    rng: np.random.Generator,
) -> tuple[Ints, Ints, Ints]:
    """How many devices of which class report which bin: (class, bin, devices), exactly drawn.

    `owners` (increasing) and `bins` are of the rows of all classes, a denied row being -1;
    `answering` is the number of devices a class. Classes without a row report bin 0.
    """
    # With one feature an OOV row is never better than no row at all.
    keep = bins > 0 if len(encoding.features) == 1 else bins >= 0
    if not keep.all():
        owners, bins = owners[keep], bins[keep]
    if len(bins):
        best = _misses(encoding, bins)
        owners, bins = _least(owners, bins, best)
    starts = _starts(owners)
    classes = owners[starts]
    devices = answering[classes]
    silent = answering.copy()
    silent[classes] = 0
    empty = np.flatnonzero(silent)
    nothing = (empty, np.zeros(len(empty), dtype=np.int64), silent[empty])
    if not len(bins):
        return nothing
    if selection == "first":
        found = (classes, np.minimum.reduceat(bins, starts), devices)
    else:
        lengths = np.diff(np.append(starts, len(bins)))
        found = _uniform(classes, starts, lengths, bins, devices, rng)
    return (
        np.concatenate((found[0], nothing[0])),
        np.concatenate((found[1], nothing[1])),
        np.concatenate((found[2], nothing[2])),
    )


def _misses(encoding: Encoding, bins: Ints) -> NDArray[np.int8]:
    """In how many features each row is OOV."""
    misses = np.zeros(len(bins), dtype=np.int8)
    stride = encoding.size
    for feature in encoding.features:
        stride //= feature.size
        misses += bins // stride % feature.size == 0
    return misses


def _starts(owners: Ints) -> Ints:
    """Where each class' rows begin."""
    if not len(owners):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1])))


def _least(owners: Ints, bins: Ints, misses: NDArray[np.int8]) -> tuple[Ints, Ints]:
    """Of each class the rows with the fewest misses."""
    starts = _starts(owners)
    if len(starts) == len(owners):
        return owners, bins
    least = np.minimum.reduceat(misses, starts)
    lengths = np.diff(np.append(starts, len(owners)))
    keep = misses == np.repeat(least, lengths)
    return owners[keep], bins[keep]


def _uniform(
    classes: Ints, starts: Ints, lengths: Ints, bins: Ints, devices: Ints, rng: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """Every device draws one of its class' rows."""
    if not len(devices) or int(devices.max()) <= 1:
        at = starts + (rng.random(len(starts)) * lengths).astype(np.int64)
        return classes, bins[at], devices
    # Multinomial, row by row: of the devices left, each takes the next of k rows with chance 1/k.
    found: list[tuple[Ints, Ints, Ints]] = []
    left, at, rows = devices.copy(), starts.copy(), lengths.copy()
    alive = np.flatnonzero(left > 0)
    while len(alive):
        taken = left[alive].copy()
        several = rows[alive] > 1
        taken[several] = rng.binomial(taken[several], 1.0 / rows[alive][several])
        some = taken > 0
        found.append((classes[alive][some], bins[at[alive]][some], taken[some]))
        left[alive] -= taken
        at[alive] += 1
        rows[alive] -= 1
        alive = alive[(left[alive] > 0) & (rows[alive] > 0)]
    return (
        np.concatenate([part[0] for part in found]),
        np.concatenate([part[1] for part in found]),
        np.concatenate([part[2] for part in found]),
    )
