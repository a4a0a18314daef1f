"""Privacy losses of releases, for compositions that are fixed in advance.

**Envelopes.** The native module bounds one release by the curve of its hockey-stick divergences.
For laws P, Q and g >= 0, `H_g(P||Q) = sum (P - gQ)+` is convex and nonincreasing in g, and H_0 = 1.
Values on a grid, joined by chords, thus bound it from above at *every* g, and a convex bound is
itself the curve of a pair: the chord's change of slope at a knot is that pair's Q-mass with ratio
g. g < 1 (negative epsilon) is needed as much as g > 1, or domination does not survive a product.
What is stored is the excess over the trivial floor (1-g)+, which keeps its relative precision.

**Losses.** A dominating pair is kept as the law of its loss ln(P/Q) under P on the grid
`spacing * index`, plus a mass of infinite loss. A release is the product of an envelope and its
reversal; further releases are convolved in. Resampling an envelope on the grid joins its values by
chords again, which only raises it (connect-the-dots; Doroshenko et al. 2022), so every total is
certified.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy  # which loads its parts when they are first used

from chorister import _native
from chorister.errors import InternalError, InvalidInput
from chorister.privacy.randomizers import Mechanism
from chorister.privacy.total_weight import Floats

_DIRECT_PRODUCTS = 4_000_000
_FFT_ERROR = 1e-13  # added to the infinite loss for every transform
_MOST_POINTS = 2**23
_PRECISION = 1e-9  # of an epsilon, relative


# --- Envelopes -----------------------------------------------------------------------------------


def certified_slack(delta: float) -> float:
    """What is added to a computed delta for rounding before it is compared with `delta`."""
    return delta * 1e-9 + 5e-15


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """Knots g (increasing, 1 among them) with the excess there; chords between; flat beyond."""

    g: Floats
    excess: Floats

    @property
    def reference_mass(self) -> tuple[Floats, float]:
        """Q-mass of the dominating pair at each knot, and its Q-mass with ratio 0.

        The slope of the excess jumps by 1 at g = 1, where the floor (1-g)+ has its kink. Negative
        masses can only come from rounding; dropping them raises every divergence.
        """
        chords = np.diff(self.excess) / np.diff(self.g)
        at_zero = float(self.excess[0] / self.g[0])
        slopes = np.concatenate(((at_zero,), chords, (0.0,)))
        mass = np.diff(slopes)
        mass[self.g == 1.0] += 1.0
        return np.maximum(mass, 0.0), max(at_zero, 0.0)

    def excess_at(self, g: Floats) -> Floats:
        """How far H_g of the dominating pair exceeds (1-g)+."""
        first = self.g[0]
        inside = np.interp(g, self.g, self.excess)
        return np.where(g < first, self.excess[0] * g / first, inside)

    def divergence(self, g: Floats) -> Floats:
        """H_g of the dominating pair."""
        return self.excess_at(g) + np.maximum(1.0 - g, 0.0)


def exact_envelope(
    cohort: int, mechanism: Mechanism, local_epsilon: float, delta: float, *, noised: bool
) -> Envelope:
    """The dominating pair of one coordinate of a release, tight around `delta`."""
    knots, excess = _native.exact_envelope(
        cohort,
        mechanism.chances(local_epsilon),
        noised=noised,
        delta=delta,
    )
    return Envelope(g=1.0 + np.frombuffer(knots), excess=np.frombuffer(excess))


def least_epsilon(delta_at: Callable[[float], float], delta: float, upper: float) -> float:
    """Least epsilon in [0, upper] with delta_at(epsilon) <= delta, from above.

    The upper end is tested first and is the answer if it fails: it must hold for other reasons
    (pure differential privacy). ln delta is nearly quadratic in epsilon, so a secant in ln delta
    converges in a few steps; bisection guards it. The returned value was itself tested.
    """
    if _checked(delta_at(upper)) > delta:
        return upper
    at_zero = _checked(delta_at(0.0))
    if at_zero <= delta:
        return 0.0
    low, high = 0.0, upper
    log_target = math.log(delta)
    low_gap = math.log(at_zero) - log_target
    step = 0
    guess = upper / 2.0
    while high - low > _PRECISION * high:
        value = _checked(delta_at(guess))
        gap = (math.log(value) if value > 0.0 else -745.0) - log_target
        if gap <= 0.0:
            high, high_gap = guess, gap
        else:
            low, low_gap = guess, gap
        step += 1
        if step > 200:
            raise InternalError("the search for epsilon did not converge")
        if high == upper or step % 3 == 0:
            guess = (low + high) / 2.0
            continue
        # Aim a little beyond the secant's root, so that the bracket closes from both sides.
        share = low_gap / (low_gap - high_gap)
        width = high - low
        aim = low + share * width
        nudge = max(_PRECISION * high / 4.0, 1e-3 * width)
        aim += nudge if gap > 0.0 else -nudge
        guess = min(max(aim, low + width * 1e-4), high - width * 1e-4)
    return high


def _checked(value: float) -> float:
    if math.isnan(value):
        raise InternalError("an accountant's delta is not a number; nothing was released")
    return value


# --- Losses --------------------------------------------------------------------------------------


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
        """Both losses added: the composition of two releases fixed in advance."""
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
    excess = envelope.excess_at(g)
    sampled = Envelope(g=g, excess=excess)
    mass, at_zero = sampled.reference_mass
    gained = PrivacyLoss(spacing=spacing, first=-reach, mass=g * mass, infinite=float(excess[-1]))
    lost = PrivacyLoss(spacing=spacing, first=-reach, mass=mass[::-1], infinite=at_zero)
    return gained._trimmed(cut).then(lost._trimmed(cut), cut)
