"""Bounded reports: how many bits a report may set.

A hostile client with a plain vector could set every bit. So an honest device
redraws its report while the weight exceeds w, and the aggregators verify the bound. With
`tau = Pr[weight > w] <= 2^-80` the price in the aggregate is tiny: see :func:`delta_before_bound`.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from functools import lru_cache

from chorister.errors import InvalidInput
from chorister.privacy.decimals import DOWN, NEAREST

# Largest chance that an honest report has to be drawn again.
WEIGHT_TAIL = NEAREST.divide(Decimal(1), Decimal(2**80))

_MOST_WEIGHTED = 1.2e12  # 2^-80 times this is just below 1e-12
BOUND_DELTA = Decimal("1e-12")  # what a recipe's delta sets aside for bounded reports


@lru_cache(maxsize=1024)
def least_weight_bound(length: int, q_threshold: int, h_threshold: int) -> int:
    """Least w with Pr[weight > w] <= 2^-80, never above |D|, for the law actually sampled.

    `Pr[weight > w] = h Pr[Bin(|D|-1,q) >= w] + (1-h) Pr[Bin(|D|-1,q) >= w+1]`: a function of the
    domain's size and the thresholds alone, exact to 50 digits, hence the same everywhere.
    """
    unit = Decimal(2**64)
    others = length - 1
    # Decimal sums, products and quotients are correctly rounded by specification, so w is the same
    # on every machine. 80 digits leave 50 to the complement 1 - cdf at 2^-80.
    with localcontext(NEAREST):
        q, h = Decimal(q_threshold) / unit, Decimal(h_threshold) / unit
        odds = q / (1 - q)
        mass = ((1 - q).ln() * others).exp()  # ln and exp are correctly rounded; ** need not be
        reach = Decimal(1)  # Pr[Bin(|D|-1, q) >= w]
        for w in range(length):
            beyond = reach - mass  # Pr[Bin(|D|-1, q) >= w + 1]
            if h * reach + (1 - h) * beyond <= WEIGHT_TAIL:
                return w
            reach = beyond
            mass = mass * odds * (others - w) / (w + 1)
    return length


def covers_bound(epsilon: float, honest: int) -> bool:
    """Whether 1e-12 of delta pays for so many bounded reports at this epsilon."""
    return honest >= 1 and epsilon <= math.log(_MOST_WEIGHTED / honest)


def delta_before_bound(delta: Decimal, epsilon: Decimal, honest: int) -> Decimal:
    """What a recipe's delta leaves for amplification once the weight bound is paid for.

    Bounded reports are conditioned on an event of probability `p = (1-tau)^honest` that is equally
    likely under both datasets: `P(S|ok) <= P(S)/p` and `Q(S) <= p Q(S|ok) + (1-p)`, therefore
    `delta' <= (delta + e^eps (1-p)) / p`. At tau <= 2^-80 the price is below 1e-12 as long as
    `honest e^eps <= 1.2e12`; `honest` is 1 in a noised crowd, where nobody else's report matters.
    Raises beyond that, or where nothing would be left.
    """
    if not covers_bound(float(epsilon), honest):
        raise InvalidInput(
            f"bounded reports need 1 <= honest reports x e^epsilon <= {_MOST_WEIGHTED:g}: epsilon "
            f"{epsilon:f} with {honest:,} is out of range"
        )
    if not BOUND_DELTA < delta < 1:
        raise InvalidInput(
            f"with bounded reports delta must lie strictly between {BOUND_DELTA} and 1, not {delta}"
        )
    return DOWN.subtract(delta, BOUND_DELTA)
