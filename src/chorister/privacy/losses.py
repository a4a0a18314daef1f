"""Privacy-loss distributions on one even grid, for compositions fixed beforehand.

A dominating pair is kept as the law of its loss ln(P/Q) under P on the grid `spacing * index`,
plus a mass of infinite loss. A release is the product of an envelope and its reversal; further
releases are convolved in. Resampling an envelope on the grid joins its values by chords again,
which only raises it (connect-the-dots; Doroshenko et al. 2022), so every total is certified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy  # which loads its parts when they are first used

from chorister.errors import InternalError, InvalidInput
from chorister.privacy.binomials import Floats
from chorister.privacy.envelopes import Envelope

__all__ = ["PrivacyLoss", "loss_deviation", "release_loss"]

_DIRECT_PRODUCTS = 4_000_000
_FFT_ERROR = 1e-13  # added to the infinite loss for every transform
_MOST_POINTS = 2**23


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacyLoss:
    """The law of ln(P/Q) under P: `mass[i]` at `spacing * (first + i)`, the rest infinite."""

    spacing: float
    first: int
    mass: Floats
    infinite: float

    def delta(self, epsilon: float) -> float:
        """`E[(1 - e^(eps - loss))+]`."""
        losses = self.spacing * (self.first + np.arange(self.mass.size))
        above = losses > epsilon
        gain = -np.expm1(epsilon - losses[above])
        return float(np.dot(self.mass[above], gain)) + self.infinite

    def then(self, other: PrivacyLoss, cut: float) -> PrivacyLoss:
        """Both losses added: the composition of two releases fixed beforehand."""
        if self.spacing != other.spacing:
            raise InvalidInput("privacy losses must share one grid to be composed")
        size = self.mass.size + other.mass.size - 1
        _check_size(size)
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        if self.mass.size * other.mass.size <= _DIRECT_PRODUCTS:
            mass = np.convolve(self.mass, other.mass)
        else:
            length = scipy.fft.next_fast_len(size, real=True)
            spectrum = scipy.fft.rfft(self.mass, length) * scipy.fft.rfft(other.mass, length)
            mass = np.maximum(scipy.fft.irfft(spectrum, length)[:size], 0.0)
            infinite += _FFT_ERROR
        total = PrivacyLoss(
            spacing=self.spacing, first=self.first + other.first, mass=mass, infinite=infinite
        )
        return total._trimmed(cut)

    def times(self, count: int, cut: float) -> PrivacyLoss:
        """`count` such releases, by repeated squaring."""
        if count < 1:
            raise InvalidInput(f"a release is composed at least once, not {count} times")
        power = self
        while not count & 1:
            power, count = power.then(power, cut), count >> 1
        total, count = power, count >> 1
        while count:
            power = power.then(power, cut)
            if count & 1:
                total = total.then(power, cut)
            count >>= 1
        return total

    def _trimmed(self, cut: float) -> PrivacyLoss:
        """Cut `cut` off either end: above it becomes infinite, below it moves up."""
        above = np.cumsum(self.mass[::-1])[::-1]
        below = np.cumsum(self.mass)
        start = int(np.searchsorted(below, cut))
        stop = int(np.searchsorted(-above, -cut))
        if stop <= start:
            raise InternalError("a privacy loss vanished; nothing was released")
        mass = self.mass[start:stop].copy()
        lost_above = float(above[stop]) if stop < above.size else 0.0
        mass[0] += float(below[start - 1]) if start else 0.0
        return PrivacyLoss(
            spacing=self.spacing,
            first=self.first + start,
            mass=mass,
            infinite=self.infinite + lost_above,
        )


def _check_size(points: int) -> None:
    if points > _MOST_POINTS:
        raise InvalidInput(
            f"this composition needs a grid of {points:,} points, more than {_MOST_POINTS:,}: "
            "compose fewer releases at once"
        )


def loss_deviation(envelope: Envelope) -> float:
    """Standard deviation of the loss at one coordinate: the scale that a grid must resolve."""
    mass, _ = envelope.reference_mass
    weight = mass * envelope.g
    losses = np.log(envelope.g)
    total = float(weight.sum())
    mean = float(np.dot(weight, losses)) / total
    return math.sqrt(max(float(np.dot(weight, (losses - mean) ** 2)) / total, 1e-24))


def release_loss(envelope: Envelope, spacing: float, cut: float) -> PrivacyLoss:
    """The loss of one release: the envelope at one coordinate, its reversal at the other."""
    significant = np.flatnonzero(envelope.excess > cut * np.minimum(1.0, envelope.g))
    ends = np.abs(np.log(envelope.g[significant[[0, -1]]]))
    reach = math.ceil(float(ends.max()) / spacing) + 1
    _check_size(2 * reach + 1)  # before any of it is laid out
    index = np.arange(-reach, reach + 1)
    g = np.exp(spacing * index)
    excess = envelope.divergence(g) - np.maximum(1.0 - g, 0.0)
    below = g < 1.0
    # Below 1 the divergence is close to 1 - g: interpolate its excess directly instead.
    first = envelope.g[0]
    inside = np.interp(g[below], envelope.g, envelope.excess)
    excess[below] = np.where(g[below] < first, envelope.excess[0] * g[below] / first, inside)
    sampled = Envelope(g=g, excess=excess)
    mass, at_zero = sampled.reference_mass
    gained = PrivacyLoss(spacing=spacing, first=-reach, mass=g * mass, infinite=float(excess[-1]))
    lost = PrivacyLoss(spacing=spacing, first=-reach, mass=mass[::-1], infinite=at_zero)
    return gained._trimmed(cut).then(lost._trimmed(cut), cut)
