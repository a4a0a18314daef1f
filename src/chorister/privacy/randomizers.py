"""Private one-hot encoding: what a device sends, and how an analyst reads the sum of it.

A device that holds element `d` of a domain of `length` elements sends one bit per coordinate:
1 with chance `h` at its own coordinate and 1 with chance `q = 1/(e^eps0 + 1)` elsewhere.

- *asymmetric* (`h = 1/2`; paper, appendix A): eps0-DP in the replacement model;
- *symmetric* (`h = 1 - q`; paper, appendix C): eps0-DP in the deletion model, and therefore
  2 eps0-DP in the replacement model.

**The law that is sampled.** Bits are drawn by comparing 64 random bits with an integer
threshold, so the chances are multiples of 2^-64. `q` is rounded up and `h` towards `q`:

1. *locally*, the largest likelihood ratio over all reports is `h(1-q) / (q(1-h))`, which falls
   when q rises and when h falls towards q: the sampled law never exceeds the stated guarantee;
2. *in the sum*, write the sampled chances as `q' = q + a(1 - 2q)`, `h' = h - a(2h - 1)`: every bit
   is the nominal bit sent through a binary symmetric channel of error `a >= 0` (for h = 1/2 that
   leaves h untouched). The sum of n such bits is `Bin(S, 1-a) + Bin(n-S, a)` given the nominal
   sum S: a post-processing of S. Hence any bound that holds for the nominal sum holds for ours.
   The aggregators' noise uses the same threshold and goes through the same channel.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from chorister import _native
from chorister.errors import InvalidInput
from chorister.privacy.decimals import (
    DOWN,
    NEAREST,
    UP,
    Number,
    as_choice,
    as_decimal,
    float_above,
)
from chorister.privacy.weights import least_weight_bound

if TYPE_CHECKING:  # arrays are the analyst's: a device has no numpy
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from chorister.privacy.total_weight import Floats, TotalWeight

MIN_LOCAL_EPSILON = Decimal("0.001")
MAX_LOCAL_EPSILON = Decimal(20)
MAX_LENGTH = 1_000_000
_MAX_DIGITS = 30

AGGREGATORS: Final = 2
"""How many aggregators add noise to a release, each independently of the other."""


class Mechanism(StrEnum):
    """Which private one-hot encoding."""

    # `_RULES` has everything that distinguishes one from another.

    ASYMMETRIC = "asymmetric"
    SYMMETRIC = "symmetric"

    def replacement_epsilon(self, local_epsilon: Decimal) -> Decimal:
        """The local guarantee for replacing a value, which policies limit; rounded up."""
        return _RULES[self].replacement(local_epsilon)

    def largest_local_epsilon(self, replacement: Decimal) -> Decimal:
        """The largest eps0 whose replacement value is within a limit; rounded down."""
        return _RULES[self].parameter(replacement)

    def thresholds(self, local_epsilon: Decimal) -> tuple[int, int]:
        """The chances q and h of a 1, times 2^64, as they are sampled."""
        return _thresholds(self, local_epsilon)

    def chances(self, local_epsilon: float) -> _native.Chances:
        """The chances q and h as the native bound takes them."""
        return _chances(self, local_epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rules:
    """What defines a mechanism.

    The local guarantee is at least `ln(h (1-q) / (q (1-h)))`, and has at most 30 decimal places.
    For the sampled law to be a post-processing of the nominal one, `own` must commute with the
    channel above: `own(q + a(1 - 2q)) = h - a(2h - 1)` for `h = own(q)`, or less.
    """

    own: Callable[[Decimal], Decimal]  # h, given q
    replacement: Callable[[Decimal], Decimal]  # the local guarantee, given eps0; rounded up
    parameter: Callable[[Decimal], Decimal]  # eps0, given the local guarantee; rounded down


_ONE, _TWO = Decimal(1), Decimal(2)
_RULES: Final = {
    Mechanism.ASYMMETRIC: _Rules(
        own=lambda _: Decimal("0.5"),
        replacement=lambda local_epsilon: local_epsilon,
        parameter=lambda replacement: replacement,
    ),
    # Any value is within eps0 of the law without one, so two values are within 2 eps0.
    Mechanism.SYMMETRIC: _Rules(
        own=lambda q: NEAREST.subtract(_ONE, q),
        replacement=lambda local_epsilon: UP.multiply(local_epsilon, _TWO),
        parameter=lambda replacement: DOWN.divide(replacement, _TWO),
    ),
}


def _other(local_epsilon: Decimal) -> Decimal:
    """The chance q of a 1 at a coordinate that is not the device's own, to 80 digits."""
    # exp of a Decimal is correctly rounded, so 80 digits give the same threshold on every machine.
    return NEAREST.divide(_ONE, NEAREST.add(NEAREST.exp(local_epsilon), _ONE))


@lru_cache(maxsize=256)
def _thresholds(mechanism: Mechanism, local_epsilon: Decimal) -> tuple[int, int]:
    """q rounded up, h towards q."""
    unit = Decimal(2**64)
    q_threshold = NEAREST.multiply(_other(local_epsilon), unit).to_integral_value(context=UP)
    h = _RULES[mechanism].own(NEAREST.divide(q_threshold, unit))
    h_threshold = NEAREST.multiply(h, unit).to_integral_value(context=DOWN)
    return int(q_threshold), int(h_threshold)


@lru_cache(maxsize=256)
def _chances(mechanism: Mechanism, local_epsilon: float) -> _native.Chances:
    # Each is rounded once: one minus a float near one would lose its digits.
    if not float(MIN_LOCAL_EPSILON) <= local_epsilon <= float(MAX_LOCAL_EPSILON):
        raise _out_of_range(local_epsilon)
    exact = Decimal.from_float(local_epsilon)
    q = _other(exact)
    h = _RULES[mechanism].own(q)
    return _native.Chances(
        q=float(q),
        not_q=float(NEAREST.subtract(_ONE, q)),
        h=float(h),
        not_h=float(NEAREST.subtract(_ONE, h)),
        gap=float(NEAREST.subtract(h, q)),
        replacement=float_above(mechanism.replacement_epsilon(exact)),
    )


def bits_per_bin(n: int, noise_trials: int) -> int:
    """How many bits a released sum adds up in each bin: one per report, and all the noise."""
    return n + AGGREGATORS * noise_trials


class HostileInfluence(NamedTuple):
    """How far one hostile report can move estimates, in devices."""

    bins: int  # at most this many rise
    up: float  # each by this much
    down: float  # all others fall by this much


def as_local_epsilon(value: Number) -> Decimal:
    """Read eps0 exactly: a float means the decimal number that it prints as."""
    if isinstance(value, bool):
        raise InvalidInput("local_epsilon must be a number, not a boolean")
    try:
        exact = as_decimal(value)
    except (InvalidOperation, TypeError, ValueError):
        raise InvalidInput(f"local_epsilon {value!r} is not a decimal number") from None
    if not exact.is_finite() or not MIN_LOCAL_EPSILON <= exact <= MAX_LOCAL_EPSILON:
        raise _out_of_range(value)
    if len(exact.as_tuple().digits) > _MAX_DIGITS:
        raise InvalidInput(f"local_epsilon must have at most {_MAX_DIGITS} significant digits")
    return exact


def _out_of_range(value: Number) -> InvalidInput:
    return InvalidInput(
        f"local_epsilon must lie between {MIN_LOCAL_EPSILON} and {MAX_LOCAL_EPSILON}, not {value}"
    )


def _check_cohort(n: int, noise_trials: int) -> None:
    if n < 1:
        raise InvalidInput(f"n, the number of reports, must be at least 1, not {n}")
    if noise_trials < 0:
        raise InvalidInput(f"noise_trials must be at least 0 (no noise), not {noise_trials}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OneHotRandomizer:
    """One private one-hot encoding over a domain of `length` coordinates, OOV included.

    `n` below is the number of reports in a sum, and `noise_trials` is M where *each* aggregator
    added an independent Bin(M, q) to every bin, 0 where none did.
    """

    mechanism: Mechanism  # asymmetric or symmetric
    local_epsilon: Decimal  # eps0, the mechanism's parameter, exactly as it was written
    length: int  # |D|, the number of coordinates

    def __init__(self, *, mechanism: Mechanism | str, local_epsilon: Number, length: int) -> None:
        chosen = as_choice(Mechanism, mechanism, "mechanism")
        if isinstance(length, bool) or not 2 <= length <= MAX_LENGTH:
            raise InvalidInput(f"length must lie between 2 and {MAX_LENGTH:,}, not {length}")
        object.__setattr__(self, "mechanism", chosen)
        object.__setattr__(self, "local_epsilon", as_local_epsilon(local_epsilon))
        object.__setattr__(self, "length", int(length))

    # --- The law of one report ---------------------------------------------------------------

    @property
    def q_threshold(self) -> int:
        """2^64 times the chance of a 1 at another coordinate, rounded up."""
        return self.mechanism.thresholds(self.local_epsilon)[0]

    @property
    def h_threshold(self) -> int:
        """2^64 times the chance of a 1 at the own coordinate, rounded towards q."""
        return self.mechanism.thresholds(self.local_epsilon)[1]

    @property
    def q(self) -> float:
        """Chance of a 1 at a coordinate that is not the device's own, as sampled."""
        return self.q_threshold / 2**64

    @property
    def h(self) -> float:
        """Chance of a 1 at the device's own coordinate, as sampled."""
        return self.h_threshold / 2**64

    @property
    def replacement_epsilon(self) -> Decimal:
        """Local guarantee in the replacement model: what a policy's local limits compare."""
        return self.mechanism.replacement_epsilon(self.local_epsilon)

    @property
    def max_weight(self) -> int:
        """Weight bound of bounded reports: the least w with Pr[weight > w] <= 2^-80."""
        return least_weight_bound(self.length, self.q_threshold, self.h_threshold)

    # --- The device ----------------------------------------------------------------------------

    def randomize(self, index: int, *, bounded: bool = True) -> bytes:
        """Draw a report for coordinate `index`: one byte per coordinate, 0 or 1.

        Bounded reports are redrawn whole while their weight exceeds `max_weight`. The weight has
        the same law whatever the index, so conditioning on it leaves every likelihood ratio, and
        with it the replacement guarantee, untouched.
        """
        self._check_index(index)
        return _native.randomize_one_hot(
            array("Q", [index]),
            self.length,
            q_threshold=self.q_threshold,
            h_threshold=self.h_threshold,
            max_weight=self.max_weight if bounded else self.length,
        )

    def randomize_many(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Draw one report for each of many devices: an array of shape (devices, length)."""
        import numpy as np

        held = np.asarray(indices, dtype=np.int64)
        if held.ndim != 1:
            raise InvalidInput("indices must be one-dimensional")
        if held.size and not 0 <= int(held.min()) <= int(held.max()) < self.length:
            raise InvalidInput(f"every index must lie between 0 and {self.length - 1}")
        drawn = _native.randomize_one_hot(
            held.astype(np.uint64),
            self.length,
            q_threshold=self.q_threshold,
            h_threshold=self.h_threshold,
            max_weight=self.max_weight,
        )
        return np.frombuffer(drawn, dtype=np.uint8).reshape(held.size, self.length)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.length:
            raise InvalidInput(f"index must lie between 0 and {self.length - 1}, not {index}")

    # --- The analyst ---------------------------------------------------------------------------

    def debias(self, counts: ArrayLike, n: int, noise_trials: int = 0) -> Floats:
        """Unbiased estimates of the true counts from the sums of `n` reports.

        `(S - (n + 2M) q) / (h - q)`; without noise that is `2(E+1)/(E-1) S - 2n/(E-1)` for
        asymmetric (the paper's appendix A prints n/(E-1), which is biased) and
        `(E+1)/(E-1) S - n/(E-1)` for symmetric (appendix C).
        """
        import numpy as np

        _check_cohort(n, noise_trials)
        sums = np.asarray(counts, dtype=np.float64)
        return (sums - bits_per_bin(n, noise_trials) * self.q) / (self.h - self.q)

    def variance(self, n: int, frequency: ArrayLike = 0.0, noise_trials: int = 0) -> Floats:
        """Variance of an estimate of a bin whose true count is `frequency`.

        Without noise `4nE/(E-1)^2 + f` for asymmetric and `nE/(E-1)^2` for symmetric (paper,
        appendices A and C); the aggregators' noise adds 2M q(1-q) before the scaling.
        """
        import numpy as np

        _check_cohort(n, noise_trials)
        held = np.clip(np.asarray(frequency, dtype=np.float64), 0.0, float(n))
        return self._base_variance(n, noise_trials) + self.variance_slope * held

    def std_error(self, n: int, frequency: ArrayLike = 0.0, noise_trials: int = 0) -> Floats:
        """Standard error of an estimate of a bin whose true count is `frequency`."""
        import numpy as np

        return np.sqrt(self.variance(n, frequency, noise_trials))

    def total_weight(self, n: int, noise_trials: int = 0, *, bounded: bool = True) -> TotalWeight:
        """The law of the sum's total weight, which does not depend on anybody's data."""
        from chorister.privacy.total_weight import TotalWeight

        _check_cohort(n, noise_trials)
        return TotalWeight(
            reports=n,
            other_bits=n * (self.length - 1),
            noise_bits=AGGREGATORS * noise_trials * self.length,
            q=self.q,
            h=self.h,
            report_limit=self.max_weight if bounded else self.length,
        )

    @property
    def step(self) -> float:
        """What one more bit in a sum adds to an estimate."""
        return 1.0 / (self.h - self.q)

    def hostile_influence(self, *, bounded: bool = True) -> HostileInfluence:
        """How far one hostile report can move the estimates, compared with its absence.

        A report adds `(bit - q) / (h - q)` to every bin: it counts among the n whose mean is
        subtracted, so bins that it leaves at 0 fall; if it has no 1 at all, every bin falls.
        """
        return HostileInfluence(
            bins=self.max_weight if bounded else self.length,
            up=(1.0 - self.q) * self.step,
            down=self.q * self.step,
        )

    def _base_variance(self, n: int, noise_trials: int) -> float:
        scale = (self.h - self.q) ** 2
        return bits_per_bin(n, noise_trials) * self.q * (1.0 - self.q) / scale

    @property
    def variance_slope(self) -> float:
        """Variance that one holder adds to its bin: 1 for asymmetric, 0 for symmetric."""
        # From the integers, so that both are exact.
        one, q, h = 2**64, self.q_threshold, self.h_threshold
        return (h * (one - h) - q * (one - q)) / (h - q) ** 2
