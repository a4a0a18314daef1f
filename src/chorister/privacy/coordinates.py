"""One coordinate of a sum of one-hot reports, before and after one device changes its value.

When a device replaces d by d', only coordinates d and d' of the sum change their law, and they are
independent given everybody's data. At coordinate d, with `references` others that do not hold d and
`holders` that do,

    Z = Bin(references, q) + Bin(holders, h),   A = Z + Ber(h),   B = Z + Ber(q):

A if the device holds d, B if it does not. Z is log-concave (a sum of Bernoullis), so the likelihood
ratio A/B rises with the count, and every hockey-stick divergence is attained on an upper tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chorister.privacy.binomials import CountLaw, Floats, binomial, convolve

__all__ = ["Coordinate", "coordinate"]

# A cut is 1e-9 of the delta that matters; a transform may err by a tenth of that delta, which
# moves epsilon by a fraction of a percent and occurs only at deltas near 1e-12.
_ERROR_SHARE = 1e8


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """A (own value) against B (another value) at one coordinate, ready for tail sums.

    Index i stands for the count `first + i`; A and B reach one count further than Z.
    """

    first: int  # the smallest count in the window
    ratio: Floats  # A/B at each count, nondecreasing
    here: Floats  # Z at the count
    before: Floats  # Z at the count below: the part that an own 1 shifts up
    upper: Floats  # Pr[Z >= count], summed from the top; one entry longer
    lower: Floats  # Pr[Z < count], summed from the bottom; one entry longer
    q: float
    h: float
    missing: float  # bound on the mass that Z leaves out
    error: float  # bound on the absolute error of a tail sum

    @property
    def reference_mass(self) -> Floats:
        """B at each count."""
        return (1.0 - self.q) * self.here + self.q * self.before

    def excess(self, g: Floats) -> Floats:
        """How far the hockey-stick divergence exceeds its trivial floor (1-g)+, from above.

        That is `H_g(A||B) = sum (A - gB)+` for g >= 1 and `H_g - (1-g) = sum (gB - A)+` for g < 1.
        Each is summed on the tail where it lives, so it keeps its relative precision however
        small; with t the first count where A > gB,

            sum_{x>=t} A - gB = (1-g) Pr[Z >= t] + (h - gq) Z(t-1),
            sum_{x<t}  gB - A = (g-1) Pr[Z < t]  + (h - gq) Z(t-1).

        The window holds Z conditioned on it, an honest law of its own; Z is a mixture of that and
        of a rest of mass `missing`, and the divergence is convex, so `missing` times the trivial
        ceiling min(1, g) covers the rest.
        """
        t = np.minimum(np.searchsorted(self.ratio, g, side="right"), self.ratio.size)
        own = (self.h - g * self.q) * self.before[t - (t == self.ratio.size)]
        own[t == self.ratio.size] = 0.0  # no count has A > gB (g is at least h/q)
        above = (1.0 - g) * self.upper[t] + own
        below = (g - 1.0) * self.lower[t] + own
        value: Floats = np.maximum(np.where(g >= 1.0, above, below), 0.0)
        value += np.minimum(1.0, g) * self.missing + (1.0 + g) * self.error
        return value


def coordinate(references: int, holders: int, q: float, h: float, cut: float) -> Coordinate:
    """Lay out the pair for so many references and holders, missing a mass of about `cut`."""
    # For symmetric one-hot 1 - h is q; subtracting h = 1 - q from 1 again would lose its digits.
    not_h = q if h == 1.0 - q else 1.0 - h
    if holders == 0:
        z = binomial(references, q, cut)
    elif references == 0:
        z = binomial(holders, h, cut, not_h)
    else:
        z = convolve(
            binomial(references, q, cut), binomial(holders, h, cut, not_h), _ERROR_SHARE * cut
        )
    return _lay_out(z, q, h, not_h)


def _lay_out(z: CountLaw, q: float, h: float, not_h: float) -> Coordinate:
    size = z.mass.size
    here, before = np.zeros(size + 1), np.zeros(size + 1)
    here[:-1] = before[1:] = z.mass
    ratio = (not_h * here + h * before) / ((1.0 - q) * here + q * before)
    # Log-concavity makes the ratio nondecreasing; rounding must not unsort what is searched.
    np.maximum.accumulate(ratio, out=ratio)
    upper, lower = np.zeros(size + 2), np.zeros(size + 2)
    np.cumsum(z.mass[::-1], out=upper[size - 1 :: -1])
    np.cumsum(z.mass, out=lower[1:-1])
    lower[-1] = lower[-2]
    return Coordinate(
        first=z.first,
        ratio=ratio,
        here=here,
        before=before,
        upper=upper,
        lower=lower,
        q=q,
        h=h,
        missing=z.missing,
        error=z.error,
    )
