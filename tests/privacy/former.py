"""One coordinate of a sum, computed in Python by other means than the native module's.

Binomials by products from their mode, sums of two by direct convolution; the native module follows
a recurrence of the sum itself. For comparisons, on crowds small enough for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorister import _native
from chorister.privacy import Mechanism
from chorister.privacy.total_weight import binomial

Floats: TypeAlias = NDArray[np.float64]


def own(mechanism: Mechanism, q: Any) -> Any:
    """A mechanism's h, stated a second time for comparisons, in whatever numbers q is."""
    return {Mechanism.ASYMMETRIC: q / q / 2, Mechanism.SYMMETRIC: 1 - q}[mechanism]


def probabilities(mechanism: Mechanism, local_epsilon: float) -> tuple[float, float]:
    """The nominal q and h of a mechanism."""
    q = 1.0 / (math.exp(local_epsilon) + 1.0)
    return q, own(mechanism, q)


def native_composition_delta(
    cohort: int,
    mechanism: Mechanism,
    local_epsilon: float,
    epsilon: float,
    *,
    held: int,
    instead: int,
) -> float:
    """Delta with everybody's data known: `held` others at the device's value, `instead` at d'."""
    chances = mechanism.chances(local_epsilon)
    return _native.composition_delta(cohort, chances, held=held, instead=instead, epsilon=epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """A = Z + Ber(h) against B = Z + Ber(q). Index i stands for the count `first + i`."""

    first: int
    ratio: Floats  # A/B at each count, nondecreasing
    own_mass: Floats  # A
    reference_mass: Floats  # B

    def excess(self, g: Floats) -> Floats:
        """`sum (A - gB)+` for g >= 1 and `sum (gB - A)+` for g < 1, summed term by term."""
        return np.array([self._excess(each) for each in g])

    def _excess(self, g: float) -> float:
        gain = self.own_mass - g * self.reference_mass
        return math.fsum(np.maximum(gain if g >= 1.0 else -gain, 0.0))


def coordinate(references: int, holders: int, q: float, h: float, cut: float) -> Coordinate:
    """The pair for so many references and holders, on windows that miss about `cut`."""
    one, two = binomial(references, q, cut), binomial(holders, h, cut)
    z = np.convolve(one.mass, two.mass)
    here, before = np.append(z, 0.0), np.insert(z, 0, 0.0)
    own, other = (1.0 - h) * here + h * before, (1.0 - q) * here + q * before
    return Coordinate(
        first=one.first + two.first, ratio=own / other, own_mass=own, reference_mass=other
    )


def composition_delta(gained: Coordinate, lost: Coordinate, epsilon: float) -> float:
    """Delta with everybody's data known: `sum B'(y) H(e^eps ratio'(y))`."""
    g = math.exp(epsilon) * lost.ratio
    divergence = gained.excess(g) + np.maximum(1.0 - g, 0.0)
    return float(np.dot(lost.reference_mass, divergence))
