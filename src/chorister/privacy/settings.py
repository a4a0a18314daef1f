"""What stays fixed while cohort, epsilon and delta vary, and how numbers are read.

Numbers are rounded towards more privacy loss on their way to floating point, so that a certified
bound for the float holds for what was written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import TypeVar

from chorister.errors import InvalidInput
from chorister.privacy.decimals import Number, as_decimal, float_above
from chorister.privacy.randomizers import Mechanism, as_local_epsilon
from chorister.privacy.renyi import RenyiRelease

MAX_COHORT = 10**9
_MAX_EPSILON = 50.0
_Choice = TypeVar("_Choice", bound=StrEnum)


class Crowd(StrEnum):
    """What hides a device: other people assumed honest, or noise of the aggregators."""

    HONEST = "honest"
    NOISED = "noised"


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

    def renyi(self, members: int, count: int = 1) -> RenyiRelease:
        """A release over so many members, for the Renyi accountant."""
        return RenyiRelease(
            cohort=members,
            mechanism=self.mechanism,
            local_epsilon=self.parameter,
            noised=self.noised,
            count=count,
        )


def noise_trials(crowd: Crowd | str, min_cohort: int) -> int:
    """How many trials of chance q each aggregator adds to every bin: as many as others hide it.

    The native bound relies on this number: with one honest aggregator a device is hidden among
    `min_cohort - 1` coordinates that nobody holds, whoever the other clients are.
    """
    return min_cohort - 1 if crowd == Crowd.NOISED else 0


def as_choice(kind: type[_Choice], value: str, name: str) -> _Choice:
    """Read one of an enumeration's names."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(f"{name} must be one of {', '.join(kind)}, not {value!r}") from None


def _as_fraction(value: Fraction | int | str) -> Fraction:
    """Read a rational. Floats are refused: int(0.29 * 100) is 28."""
    if isinstance(value, bool) or not isinstance(value, Fraction | int | str):
        raise InvalidInput("honest_fraction must be a rational such as Fraction(9, 10) or '9/10'")
    try:
        fraction = Fraction(value)
    except (ValueError, ZeroDivisionError):
        raise InvalidInput(f"honest_fraction {value!r} is not a rational number") from None
    if not 0 < fraction <= 1:
        raise InvalidInput(f"honest_fraction must lie in (0, 1], not {value}")
    return fraction


def honest_members(cohort: int, fraction: Fraction) -> int:
    """floor(fraction x cohort), in integers; refused if nobody is left to be honest."""
    _check_cohort(cohort)
    members = fraction.numerator * cohort // fraction.denominator
    if members < 1:
        least = -(-fraction.denominator // fraction.numerator)
        raise InvalidInput(
            f"{fraction} of a cohort of {cohort} is nobody: the cohort must be at least {least}"
        )
    return members


def _check_cohort(cohort: int) -> None:
    if type(cohort) is not int or not 1 <= cohort <= MAX_COHORT:
        raise InvalidInput(f"cohort must be an integer from 1 to {MAX_COHORT:,}, not {cohort}")


def as_delta(value: Number) -> float:
    """Read a delta in (0, 1), rounded down: a smaller delta never has a smaller epsilon."""
    number = _as_float(value, "delta")
    if not 0.0 < number < 1.0:
        raise InvalidInput(f"delta must lie strictly between 0 and 1, not {value}")
    exact = as_decimal(value)
    return number if Decimal(number) <= exact else math.nextafter(number, 0.0)


def as_epsilon(value: Number) -> float:
    """Read an epsilon in [0, 50], rounded down: what is proved for less holds for it."""
    number = _as_float(value, "epsilon")
    if not 0.0 <= number <= _MAX_EPSILON:
        raise InvalidInput(f"epsilon must lie between 0 and {_MAX_EPSILON:g}, not {value}")
    exact = as_decimal(value)
    return number if Decimal(number) <= exact else max(0.0, math.nextafter(number, 0.0))


def _as_float(value: Number, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError):
        raise InvalidInput(f"{name} {value!r} is not a number") from None
    if math.isnan(number) or isinstance(value, bool):
        raise InvalidInput(f"{name} must be a number, not {value}")
    return number
