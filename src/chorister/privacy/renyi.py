"""Renyi divergences of a sum of one-hot reports, certified over every composition of the crowd.

`D_alpha(P||Q) = ln(sum Q (P/Q)^alpha) / (alpha - 1)` adds up over the two coordinates that change
and obeys post-processing, so the blocks of :mod:`blocks` bound it too: the maximum over blocks
that cover 0..N. One composition alone is *not* the worst case for large orders (up to 45 % too
low).

**Tails.** High orders weigh events far beyond any fixed probability mass. Tilting Z by e^(theta x)
gives a sum of two binomials with other chances, so windows moved along theta give ln Z with full
relative precision wherever it is needed; they end where Chernoff's bound times the largest ratio
to the power alpha is below e^-35 (of a sum that is at least 1), and that rest is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy  # which loads its parts when they are first used

from chorister.errors import InternalError, InvalidInput
from chorister.privacy.binomials import Floats, binomial, convolve
from chorister.privacy.blocks import probabilities
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
_REST = 35.0  # what is left out is below e^-35
_RISE = 5e-4  # blocks may exceed the largest single composition by this fraction
_SLACK = 1e-9  # for rounding, on every divergence


class _Chance(NamedTuple):
    """The chances of a 1 and of a 0; either may be tiny, so neither is computed from the other."""

    one: float
    zero: float

    def flipped(self) -> _Chance:
        return _Chance(self.zero, self.one)

    def log_one(self) -> float:
        return math.log(self.one) if self.one < 0.5 else math.log1p(-self.zero)

    def log_zero(self) -> float:
        return self.flipped().log_one()

    def tilted(self, theta: float) -> _Chance:
        """The chances weighed by e^(theta bit)."""
        one = self.one * math.exp(min(theta, 0.0))
        zero = self.zero * math.exp(min(-theta, 0.0))
        return _Chance(one / (one + zero), zero / (one + zero))

    def log_moment(self, theta: float) -> float:
        """ln E[e^(theta (bit - likelier bit))]: small, so that its error is small times n."""
        rare, sign = (self.one, theta) if self.one <= 0.5 else (self.zero, -theta)
        if sign < 700.0:
            return math.log1p(rare * math.expm1(sign))
        return math.log(rare) + sign  # the other term is below e^-600 of this one


@dataclass(frozen=True, kw_only=True, slots=True)
class _Count:
    """Z = Bin(references, p) + Bin(holders, p'), and its exponential tilts."""

    references: int
    holders: int
    reference: _Chance
    holder: _Chance

    @property
    def size(self) -> int:
        return self.references + self.holders

    @property
    def _likeliest(self) -> int:
        """The count if every bit takes its likelier value."""
        return self.references * (self.reference.one > 0.5) + self.holders * (self.holder.one > 0.5)

    def _log_moment(self, theta: float) -> float:
        """ln E[e^(theta (Z - likeliest))]."""
        return self.references * self.reference.log_moment(theta) + (
            self.holders * self.holder.log_moment(theta)
        )

    def log_tail(self, theta: float, edge: int) -> float:
        """Chernoff's bound on ln Pr[Z >= edge], or for negative theta on ln Pr[Z <= edge]."""
        return self._log_moment(theta) - theta * (edge - self._likeliest)

    def mean(self, theta: float) -> float:
        """The mean of Z tilted by theta."""
        return self.references * self.reference.tilted(theta).one + (
            self.holders * self.holder.tilted(theta).one
        )

    def tilt_to(self, mean: float, low: float, high: float) -> float:
        """The tilt that moves the mean there, within [low, high]."""
        for _ in range(60):
            middle = (low + high) / 2.0
            if self.mean(middle) < mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2.0

    def window(self, theta: float) -> tuple[int, Floats]:
        """First count and ln Z around the mean of Z tilted by theta."""
        reference, holder = self.reference.tilted(theta), self.holder.tilted(theta)
        law = convolve(
            binomial(self.references, reference.one, 1e-16, reference.zero),
            binomial(self.holders, holder.one, 1e-16, holder.zero),
            math.inf,
        )
        solid = np.flatnonzero(law.mass > 1e-5 * law.mass.max())
        start, stop = int(solid[0]), int(solid[-1]) + 1
        # Counted from the likeliest value: theta times a count of a billion would lose digits.
        away = law.first - self._likeliest + np.arange(start, stop)
        return law.first + start, (
            np.log(law.mass[start:stop]) - theta * away + self._log_moment(theta)
        )


def _stitched(z: _Count, rest_above: float, rest_below: float) -> tuple[int, Floats]:
    """ln Z from where ln Pr[Z <= x] < -rest_below to where ln Pr[Z >= x] < -rest_above."""
    first, middle = z.window(0.0)
    pieces = [middle]
    theta, last = 0.0, first + middle.size - 1
    while last < z.size and z.log_tail(theta, last) > -rest_above:
        theta, start, logs = _next_window(z, theta, last, upwards=True)
        pieces.append(logs[last + 1 - start :])
        last = start + logs.size - 1
    theta = 0.0
    while first > 0 and z.log_tail(theta, first) > -rest_below:
        theta, start, logs = _next_window(z, theta, first, upwards=False)
        pieces.insert(0, logs[: first - start])
        first = start
    return first, np.concatenate(pieces)


def _next_window(z: _Count, theta: float, edge: int, *, upwards: bool) -> tuple[float, int, Floats]:
    """The window that continues beyond `edge` without a gap, its tilt and its first count.

    Towards an end of the support windows get narrower, so a step that leaves a gap is halved.
    """
    step = 0.8 * abs(edge - z.mean(theta)) + 1.0
    while True:
        if upwards:
            tilt = z.tilt_to(min(edge + step, z.size - 0.01), theta, 745.0)
        else:
            tilt = z.tilt_to(max(edge - step, 0.01), -745.0, theta)
        start, logs = z.window(tilt)
        joins = start <= edge + 1 if upwards else start + logs.size >= edge
        moves = start + logs.size - 1 > edge if upwards else start < edge
        if joins and moves:
            return tilt, start, logs
        step /= 2.0
        if step < 1e-3:
            raise InternalError("windows of a count do not join; nothing was released")


def _divergence(z: _Count, top: _Chance, bottom: _Chance, order: int) -> float:
    """D_order(Z + Ber(top) || Z + Ber(bottom)), top > bottom, from above.

    The ratio rises with the count, from (1-top)/(1-bottom) < 1 to top/bottom.
    """
    largest = top.log_one() - bottom.log_one()
    _, logs = _stitched(z, order * largest + _REST, _REST)
    here, before = np.append(logs, -np.inf), np.insert(logs, 0, -np.inf)
    p = np.logaddexp(top.log_zero() + here, top.log_one() + before)
    q = np.logaddexp(bottom.log_zero() + here, bottom.log_one() + before)
    moment = float(scipy.special.logsumexp(order * p - (order - 1) * q))
    moment = float(np.logaddexp(moment, math.log(2.0) - _REST))
    return max(0.0, moment / (order - 1)) + _SLACK


def _worst(others: int, block: Callable[[int, int], float]) -> float:
    """Maximum of `block(first, last)` over blocks that cover 0..others."""
    attained = bound = block(0, 0)  # by a single composition; by the blocks
    first, width, growth = 1, 1.0, 2.0
    while first <= others:
        while True:
            last = min(others, first + int(width) - 1)
            value = block(first, last)
            if last == first:
                attained = max(attained, value)
                break
            if value <= attained * (1.0 + _RISE):
                break
            # Higher than anything so far: is that the block's width or its members?
            attained = max(attained, block(first, first), block(last, last))
            if value <= attained * (1.0 + _RISE):
                break
            width, growth = max(1.0, width / growth), max(1.0 + (growth - 1.0) / 2.0, 1.1)
        if value <= attained:
            growth = min(2.0, 1.3 * growth)
        bound = max(bound, value)
        first, width = last + 1, width * growth
    return bound


@lru_cache(maxsize=4096)
def renyi_divergence(
    cohort: int, mechanism: Mechanism, local_epsilon: float, order: int, *, noised: bool
) -> float:
    """D_order of one release: the sum over its two coordinates, each over the worst crowd."""
    check_order(order)
    gained, lost = _sides(mechanism, local_epsilon, order)
    others = cohort - 1
    if noised:
        return gained(others, 0) + lost(others, 0)
    if mechanism is Mechanism.SYMMETRIC:
        # Pair N-k is the reversal of pair k, so both coordinates have the same worst case.
        return 2.0 * _worst(others, lambda first, last: gained(first, others - last))
    return _worst(others, lambda first, last: gained(others - last, first)) + (
        _worst(others, lambda first, last: lost(others - last, first))
    )


@lru_cache(maxsize=4096)
def _one_composition(
    cohort: int, mechanism: Mechanism, local_epsilon: float, order: int, *, noised: bool
) -> float:
    """D_order of the witness: cheap, no bound; it only shows which orders are worth a sweep."""
    gained, lost = _sides(mechanism, local_epsilon, order)
    others = cohort - 1
    if mechanism is Mechanism.SYMMETRIC and not noised:
        return 2.0 * gained(0, others)
    return gained(others, 0) + lost(others, 0)


def _sides(
    mechanism: Mechanism, local_epsilon: float, order: int
) -> tuple[Callable[[int, int], float], Callable[[int, int], float]]:
    """D_order at the value that the device holds and at another, by references and holders."""
    q, h = probabilities(mechanism, local_epsilon)
    # For symmetric one-hot 1 - h is q; subtracting h = 1 - q from 1 again would lose its digits.
    other = _Chance(q, 1.0 - q)
    own = other.flipped() if mechanism is Mechanism.SYMMETRIC else _Chance(h, 1.0 - h)

    def gained(references: int, holders: int) -> float:
        z = _Count(references=references, holders=holders, reference=other, holder=own)
        return _divergence(z, own, other, order)

    def lost(references: int, holders: int) -> float:
        # Counting zeros instead of ones turns B against A into the same shape.
        z = _Count(
            references=references,
            holders=holders,
            reference=other.flipped(),
            holder=own.flipped(),
        )
        return _divergence(z, other.flipped(), own.flipped(), order)

    return gained, lost


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
