"""Every composition of a cohort at one coordinate, dominated by one envelope.

The others' data enter a coordinate through one number: k, how many of the N others hold its value.
Dropping a user never lowers a divergence (adding the user's bits back is a post-processing), so for
every k in [K1, K2] pair k is a post-processing of the pair with `N - K2` references and `K1`
holders: a *block*. Blocks that cover 0..N without a gap bound every k; their maximum on a grid of
ratios, joined by chords, is an :class:`Envelope` that dominates them all.

Which widths are worth their price is decided by what matters: the derivative of the final delta
with respect to the envelope at each knot. A block is halved if it would raise delta by more than
its share; a block of width 1 is merged whatever it does, never skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from chorister.errors import InternalError
from chorister.privacy.binomials import Floats
from chorister.privacy.coordinates import Coordinate, coordinate
from chorister.privacy.envelopes import Envelope, least_epsilon
from chorister.privacy.randomizers import Mechanism

__all__ = ["cohort_envelope", "cut_for", "pair_envelope", "probabilities"]

_KNOTS = 2000  # about 120 a standard deviation of the loss: chords cost 5e-6 of epsilon
_TAIL_KNOTS = 48  # between the window's last ratio and the largest possible one
# By how much all blocks together may raise delta, relatively. A small eps0 makes holders and
# references nearly alike, so that every k costs the same and blocks must be many: it gets more.
_RISE = {Mechanism.ASYMMETRIC: 2e-4, Mechanism.SYMMETRIC: 2e-3}
_MOST_RISE = 5e-2


def probabilities(mechanism: Mechanism, local_epsilon: float) -> tuple[float, float]:
    """The nominal q and h of a mechanism."""
    q = 1.0 / (math.exp(local_epsilon) + 1.0)
    return q, (0.5 if mechanism is Mechanism.ASYMMETRIC else 1.0 - q)


def cut_for(delta: float) -> float:
    """The tail mass that a window may leave out when `delta` is what matters."""
    return max(delta * 1e-9, 1e-290)


def pair_envelope(pair: Coordinate) -> Envelope:
    """The envelope of a single pair: exact, with every ratio a knot, where it has few enough."""
    g = _knots(pair, symmetric=False)
    return Envelope(g=g, excess=pair.excess(g))


def cohort_envelope(
    others: int,
    mechanism: Mechanism,
    local_epsilon: float,
    delta: float,
    epsilon: float | None = None,
) -> Envelope:
    """An envelope of every k in 0..others, tight around `delta` (or around the given epsilon)."""
    q, h = probabilities(mechanism, local_epsilon)
    cut = cut_for(delta)
    symmetric = mechanism is Mechanism.SYMMETRIC
    worst = coordinate(0, others, q, h, cut) if symmetric else coordinate(others, 0, q, h, cut)
    g = _knots(worst, symmetric=symmetric)
    envelope = _merged(worst.excess(g), g, symmetric=symmetric)
    base = Envelope(g=g, excess=envelope)
    if epsilon is None:
        limit = local_epsilon * (2.0 if symmetric else 1.0)
        epsilon = least_epsilon(base.delta, delta, limit, precision=1e-4)
    weight = _sensitivity(base, epsilon)
    share = min(_MOST_RISE, _RISE[mechanism] / min(1.0, local_epsilon) ** 2)
    budget = share * max(delta, base.delta(epsilon))
    covered = 1
    for first, last, excess in _sweep(others, q, h, cut, g, envelope, weight, budget, symmetric):
        if first != covered:
            raise InternalError("the blocks leave a gap; nothing was released")
        covered = last + 1
        np.maximum(envelope, excess, out=envelope)
    if covered <= (others // 2 if symmetric else others):
        raise InternalError("the blocks do not cover the cohort; nothing was released")
    return Envelope(g=g, excess=envelope)


def _sweep(
    others: int,
    q: float,
    h: float,
    cut: float,
    g: Floats,
    envelope: Floats,
    weight: Floats,
    budget: float,
    symmetric: bool,
) -> Iterator[tuple[int, int, Floats]]:
    """Blocks after the first, as distances from the worst k (0, or N for symmetric).

    Symmetric one-hot is its own mirror: `Z_{N-k} = N - Z_k` turns pair N-k into the reversal of
    pair k, so half of the range suffices once every curve is merged with its own reversal.
    """
    end = others // 2 if symmetric else others
    first, width, growth = 1, 1.0, 2.0
    floor = budget / 40.0  # so that the last blocks are not starved into width 1
    while first <= end:
        while True:
            last = min(end, first + int(width) - 1)
            if symmetric:
                pair = coordinate(first, others - last, q, h, cut)
            else:
                pair = coordinate(others - last, first, q, h, cut)
            excess = _merged(pair.excess(g), g, symmetric=symmetric)
            rise = float(np.dot(weight, np.maximum(excess - envelope, 0.0)))
            allowed = max(budget / 2.0, floor)
            if last == first or rise <= allowed:
                break
            # Doubling again at once would be refused again: grow gently from here.
            width, growth = max(1.0, width / growth), max(1.0 + (growth - 1.0) / 2.0, 1.1)
        if rise < allowed / 8.0:
            growth = min(2.0, 1.3 * growth)
        budget -= min(rise, budget / 2.0)
        yield first, last, excess
        first = last + 1
        width *= growth


def _merged(excess: Floats, g: Floats, *, symmetric: bool) -> Floats:
    """A curve, or for symmetric one-hot its maximum with its reversal `g F(1/g)`."""
    return np.maximum(excess, g * excess[::-1]) if symmetric else excess


def _knots(pair: Coordinate, *, symmetric: bool) -> Floats:
    """Ratios to evaluate at: the pair's own, thinned if many, its tails filled, 1 included."""
    logs = np.log(np.unique(pair.ratio))
    inner = logs[1:-1]
    if inner.size > _KNOTS:
        inner = inner[np.linspace(0, inner.size - 1, _KNOTS).round().astype(np.int64)]
    elif inner.size > 1:
        # Other compositions have their own kinks between these: few ratios are subdivided.
        parts = math.ceil(_KNOTS / (1.25 * inner.size))
        at = np.arange((inner.size - 1) * parts + 1) / parts
        inner = np.interp(at, np.arange(inner.size), inner)
    ends = [logs[0], *inner[:1]], [*inner[-1:], logs[-1]]
    tails = [np.linspace(end[0], end[-1], _TAIL_KNOTS) for end in ends]
    logs = np.concatenate((tails[0], inner, tails[1], (0.0,)))
    if symmetric:
        logs = np.abs(logs)
        logs = np.concatenate((-logs, logs))
    logs = np.unique(logs)
    # Knots closer than rounding would make chords of noise.
    span = float(logs[-1] - logs[0])
    kept = np.concatenate(((True,), np.diff(logs) > 1e-9 * span))
    kept |= logs == 0.0
    logs = logs[kept]
    if symmetric:
        positive = logs[logs > 0.0]
        logs = np.concatenate((-positive[::-1], (0.0,), positive))
    return np.exp(logs)


def _sensitivity(base: Envelope, epsilon: float) -> Floats:
    """How much delta(epsilon) rises with the envelope at each knot, to first order.

    delta is bilinear in the curve: once through the divergences `H(e^eps g_j)` that the masses
    weigh, once through the masses themselves, which are second differences of the curve.
    """
    g = base.g
    mass, _ = base.reference_mass
    reach = math.exp(epsilon) * g
    right = np.searchsorted(g, reach)
    inside = (right > 0) & (right < g.size)
    at = right[inside]
    share = (reach[inside] - g[at - 1]) / (g[at] - g[at - 1])
    weight = np.zeros(g.size)
    weight += np.bincount(at, mass[inside] * share, g.size)
    weight += np.bincount(at - 1, mass[inside] * (1.0 - share), g.size)
    weight[-1] += float(mass[right == g.size].sum())
    phi = base.divergence(reach)
    slopes = np.concatenate((((phi[0] - 1.0) / g[0],), np.diff(phi) / np.diff(g), (0.0,)))
    return weight + np.maximum(np.diff(slopes), 0.0)
