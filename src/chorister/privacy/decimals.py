"""How numbers are read and added: exactly, or rounded towards more privacy loss.

A host app may have set any precision, rounding or traps for its own decimal arithmetic; what is
enforced must not depend on them. So every operation names its direction: losses are rounded
:data:`UP`, what is left of a budget :data:`DOWN`. With 80 digits, numbers as people write them come
out exact either way. On the way to floating point, numbers are rounded so that a certified bound
for the float holds for what was written.
"""

from __future__ import annotations

import math
import numbers
from decimal import (
    MAX_EMAX,
    MIN_EMIN,
    ROUND_CEILING,
    ROUND_FLOOR,
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DivisionByZero,
    InvalidOperation,
    Overflow,
)
from enum import StrEnum
from typing import TypeAlias, TypeVar

from chorister.errors import InvalidInput

Number: TypeAlias = Decimal | int | str | float
_Choice = TypeVar("_Choice", bound=StrEnum)
_MAX_EPSILON = 50.0


def _context(rounding: str) -> Context:
    # Every field is given: whatever is not would come from a default that the host can change.
    return Context(
        prec=80,
        rounding=rounding,
        Emin=MIN_EMIN,
        Emax=MAX_EMAX,
        capitals=1,
        clamp=0,
        flags=[],
        traps=[InvalidOperation, DivisionByZero, Overflow],
    )


UP = _context(ROUND_CEILING)
DOWN = _context(ROUND_FLOOR)
NEAREST = _context(ROUND_HALF_EVEN)


def as_decimal(value: Number) -> Decimal:
    """Read a number exactly, NumPy's included: a float means the decimal that it prints as."""
    if isinstance(value, float):
        return Decimal(repr(float(value)))
    if isinstance(value, numbers.Integral):
        return Decimal(int(value))
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return Decimal(str(value))  # of NumPy, with fewer digits than a float
    return Decimal(value)


def rounded_up(value: float, unit: Decimal) -> Decimal:
    """The least multiple of `unit` that is not below a float."""
    return Decimal.from_float(value).quantize(unit, context=UP)


def float_above(value: Decimal) -> float:
    """The least float that is not below a decimal."""
    nearest = float(value)
    return nearest if Decimal(nearest) >= value else math.nextafter(nearest, math.inf)


def as_choice(kind: type[_Choice], value: str, name: str) -> _Choice:
    """Read one of an enumeration's names."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(f"{name} must be one of {', '.join(kind)}, not {value!r}") from None


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
        number = float(as_decimal(value))
    except (TypeError, ValueError, ArithmeticError):
        raise InvalidInput(f"{name} {value!r} is not a number") from None
    if math.isnan(number) or isinstance(value, bool):
        raise InvalidInput(f"{name} must be a number, not {value}")
    return number
