"""What one release reveals, certified: a setting, its exact bound, its Renyi divergences.

The bounds are computed by the native module (`src/rust/src/bound`, with the proofs beside the
code): one implementation for devices, aggregators and analysts. Here it gets the package's types
and a memory.

*Honest crowd*: everybody's data but the device's own are arbitrary, so the bound is a supremum over
all compositions of the others. One composition is a **witness**: a lower bound on the truth. Only
the upper bound is enforced. *Noised crowd*: one pair of laws whoever the other clients are; lower =
upper but for rounding.

`D_alpha(P||Q) = ln(sum Q (P/Q)^alpha) / (alpha - 1)` is the maximum over blocks that cover every
composition. One composition alone is *not* the worst case for large orders (up to 45% too low).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Final

from chorister import _native
from chorister.errors import InvalidInput
from chorister.privacy.decimals import Number, as_choice, float_above
from chorister.privacy.randomizers import Mechanism, as_local_epsilon

MAX_COHORT: Final = 10**9
MAX_ORDER: Final = 20_000
_RATIONAL: Final = re.compile(r"[0-9]{1,30}([./][0-9]{1,30})?")
# Every integer order where epsilon can fall off a cliff, and steps of 3% where it is flat.
ORDERS: Final = (*range(2, 129), *(round(128 * 1.03**i) for i in range(1, 171)))


# --- What stays fixed while cohort, epsilon and delta vary ---------------------------------------


class Crowd(StrEnum):
    """What hides a device: other people assumed honest, or noise of the aggregators."""

    HONEST = "honest"
    NOISED = "noised"


def noise_trials(crowd: Crowd | str, min_cohort: int) -> int:
    """How many trials of chance q each aggregator adds to every bin: as many as others hide it.

    The native bound relies on this number: with one honest aggregator a device is hidden among
    `min_cohort - 1` coordinates that nobody holds, whoever the other clients are.
    """
    return min_cohort - 1 if crowd == Crowd.NOISED else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What stays fixed while cohort, epsilon and delta vary."""

    local_epsilon: Decimal  # eps0, the mechanism's parameter
    mechanism: Mechanism
    crowd: Crowd
    honest_fraction: Fraction  # of the cohort, in every released batch; 1 for a noised crowd

    def __init__(
        self,
        *,
        local_epsilon: Number,
        mechanism: Mechanism | str = Mechanism.ASYMMETRIC,
        crowd: Crowd | str = Crowd.HONEST,
        honest_fraction: Fraction | int | str = Fraction(1),
    ) -> None:
        object.__setattr__(self, "local_epsilon", as_local_epsilon(local_epsilon))
        object.__setattr__(self, "mechanism", as_choice(Mechanism, mechanism, "mechanism"))
        object.__setattr__(self, "crowd", as_choice(Crowd, crowd, "crowd"))
        object.__setattr__(self, "honest_fraction", _as_fraction(honest_fraction))
        if self.crowd is Crowd.NOISED and self.honest_fraction != 1:
            raise InvalidInput(
                "a crowd noised by the aggregators assumes nothing of other clients: "
                "leave honest_fraction at 1"
            )

    @property
    def noised(self) -> bool:
        """Whether the aggregators hide the device."""
        return self.crowd is Crowd.NOISED

    @property
    def parameter(self) -> float:
        """eps0 as a float, rounded up: a larger eps0 never has a smaller epsilon."""
        return float_above(self.local_epsilon)

    @property
    def replacement(self) -> float:
        """The local guarantee in the replacement model, which bounds epsilon for every cohort."""
        return float_above(self.mechanism.replacement_epsilon(Decimal(self.parameter)))

    def noise_trials(self, cohort: int) -> int:
        """M, where each aggregator adds Bin(M, q) to every bin; 0 where none adds noise."""
        return noise_trials(self.crowd, cohort)

    def members(self, cohort: int) -> int:
        """How many of a cohort hide the device, itself included."""
        return honest_members(cohort, self.honest_fraction)

    def bounded_reports(self, cohort: int) -> int:
        """How many reports' weight bounds the guarantee rests on: only the device's, with noise."""
        return 1 if self.noised else self.members(cohort)

    def renyi(self, members: int, count: int = 1) -> RenyiRelease:
        """A release over so many members, for the Renyi accountant."""
        return RenyiRelease(
            cohort=members,
            mechanism=self.mechanism,
            local_epsilon=self.parameter,
            noised=self.noised,
            count=count,
        )


def _as_fraction(value: Fraction | int | str) -> Fraction:
    """Read a rational. Floats are refused: int(0.29 * 100) is 28."""
    if isinstance(value, bool) or not isinstance(value, Fraction | int | str):
        raise InvalidInput("honest_fraction must be a rational such as Fraction(9, 10) or '9/10'")
    # `Fraction` alone would spell out the zeros of "1e300000000".
    if isinstance(value, str) and not _RATIONAL.fullmatch(value):
        raise InvalidInput(f"honest_fraction {value!r:.60} is not a rational number")
    try:
        fraction = Fraction(value)
    except ZeroDivisionError:
        raise InvalidInput(f"honest_fraction {value!r} is not a rational number") from None
    if not 0 < fraction <= 1:
        raise InvalidInput(f"honest_fraction must lie in (0, 1], not {value}")
    return fraction


def honest_members(cohort: int, fraction: Fraction) -> int:
    """floor(fraction x cohort), in integers; raises where nobody is left to be honest."""
    if type(cohort) is not int or not 1 <= cohort <= MAX_COHORT:
        raise InvalidInput(f"cohort must be an integer from 1 to {MAX_COHORT:,}, not {cohort}")
    members = fraction.numerator * cohort // fraction.denominator
    if members < 1:
        least = -(-fraction.denominator // fraction.numerator)
        raise InvalidInput(
            f"{fraction} of a cohort of {cohort} is no device: the cohort must be at least {least}"
        )
    return members


# --- Epsilon and delta ---------------------------------------------------------------------------


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
    chances = mechanism.chances(local_epsilon)
    lower, upper = _native.exact_epsilon(cohort, chances, noised=noised, delta=delta)
    return Exact(lower=lower, upper=upper)


@lru_cache(maxsize=512)
def exact_delta(
    cohort: int, mechanism: Mechanism, local_epsilon: float, epsilon: float, *, noised: bool
) -> Exact:
    """Delta of one release at `epsilon`."""
    chances = mechanism.chances(local_epsilon)
    lower, upper = _native.exact_delta(cohort, chances, noised=noised, epsilon=epsilon)
    return Exact(lower=lower, upper=upper)


def witness_delta(
    cohort: int, mechanism: Mechanism, local_epsilon: float, epsilon: float, *, noised: bool
) -> float:
    """Delta of the witness composition: never above the truth but for rounding."""
    chances = mechanism.chances(local_epsilon)
    return _native.witness_delta(cohort, chances, noised=noised, epsilon=epsilon)


# --- Renyi divergences ---------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def renyi_divergence(
    cohort: int,
    mechanism: Mechanism,
    local_epsilon: float,
    order: int,
    *,
    noised: bool,
    witness: bool = False,
) -> float:
    """D_order of one release: the sum over its two coordinates, each over the worst crowd.

    With `witness` it is that of one composition: cheap, no bound; it shows which orders are worth
    computing the bound for.
    """
    check_order(order)
    chances = mechanism.chances(local_epsilon)
    return _native.renyi_divergence(cohort, chances, noised=noised, order=order, witness=witness)


def check_order(order: int) -> None:
    """Raise unless the order is one that the native module computes."""
    if type(order) is not int or not 2 <= order <= MAX_ORDER:
        raise InvalidInput(f"a Renyi order must be an integer from 2 to {MAX_ORDER:,}, not {order}")


def renyi_to_epsilon(divergence: float, order: int, delta: float) -> float:
    """(eps, delta) from D_order (Canonne, Kamath, Steinke 2020, Proposition 12).

    `eps = D + ln(1 - 1/a) - ln(delta a)/(a - 1)`.
    """
    shift = math.log1p(-1.0 / order) - (math.log(delta) + math.log(order)) / (order - 1)
    return max(0.0, divergence + shift)


def renyi_to_delta(divergence: float, order: int, epsilon: float) -> float:
    """Delta at epsilon from D_order: the same proposition solved for delta."""
    log_delta = (order - 1) * (divergence - epsilon + math.log1p(-1.0 / order)) - math.log(order)
    return min(1.0, math.exp(min(log_delta, 0.0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RenyiRelease:
    """One release, as often as it is repeated."""

    cohort: int
    mechanism: Mechanism
    local_epsilon: float
    noised: bool
    count: int = 1

    def divergence(self, order: int, *, witness: bool = False) -> float:
        """Certified D_order of all repetitions, or the witness's, which is no bound."""
        return self.count * renyi_divergence(
            self.cohort,
            self.mechanism,
            self.local_epsilon,
            order,
            noised=self.noised,
            witness=witness,
        )


def renyi_epsilon(releases: Sequence[RenyiRelease], delta: float) -> tuple[float, int]:
    """Smallest epsilon of all releases together over the orders, and its order."""
    return _best_order(lambda total, order: renyi_to_epsilon(total, order, delta), releases)


def renyi_delta(releases: Sequence[RenyiRelease], epsilon: float) -> tuple[float, int]:
    """Smallest delta of all releases together over the orders, and its order."""
    return _best_order(lambda total, order: renyi_to_delta(total, order, epsilon), releases)


def _best_order(
    convert: Callable[[float, int], float], releases: Sequence[RenyiRelease]
) -> tuple[float, int]:
    """Least value over the orders; any order is valid, so the search need not be perfect.

    The value is not unimodal in the order, so the witness is looked at along all of them, coarsely
    and then closely, before the certified divergence is computed at the most promising.
    """

    def value(order: int, *, witness: bool) -> float:
        total = sum(release.divergence(order, witness=witness) for release in releases)
        return convert(total, order)

    def quick(index: int) -> float:
        return value(ORDERS[index], witness=True)

    coarse = min(range(0, len(ORDERS), 8), key=quick)
    close = min(range(max(0, coarse - 7), min(len(ORDERS), coarse + 8)), key=quick)
    # Other compositions weigh more at high orders: the best certified order lies there or below.
    nearby = {ORDERS[max(0, close - back)] for back in (0, 2, 6)}
    return min((value(order, witness=False), order) for order in nearby)
