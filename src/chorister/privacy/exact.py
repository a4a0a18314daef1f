"""Exact amplification for sums of private one-hot reports: certified from above, with a witness.

The bound is computed by the native module (`src/rust/src/bound`, with the proofs beside the code):
one implementation for devices, aggregators and analysts. Here it is given the package's types and
a memory.

*Honest crowd*: everybody's data but the device's own are arbitrary, so the bound is a supremum over
all compositions of the others. One composition is a **witness**: a lower bound on the truth. Only
the upper bound is enforced. *Noised crowd*: one pair of laws whoever the other clients are; lower =
upper but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from chorister import _native
from chorister.privacy.randomizers import Mechanism

__all__ = ["Exact", "composition_delta", "exact_delta", "exact_epsilon", "witness_delta"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """A value between a witness and a certified bound."""

    lower: float  # no true value is smaller
    upper: float  # certified: no true value is larger


@lru_cache(maxsize=512)
def exact_epsilon(
    cohort: int, mechanism: Mechanism, local_epsilon: float, delta: float, *, noised: bool
) -> Exact:
    """Epsilon of one release at `delta`."""
    lower, upper = _native.exact_epsilon(
        cohort,
        mechanism.chances(local_epsilon),
        noised=noised,
        delta=delta,
    )
    return Exact(lower=lower, upper=upper)


@lru_cache(maxsize=512)
def exact_delta(
    cohort: int, mechanism: Mechanism, local_epsilon: float, epsilon: float, *, noised: bool
) -> Exact:
    """Delta of one release at `epsilon`."""
    lower, upper = _native.exact_delta(
        cohort,
        mechanism.chances(local_epsilon),
        noised=noised,
        epsilon=epsilon,
    )
    return Exact(lower=lower, upper=upper)


def witness_delta(
    cohort: int, mechanism: Mechanism, local_epsilon: float, epsilon: float, *, noised: bool
) -> float:
    """Delta of the witness composition: never above the truth but for rounding."""
    return _native.witness_delta(
        cohort,
        mechanism.chances(local_epsilon),
        noised=noised,
        epsilon=epsilon,
    )


def composition_delta(
    cohort: int,
    mechanism: Mechanism,
    local_epsilon: float,
    epsilon: float,
    *,
    held: int,
    instead: int,
) -> float:
    """Delta with everybody's data known: `held` others at the device's value, `instead` at d'."""
    return _native.composition_delta(
        cohort,
        mechanism.chances(local_epsilon),
        held=held,
        instead=instead,
        epsilon=epsilon,
    )
