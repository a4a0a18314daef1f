"""A pair of laws known by an upper bound on all its hockey-stick divergences, for compositions.

What bounds one release is computed by the native module; here its envelope is received, for
planning tools that compose many (:mod:`losses`).

For laws P, Q and g >= 0, `H_g(P||Q) = sum (P - gQ)+` is convex and nonincreasing in g, and
H_0 = 1. Values on a grid, joined by chords, thus bound it from above at *every* g, and a convex
bound is itself the curve of a pair: the chord's change of slope at a knot is that pair's Q-mass
with ratio g. g < 1 (negative epsilon) is needed as much as g > 1, or domination does not survive
a product.

What is stored is the excess over the trivial floor (1-g)+, which keeps its relative precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chorister import _native
from chorister.errors import InternalError
from chorister.privacy.binomials import Floats
from chorister.privacy.randomizers import Mechanism

__all__ = ["Envelope", "certified_slack", "exact_envelope", "least_epsilon"]


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

    def divergence(self, g: Floats) -> Floats:
        """H_g of the dominating pair."""
        first = self.g[0]
        inside = np.interp(g, self.g, self.excess)
        below = np.where(g < first, self.excess[0] * g / first, inside)
        return below + np.maximum(1.0 - g, 0.0)


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


def least_epsilon(
    delta_at: Callable[[float], float], delta: float, upper: float, *, precision: float = 1e-9
) -> float:
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
    while high - low > precision * high:
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
        nudge = max(precision * high / 4.0, 1e-3 * width)
        aim += nudge if gap > 0.0 else -nudge
        guess = min(max(aim, low + width * 1e-4), high - width * 1e-4)
    return high


def _checked(value: float) -> float:
    if math.isnan(value):
        raise InternalError("an accountant's delta is not a number; nothing was released")
    return value
