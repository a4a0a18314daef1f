"""Probability vectors and tails of binomials, with a bound on everything left out.

Windows are cut by tail mass (Bernstein's inequality), never by a number of sigmas, and each law
carries bounds on what its vector leaves out and on what it may get wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import scipy  # which loads its parts when they are first used
from numpy.typing import NDArray

__all__ = ["CountLaw", "Floats", "binomial", "lower_tail", "upper_tail"]

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountLaw:
    """The law of a count: `mass[i]` is the chance of `first + i`."""

    first: int  # the smallest count in the window
    mass: Floats  # chances; positive
    missing: float  # bound on the mass outside the window


def binomial(trials: int, p: float, cut: float) -> CountLaw:
    """Bin(trials, p) on a window that misses at most `cut` of its mass on either side.

    By Bernstein, `Pr[|X - np| >= s] <= 2 exp(-s^2 / (2(v + s/3)))`, v = np(1-p); solving for s
    gives the window. Inside, the ratio of neighbours is exact and products run outwards from the
    mode, so the relative error is about the window's length in roundings (1e-12 at a length of
    1e4).
    """
    rest = 1.0 - p
    c = -math.log(cut)
    variance = trials * p * rest
    reach = c / 3.0 + math.sqrt(c * c / 9.0 + 2.0 * c * variance) + 1.0
    first = max(0, math.floor(trials * p - reach))
    last = min(trials, math.ceil(trials * p + reach))
    mode = min(max(math.floor((trials + 1) * p), first), last)
    odds = p / rest
    up = np.arange(mode, last, dtype=np.float64)
    down = np.arange(mode, first, -1, dtype=np.float64)
    mass = np.concatenate(
        (
            np.cumprod(down / (odds * (trials - down + 1.0)))[::-1],
            np.ones(1),
            np.cumprod(odds * (trials - up) / (up + 1.0)),
        )
    )
    mass /= mass.sum()
    return CountLaw(first=first, mass=mass, missing=2.0 * cut)


def upper_tail(count: Floats, trials: Floats | float, p: float) -> Floats:
    """Pr[Bin(trials, p) > count] for whole counts, by the incomplete beta function.

    scipy.stats says the same; importing it would cost a device a second.
    """
    inside = (count >= 0.0) & (count < trials)
    safe = np.where(inside, count, 0.0)
    tail = scipy.special.betainc(safe + 1.0, np.maximum(trials - safe, 1.0), p)
    return np.where(inside, tail, np.where(count < 0.0, 1.0, 0.0))


def lower_tail(count: Floats, trials: Floats | float, p: float) -> Floats:
    """Pr[Bin(trials, p) <= count] for whole counts."""
    inside = (count >= 0.0) & (count < trials)
    safe = np.where(inside, count, 0.0)
    tail = scipy.special.betaincc(safe + 1.0, np.maximum(trials - safe, 1.0), p)
    return np.where(inside, tail, np.where(count < 0.0, 0.0, 1.0))
