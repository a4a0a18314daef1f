"""Renyi divergences of a sum of one-hot reports, certified over every composition of the crowd.

`D_alpha(P||Q) = ln(sum Q (P/Q)^alpha) / (alpha - 1)` is computed by the native module
(`src/rust/src/bound/renyi.rs`, with its proof): the maximum over blocks that cover every
composition. One composition alone is *not* the worst case for large orders (up to 45 % too low).
Here are the conversions to epsilon and delta, and the search for the best order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from chorister import _native
from chorister.errors import InvalidInput
from chorister.privacy.randomizers import Mechanism

__all__ = [
    "MAX_ORDER",
    "ORDERS",
    "RenyiRelease",
    "check_order",
    "renyi_delta",
    "renyi_divergence",
    "renyi_epsilon",
    "renyi_to_delta",
    "renyi_to_epsilon",
]

MAX_ORDER = 20_000
# Every integer order where epsilon can fall off a cliff, and steps of 3 % where it is flat.
ORDERS: tuple[int, ...] = (
    *range(2, 129),
    *(round(128 * 1.03**i) for i in range(1, 171)),
)


@lru_cache(maxsize=4096)
def renyi_divergence(
    cohort: int, mechanism: Mechanism, local_epsilon: float, order: int, *, noised: bool
) -> float:
    """D_order of one release: the sum over its two coordinates, each over the worst crowd."""
    return _divergence(cohort, mechanism, local_epsilon, order, noised=noised, witness=False)


@lru_cache(maxsize=4096)
def _one_composition(
    cohort: int, mechanism: Mechanism, local_epsilon: float, order: int, *, noised: bool
) -> float:
    """D_order of the witness: cheap, no bound; it only shows which orders are worth a sweep."""
    return _divergence(cohort, mechanism, local_epsilon, order, noised=noised, witness=True)


def _divergence(
    cohort: int,
    mechanism: Mechanism,
    local_epsilon: float,
    order: int,
    *,
    noised: bool,
    witness: bool,
) -> float:
    check_order(order)
    return _native.renyi_divergence(
        cohort,
        mechanism.chances(local_epsilon),
        noised=noised,
        order=order,
        witness=witness,
    )


def check_order(order: int) -> None:
    """Raise unless the order is one that this module computes."""
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

    def divergence(self, order: int) -> float:
        """Certified D_order of all repetitions."""
        return self.count * renyi_divergence(
            self.cohort, self.mechanism, self.local_epsilon, order, noised=self.noised
        )

    def witness(self, order: int) -> float:
        """D_order of one composition: cheap, no bound."""
        return self.count * _one_composition(
            self.cohort, self.mechanism, self.local_epsilon, order, noised=self.noised
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

    def quick(index: int) -> float:
        order = ORDERS[index]
        return convert(sum(release.witness(order) for release in releases), order)

    coarse = min(range(0, len(ORDERS), 8), key=quick)
    close = min(range(max(0, coarse - 7), min(len(ORDERS), coarse + 8)), key=quick)
    # Other compositions weigh more at high orders: the best certified order lies there or below.
    nearby = {ORDERS[max(0, close - back)] for back in (0, 2, 6)}
    return min(
        (convert(sum(release.divergence(order) for release in releases), order), order)
        for order in nearby
    )
