"""Exact amplification for sums of private one-hot reports: certified from above, with a witness.

*Honest crowd*: everybody's data but the device's own are arbitrary, so the bound is a supremum
over all compositions (k, k') of the others at the two coordinates that change. The envelope X* of
:mod:`blocks` dominates every k at one coordinate, its reversal Y* every k' at the other, and the
product X* x Y* every (k, k'): a **certified upper bound**. One composition, (0, 0) for asymmetric
and (N, 0) for symmetric one-hot, is a **witness**: a lower bound on the truth. On large cohorts
they agree to some 1e-5; on tiny ones the witness can lie far below. Only the upper bound is
enforced.

*Noised crowd*: each aggregator adds Bin(M, q), M = cohort - 1, to every bin. If one aggregator is
honest the device's coordinates see the pair with M references and no holders whoever the other
clients are: a **single pair**, no supremum, lower = upper but for rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from chorister.errors import InternalError
from chorister.privacy.blocks import cohort_envelope, cut_for, pair_envelope, probabilities
from chorister.privacy.coordinates import Coordinate, coordinate
from chorister.privacy.envelopes import Envelope, certified_slack, least_epsilon
from chorister.privacy.randomizers import Mechanism

__all__ = ["Exact", "exact_delta", "exact_envelope", "exact_epsilon", "witness_delta"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """A value between a witness and a certified bound."""

    lower: float  # no true value is smaller
    upper: float  # certified: no true value is larger


@dataclass(frozen=True, kw_only=True, slots=True)
class _Release:
    """Two independent coordinates of one release, everybody's data known."""

    gained: Coordinate  # A against B at the value that the device holds
    lost: Coordinate  # B against A at the value that it might have held instead

    def delta(self, epsilon: float) -> float:
        """`sum_x B'(x) H_{e^eps ratio'(x)}(A||B)`, rounding and windows counted in full."""
        g = math.exp(epsilon) * self.lost.ratio
        divergence = self.gained.excess(g) + np.maximum(1.0 - g, 0.0)
        rest = self.lost.missing + 2.0 * self.lost.error
        return float(np.dot(self.lost.reference_mass, divergence)) + rest

    @property
    def uncertainty(self) -> float:
        """By how much `delta` can exceed the truth through what its windows leave out."""
        return sum(3.0 * side.missing + 8.0 * side.error for side in (self.gained, self.lost))


def _witness(others: int, mechanism: Mechanism, local_epsilon: float, cut: float) -> _Release:
    q, h = probabilities(mechanism, local_epsilon)
    empty = coordinate(others, 0, q, h, cut)
    if mechanism is Mechanism.ASYMMETRIC:
        return _Release(gained=empty, lost=empty)
    return _Release(gained=coordinate(0, others, q, h, cut), lost=empty)


def _single_pair(others: int, mechanism: Mechanism, local_epsilon: float, cut: float) -> _Release:
    q, h = probabilities(mechanism, local_epsilon)
    empty = coordinate(others, 0, q, h, cut)
    return _Release(gained=empty, lost=empty)


def _pure(mechanism: Mechanism, local_epsilon: float) -> float:
    """Epsilon at which delta is 0, however small the cohort: the local replacement guarantee."""
    return local_epsilon * (2.0 if mechanism is Mechanism.SYMMETRIC else 1.0)


def witness_delta(
    cohort: int, mechanism: Mechanism, local_epsilon: float, epsilon: float, *, noised: bool
) -> float:
    """Delta of the witness composition: never above the truth but for rounding."""
    build = _single_pair if noised else _witness
    # Two passes: the second window is cut for the size of the answer.
    rough = build(cohort - 1, mechanism, local_epsilon, 1e-18).delta(epsilon)
    cut = cut_for(max(rough, 1e-30))
    return build(cohort - 1, mechanism, local_epsilon, cut).delta(epsilon)


@lru_cache(maxsize=512)
def exact_epsilon(
    cohort: int, mechanism: Mechanism, local_epsilon: float, delta: float, *, noised: bool
) -> Exact:
    """Epsilon of one release at `delta`."""
    limit = _pure(mechanism, local_epsilon)
    slack = certified_slack(delta)
    build = _single_pair if noised else _witness
    witness = build(cohort - 1, mechanism, local_epsilon, cut_for(delta))
    unsure = witness.uncertainty + slack
    lower = least_epsilon(lambda e: max(witness.delta(e) - unsure, 0.0), delta, limit)
    lower = 0.0 if lower == 0.0 else lower * (1.0 - 2e-9)
    if noised:
        upper = least_epsilon(lambda e: witness.delta(e) + slack, delta, limit)
    else:
        envelope = cohort_envelope(cohort - 1, mechanism, local_epsilon, delta, lower)
        upper = least_epsilon(lambda e: envelope.delta(e) + slack, delta, limit)
    return _certified(lower, upper)


@lru_cache(maxsize=512)
def exact_delta(
    cohort: int, mechanism: Mechanism, local_epsilon: float, epsilon: float, *, noised: bool
) -> Exact:
    """Delta of one release at `epsilon`."""
    if epsilon >= _pure(mechanism, local_epsilon):
        return Exact(lower=0.0, upper=0.0)
    seen = witness_delta(cohort, mechanism, local_epsilon, epsilon, noised=noised)
    lower = max(0.0, seen * (1.0 - 1e-8) - 1e-14)
    if noised:
        upper = seen + certified_slack(seen)
    else:
        scale = max(seen, 1e-15)
        envelope = cohort_envelope(cohort - 1, mechanism, local_epsilon, scale, epsilon)
        value = envelope.delta(epsilon)
        upper = value + certified_slack(value)
    return _certified(lower, min(upper, 1.0))


def exact_envelope(
    cohort: int, mechanism: Mechanism, local_epsilon: float, delta: float, *, noised: bool
) -> Envelope:
    """The dominating pair of one coordinate, for compositions; see :mod:`losses`."""
    if noised:
        q, h = probabilities(mechanism, local_epsilon)
        return pair_envelope(coordinate(cohort - 1, 0, q, h, cut_for(delta)))
    return cohort_envelope(cohort - 1, mechanism, local_epsilon, delta)


def _certified(lower: float, upper: float) -> Exact:
    if not (math.isfinite(lower) and math.isfinite(upper)) or upper < lower:
        raise InternalError(f"certified {upper} below witness {lower}: a bug; nothing was released")
    return Exact(lower=lower, upper=upper)
