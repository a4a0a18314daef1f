"""Probability vectors of sums of two binomials, with a bound on everything left out.

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

__all__ = ["CountLaw", "Floats", "binomial", "convolve", "lower_tail", "upper_tail"]

Floats: TypeAlias = NDArray[np.float64]

# Direct convolution keeps relative precision in the tails and is used up to this many products;
# beyond it the transform is used wherever its absolute error is harmless.
_DIRECT_PRODUCTS = 1_500_000
_UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, kw_only=True, slots=True)
class CountLaw:
    """The law of a count: `mass[i]` is the chance of `first + i`."""

    first: int  # the smallest count in the window
    mass: Floats  # chances; positive
    missing: float  # bound on the mass outside the window
    error: float  # bound on the absolute error of any sum of entries, beyond relative rounding


def binomial(trials: int, p: float, cut: float, complement: float | None = None) -> CountLaw:
    """Bin(trials, p) on a window that misses at most `cut` of its mass on either side.

    By Bernstein, `Pr[|X - np| >= s] <= 2 exp(-s^2 / (2(v + s/3)))`, v = np(1-p); solving for s
    gives the window. Inside, the ratio of neighbours is exact and products run outwards from the
    mode, so the relative error is about the window's length in roundings (1e-12 at a length of
    1e4).
    """
    rest = 1.0 - p if complement is None else complement  # where p is near 1, only its caller knows
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
    return CountLaw(first=first, mass=mass, missing=2.0 * cut, error=0.0)


def convolve(a: CountLaw, b: CountLaw, tolerance: float) -> CountLaw:
    """The law of the sum of two independent counts.

    Positive products are added directly: no cancellation, full relative precision. Long vectors go
    through the Fourier transform if its worst absolute error in any tail sum,
    `3 u log2(L) |a|_2 |b|_2` an entry times the number of entries, stays below `tolerance`; that
    error then counts as missing, and what lies in the noise at either end is cut off.
    """
    first, missing, error = a.first + b.first, a.missing + b.missing, a.error + b.error
    size = a.mass.size + b.mass.size - 1
    if a.mass.size * b.mass.size > _DIRECT_PRODUCTS:
        length = scipy.fft.next_fast_len(size, real=True)
        norm = float(np.linalg.norm(a.mass) * np.linalg.norm(b.mass))
        entry = 3.0 * _UNIT_ROUNDOFF * math.log2(length) * norm
        if entry * size <= tolerance:
            mass = scipy.fft.irfft(
                scipy.fft.rfft(a.mass, length) * scipy.fft.rfft(b.mass, length), length
            )[:size]
            # Entries near the error are noise; they sit at the two ends of a log-concave law.
            solid = np.flatnonzero(mass > 30.0 * entry)
            start, stop = int(solid[0]), int(solid[-1]) + 1
            lost = float(np.abs(mass[:start]).sum() + np.abs(mass[stop:]).sum())
            return CountLaw(
                first=first + start,
                mass=mass[start:stop],
                missing=missing + lost + entry * size,
                error=error + entry * size,
            )
    return CountLaw(first=first, mass=np.convolve(a.mass, b.mass), missing=missing, error=error)


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
